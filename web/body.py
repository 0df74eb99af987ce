"""Clients that stop in the middle of their body, or of reading their answer, must not keep a thread for ever."""

from __future__ import annotations

import socket
import time
from contextlib import suppress
from functools import partial

from flask import Flask, request
from gunicorn.http.errors import ParseException
from werkzeug.exceptions import ClientDisconnected

from app.errors import BodyTimeout, InvalidRequest
from web.arrivals import ARRIVALS

BODY_S = 10.0
"""Silence in the middle of a body; any network that can be used is faster."""

BODY_BYTES_PER_S = 16 * 1024
"""The whole of a body has ``BODY_S`` and its length at this rate, however often a byte of it comes."""

SEND_S = 30.0
"""A client that takes nothing of its answer for so long is given up: it keeps a thread, and a place."""


def install(app: Flask) -> None:
    """Bound how long an answer waits for its client to read."""

    @app.before_request
    def bound_writes() -> None:
        connection = request.environ.get("gunicorn.socket")
        if connection is not None:
            connection.settimeout(SEND_S)


def read_body() -> bytes:
    """The whole body.

    Raises:
        BodyTimeout: nothing came for BODY_S, or it is slower than BODY_BYTES_PER_S.
        InvalidRequest: its chunks are no HTTP.
        ClientDisconnected, RequestEntityTooLarge: as Werkzeug says.
    """
    connection = request.environ.get("gunicorn.socket")
    if connection is None:
        return request.get_data(cache=False)
    started = time.monotonic()
    length = request.content_length or request.max_content_length or 0
    connection.settimeout(BODY_S)
    cut = partial(connection.shutdown, socket.SHUT_RD)  # the client can still be told
    ARRIVALS.expect_body(connection, BODY_S + length / BODY_BYTES_PER_S, cut)
    try:
        data = request.get_data(cache=False)
    except (ParseException, TimeoutError, ClientDisconnected) as error:
        silent = not isinstance(error, ParseException) and time.monotonic() - started >= BODY_S
        if silent or not ARRIVALS.is_here(connection):
            with suppress(OSError):  # cut off already
                cut()  # what else comes is the rest of the body, not another request
            raise _too_slow() from error
        if isinstance(error, ParseException):
            raise InvalidRequest(f"the body is not valid HTTP: {error}") from error
        raise
    finally:
        in_time = ARRIVALS.is_here(connection)
        connection.settimeout(SEND_S)
    if not in_time:  # cut off, its end looks like that of a shorter body
        raise _too_slow()
    return data


def _too_slow() -> BodyTimeout:
    return BodyTimeout(f"the rest of the body did not come in time ({BODY_S:g} s of silence at most)")
