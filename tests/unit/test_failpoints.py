"""Failpoints: off unless asked for; an order is taken once, by whom and where it says; a cut link loses everything."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from app.errors import PullError
from app.kv import KVPool, KVReader
from app.link import CallOutcome, Link
from app.protocol.messages import ACCEPTED, Grant, Message
from app.versions import SPOKEN
from workers.failpoints.link import CutLink
from workers.failpoints.orders import ARMED, Action, Order, Orders, Point
from workers.failpoints.wrong_bytes import WrongBytes

GRANT = Grant(uid="u", attempt=1, fence="f", lease_id="l", decode_incarnation="d", decode_address="tcp://127.0.0.1:1")


def arm(folder: Path, **order: Any) -> None:
    (folder / ARMED).write_text(Order(**{"role": "prefill", "action": Action.CORRUPT, **order}).model_dump_json())


def test_without_the_setting_nothing_of_it_is_even_imported() -> None:
    script = "import sys, workers.kv_node, workers.host; print([n for n in sys.modules if 'failpoints' in n])"
    environment = {name: value for name, value in os.environ.items() if name != "BATON_FAILPOINTS"}
    said = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    assert said.stdout == "[]\n"


def test_an_order_is_taken_once_by_its_role_at_its_point_for_its_request(tmp_path: Path) -> None:
    prefill, decode = Orders(tmp_path, "prefill"), Orders(tmp_path, "decode")
    assert prefill.reached(Point.SEALED, "uid") is None
    arm(tmp_path, point=Point.SEALED, request_id="mine")
    for orders in (prefill, decode):
        orders.know("mine", "uid", "fence")
        orders.know("other", "uid of another")
    assert decode.reached(Point.SEALED, "uid") is None
    assert prefill.reached(Point.AFTER_CLAIM, "uid") is None
    assert prefill.reached(Point.SEALED, "uid of another") is None
    assert prefill.reached(Point.SEALED, "never heard of") is None
    assert prefill.reached(Point.SEALED, "fence") is Action.CORRUPT
    assert [path.name for path in tmp_path.iterdir()] == [f"corrupt-{os.getpid()}"]
    assert prefill.reached(Point.SEALED, "fence") is None


def test_an_order_that_names_no_request_is_for_any(tmp_path: Path) -> None:
    orders = Orders(tmp_path, "prefill")
    arm(tmp_path, point=Point.BEFORE_CLAIM, action=Action.CUT)
    assert not orders.cut
    assert orders.reached(Point.BEFORE_CLAIM, "") is Action.CUT
    assert orders.cut
    (tmp_path / f"cut-{os.getpid()}").unlink()
    assert not orders.cut


@pytest.fixture
def peer() -> Iterator[Link]:
    """A node that accepts every call."""

    def accept(call_id: str, message: Message) -> None:
        link.reply(call_id, ACCEPTED)

    link = Link("peer", "127.0.0.1", accept, lambda name, error: None)
    link.version = SPOKEN.newest
    yield link
    link.close()


def call(link: Link, to: Link) -> CallOutcome:
    ended = threading.Event()
    outcomes: list[CallOutcome] = []

    def done(outcome: CallOutcome) -> None:
        outcomes.append(outcome)
        ended.set()

    link.call(to.address, to.incarnation, GRANT, 0.3, done)
    assert ended.wait(5)
    return outcomes[0]


def test_a_cut_link_loses_what_it_sends_and_what_is_sent_to_it_until_it_is_mended(tmp_path: Path, peer: Link) -> None:
    heard: list[Message] = []

    def accept(call_id: str, message: Message) -> None:
        heard.append(message)
        link.reply(call_id, ACCEPTED)

    link = CutLink(Orders(tmp_path, "decode"), "me", "127.0.0.1", accept, lambda name, error: None)
    link.version = SPOKEN.newest
    cut = tmp_path / f"cut-{os.getpid()}"
    try:
        assert call(link, peer).reply == ACCEPTED
        assert call(peer, link).reply == ACCEPTED
        cut.touch()
        for outcome in (call(link, peer), call(peer, link)):
            assert (outcome.reply, outcome.not_sent) == (None, False)
        assert heard == [GRANT]
        cut.unlink()
        assert call(link, peer).reply == ACCEPTED
        assert call(peer, link).reply == ACCEPTED
        assert heard == [GRANT, GRANT]
    finally:
        link.close()


@pytest.mark.parametrize(
    ("action", "reason"),
    [(Action.CORRUPT, "digest"), (Action.SWAPPED, "digest"), (Action.SHORT, "short"), (Action.FOREIGN, "foreign")],
)
def test_each_kind_of_wrong_bytes_is_what_its_name_says(action: Action, reason: str) -> None:
    source, target = (KVPool.create(4, 4096, name, "layout") for name in ("source", "target"))
    reader = KVReader()
    try:
        blocks = (1, 2)
        for block in blocks:
            source.bump(block)
            source.blocks[block] = block
        generations, digests = [int(source.generations[block]) for block in blocks], source.digest(blocks)
        reader.pull(source.location(), blocks, generations, digests, target, (0, 1))
        wrong = WrongBytes(source).spoil(action, source.location(), blocks)
        with pytest.raises(PullError) as error:
            reader.pull(wrong, blocks, generations, digests, target, (0, 1))
        assert error.value.reason == reason
    finally:
        reader.close()
        source.close()
        target.close()
