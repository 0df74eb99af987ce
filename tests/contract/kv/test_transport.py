"""What every KV transport must do, tried between two real processes.

A new transport joins by a line in ``TRANSPORTS`` and an owner that speaks the same commands.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from app.errors import PullError
from app.kv import KVPool, KVReader, KVTransport, PullFailure
from app.schemas import KVLocation

ROOT = Path(__file__).parents[3]
LAYOUT = "test layout"
NUM_BLOCKS, BLOCK_BYTES = 8, 64 * 1024
TRANSPORTS: dict[str, Callable[[], KVTransport]] = {"shm": KVReader}


class Owner:
    """The other process."""

    def __init__(self, incarnation: str = "owner-1", layout: str = LAYOUT) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__).parent / "owner.py"), incarnation, layout],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            text=True,
        )
        self.location = KVLocation.model_validate_json(self._line())

    def ask(self, command: str) -> Any:
        self.send(command)
        return self.answer()

    def send(self, command: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(command + "\n")
        self.process.stdin.flush()

    def answer(self) -> Any:
        return json.loads(self._line())

    def commit(self, *blocks: int) -> tuple[list[int], list[int], list[bytes]]:
        answer = self.ask(f"commit {' '.join(map(str, blocks))}")
        return list(blocks), answer["generations"], [bytes.fromhex(digest) for digest in answer["digests"]]

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(10)

    def close(self) -> None:
        self.kill()
        for stream in (self.process.stdin, self.process.stdout):
            assert stream is not None
            stream.close()

    def _line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline()


def expected_block(block: int) -> np.ndarray:
    """What ``owner.py`` filled its pool with."""
    return np.random.default_rng(11).integers(0, 256, (NUM_BLOCKS, BLOCK_BYTES), np.uint8)[block]


@pytest.fixture
def owner() -> Iterator[Owner]:
    process = Owner()
    yield process
    process.close()


@pytest.fixture(params=TRANSPORTS)
def transport(request: pytest.FixtureRequest) -> Iterator[KVTransport]:
    made = TRANSPORTS[request.param]()
    yield made
    made.close()


@pytest.fixture
def pool() -> Iterator[KVPool]:
    made = KVPool.create(NUM_BLOCKS, BLOCK_BYTES, "reader-1", LAYOUT)
    yield made
    made.close()


def reason_of(failure: pytest.ExceptionInfo[PullError]) -> str:
    return failure.value.reason


def test_a_pull_copies_exactly_the_named_blocks(owner: Owner, transport: KVTransport, pool: KVPool) -> None:
    transport.pull(owner.location, *owner.commit(5, 0, 7), pool, [1, 2, 3])
    for src, dst in ((5, 1), (0, 2), (7, 3)):
        np.testing.assert_array_equal(pool.blocks[dst], expected_block(src))
    assert not pool.blocks[[0, 4, 5, 6, 7]].any()


def test_a_block_in_its_next_use_is_refused(owner: Owner, transport: KVTransport, pool: KVPool) -> None:
    committed = owner.commit(2, 3)
    owner.ask("reuse 3")
    with pytest.raises(PullError) as failure:
        transport.pull(owner.location, *committed, pool, [0, 1])
    assert reason_of(failure) == PullFailure.GENERATION


def test_one_flipped_bit_is_refused(owner: Owner, transport: KVTransport, pool: KVPool) -> None:
    committed = owner.commit(2, 3)
    owner.ask("flip 3")
    with pytest.raises(PullError) as failure:
        transport.pull(owner.location, *committed, pool, [0, 1])
    assert reason_of(failure) == PullFailure.DIGEST


def test_digests_of_swapped_blocks_are_refused(owner: Owner, transport: KVTransport, pool: KVPool) -> None:
    blocks, generations, digests = owner.commit(2, 3)
    with pytest.raises(PullError) as failure:
        transport.pull(owner.location, blocks, generations, digests[::-1], pool, [0, 1])
    assert reason_of(failure) == PullFailure.DIGEST


@pytest.mark.parametrize("short", ["blocks", "generations", "digests", "destinations", "all"])
def test_unequal_counts_are_refused_before_anything_is_copied(
    owner: Owner, transport: KVTransport, pool: KVPool, short: str
) -> None:
    blocks, generations, digests = owner.commit(2, 3)
    parts = {"blocks": blocks, "generations": generations, "digests": digests, "destinations": [0, 1]}
    for name in parts if short == "all" else [short]:
        parts[name] = parts[name][:-2] if short == "all" else parts[name][:-1]
    with pytest.raises(PullError) as failure:
        transport.pull(
            owner.location, parts["blocks"], parts["generations"], parts["digests"], pool, parts["destinations"]
        )
    assert reason_of(failure) == PullFailure.COUNTS
    assert not pool.blocks.any()


@pytest.mark.parametrize("block", [-1, NUM_BLOCKS])
def test_a_block_outside_the_pool_is_refused(owner: Owner, transport: KVTransport, pool: KVPool, block: int) -> None:
    _, generations, digests = owner.commit(2)
    with pytest.raises(PullError) as failure:
        transport.pull(owner.location, [block], generations, digests, pool, [0])
    assert reason_of(failure) == PullFailure.SHORT


@pytest.mark.parametrize("destinations", [[0, 0], [0, NUM_BLOCKS], [-1, 0]])
def test_wrong_destinations_are_the_callers_error(
    owner: Owner, transport: KVTransport, pool: KVPool, destinations: list[int]
) -> None:
    with pytest.raises(ValueError, match="dst_blocks"):
        transport.pull(owner.location, *owner.commit(2, 3), pool, destinations)


def test_pools_of_different_layouts_refuse_each_other(owner: Owner, transport: KVTransport) -> None:
    other = KVPool.create(NUM_BLOCKS, BLOCK_BYTES, "reader-1", "another layout")
    with pytest.raises(PullError) as failure:
        transport.pull(owner.location, *owner.commit(2), other, [0])
    other.close()
    assert reason_of(failure) == PullFailure.LAYOUT


def test_a_location_that_lies_about_the_layout_is_refused(transport: KVTransport, pool: KVPool) -> None:
    owner = Owner(layout="another layout")
    with pytest.raises(PullError) as failure:
        transport.pull(owner.location.model_copy(update={"layout": LAYOUT}), *owner.commit(2), pool, [0])
    owner.close()
    assert reason_of(failure) == PullFailure.LAYOUT


@pytest.mark.parametrize("lie", [{"incarnation": "owner-0"}, {"num_blocks": NUM_BLOCKS - 1}])
def test_a_location_of_another_life_is_refused(
    owner: Owner, transport: KVTransport, pool: KVPool, lie: dict[str, object]
) -> None:
    with pytest.raises(PullError) as failure:
        transport.pull(owner.location.model_copy(update=lie), *owner.commit(2), pool, [0])
    assert reason_of(failure) == PullFailure.FOREIGN


def test_a_killed_owner_is_gone_and_leaves_nothing(owner: Owner, transport: KVTransport, pool: KVPool) -> None:
    before = set(Path("/dev/shm").iterdir())
    committed = owner.commit(2)
    transport.pull(owner.location, *committed, pool, [0])
    owner.kill()
    with pytest.raises(PullError) as failure:
        transport.pull(owner.location, *committed, pool, [1])
    assert reason_of(failure) == PullFailure.GONE
    assert set(Path("/dev/shm").iterdir()) <= before
    assert not pool.blocks[1].any()


def test_a_closed_pool_is_gone(owner: Owner, transport: KVTransport, pool: KVPool) -> None:
    committed = owner.commit(2)
    owner.ask("close")
    with pytest.raises(PullError) as failure:
        transport.pull(owner.location, *committed, pool, [0])
    assert reason_of(failure) in (PullFailure.GONE, PullFailure.FOREIGN)


def test_a_pull_never_returns_bytes_that_were_not_committed(owner: Owner, transport: KVTransport, pool: KVPool) -> None:
    committed = owner.commit(0)
    transport.pull(owner.location, *committed, pool, [0])
    owner.send("churn 3000")
    outcomes = set()
    for _ in range(300):
        try:
            transport.pull(owner.location, *committed, pool, [0])
        except PullError as error:
            outcomes.add(error.reason)
        else:
            np.testing.assert_array_equal(pool.blocks[0], expected_block(0))
    owner.answer()
    assert outcomes <= {PullFailure.GENERATION, PullFailure.DIGEST}
    with pytest.raises(PullError):
        transport.pull(owner.location, *committed, pool, [0])


def test_forgetting_what_is_gone_is_harmless(owner: Owner, transport: KVTransport, pool: KVPool) -> None:
    transport.forget_gone()
    for _ in range(2):
        transport.pull(owner.location, *owner.commit(1), pool, [0])
        transport.forget_gone()
    np.testing.assert_array_equal(pool.blocks[0], expected_block(1))
    owner.kill()
    for _ in range(2):
        transport.forget_gone()
