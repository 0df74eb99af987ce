"""The client's id of a request: ``X-Request-Id``, taken or drawn, and echoed on every answer."""

from __future__ import annotations

import re

from flask import Flask, Response, g, request

from app.errors import InvalidRequest
from app.ids import draw_id

HEADER = "X-Request-Id"
ANSWER_PREFIXES = ("chatcmpl-", "cmpl-")
"""What stands before the request's id in the id of its answer."""
_PATTERN = re.compile(r"[A-Za-z0-9._:-]{1,128}")


def current() -> str:
    """Id of the request that this thread answers. Drawn on first use if the header has not been looked at."""
    if "request_id" not in g:
        g.request_id = draw_id()
    return str(g.request_id)


def adopt(request_id: str) -> None:
    """This thread answers an earlier request: its answer and its errors carry that one's id.

    The header still echoes what the client gave, if it gave one.
    """
    g.request_id = request_id


def is_valid(request_id: str) -> bool:
    """Whether it can be one: not what a path swallows, nor what the id of another request's answer looks like."""
    if request_id.startswith(ANSWER_PREFIXES) or not request_id.strip("."):
        return False
    return _PATTERN.fullmatch(request_id) is not None


def install(app: Flask) -> None:
    """Read the header before each request and set it on each answer."""

    @app.before_request
    def read_header() -> None:
        given = request.headers.get(HEADER)
        if given is None:
            return
        if not is_valid(given):
            raise InvalidRequest(
                f"{HEADER} must be 1 to 128 of A-Z a-z 0-9 . _ : -, not only dots, and not begin as an answer's id "
                f"({', '.join(ANSWER_PREFIXES)})",
                param=HEADER,
            )
        g.request_id = g.given_request_id = given

    @app.after_request
    def echo_header(response: Response) -> Response:
        response.headers[HEADER] = g.get("given_request_id") or current()
        return response
