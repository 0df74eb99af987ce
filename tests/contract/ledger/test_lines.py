"""The lines beside the records follow the records, and are never believed against them."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from app.protocol.commands import FailureKind, ReserveStatus
from tests.contract.ledger.support import World
from tests.contract.ledger.worlds import TwinWorld, ValkeyWorld

pytestmark = pytest.mark.usefixtures("cluster")

LINES = ("queue", "waiters", "deadlines", "rings")
IN_NONE: dict[str, set[str]] = {name: set() for name in LINES}
ENDS: dict[str, Callable[[World], object]] = {
    "abort": lambda world: world.abort(),
    "last token": lambda world: world.emit("u", 0, 7, end="stop"),
    "failure": lambda world: world.fail("u", kind=FailureKind.FINAL),
}


def lines(world: World) -> dict[str, set[str]]:
    dump = world.dump()
    return {name: set(dump[name]) for name in LINES}


def make_waiter(world: World, uid: str) -> None:
    if isinstance(world, ValkeyWorld):
        world.raw.zadd(f"{world.prefix}waiters", {uid: 1})
    elif isinstance(world, TwinWorld):
        world.ledger.store.waiters[uid] = 1


@pytest.mark.parametrize("end", ENDS)
def test_what_ended_stands_in_no_line(world: World, end: str) -> None:
    world.prefilling()
    assert lines(world) == IN_NONE | {"waiters": {"u"}, "deadlines": {"u"}}
    ENDS[end](world)
    assert lines(world) == IN_NONE


def test_what_decodes_waits_for_nothing_in_the_ledger(world: World) -> None:
    world.decoding()
    assert lines(world) == IN_NONE


def test_a_waiter_whose_record_moved_on_is_dropped(world: World) -> None:
    """No command leads there; data that were lost in part may."""
    world.prefilling()
    world.abort()
    make_waiter(world, "u")
    assert world.reserve("l", "u").status is ReserveStatus.NOTHING
    assert (world.state(), lines(world)["waiters"], world.owned("d")) == ("ABORTED", set(), set())
