"""Rule 2: what arrives after its not_after changes nothing, except commands that are exempt."""

from __future__ import annotations

from typing import Any

import pytest

from app.protocol.commands import (
    Abort,
    Activate,
    Admit,
    Attach,
    Claim,
    Cluster,
    Deregister,
    Detach,
    Drain,
    Emit,
    FailAttempt,
    FailureKind,
    Heartbeat,
    Holdings,
    Limits,
    Register,
    ReportExit,
    ReserveNext,
    Scan,
    Snapshot,
    Stamp,
    Watcher,
)
from app.schemas import Gauges, NodeInfo, SamplingParams
from tests.contract.ledger.support import World

LATE = [
    Admit("n", "n", (1,), SamplingParams(seed=1, max_tokens=2), Watcher("w", "x"), Limits(3, 9, 9_000, 9_000, 9_000)),
    Abort("u", "user"),
    Abort("unknown", "user"),
    Detach("u", Watcher("w", "connection-u")),
    Attach("u", Watcher("w", "new")),
    Claim("", "p", "new", 100, 16),
    Stamp("u", 1, "f", "p", True),
    FailAttempt("u", 1, "f", "p", "", FailureKind.FAILURE, "engine_error", ""),
    ReserveNext("", "d", "new", 100, 16),
    Activate("u", 1, "f", "l", "d", 0, 7),
    Emit("u", 1, "f", "p", 0, (7,)),
    Drain("p"),
    Deregister("d2"),
]
EXEMPT = [
    Register(NodeInfo(incarnation="new", role="web", name="new", pid=1, host="h"), 1_000),
    Heartbeat("p", Gauges()),
    Scan(0),
    ReportExit("d2"),
    Snapshot("u"),
    Holdings("p"),
    Cluster(),
]


@pytest.fixture(autouse=True)
def _busy_cluster(world: World) -> None:
    world.cluster()
    world.node("d2", "decode")
    world.prefilling("u", "f")
    world.reserve("l")
    world.prefilling("v", "g")
    world.admit("x")


@pytest.mark.parametrize("command", LATE, ids=lambda command: command.name)
def test_a_late_write_changes_nothing(world: World, command: Any) -> None:
    before = world.dump()
    impatient = world.impatient()
    assert impatient.execute(command).status == "LATE"
    impatient.close()
    assert world.dump() == before
    assert world.do(command).status != "LATE"


@pytest.mark.parametrize("command", EXEMPT, ids=lambda command: command.name)
def test_exempt_commands_are_never_late(world: World, command: Any) -> None:
    impatient = world.impatient()
    assert getattr(impatient.execute(command), "status", "") != "LATE"
    impatient.close()


def test_every_answer_carries_the_same_ledger_time(world: World) -> None:
    world.advance(1_234)
    times = {world.do(command).time_ms for command in (*LATE, *EXEMPT)}
    assert len(times) == 1
