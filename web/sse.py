"""Answers on the wire: one JSON object, or server-sent events. What stands in them is the shape's business."""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from itertools import chain
from typing import Any, Protocol

from flask import Response, request

from app.protocol.commands import IdempotencyKey
from web import idempotency, request_id
from web.admission import Job, admit
from web.answer import Answer, Delta
from web.client import Client, ClientGone
from web.errors import as_api_error, error_body
from web.params import Prepared
from web.relay import Ping, relay
from web.services import services

CLIENT_CLOSED_REQUEST = 499
"""nginx's status for it; nobody reads the answer."""

Json = dict[str, Any]
Deltas = Generator[Delta | Ping, None, None]


class Shape(Protocol):
    """How one route writes an answer."""

    def delta(self, delta: Delta) -> list[Json]:
        """Chunks for one delta: maybe none; the last of a choice with the finish reason."""

    def usage(self, answers: Sequence[Answer]) -> Json:
        """The chunk after the last one, if the client asked for usage."""

    def whole(self, answers: Sequence[Answer]) -> Json:
        """The answer in one piece."""


def respond(make_shape: Callable[[Job], Shape], prepared: Prepared, key: IdempotencyKey | None) -> Response:
    """Admit the request and answer it. Errors before the first byte are raised, and become a real HTTP status."""
    these = services()
    client = Client(request.environ)
    tokenizer, choices = these.model.tokenizer, enumerate(prepared.choices)
    answers = [Answer(tokenizer, choice.prompt_ids, choice.sampling, index) for index, choice in choices]
    job = admit(these, request_id.current(), prepared, key)
    deltas = relay(these, job, answers, client)
    if job.records:
        request_id.adopt(job.client_id)
        idempotency.mark_replayed()
    shape = make_shape(job)
    if prepared.stream:
        return _stream(shape, prepared, answers, deltas)
    try:
        for _ in deltas:
            pass
    except ClientGone:
        return Response(status=CLIENT_CLOSED_REQUEST)
    return Response(_dump(shape.whole(answers)), mimetype="application/json")


def _stream(shape: Shape, prepared: Prepared, answers: Sequence[Answer], deltas: Deltas) -> Response:
    """Wait for the first thing to say: until then an error can still be a status."""
    try:
        first = next(deltas)
    except ClientGone:
        return Response(status=CLIENT_CLOSED_REQUEST)
    body = _events(shape, prepared, answers, first, deltas, request_id.current())
    response = Response(body, mimetype="text/event-stream")
    response.headers["Cache-Control"] = "no-cache"
    response.headers["X-Accel-Buffering"] = "no"
    return response


def _events(
    shape: Shape,
    prepared: Prepared,
    answers: Sequence[Answer],
    first: Delta | Ping,
    deltas: Deltas,
    of_request: str,
) -> Iterator[str]:
    """The event stream, one string per delta, so that each is one write. Closing it says that the client has gone."""
    try:
        with closing(deltas):
            for item in chain([first], deltas):
                if isinstance(item, Ping):
                    yield ": ping\n\n"
                    continue
                chunks = shape.delta(item)
                if chunks:
                    yield "".join(map(_event, chunks))
        if prepared.include_usage:
            yield _event(shape.usage(answers))
        yield "data: [DONE]\n\n"
    except ClientGone:
        return
    except Exception as error:  # noqa: BLE001 - the last stop before the wire: the client must get an event that says so
        yield _event(error_body(as_api_error(error, of_request), of_request))


def _event(chunk: Json) -> str:
    return f"data: {_dump(chunk)}\n\n"


def _dump(value: Json) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
