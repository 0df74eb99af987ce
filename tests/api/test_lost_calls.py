"""Many clients on few keys over a ledger that loses and delays calls: exact answers or errors, and nothing is left."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from app.errors import LedgerUnavailable, LedgerUnknown
from app.ledger.api import Ledger
from app.protocol.commands import Abort, Admit, Attach, Detach, Scan, Snapshot, Work
from tests.api.conftest import MakeRig, Rig, chunks
from tests.api.keyed import joined, records, watchers
from tests.api.support import Step, Wait, ids, say
from tests.api.test_answers import Around
from tests.waiting import wait_for

RETRYABLE = {"service_unavailable", "request_expired"}


class Lossy(Around):
    """Of web's calls some are not applied, some are applied and their answers lost, some are applied much later."""

    dice: random.Random | None = None

    def __init__(self, inner: Ledger) -> None:
        super().__init__(inner)
        self.late: list[threading.Timer] = []

    def execute(self, command: Any) -> Any:
        dice = self.dice
        if dice is None or not isinstance(command, Admit | Attach | Abort | Detach | Snapshot):
            return self.inner.execute(command)
        match dice.choices(("fine", "refused", "answer lost", "late", "never"), (70, 8, 8, 7, 7))[0]:
            case "fine":
                return self.inner.execute(command)
            case "refused":
                raise LedgerUnavailable("refused")
            case "answer lost":
                self.inner.execute(command)
            case "late":
                not_after = self.inner.time_ms() + 300
                self.late.append(threading.Timer(dice.uniform(0, 0.4), self.inner.apply, (command, not_after)))
                self.late[-1].start()
                raise LedgerUnknown("no answer yet", not_after_ms=not_after)
        raise LedgerUnknown("no answer", not_after_ms=self.inner.time_ms() + 1)


def text_of(work: Work) -> str:
    return f"é{''.join(chr(97 + i % 26) for i in work.prompt_ids[:6])}🙂"


ENDLESS = "2" * 6
"""The answer to this prompt begins, and never ends: only that nobody watches it can end it."""


def script(work: Work) -> Iterator[Step]:
    pause = threading.Event()
    steps = say(text_of(work))
    if list(work.prompt_ids) == ids(ENDLESS):
        steps[4:] = [Wait(threading.Event())]
    for step in steps:
        yield step
        pause.wait(0.003)


class Client:
    """Asks for one thing under one key again and again, leaves in the middle, cancels, and notes what it got."""

    def __init__(self, rig: Rig, seed: int) -> None:
        self._rig = rig
        self._dice = random.Random(seed)
        self.texts: list[tuple[str, str]] = []
        self.codes: set[str] = set()

    def run(self) -> None:
        for turn in range(15):
            number = self._dice.randrange(3)
            headers = {"Idempotency-Key": f"{turn}-{number}"} if self._dice.random() < 0.8 else {}
            self._ask(f"{number}" * 6, headers)

    def _ask(self, prompt: str, headers: dict[str, str]) -> None:
        leaves = self._dice.random() < 0.3 or prompt == ENDLESS
        answer = self._rig.complete(headers=headers, prompt=prompt, stream=True, buffered=False)
        body = b""
        try:
            for part in answer.iter_encoded():
                body += part
                if leaves and (prompt == ENDLESS or self._dice.random() < 0.5):
                    return
        finally:
            answer.close()
        if answer.status_code != 200:
            assert answer.status_code == 499 or answer.headers["x-should-retry"] == "true", body
            return
        last = chunks(body.decode())[-1]
        if last == "[DONE]":
            self.texts.append((prompt, joined(body.decode())))
        else:
            self.codes.add(last["error"]["code"])
        if self._dice.random() < 0.1:
            self._rig.post(f"/v1/requests/{answer.headers['X-Request-Id']}/cancel", b"")


@pytest.mark.parametrize("seed", range(3))
def test_whatever_calls_are_lost_answers_are_exact_and_everything_is_given_back(make_rig: MakeRig, seed: int) -> None:
    rig = make_rig(script=script, wrap=Lossy, idempotency_grace_s=0.2, ledger_timeout_s=0.1, num_blocks=4096)
    ledger: Any = rig.ledger
    ledger.dice = random.Random(seed)
    clients = [Client(rig, 100 * seed + number) for number in range(12)]
    with ThreadPoolExecutor(len(clients)) as pool:
        for done in [pool.submit(client.run) for client in clients]:
            done.result()
    ledger.dice = None
    for call in ledger.late:
        call.join()
    for client in clients:
        assert client.codes <= {*RETRYABLE, "request_cancelled"}
        for prompt, text in client.texts:
            assert text == f"é{''.join(chr(97 + b % 26) for b in prompt.encode())}🙂"
    assert sum(len(client.texts) for client in clients) > len(clients)
    wait_for(lambda: rig.ledger.execute(Scan(0)) and watchers(rig) == 0, 15)
    wait_for(lambda: rig.ledger.execute(Scan(0)) and not any(r.in_process for r in records(rig)), 15)
    rig.check_all_given_back()
