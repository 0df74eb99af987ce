"""What identifies a request that is sent again under its Idempotency-Key."""

from __future__ import annotations

import hashlib

from flask import Flask

from web.idempotency import read_key
from web.openai_schemas import CompletionBody
from web.params import parse_body


def test_what_an_idempotency_key_is_compared_with_does_not_change_when_fields_are_added() -> None:
    app = Flask(__name__)
    body = parse_body(b'{"model":"m","prompt":"hi","max_tokens":3}', CompletionBody)
    with app.test_request_context("/v1/completions", headers={"Idempotency-Key": "k"}):
        key = read_key(body, "fingerprint")
    sent = '["/v1/completions",{"max_tokens":3,"model":"m","prompt":"hi"}]'
    assert key is not None
    assert key.body == hashlib.sha256(sent.encode()).hexdigest()
