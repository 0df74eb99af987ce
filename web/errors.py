"""The one place where an error becomes what a client sees: OpenAI's error object, status and headers."""

from __future__ import annotations

import math
from typing import Any

from flask import Flask, Response, jsonify, request
from werkzeug.exceptions import HTTPException, RequestEntityTooLarge
from werkzeug.exceptions import MethodNotAllowed as WrongMethod
from werkzeug.exceptions import NotFound as NoRoute

from app.errors import (
    ApiError,
    BodyTooLarge,
    InternalError,
    InvalidRequest,
    LedgerError,
    MethodNotAllowed,
    RouteNotFound,
    ServiceUnavailable,
)
from web import request_id
from web.logs import LOGGER

LEDGER_RETRY_AFTER_S = 1.0
"""A restarted Redis is back in well under a second; clients add their own back-off."""


MOST_CHARACTERS = 1000


def error_body(error: ApiError, of_request: str) -> dict[str, Any]:
    """OpenAI's error object, with all four keys always present. The message names the request."""
    message = f"{_shortened(str(error))} (request {of_request})"
    return {"error": {"message": message, "type": error.type, "param": error.param, "code": error.code}}


def _shortened(message: str) -> str:
    """Some errors repeat what the client sent."""
    return message if len(message) <= MOST_CHARACTERS else message[: MOST_CHARACTERS - 1] + "…"


def error_response(error: ApiError) -> Response:
    """``error`` as the answer to the current request, with what tells a client whether to try again."""
    response = jsonify(error_body(error, request_id.current()))
    response.status_code = error.status
    response.headers["x-should-retry"] = "true" if error.retry_helps else "false"
    if error.retry_after_s is not None:
        response.headers["Retry-After"] = str(max(1, math.ceil(error.retry_after_s)))
    return response


def as_api_error(error: Exception, of_request: str) -> ApiError:
    """What a client is told about ``error``. One that nobody expected is logged with its trace."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, LedgerError):
        LOGGER.warning("ledger_error request_id=%s error=%r", of_request, str(error))
        return ServiceUnavailable("the ledger does not answer; try again", retry_after_s=LEDGER_RETRY_AFTER_S)
    LOGGER.error("internal_error request_id=%s", of_request, exc_info=error)
    return InternalError("internal error; the server's log has the details under this request's id")


def install(app: Flask) -> None:
    """Answer every failure, also those that Flask finds itself, in the same form."""

    @app.errorhandler(HTTPException)
    def http_error(error: HTTPException) -> Response | HTTPException:
        if error.code is None or error.code < 400:
            return error
        response = error_response(_from_http(error, app))
        if isinstance(error, WrongMethod) and error.valid_methods:
            response.headers["Allow"] = ", ".join(sorted(error.valid_methods))
        return response

    @app.errorhandler(Exception)
    def any_error(error: Exception) -> Response:
        return error_response(as_api_error(error, request_id.current()))


def _from_http(error: HTTPException, app: Flask) -> ApiError:
    if isinstance(error, NoRoute):
        return RouteNotFound(f"there is no {request.method} {request.path}")
    if isinstance(error, WrongMethod):
        return MethodNotAllowed(f"{request.path} does not know {request.method}")
    if isinstance(error, RequestEntityTooLarge):
        return BodyTooLarge(f"the body is larger than {app.config['MAX_CONTENT_LENGTH']} bytes (BATON_MAX_BODY_BYTES)")
    if error.code is not None and error.code < 500:
        return InvalidRequest(error.description or error.name)
    return as_api_error(error, request_id.current())
