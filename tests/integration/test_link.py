"""Calls between nodes over real sockets: each ends in one of four ways, none later than its deadline."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator

import pytest

from app.link import CallOutcome, Link
from app.protocol.messages import ACCEPTED, Message, PullResult, Refusal, refused

RESULT = PullResult(uid="u", attempt=1, fence="f", lease_id="l", activated=True)


class Peer:
    """A link that answers every call as told and remembers what it got."""

    def __init__(self, incarnation: str, answer: object = ACCEPTED) -> None:
        self.got: list[Message] = []
        self.answer = answer
        self.link = Link(incarnation, "127.0.0.1", self._called)

    def _called(self, call_id: str, message: Message) -> None:
        self.got.append(message)
        if self.answer is not None:
            self.link.reply(call_id, self.answer)  # type: ignore[arg-type]


@pytest.fixture
def caller() -> Iterator[Link]:
    link = Link("caller", "127.0.0.1", lambda call_id, message: None)
    yield link
    link.close()


def ask(link: Link, address: str, incarnation: str, timeout_s: float = 2.0) -> tuple[CallOutcome, float]:
    """The outcome of one call and the seconds it took."""
    outcomes: queue.Queue[CallOutcome] = queue.Queue()
    start = time.monotonic()
    link.call(address, incarnation, RESULT, timeout_s, outcomes.put)
    return outcomes.get(timeout=timeout_s + 5), time.monotonic() - start


def test_an_accepted_call_is_acknowledged_and_delivered_once(caller: Link) -> None:
    peer = Peer("peer")
    try:
        outcomes = [ask(caller, peer.link.address, "peer")[0] for _ in range(20)]
    finally:
        peer.link.close()
    assert [outcome.reply for outcome in outcomes] == [ACCEPTED] * 20
    assert peer.got == [RESULT] * 20


def test_a_refusal_comes_with_its_reason(caller: Link) -> None:
    no = refused(Refusal.STALE_FENCE, "why")
    peer = Peer("peer", no)
    try:
        assert ask(caller, peer.link.address, "peer")[0].reply == no
    finally:
        peer.link.close()


def test_a_call_to_an_earlier_incarnation_is_refused_by_its_successor(caller: Link) -> None:
    peer = Peer("second life")
    try:
        reply = ask(caller, peer.link.address, "first life")[0].reply
    finally:
        peer.link.close()
    assert reply is not None and reply.reason is Refusal.INCARNATION
    assert peer.got == []


def test_an_absent_peer_means_certainly_not_sent_and_soon(caller: Link) -> None:
    peer = Peer("peer")
    address = peer.link.address
    peer.link.close()
    outcome, took = ask(caller, address, "peer", timeout_s=2.0)
    assert outcome.reply is None and outcome.not_sent
    assert took < 2.5


def test_a_peer_that_does_not_answer_means_unacknowledged_at_the_deadline(caller: Link) -> None:
    peer = Peer("peer", answer=None)
    try:
        outcome, took = ask(caller, peer.link.address, "peer", timeout_s=0.3)
        assert outcome.reply is None and not outcome.not_sent
        assert 0.3 <= took < 2.0
        peer.answer = ACCEPTED
        assert ask(caller, peer.link.address, "peer")[0].reply == ACCEPTED, "the next call works"
    finally:
        peer.link.close()


def test_one_dead_peer_does_not_hold_up_calls_to_another(caller: Link) -> None:
    silent, good = Peer("silent", answer=None), Peer("good")
    slow: queue.Queue[CallOutcome] = queue.Queue()
    try:
        caller.call(silent.link.address, "silent", RESULT, 2.0, slow.put)
        outcome, took = ask(caller, good.link.address, "good")
        assert outcome.reply == ACCEPTED
        assert slow.empty(), "the silent peer's deadline has not passed"
        assert took < 1.5
    finally:
        silent.link.close()
        good.link.close()


CHILD = textwrap.dedent("""
    import sys, threading
    from app.link import Link
    from app.protocol.messages import ACCEPTED
    def called(call_id, message):
        print("got", flush=True)
        link.reply(call_id, ACCEPTED)
    link = Link("child", "127.0.0.1", called)
    print(link.address, flush=True)
    threading.Event().wait()
""")


@pytest.fixture
def child() -> Iterator[tuple[subprocess.Popen[str], str]]:
    process = subprocess.Popen([sys.executable, "-c", CHILD], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    with process:
        yield process, process.stdout.readline().strip()
        process.kill()


def freeze(process: subprocess.Popen[str]) -> None:
    """SIGSTOP, and wait until the kernel says that it stopped: the signal alone takes effect some time later."""
    os.kill(process.pid, signal.SIGSTOP)
    os.waitpid(process.pid, os.WUNTRACED)


def test_a_killed_peer_ends_the_call_long_before_its_deadline(
    caller: Link, child: tuple[subprocess.Popen[str], str]
) -> None:
    process, address = child
    assert ask(caller, address, "child")[0].reply == ACCEPTED
    freeze(process)
    outcomes: queue.Queue[CallOutcome] = queue.Queue()
    start = time.monotonic()
    caller.call(address, "child", RESULT, 20.0, outcomes.put)
    process.kill()
    assert outcomes.get(timeout=10).reply is None
    assert time.monotonic() - start < 5


def test_what_a_frozen_peer_reads_after_the_deadline_is_not_acted_on(
    caller: Link, child: tuple[subprocess.Popen[str], str]
) -> None:
    process, address = child
    assert process.stdout is not None
    assert ask(caller, address, "child")[0].reply == ACCEPTED
    assert process.stdout.readline() == "got\n"
    freeze(process)
    outcome, _ = ask(caller, address, "child", timeout_s=0.4)
    assert outcome.reply is None
    os.kill(process.pid, signal.SIGCONT)
    assert ask(caller, address, "child")[0].reply == ACCEPTED
    process.kill()
    assert process.stdout.read() == "got\n", "only the call after the thaw was delivered"
