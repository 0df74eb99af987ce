"""Each fault at each step: the request is exact and decided in time, its neighbours are exact, nothing is left over."""

from __future__ import annotations

import os
import signal
import time

import pytest

from app.schemas import Role
from tests.chaos.cells import BOUND_S, CELLS, SHORT, Cell, Fault
from tests.chaos.stack import Stack
from tests.chaos.trial import Trial, ended_at
from workers.failpoints.orders import Action, Point

pytestmark = [pytest.mark.chaos, pytest.mark.model, pytest.mark.matrix, pytest.mark.timeout(240)]


@pytest.mark.parametrize(
    "cell", [pytest.param(cell, marks=[pytest.mark.short] if cell in SHORT else [], id=str(cell)) for cell in CELLS]
)
def test_a_fault_at_a_step_costs_nobody_a_token_and_leaves_nothing(stack: Stack, cell: Cell) -> None:
    action = Action.CUT if cell.fault is Fault.CUT else Action.STOP
    with Trial(stack, cell.point, cell.role, action) as trial:
        fault_at = hurt(trial, cell.fault)
        noticeable_at = ended_at(trial.pid) if cell.fault is Fault.KILL else fault_at
        trial.wait_ended()
    trial.check(cell.fault, fault_at, BOUND_S[cell.fault], noticeable_at)


@pytest.mark.parametrize(
    ("point", "stands", "dies"),
    [
        (Point.AFTER_RESERVE, "decode", "prefill"),
        (Point.AFTER_FIRST_TOKEN, "prefill", "decode"),
        (Point.AFTER_COMMIT, "decode", "prefill"),
        pytest.param(Point.DURING_PULL, "decode", "prefill", marks=pytest.mark.short),
        (Point.AFTER_ACTIVATE, "decode", "prefill"),
    ],
)
def test_a_node_that_dies_while_its_peer_stands_at_a_step_costs_nobody_a_token_and_leaves_nothing(
    stack: Stack, point: Point, stands: Role, dies: Role
) -> None:
    with Trial(stack, point, stands, Action.STOP) as trial:
        peer = stack.baton.nodes()[stack.node_of(trial.request_id, dies)]["pid"]
        os.kill(peer, signal.SIGKILL)
        fault_at, noticeable_at = time.monotonic(), ended_at(peer)
        trial.go_on()
        trial.wait_ended()
    trial.check(f"{dies} killed", fault_at, BOUND_S[Fault.KILL], noticeable_at)


def hurt(trial: Trial, fault: Fault) -> float:
    """Do to the process that stands there what the fault is; answers when."""
    if fault is Fault.CRASH:
        trial.undo.enter_context(trial.stack.nobody_sees_exits())
    if fault in (Fault.KILL, Fault.CRASH):
        os.kill(trial.pid, signal.SIGKILL)
    elif fault is Fault.CUT:
        trial.undo.callback(trial.stack.lift)
    return time.monotonic()
