"""The control worker: its task scans with the host's own ledger and bells, while there is a host."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from app.bells import BellLane
from app.ledger.memory import MemoryLedger
from app.protocol.commands import Admit, Bell, Cluster, Limits, Register, Watcher
from app.schemas import NodeInfo, SamplingParams
from app.settings import load_settings
from workers.control import ControlHost, scan


@dataclass
class HeardBells:
    rung: list[Bell] = field(default_factory=list)
    closed: bool = False

    def ring(self, bell: Bell) -> None:
        self.rung.append(bell)

    def close(self) -> None:
        self.closed = True


class ClosableLedger(MemoryLedger):
    closed = False

    def close(self) -> None:
        self.closed = True


def crash(name: str, error: BaseException) -> None:
    raise AssertionError(name) from error


ROOMY = Limits(1, 1000, 60_000, 60_000, 60_000)


def test_the_task_scans_through_its_host_and_the_host_gives_everything_back() -> None:
    ledger, bells = ClosableLedger(lambda: time.time_ns() // 1_000_000), HeardBells()
    host = ControlHost(load_settings(scan_s=0.001), "control1@h", ledger, BellLane(bells, crash))
    task: Any = scan
    assert "no control worker" in task()
    host.start()
    try:
        ledger.execute(Register(NodeInfo(incarnation="w", role="web", name="w", pid=1, host="h"), 60_000))
        sampling, limits = SamplingParams(seed=1, max_tokens=2), Limits(1, 10, 60_000, 60_000, 60_000)
        ledger.execute(Admit("u", "u", (1, 2), sampling, Watcher("w", "x"), limits))
        ledger.store.rings["u"] = 0
        ledger.store.scanned = -1
        assert task() == "bells=1 expired=0 recovered=0"
        for number in range(300):  # more than one script takes
            ledger.execute(Admit(f"v{number}", f"v{number}", (1, 2), sampling, Watcher("w", "x"), ROOMY))
            ledger.store.deadlines[f"v{number}"] = 0
        ledger.store.scanned = -1
        assert task().endswith("expired=300 recovered=0")
        assert host.drain(1)
        assert [node.node.role for node in ledger.execute(Cluster()).nodes] == ["web"]
    finally:
        host.close()
    assert bells.rung[0] == Bell("prefill", "u", 1)
    assert (bells.closed, ledger.closed) == (True, True)
    assert "no control worker" in task()
