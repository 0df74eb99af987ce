"""Calls between nodes over real sockets: each ends in one of four ways, none later than its deadline."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from typing import Any

import pytest
import zmq

from app.link import CallOutcome, Link
from app.protocol.messages import ACCEPTED, Message, PullResult, Refusal, refused
from app.versions import SPOKEN
from tests.waiting import wait_for

RESULT = PullResult(uid="u", attempt=1, fence="f", lease_id="l", activated=True)


def never(name: str, error: BaseException) -> None:
    """A link in these tests must not die."""
    raise AssertionError(name) from error


class Peer:
    """A link that answers every call as told and remembers what it got."""

    def __init__(self, incarnation: str, answer: object = ACCEPTED) -> None:
        self.got: list[Message] = []
        self.answer = answer
        self.link = Link(incarnation, "127.0.0.1", self._called, never)
        self.link.version = SPOKEN.newest

    def _called(self, call_id: str, message: Message) -> None:
        self.got.append(message)
        if self.answer is not None:
            self.link.reply(call_id, self.answer)  # type: ignore[arg-type]


@pytest.fixture
def caller() -> Iterator[Link]:
    link = Link("caller", "127.0.0.1", lambda call_id, message: None, never)
    link.version = SPOKEN.newest
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
    assert took < 1, "a refused connection is no reason to wait for the deadline"


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
    from app.versions import SPOKEN
    def called(call_id, message):
        print("got", flush=True)
        link.reply(call_id, ACCEPTED)
    link = Link("child", "127.0.0.1", called, lambda name, error: None)
    link.version = SPOKEN.newest
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


ENVELOPE = {"number": 1, "to": "peer", "sender": "x", "boot": "", "deadline": 1e9, "message": RESULT.model_dump()}


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        b"\xff\x00 not json",
        b"[" * 200_000,
        b'{"number": 1}',
        json.dumps({**ENVELOPE, "number": -1}).encode(),
        json.dumps({**ENVELOPE, "deadline": float("inf")}).encode(),
        json.dumps({**ENVELOPE, "sender": None}).encode(),
        json.dumps({**ENVELOPE, "message": {"kind": "grant"}}).encode(),
        json.dumps({**ENVELOPE, "message": {**RESULT.model_dump(), "v": 2}}).encode(),
        json.dumps({**ENVELOPE, "message": [[[]]]}).encode(),
    ],
    ids=lambda frame: repr(frame[:40]),
)
def test_what_is_no_call_is_not_delivered_and_the_next_call_works(caller: Link, frame: bytes) -> None:
    peer = Peer("peer")
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        with context.socket(zmq.DEALER) as stranger:
            stranger.setsockopt(zmq.LINGER, 1000)
            stranger.connect(peer.link.address)
            stranger.send_multipart([b"", frame])
            for _ in range(3):
                assert ask(caller, peer.link.address, "peer")[0].reply == ACCEPTED
    finally:
        context.term()
        peer.link.close()
    assert peer.got == [RESULT] * 3


@pytest.mark.parametrize(
    ("message", "reason"), [({"kind": "grant"}, "malformed"), (RESULT.model_dump() | {"v": 99}, "version")]
)
def test_a_malformed_message_in_a_good_envelope_is_refused_by_name(message: dict[str, Any], reason: str) -> None:
    peer = Peer("peer")
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        with context.socket(zmq.DEALER) as stranger:
            stranger.setsockopt(zmq.LINGER, 0)
            stranger.connect(peer.link.address)
            stranger.send_multipart([b"", json.dumps({**ENVELOPE, "message": message}).encode()])
            assert stranger.poll(5000)
            answer = json.loads(stranger.recv_multipart()[-1])
    finally:
        context.term()
        peer.link.close()
    assert (answer["number"], answer["reply"]["reason"]) == (1, reason)


def test_a_call_on_a_closed_link_was_certainly_not_sent() -> None:
    link = Link("caller", "127.0.0.1", lambda call_id, message: None, never)
    link.version = SPOKEN.newest
    link.close()
    outcome, took = ask(link, "tcp://127.0.0.1:1", "peer", timeout_s=5)
    assert outcome.reply is None
    assert outcome.not_sent
    assert took < 1


def test_a_link_that_dies_says_so_and_later_calls_end_at_once() -> None:
    crashes: queue.Queue[str] = queue.Queue()

    def fail(call_id: str, message: Message) -> None:
        raise ZeroDivisionError

    broken = Link("broken", "127.0.0.1", fail, lambda name, error: crashes.put(f"{name} {type(error).__name__}"))
    broken.version = SPOKEN.newest
    caller = Link("caller", "127.0.0.1", lambda call_id, message: None, never)
    caller.version = SPOKEN.newest
    try:
        ask(caller, broken.address, "broken", timeout_s=1)
        assert crashes.get(timeout=5) == "link ZeroDivisionError"
        outcome, took = ask(broken, caller.address, "caller", timeout_s=5)
        assert outcome.not_sent
        assert took < 1
    finally:
        caller.close()
        broken.close()


def test_a_call_without_an_answer_leaves_its_neighbours_on_the_same_link_alone(caller: Link) -> None:
    silent_first: list[str] = []
    outcomes: dict[str, queue.Queue[CallOutcome]] = {name: queue.Queue() for name in ("lost", "slow", "next")}

    def called(call_id: str, message: Message) -> None:
        silent_first.append(call_id)

    peer = Link("peer", "127.0.0.1", called, never)
    peer.version = SPOKEN.newest
    try:
        caller.call(peer.address, "peer", RESULT, 0.2, outcomes["lost"].put)
        caller.call(peer.address, "peer", RESULT, 10, outcomes["slow"].put)
        assert outcomes["lost"].get(timeout=5).reply is None
        peer.reply(silent_first[1], ACCEPTED)
        assert outcomes["slow"].get(timeout=5).reply == ACCEPTED
        caller.call(peer.address, "peer", RESULT, 10, outcomes["next"].put)
        wait_for(lambda: len(silent_first) >= 3)
        peer.reply(silent_first[2], ACCEPTED)
        assert outcomes["next"].get(timeout=5).reply == ACCEPTED
    finally:
        peer.close()
