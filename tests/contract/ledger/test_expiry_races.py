"""The scan for timeouts against those who activate at the same moment, on a real server."""

from __future__ import annotations

import random
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from app.protocol.commands import Activate, ActivateStatus
from tests.contract.ledger.worlds import ValkeyWorld

REQUESTS = 120
STEP_MS = 10


def test_what_expires_and_is_activated_at_once_goes_one_way_each(real: ValkeyWorld) -> None:
    real.cluster()
    for i in range(REQUESTS):  # the first expires in a second, each next one a little later
        real.prefilling(f"u{i}", f"f{i}", first_token_timeout_ms=1_000 + STEP_MS * i, max_queued=1000)
        assert real.reserve(f"l{i}", f"u{i}", free=10_000).uid == f"u{i}"
    activated: set[str] = set()
    expired: set[str] = set()
    start = threading.Barrier(3)

    def activate(numbers: list[int]) -> None:
        start.wait()
        for i in numbers:
            answer: Any = real.ledger.execute(Activate(f"u{i}", 1, f"f{i}", f"l{i}", "d", 0, 7))
            if answer.status is ActivateStatus.ACTIVATED:
                activated.add(f"u{i}")
            else:
                assert answer.status is ActivateStatus.FENCED

    def scan() -> None:
        start.wait()
        for _ in range(REQUESTS):
            real.advance(STEP_MS)
            expired.update(real.scan().expired)

    real.advance(1_000)
    expired.update(real.scan().expired)
    numbers = random.Random(5).sample(range(REQUESTS), REQUESTS)
    with ThreadPoolExecutor(3) as pool:
        running = [pool.submit(activate, numbers[::2]), pool.submit(activate, numbers[1::2]), pool.submit(scan)]
        for one in running:
            one.result()
    assert expired
    assert activated
    assert not expired & activated
    assert expired | activated == {f"u{i}" for i in range(REQUESTS)}
    leases = real.dump()["leases"]
    for i in range(REQUESTS):
        went = ("DECODING", 1, "ACTIVE") if f"u{i}" in activated else ("QUEUED", 2, "EXPIRED")
        record = real.read(f"u{i}")
        assert (record.state, record.attempt, leases[f"l{i}"]["state"]) == went
    assert real.owned("p") == set()
