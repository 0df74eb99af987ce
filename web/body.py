"""Clients that stop in the middle of their body, or of reading their answer, must not keep a thread for ever."""

from __future__ import annotations

import socket
import time

from flask import Flask, request
from gunicorn.http.errors import ParseException
from werkzeug.exceptions import ClientDisconnected

from app.errors import BodyTimeout, InvalidRequest

BODY_S = 10.0
"""Silence in the middle of a body; any network that can be used is faster."""

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
        BodyTimeout: nothing came for BODY_S.
        InvalidRequest: its chunks are no HTTP.
        ClientDisconnected, RequestEntityTooLarge: as Werkzeug says.
    """
    connection = request.environ.get("gunicorn.socket")
    started = time.monotonic()
    if connection is not None:
        connection.settimeout(BODY_S)
    try:
        return request.get_data(cache=False)
    except (TimeoutError, ClientDisconnected) as error:
        if time.monotonic() - started < BODY_S:
            raise
        if connection is not None:
            connection.shutdown(socket.SHUT_RD)  # what else comes is the rest of the body, not another request
        raise BodyTimeout(f"the rest of the body did not come within {BODY_S:g} s") from error
    except ParseException as error:
        raise InvalidRequest(f"the body is not valid HTTP: {error}") from error
    finally:
        if connection is not None:
            connection.settimeout(SEND_S)
