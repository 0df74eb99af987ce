"""`baton restart` under load: one prefill and one decode worker, so that nobody else could take over."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.chaos.rolling import CLIENTS, roll
from tests.integration.baton import Baton

pytestmark = [pytest.mark.chaos, pytest.mark.model, pytest.mark.matrix, pytest.mark.short, pytest.mark.timeout(600)]


def test_a_rolling_restart_of_every_process_under_load_fails_no_request(
    new_home: Callable[[Path], Path], tmp_path: Path
) -> None:
    small = ("--num-blocks", "64", "--max-num-seqs", "8")
    baton = Baton(new_home(tmp_path), tmp_path / "output", *small, BATON_QUEUE_TIMEOUT_S="300")
    try:
        baton.wait_until_ready()
        tally = roll(baton)
        assert baton.printed("everything is restarted")
        assert baton.is_ready()
    finally:
        baton.stop()
    assert dict(tally.wrong) == {}
    assert tally.exact > 3 * CLIENTS
    assert not baton.printed("restart: ")
