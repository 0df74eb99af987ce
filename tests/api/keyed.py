"""What the tests of Idempotency-Key share: a worker that can be held, and looks into the ledger."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

from werkzeug.test import TestResponse

from app.ledger.memory.state import Record
from app.protocol.commands import Work
from tests.api.conftest import Rig, chunks
from tests.api.support import Step, Wait, say

TEXT = "Grüße, 世界!"
KEY = {"Idempotency-Key": "k"}


class Held:
    """A worker that says the first half, waits, and says the rest; it remembers what it was given."""

    def __init__(self, text: str = TEXT) -> None:
        self.go_on = threading.Event()
        self.seen: list[Work] = []
        self._steps = say(text)

    def __call__(self, work: Work) -> Iterator[Step]:
        self.seen.append(work)
        half = len(self._steps) // 2
        yield from self._steps[:half]
        yield Wait(self.go_on)
        yield from self._steps[half:]


def records(rig: Rig) -> list[Record]:
    ledger: Any = rig.ledger
    return list(ledger.save().records.values())


def watchers(rig: Rig) -> int:
    return sum(len(record.watchers) for record in records(rig))


def replayed(answer: TestResponse) -> bool:
    return answer.headers.get("Idempotent-Replayed") == "true"


def joined(body: str) -> str:
    *got, done = chunks(body)
    assert done == "[DONE]"
    return "".join(c["choices"][0]["text"] for c in got if c["choices"])


def text_of(answer: TestResponse) -> str:
    return str(answer.json["choices"][0]["text"])  # type: ignore[index]


def read_rest(answer: TestResponse) -> str:
    """The rest of an answer that is not buffered, closed at its end as a server does it."""
    try:
        return b"".join(answer.iter_encoded()).decode()
    finally:
        answer.close()


def start(rig: Rig, **fields: Any) -> TestResponse:
    """A stream with the key, of which nothing more is read than what was needed to open it."""
    return rig.complete(headers=KEY, stream=True, buffered=False, **fields)
