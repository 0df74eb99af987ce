"""Rule 9: a clock that was set back is followed from where it is, not waited for until it is where it was."""

from __future__ import annotations

import itertools

from app.protocol.commands import Scan
from tests.contract.ledger.support import World


def test_ledger_time_goes_on_after_the_clock_was_set_back(world: World) -> None:
    world.clock_was(-60_000)
    first = world.ledger.execute(Scan(0)).time_ms
    looks = itertools.count()
    world.wait_until(lambda: next(looks) > 10)  # 10 ms each
    assert 100 <= world.ledger.execute(Scan(0)).time_ms - first <= 1_000
