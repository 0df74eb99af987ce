"""A web process that was told to stop: its time only gets shorter."""

from __future__ import annotations

from web.process import Process


def test_a_second_request_to_stop_can_only_shorten_the_drain() -> None:
    process = Process()
    assert (process.draining, process.drain_over) == (False, False)
    process.begin_drain(600)
    first = process.drain_deadline
    process.begin_drain(6000)
    assert process.drain_deadline == first
    assert (process.draining, process.drain_over) == (True, False)
    process.begin_drain(0)
    assert (process.draining, process.drain_over) == (True, True)
