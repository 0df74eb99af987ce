"""What only the shared-memory transport promises."""

import errno
import mmap
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from app.errors import PullError, StartupError
from app.kv import KVPool, KVReader, PullFailure
from app.kv.memory import available_bytes

from .test_transport import BLOCK_BYTES, LAYOUT, NUM_BLOCKS, Owner, expected_block, owner, pool

__all__ = ["owner", "pool"]


@pytest.fixture
def reader() -> Iterator[KVReader]:
    made = KVReader(max_mappings=2)
    yield made
    made.close()


def resident_of_others() -> int:
    """Bytes of pools mapped read-only that count as this process's memory."""
    found, ours = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, second, *_ = line.split()
        if not first.endswith(":"):
            ours = "memfd:baton-kv" in line and "w" not in second
        elif first == "Rss:" and ours:
            found += int(second) * 1024
    return found


def mapped_pools() -> int:
    return sum("memfd:baton-kv" in line for line in Path("/proc/self/maps").read_text().splitlines())


@pytest.mark.parametrize(
    ("impostor", "reason"),
    [
        ("pipe", PullFailure.FOREIGN),
        ("other-name", PullFailure.FOREIGN),
        ("garbage", PullFailure.FOREIGN),
        ("empty", PullFailure.FOREIGN),
        ("unsealed", PullFailure.FOREIGN),
        ("truncated", PullFailure.SHORT),
    ],
)
def test_an_impostor_is_refused(
    owner: Owner, reader: KVReader, pool: KVPool, impostor: str, reason: PullFailure
) -> None:
    committed = owner.commit(2)
    location = owner.location.model_copy(update=owner.ask(f"impostor {impostor}"))
    with pytest.raises(PullError) as failure:
        reader.pull(location, *committed, pool, [0])
    assert failure.value.reason == reason
    assert not pool.blocks.any()


@pytest.mark.parametrize("kept_blocks", [0, 2, NUM_BLOCKS])
def test_the_pages_of_others_are_let_go_once_many_were_read(
    owner: Owner, reader: KVReader, pool: KVPool, monkeypatch: pytest.MonkeyPatch, kept_blocks: int
) -> None:
    monkeypatch.setattr("app.kv.reader._RESIDENT_BYTES", kept_blocks * BLOCK_BYTES)
    most = 0
    for block in range(NUM_BLOCKS):
        reader.pull(owner.location, *owner.commit(block), pool, [block])
        most = max(most, resident_of_others())
    np.testing.assert_array_equal(pool.blocks, [expected_block(block) for block in range(NUM_BLOCKS)])
    # A fault maps up to 64 KiB around it; the generations, which are read after the copy, are one.
    assert min(kept_blocks, NUM_BLOCKS - 1) * BLOCK_BYTES <= most <= (kept_blocks + 2) * BLOCK_BYTES


def test_nobody_else_can_map_a_pool_for_writing(owner: Owner) -> None:
    fd = os.open(f"/proc/{owner.location.pid}/fd/{owner.location.fd}", os.O_RDWR)
    try:
        with pytest.raises(PermissionError):
            mmap.mmap(fd, 4096)
        with pytest.raises(PermissionError):
            os.ftruncate(fd, 0)
    finally:
        os.close(fd)


def test_the_mapping_of_a_dead_owner_is_let_go(owner: Owner, reader: KVReader, pool: KVPool) -> None:
    own = mapped_pools()
    committed = owner.commit(2)
    reader.pull(owner.location, *committed, pool, [0])
    assert mapped_pools() == own + 1
    owner.kill()
    with pytest.raises(PullError):
        reader.pull(owner.location, *committed, pool, [0])
    assert mapped_pools() == own


def test_mappings_are_bounded_and_the_longest_unused_goes_first(reader: KVReader, pool: KVPool) -> None:
    own = mapped_pools()
    owners = [Owner(f"owner-{number}") for number in range(3)]
    try:
        for index in (0, 1, 0, 2):
            reader.pull(owners[index].location, *owners[index].commit(1), pool, [0])
        assert reader.mapped == ("owner-0", "owner-2")
        assert mapped_pools() == own + 2
        owners[0].kill()
        reader.forget_gone()
        assert reader.mapped == ("owner-2",)
        assert mapped_pools() == own + 1
        owners[2].ask("close")  # it lives on without this pool
        reader.forget_gone()
        assert mapped_pools() == own
    finally:
        for each in owners:
            each.close()


def test_a_pool_that_does_not_fit_is_refused_with_its_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.kv.pool.available_bytes", lambda: 3 * 2**20)
    with pytest.raises(StartupError, match=r"4 blocks take 4 MiB, 3 MiB are available"):
        KVPool.create(4, 2**20, "big", LAYOUT)


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"memory.max": "max"}, None),
        ({"memory.max": "5000", "memory.current": "2000"}, 3000),
        ({"memory/memory.limit_in_bytes": "900", "memory/memory.usage_in_bytes": "1000"}, 0),
    ],
)
def test_the_limit_of_a_container_counts(tmp_path: Path, files: dict[str, str], expected: int | None) -> None:
    (tmp_path / "memory").mkdir()
    for name, text in files.items():
        (tmp_path / name).write_text(text + "\n")
    assert (available_bytes(tmp_path) == expected) == (expected is not None)


@pytest.mark.parametrize(
    ("num_blocks", "block_bytes", "incarnation", "layout"),
    [(0, 1, "a", "b"), (1, 0, "a", "b"), (1, 1, "", "b"), (1, 1, "a", ""), (1, 1, "a", "b" * 5000)],
)
def test_a_pool_without_sense_is_refused(num_blocks: int, block_bytes: int, incarnation: str, layout: str) -> None:
    with pytest.raises(StartupError):
        KVPool.create(num_blocks, block_bytes, incarnation, layout)


def test_a_closed_pool_gives_its_memory_back() -> None:
    before = mapped_pools()
    pool = KVPool.create(NUM_BLOCKS, BLOCK_BYTES, "short-lived", LAYOUT)
    assert mapped_pools() == before + 1
    pool.close()
    assert mapped_pools() == before
    with pytest.raises(ValueError, match="closed"):
        pool.location()


def test_a_pool_that_cannot_be_opened_now_fails_the_pull_and_nothing_else(
    owner: Owner, reader: KVReader, pool: KVPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_descriptor_left(*_: object) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patched:
        patched.setattr("app.kv.reader.os.open", no_descriptor_left)
        with pytest.raises(PullError, match="Too many open files") as error:
            reader.pull(owner.location, [0], [0], [b"\0" * 16], pool, [0])
    assert error.value.reason == PullFailure.UNREADABLE
