"""``/v1/requests/{id}``: what became of a request, by the client's id; and its cancellation."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from typing import Any

from flask import Blueprint, Response, jsonify

from app.errors import InvalidRequest, RequestNotFound
from app.protocol.commands import PHASES, Abort, SnapshotAnswer
from web import request_id
from web.ends import CANCELLED
from web.logs import log_event
from web.records import look_up_all, state_of
from web.services import services

blueprint = Blueprint("requests", __name__)

ANSWER_PREFIX = re.compile(f"^({'|'.join(request_id.ANSWER_PREFIXES)})")
"""Clients may ask for a request by its answer's id."""


@blueprint.get("/v1/requests/<client_id>")
def retrieve_request(client_id: str) -> Response:
    return jsonify(_describe(_find(client_id)))


@blueprint.post("/v1/requests/<client_id>/cancel")
def cancel_request(client_id: str) -> Response:
    """Abort it, whatever it is doing. Of one that has ended already the end stands."""
    found = _find(client_id)
    uid = found[0].uid
    answer = services().ledger.execute(Abort(uid, CANCELLED))
    log_event(logging.INFO, "cancel", request_id=client_id, uid=uid, status=answer.status)
    return jsonify(_describe(_find(client_id)))


def _find(client_id: str) -> list[SnapshotAnswer]:
    known_as = ANSWER_PREFIX.sub("", client_id)
    if not request_id.is_valid(known_as):
        raise InvalidRequest("a request id is 1 to 128 of A-Z a-z 0-9 . _ : -", param="id")
    records = look_up_all(services().ledger, client_id=known_as)
    if records:
        return records
    raise RequestNotFound(f"there is no record of request {client_id}", param="id")


def _describe(records: Sequence[SnapshotAnswer]) -> dict[str, Any]:
    """One record as it is; several as a state for all, and each under ``choices``."""
    first = records[0]
    head = {"id": first.client_id, "object": "request"}
    if len(records) == 1:
        return head | _describe_one(first)
    choices = [{"index": index} | _describe_one(record) for index, record in enumerate(records)]
    state = state_of(records)
    error = next((choice["error"] for choice in choices if choice["state"] == state), None)
    return head | {"uid": first.uid, "state": state, "error": error, "choices": choices}


def _describe_one(record: SnapshotAnswer) -> dict[str, Any]:
    error = {"code": record.error_code, "detail": record.error_detail} if record.error_code else None
    return {
        "uid": record.uid,
        "state": record.state,
        "attempt": record.attempt,
        "failures": record.failures,
        "prompt_tokens": record.prompt_tokens,
        "cached_tokens": record.cached_tokens,
        "finish_reason": record.finish_reason,
        "error": error,
        "nodes": {"prefill": record.prefill_node or None, "decode": record.decode_node or None},
        "timeline": {phase: record.timeline[phase] for phase in PHASES if phase in record.timeline},
    }
