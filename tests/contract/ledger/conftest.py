"""A `World` per test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from app.ledger.redis import RedisLedger
from app.valkey import EmbeddedValkey
from tests.contract.ledger.support import World
from tests.contract.ledger.worlds import TwinWorld, ValkeyWorld

OpenLedger = Callable[..., RedisLedger]


@pytest.fixture(params=["twin", "valkey"])
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    """The suite runs on both ledgers."""
    made = TwinWorld() if request.param == "twin" else ValkeyWorld(request.getfixturevalue("valkey").url)
    yield made
    made.close()


@pytest.fixture
def cluster(world: World) -> None:
    """web ``w``, prefill ``p`` and decode ``d`` are there from the start."""
    world.cluster()


@pytest.fixture
def real(valkey: EmbeddedValkey) -> Iterator[ValkeyWorld]:
    """For what only a server can show: concurrency, connections, errors."""
    made = ValkeyWorld(valkey.url)
    yield made
    made.close()


@pytest.fixture
def own(tmp_path: Path) -> Iterator[EmbeddedValkey]:
    """A server that a test may freeze, kill or reconfigure."""
    server = EmbeddedValkey(tmp_path / "own")
    server.start()
    yield server
    server.stop()


@pytest.fixture
def open_ledger() -> Iterator[OpenLedger]:
    """Opens ledgers, by default in the namespace ``own``, and closes them."""
    made: list[RedisLedger] = []

    def make(url: str, namespace: str = "own", timeout_s: float = 0.3) -> RedisLedger:
        made.append(RedisLedger(url, namespace, timeout_s=timeout_s))
        return made[-1]

    yield make
    for ledger in made:
        ledger.close()


@pytest.fixture(scope="session")
def make_worlds(valkey: EmbeddedValkey) -> Callable[[], tuple[World, World]]:
    """A fresh pair (twin, real) per call, for comparing the two."""
    return lambda: (TwinWorld(), ValkeyWorld(valkey.url))
