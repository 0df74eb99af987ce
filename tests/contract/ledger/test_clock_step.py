"""A clock that is set: back, it is followed from where it is (rule 9); forward, nothing that is in use is forgotten."""

from __future__ import annotations

import itertools
from typing import Any

from app.ledger.memory import MemoryLedger
from app.protocol.commands import Admit, Claim, Limits, Register, Scan, Watcher
from app.schemas import NodeInfo, SamplingParams
from tests.contract.ledger.support import World

SAMPLING = SamplingParams(seed=1, max_tokens=2)
LIMITS = Limits(3, 9, 60_000, 60_000, 60_000)


def test_ledger_time_goes_on_after_the_clock_was_set_back(world: World) -> None:
    world.clock_was(-60_000)
    first = world.ledger.execute(Scan(0)).time_ms
    looks = itertools.count()
    world.wait_until(lambda: next(looks) > 10)  # 10 ms each
    assert 100 <= world.ledger.execute(Scan(0)).time_ms - first <= 1_000


def test_the_twin_keeps_a_fence_for_as_long_as_its_attempt_goes_on() -> None:
    clock = [1_000_000]
    ledger = MemoryLedger(lambda: clock[0])
    for incarnation, role in (("w", "web"), ("p", "prefill")):
        info = NodeInfo(incarnation=incarnation, role=role, name=incarnation, pid=1, host="h")  # type: ignore[arg-type]
        ledger.execute(Register(info, 10_000))
    for uid in ("first", "second"):
        ledger.execute(Admit(uid, uid, (1, 2), SAMPLING, Watcher("w", uid), LIMITS))
    claim = Claim("", "p", "fence", free_blocks=100, block_size_tokens=16)
    assert ledger.execute(claim).work.uid == "first"
    clock[0] += 2 * 3_600_000
    assert ledger.execute(claim).work.uid == "first"


def test_the_server_keeps_a_fence_for_as_long_as_its_attempt_goes_on(real: Any) -> None:
    real.cluster()
    real.prefilling("u", "f")
    assert real.raw.ttl(f"{real.prefix}fence:f") == -1
    real.abort("u")
    assert real.raw.ttl(f"{real.prefix}fence:f") > 0
