"""From a checked request to one that the ledger has admitted, and back out when nobody waits for it any more."""

from __future__ import annotations

import logging
import queue
from dataclasses import dataclass

from app.errors import (
    ApiError,
    DuplicateRequest,
    LedgerError,
    LedgerUnknown,
    Overloaded,
    PromptTooLong,
    ServiceUnavailable,
)
from app.ids import draw_id
from app.protocol.commands import Abort, Admit, AdmitAnswer, AdmitStatus, Bell, Detach, Limits, Watcher
from app.settings import Settings
from web.events import Mail
from web.logs import log_event
from web.params import Prepared
from web.services import Services

FULL_RETRY_AFTER_S = 2.0
"""A queue of a thousand does not clear at once; longer would leave workers idle."""


@dataclass(frozen=True)
class Job:
    """One admitted request, with the connection that watches it."""

    uid: str
    client_id: str
    prepared: Prepared
    watcher: Watcher
    mailbox: queue.SimpleQueue[Mail]


def admit(services: Services, client_id: str, prepared: Prepared) -> Job:
    """Admit the request, ring prefill, and return what ``leave`` must be called with in the end.

    Raises:
        DuplicateRequest, Overloaded, PromptTooLong, ServiceUnavailable: nothing is left behind, or it will be aborted.
    """
    services.node.demand_registered()
    if services.process.draining:
        raise ServiceUnavailable("this web process is shutting down; try again", retry_after_s=1)
    if not services.seats.acquire(blocking=False):
        raise Overloaded(
            f"all {services.settings.web_threads} places of this web process are taken (BATON_WEB_THREADS)",
            retry_after_s=FULL_RETRY_AFTER_S,
        )
    uid = draw_id()
    job = Job(
        uid=uid,
        client_id=client_id,
        prepared=prepared,
        watcher=Watcher(services.node.incarnation, draw_id()),
        mailbox=services.node.mailboxes.open(uid),
    )
    try:
        _admit(services, job)
    except BaseException:
        _give_back(services, job)
        raise
    services.bells.ring(Bell("prefill", uid, 1))
    return job


def leave(services: Services, job: Job, *, ended: bool) -> None:
    """Nobody waits for ``job`` here any more. Unless it has ``ended``, the last watcher gone aborts it."""
    _give_back(services, job)
    if not ended:
        services.node.say_farewell(Detach(job.uid, job.watcher))


def _admit(services: Services, job: Job) -> None:
    command = Admit(
        uid=job.uid,
        client_id=job.client_id,
        prompt_ids=job.prepared.prompt_ids,
        sampling=job.prepared.sampling,
        watcher=job.watcher,
        limits=_limits(services.settings),
    )
    try:
        answer = services.ledger.execute(command)
    except LedgerUnknown as error:
        services.node.say_farewell(Abort(job.uid, "admission_unknown"))
        log_event(logging.ERROR, "admission_unknown", request_id=job.client_id, uid=job.uid, error=error)
        raise ServiceUnavailable("the ledger did not answer in time; try again", retry_after_s=1) from error
    except LedgerError as error:
        log_event(logging.ERROR, "admission_unavailable", request_id=job.client_id, uid=job.uid, error=error)
        raise ServiceUnavailable("the ledger cannot be reached; try again", retry_after_s=1) from error
    if answer.status is AdmitStatus.ADMITTED:
        log_event(
            logging.INFO,
            "admitted",
            request_id=job.client_id,
            uid=job.uid,
            prompt_tokens=len(job.prepared.prompt_ids),
            max_tokens=job.prepared.sampling.max_tokens,
        )
        return
    raise _refusal(job, answer)


def _refusal(job: Job, answer: AdmitAnswer) -> ApiError:
    status, queued = answer.status, answer.queued
    if status is AdmitStatus.DUPLICATE:
        log_event(logging.ERROR, "duplicate_request", request_id=job.client_id, uid=answer.uid)
        return DuplicateRequest(f"request id {job.client_id} is in process already", param="X-Request-Id")
    log_event(logging.WARNING, "not_admitted", request_id=job.client_id, uid=job.uid, status=status, queued=queued)
    if status is AdmitStatus.FULL:
        return Overloaded(f"{queued} requests wait already", retry_after_s=FULL_RETRY_AFTER_S)
    if status is AdmitStatus.TOO_LARGE:
        prompt, more = len(job.prepared.prompt_ids), job.prepared.sampling.max_tokens
        return PromptTooLong(
            f"{prompt} prompt tokens and max_tokens {more} fit into no node that runs; the largest KV pool that would "
            f"be needed holds {answer.room_tokens} tokens",
            param="max_tokens",
        )
    return ServiceUnavailable(f"the ledger did not take the request ({status}); try again", retry_after_s=1)


def _limits(settings: Settings) -> Limits:
    return Limits(
        max_attempts=settings.max_attempts,
        max_queued=settings.max_queued,
        queue_timeout_ms=round(settings.queue_timeout_s * 1000),
        first_token_timeout_ms=round(settings.first_token_timeout_s * 1000),
        record_ttl_ms=round(settings.record_ttl_s * 1000),
    )


def _give_back(services: Services, job: Job) -> None:
    services.node.mailboxes.close(job.uid)
    services.seats.release()
