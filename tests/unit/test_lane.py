"""A lane: order, progress that a watchdog sees, and who hears of its end."""

from __future__ import annotations

import queue
import threading

from app.lane import Lane


def quiet(name: str, error: BaseException) -> None:
    raise AssertionError(name) from error


def test_what_is_put_is_handled_in_order_and_what_waits_is_handled_before_the_end() -> None:
    seen: list[int] = []
    lane: Lane[int] = Lane("test", seen.extend, quiet)
    for number in range(5):
        lane.put(number)
    lane.start()
    lane.close()
    assert seen == [0, 1, 2, 3, 4]
    assert not lane.alive


def test_an_exception_ends_the_lane_and_is_told_once() -> None:
    crashes: queue.Queue[tuple[str, type]] = queue.Queue()
    lane: Lane[int] = Lane("test", lambda batch: [][batch[0]], lambda name, error: crashes.put((name, type(error))))
    lane.start()
    lane.put(1)
    assert crashes.get(timeout=5) == ("test", IndexError)
    lane.close()
    assert crashes.empty()


def test_after_close_nobody_hears_of_a_crash() -> None:
    crashes: list[str] = []
    go = threading.Event()

    def handle(batch: list[int]) -> None:
        go.wait(5)
        raise ZeroDivisionError  # what it works with was closed under it

    lane: Lane[int] = Lane("test", handle, lambda name, error: crashes.append(name))
    lane.start()
    lane.put(1)
    closer = threading.Thread(target=lane.close)
    closer.start()
    go.set()
    closer.join(5)
    assert not lane.alive
    assert crashes == []


def test_each_item_of_a_batch_can_be_progress_of_its_own() -> None:
    stamps: list[float] = []

    def handle(batch: list[int]) -> None:
        for _ in batch:
            lane.entered()
            stamps.append(lane.entered_at)

    lane: Lane[int] = Lane("test", handle, quiet)
    for number in range(3):
        lane.put(number)
    lane.start()
    lane.close()
    assert stamps == sorted(stamps)
    assert len(set(stamps)) == 3, "each item is an entry of its own"
    assert lane.entered_at == 0.0
