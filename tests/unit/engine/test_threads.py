"""Which threads compute: a worker's own, and those that others of the machine leave idle."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

import app.processors
from app.processors import available_processors
from workers.engine import runtime
from workers.engine.kernels.load import set_threads, threads_now
from workers.engine.thread_board import SLOTS, ThreadBoard

ROOT = Path(__file__).parents[3]


@pytest.fixture(autouse=True, scope="module")
def paddle_is_configured() -> None:
    runtime.configure(1)


@pytest.fixture
def board(tmp_path: Path, kernels: Path) -> Iterator[Callable[..., ThreadBoard]]:
    boards = []

    def open_board(own: int, processors: int) -> ThreadBoard:
        boards.append(ThreadBoard(tmp_path / "threads", own))
        boards[-1].processors = processors
        return boards[-1]

    yield open_board
    set_threads(kernels, 1)
    for each in boards:
        each.close()


def test_what_others_leave_idle_is_borrowed_in_equal_parts(board: Callable[..., ThreadBoard], kernels: Path) -> None:
    mine, two, three = board(2, 8), board(2, 8), board(3, 8)
    set_threads(kernels, 2, mine)
    assert threads_now(kernels) == 8
    mine.computing()
    assert threads_now(kernels) == 8
    two.computing()
    assert threads_now(kernels) == 2 + (8 - 2 - 2) // 2
    three.computing()
    assert threads_now(kernels) == 2
    two.idle()
    assert threads_now(kernels) == 2 + (8 - 2 - 3) // 2
    three.idle()
    assert threads_now(kernels) == 8


def test_more_workers_than_processors_borrow_nothing(board: Callable[..., ThreadBoard], kernels: Path) -> None:
    mine, *others = (board(1, 2) for _ in range(4))
    set_threads(kernels, 1, mine)
    assert threads_now(kernels) == 2
    for other in others:
        other.computing()
        assert threads_now(kernels) == 1


def test_a_worker_that_was_killed_while_it_computed_keeps_nobody_away(tmp_path: Path, kernels: Path) -> None:
    file = tmp_path / "threads"
    code = f"""
import os, pathlib, workers.engine.thread_board as t
b = t.ThreadBoard(pathlib.Path({str(file)!r}), 3); b.computing(); print("computing", flush=True); input()
"""
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "computing\n"
        mine = ThreadBoard(file, 1)
        mine.processors = 4
        try:
            set_threads(kernels, 1, mine)
            mine.computing()
            assert threads_now(kernels) == 1, "it lives, and computes on three of four"
            child.kill()
            child.wait()
            mine._look_at = 0.0
            mine.computing()
            assert threads_now(kernels) == 4
        finally:
            set_threads(kernels, 1)
            mine.close()


def test_slots_are_given_to_one_at_a_time_and_come_back(tmp_path: Path) -> None:
    file = tmp_path / "new" / "threads"
    boards = [ThreadBoard(file, 1) for _ in range(SLOTS)]
    assert sorted(board.slot for board in boards) == list(range(SLOTS))
    with pytest.raises(OSError, match="all 64 slots are taken"):
        ThreadBoard(file, 1)
    boards[7].computing()
    boards[7].close()
    again = ThreadBoard(file, 5)
    assert (again.slot, again.members[7].threads, again.members[7].busy) == (7, 5, 0)
    for board in (again, *boards):
        board.close()


def test_helpers_that_come_and_go_change_no_bit(board: Callable[..., ThreadBoard], kernels: Path) -> None:
    import paddle

    from workers.engine.ops.compiled_ops import CompiledOps

    random = np.random.default_rng(3)
    weights = random.standard_normal((400, 96)).astype(np.float16)
    inputs = [random.standard_normal((rows, 96)).astype(np.float32) for rows in (1, 2, 7, 64, 300)]
    ops = CompiledOps(kernels)
    matrix = ops.matrix([weights])
    alone = [ops.linear(paddle.to_tensor(x), matrix).numpy().tobytes() for x in inputs]
    mine, other = board(1, 4), board(1, 4)
    set_threads(kernels, 1, mine)
    over = threading.Event()

    def flicker() -> None:
        while not over.is_set():
            other.computing()
            other.members[other.slot].threads = 3
            other.idle()

    thread = threading.Thread(target=flicker)
    thread.start()
    try:
        for _ in range(200):
            assert [ops.linear(paddle.to_tensor(x), matrix).numpy().tobytes() for x in inputs] == alone
    finally:
        over.set()
        thread.join()


@pytest.mark.parametrize(
    ("said", "expected"), [("max 100000", None), ("150000 100000", 1), ("50000 100000", 1), ("nonsense", None)]
)
def test_a_control_group_that_gets_less_time_has_fewer_processors(
    said: str, expected: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "cpu.max"
    file.write_text(said)
    monkeypatch.setattr(app.processors, "_QUOTA_V2", file)
    assert available_processors() == (expected or len(os.sched_getaffinity(0)))
