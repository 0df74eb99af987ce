"""Every error Baton raises, in one tree.

::

    BatonError
    ├── ApiError                     a client sees it: HTTP status, OpenAI error type, code
    │   ├── InvalidRequest           400  the body or a header is wrong; names the field
    │   │   └── PromptTooLong        400  prompt + max_tokens can never fit
    │   ├── ModelNotFound            404
    │   ├── RouteNotFound            404
    │   ├── MethodNotAllowed         405
    │   ├── RequestNotFound          404  no record of this request id
    │   ├── NodeNotFound             404  no living node of this name
    │   ├── BodyTimeout              408  the client stopped in the middle of the body
    │   ├── DuplicateRequest         409  the id is in process, or was finished just now; a retry would not help
    │   ├── BodyTooLarge             413
    │   ├── IdempotencyKeyReused     422  the key came with another body before
    │   ├── Overloaded               429  the queue is full
    │   ├── RequestCancelled         499  somebody asked for its cancellation
    │   ├── RequestFailed            500  out of attempts, or a failure that a retry does not help
    │   ├── RequestAborted           500  it was aborted for another reason
    │   ├── InternalError            500  a bug; the log has the trace
    │   ├── RequestExpired           503  it waited past one of its timeouts
    │   └── ServiceUnavailable       503  the ledger cannot be reached or refused to write
    ├── LedgerError                  inside: a ledger call
    │   ├── LedgerUnavailable        certainly not applied
    │   ├── LedgerUnknown            may have been applied, or may be later (until ``not_after_ms``)
    │   └── LedgerForeign            the data there is not ours, or of another version
    ├── PullError                    a KV pull failed; ``reason`` says how
    ├── EngineError                  a call to the engine was wrong, or a sequence broke it
    └── StartupError                 a process cannot start; one clear line
        ├── SettingsError            names the setting
        └── ModelError               the model cannot be fetched, read or served
"""

from __future__ import annotations

from typing import ClassVar


class BatonError(Exception):
    """Root of the tree. ``str(error)`` is the message people read."""


class ApiError(BatonError):
    """An error that a client of the HTTP API sees as OpenAI's error object.

    Attributes:
        status: HTTP status.
        type: OpenAI's error ``type``.
        code: machine-readable ``code``.
        retry_helps: what ``x-should-retry`` says.
        param: the request field at fault, when there is one.
        retry_after_s: seconds for ``Retry-After``, when a wait helps.
    """

    status: ClassVar[int] = 500
    type: ClassVar[str] = "server_error"
    code: ClassVar[str] = "internal_error"
    retry_helps: ClassVar[bool] = False

    def __init__(self, message: str, *, param: str | None = None, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.retry_after_s = retry_after_s


class InvalidRequest(ApiError):
    status = 400
    type = "invalid_request_error"
    code = "invalid_value"


class PromptTooLong(InvalidRequest):
    code = "context_length_exceeded"


class ModelNotFound(ApiError):
    status = 404
    type = "invalid_request_error"
    code = "model_not_found"


class RouteNotFound(ApiError):
    status = 404
    type = "invalid_request_error"
    code = "unknown_url"


class MethodNotAllowed(ApiError):
    status = 405
    type = "invalid_request_error"
    code = "method_not_allowed"


class RequestNotFound(ApiError):
    status = 404
    type = "invalid_request_error"
    code = "request_not_found"


class NodeNotFound(ApiError):
    status = 404
    type = "invalid_request_error"
    code = "node_not_found"


class BodyTimeout(ApiError):
    status = 408
    type = "invalid_request_error"
    code = "body_timeout"
    retry_helps = True


class DuplicateRequest(ApiError):
    status = 409
    type = "invalid_request_error"
    code = "duplicate_request"


class BodyTooLarge(ApiError):
    status = 413
    type = "invalid_request_error"
    code = "body_too_large"


class IdempotencyKeyReused(ApiError):
    status = 422
    type = "invalid_request_error"
    code = "idempotency_key_reused"


class Overloaded(ApiError):
    status = 429
    type = "overloaded_error"
    code = "queue_full"
    retry_helps = True


class RequestCancelled(ApiError):
    """499 as in nginx and gRPC: the client's own wish is no fault of the server's."""

    status = 499
    type = "invalid_request_error"
    code = "request_cancelled"


class RequestFailed(ApiError):
    code = "request_failed"


class RequestAborted(ApiError):
    code = "request_aborted"


class InternalError(ApiError):
    code = "internal_error"


class RequestExpired(ApiError):
    status = 503
    type = "overloaded_error"
    code = "request_expired"
    retry_helps = True


class ServiceUnavailable(ApiError):
    status = 503
    type = "server_error"
    code = "service_unavailable"
    retry_helps = True


class LedgerError(BatonError):
    """A ledger call did not give an answer."""


class LedgerUnavailable(LedgerError):
    """The call was certainly not applied."""


class LedgerUnknown(LedgerError):
    """The call may have been applied, or be applied later, up to ledger time ``not_after_ms``."""

    def __init__(self, message: str, *, not_after_ms: int) -> None:
        super().__init__(message)
        self.not_after_ms = not_after_ms


class LedgerForeign(LedgerError):
    """The data there are not Baton's, or of a schema that this process does not understand."""


class PullError(BatonError):
    """A pull of KV blocks failed. ``reason`` is a member of ``app.kv.reader.PullFailure``."""

    def __init__(self, message: str, *, reason: str) -> None:
        super().__init__(message)
        self.reason = reason


class EngineError(BatonError):
    """A call to the engine was wrong, or one sequence could not be computed."""


class StartupError(BatonError):
    """A process cannot start. The message is one line that says what to do."""


class SettingsError(StartupError):
    """A setting is wrong; the message names it."""


class ModelError(StartupError):
    """The model cannot be fetched, read or served."""
