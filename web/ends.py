"""How a request that ended without success reaches its client."""

from __future__ import annotations

from collections.abc import Mapping

from app.errors import ApiError, RequestAborted, RequestCancelled, RequestExpired, RequestFailed, ServiceUnavailable
from app.protocol.tables import FailureReason, RequestState

CANCELLED = "cancelled"
ADMISSION_UNKNOWN = "admission_unknown"
_NOT_THE_CLIENTS_DOING: Mapping[str, str] = {
    "client_gone": "the ledger took this client for gone and ended its request",
    "web_lost": "this web process was taken for dead and its requests were ended",
    ADMISSION_UNKNOWN: "the ledger did not answer the admission in time",
}
"""Aborts for a client that has gone. One that reads this has not, so it is told to try again."""


class Ended(Exception):
    """The request ended without success. ``error`` is what the client is told."""

    def __init__(self, error: ApiError) -> None:
        super().__init__(str(error))
        self.error = error


def end_error(state: str, code: str, detail: str) -> ApiError:
    """The error of a request that ended as ``state``; ``code``: a FailureReason, a timeout, an abort's reason."""
    why = f"{code}: {detail}" if detail else code or "no reason given"
    if state == RequestState.EXPIRED:
        return RequestExpired(f"the request expired ({why})", retry_after_s=1)
    if state != RequestState.ABORTED:
        return RequestFailed(f"the request failed ({why})")
    if code == CANCELLED:
        return RequestCancelled("the request was cancelled")
    if code in _NOT_THE_CLIENTS_DOING:
        return ServiceUnavailable(f"{_NOT_THE_CLIENTS_DOING[code]} ({code}); try again", retry_after_s=1)
    return RequestAborted(f"the request was aborted ({why})")


def different_tokens() -> ApiError:
    """The error of an answer that would otherwise be spliced from two different ones."""
    why = f"{FailureReason.DIFFERENT_TOKENS}: the ledger now holds another answer than was sent so far"
    return RequestFailed(f"the request failed ({why})")
