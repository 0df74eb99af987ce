"""Two releases side by side: the version is that of the oldest node, and goes up when the last of these has gone."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from app.errors import LedgerForeign
from app.ledger.api import Ledger
from app.protocol.commands import Cluster, Heartbeat, NodeAnswer, NodeStatus, Register, Scan, Snapshot
from app.schemas import Gauges, NodeInfo
from app.versions import SPOKEN, Versions
from tests.contract.ledger.support import World

NOW = SPOKEN.newest
NEXT = NOW + 1


@pytest.fixture
def newer(world: World) -> Iterator[Ledger]:
    """The ledger for a process of the next release, which still reads what this one writes."""
    ledger = world.of_release(Versions(SPOKEN.oldest, NEXT))
    yield ledger
    ledger.close()


def join(ledger: Ledger, name: str, ttl_ms: int = 10_000_000) -> int:
    """Register a node of the next release; answers how it is to write."""
    node = NodeInfo(incarnation=name, role="web", name=name, pid=1, host="h", model="model-1", newest=NEXT)
    answer: NodeAnswer = ledger.execute(Register(node, ttl_ms))
    assert answer.status is NodeStatus.OK
    return answer.version


def version_after_a_scan(ledger: Ledger) -> int:
    ledger.execute(Scan(0))
    version: int = ledger.execute(Cluster()).version
    return version


def test_while_a_node_of_the_old_release_lives_all_write_as_it_reads(world: World, newer: Ledger) -> None:
    old = world.node("old", "decode")
    assert (old.version, join(newer, "new")) == (NOW, NOW)
    assert version_after_a_scan(newer) == NOW
    assert newer.execute(Heartbeat("new", Gauges())).version == NOW
    assert world.beat("old").version == NOW


def test_when_the_last_old_node_has_gone_the_next_scan_raises_the_version(world: World, newer: Ledger) -> None:
    world.node("old", "decode")
    join(newer, "new")
    world.exit("old")
    assert world.scan().ran  # one of the old release raises nothing
    assert world.read("u").status == "UNKNOWN"
    assert version_after_a_scan(newer) == NEXT
    assert newer.execute(Heartbeat("new", Gauges())).version == NEXT


def test_a_node_that_was_declared_dead_holds_nothing_up(world: World, newer: Ledger) -> None:
    world.node("old", "decode", ttl=1)
    join(newer, "new")
    world.advance(2)
    assert version_after_a_scan(newer) == NEXT


def test_a_process_that_does_not_read_the_version_is_refused_with_every_call(world: World, newer: Ledger) -> None:
    world.cluster()
    for name in ("w", "p", "d"):
        world.exit(name)
    join(newer, "new")
    assert version_after_a_scan(newer) == NEXT
    before = newer.execute(Cluster()).nodes
    with pytest.raises(LedgerForeign, match=str(NEXT)):
        world.node("old", "web")  # on the connection that it has
    with pytest.raises(LedgerForeign, match=str(NEXT)):
        world.ledger.execute(Snapshot("u"))
    with pytest.raises(LedgerForeign, match=str(NEXT)):
        world.abort("u")
    assert newer.execute(Cluster()).nodes == before


def test_what_a_node_of_the_next_release_says_of_itself_is_understood(world: World, newer: Ledger) -> None:
    class More(NodeInfo):
        colour: str = "red"

    newer.execute(Register(More(incarnation="new", role="web", name="new", pid=1, host="h", newest=NEXT), 1000))
    answer = world.do(Cluster())
    assert [(node.node.name, node.node.newest) for node in answer.nodes] == [("new", NEXT)]


def test_an_empty_ledger_begins_at_the_newest_of_whoever_comes_first(world: World) -> None:
    node = world.node("n", "web")
    assert (node.version, world.do(Cluster()).version) == (NOW, NOW)
