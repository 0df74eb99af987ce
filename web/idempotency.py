"""``Idempotency-Key``: sending a request again gets the first one's answer, running or finished, not a second one."""

from __future__ import annotations

import hashlib
import json
import re

from flask import Flask, Response, g, request

from app.errors import InvalidRequest
from app.protocol.commands import IdempotencyKey
from web.openai_schemas import Generation

HEADER = "Idempotency-Key"
REPLAYED_HEADER = "Idempotent-Replayed"
"""On an answer of a request that was there before, as Stripe sets it."""
_PATTERN = re.compile(r"[\x20-\x7e]{1,255}")


def read_key(body: Generation, fingerprint: str) -> IdempotencyKey | None:
    """The current request's key, None without one. ``fingerprint``: of the model, whose successor gives other answers.

    The same key of another API key (``Authorization`` header) is another key.

    Raises:
        InvalidRequest: the header could not be kept.
    """
    given = request.headers.get(HEADER)
    if given is None:
        return None
    if _PATTERN.fullmatch(given) is None:
        raise InvalidRequest(f"{HEADER} must be 1 to 255 printable ASCII characters", param=HEADER)
    return IdempotencyKey(
        scoped=_digest(request.headers.get("Authorization", ""), fingerprint, given),
        body=_digest(request.path, body.model_dump(mode="json", exclude_defaults=True)),
    )


def mark_replayed() -> None:
    """The current answer is that of a request that was there before."""
    g.replayed = True


def install(app: Flask) -> None:
    """Set the header on each answer that was marked, errors too."""

    @app.after_request
    def say_replayed(response: Response) -> Response:
        if g.get("replayed"):
            response.headers[REPLAYED_HEADER] = "true"
        return response


def _digest(*parts: object) -> str:
    canonical = json.dumps(parts, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()
