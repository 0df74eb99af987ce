"""What a client is told when the ledger does not admit its request."""

from __future__ import annotations

import logging

from app.errors import (
    ApiError,
    DuplicateRequest,
    IdempotencyKeyReused,
    LedgerError,
    Overloaded,
    PromptTooLong,
    ServiceUnavailable,
)
from app.protocol.commands import AdmitAnswer, AdmitStatus
from app.protocol.tables import RequestState
from web import idempotency, request_id
from web.logs import log_event
from web.params import Prepared
from web.records import look_up_all, state_of
from web.services import Services

FULL_RETRY_AFTER_S = 2.0
"""A queue of a thousand does not clear at once; longer would leave workers idle."""


def refusal(services: Services, client_id: str, prepared: Prepared, answer: AdmitAnswer) -> ApiError:
    """The error of an admission that was answered with anything but ADMITTED or KNOWN; logged."""
    status, queued = answer.status, answer.queued
    if status is AdmitStatus.DUPLICATE:
        log_event(logging.ERROR, "duplicate_request", request_id=client_id, uid=answer.uid)
        return DuplicateRequest(_why_duplicate(services, client_id, answer.uid), param=request_id.HEADER)
    log_event(logging.WARNING, "not_admitted", request_id=client_id, uid=answer.uid, status=status, queued=queued)
    if status is AdmitStatus.OTHER_BODY:
        return IdempotencyKeyReused(
            f"this {idempotency.HEADER} came with another body before; a new request needs a new key",
            param=idempotency.HEADER,
        )
    if status is AdmitStatus.FULL:
        asked = len(prepared.choices)
        why = f" and there is no place for {asked} more" if asked > 1 else ""
        return Overloaded(f"{queued} requests wait already{why}", retry_after_s=FULL_RETRY_AFTER_S)
    if status is AdmitStatus.TOO_LARGE:
        prompt, more = max((len(each.prompt_ids), each.sampling.max_tokens) for each in prepared.choices)
        return PromptTooLong(
            f"{prompt} prompt tokens and max_tokens {more} fit into no node that runs; the largest KV pool that would "
            f"be needed holds {answer.room_tokens} tokens",
            param="max_tokens",
        )
    return ServiceUnavailable(f"the ledger did not take the request ({status}); try again", retry_after_s=1)


def _why_duplicate(services: Services, client_id: str, uid: str) -> str:
    window_s = services.settings.dedup_window_s
    if window_s and _has_finished(services, uid):
        return f"request id {client_id} was finished within the last {window_s:g} s (BATON_DEDUP_WINDOW_S)"
    return f"request id {client_id} is in process already"


def _has_finished(services: Services, uid: str) -> bool:
    try:
        return state_of(look_up_all(services.ledger, uid=uid)) == RequestState.FINISHED
    except LedgerError:
        return False
