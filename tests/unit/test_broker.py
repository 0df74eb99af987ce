"""What a broker that is away costs those who need it."""

from __future__ import annotations

import itertools
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from redis import Redis

from app.bells import Bells
from app.broker import TRY_AGAIN_S, BrokerConnection
from app.protocol.commands import Bell
from app.settings import Settings
from app.valkey import EmbeddedValkey

ANSWER_S = 0.3


@pytest.fixture
def mute(monkeypatch: pytest.MonkeyPatch) -> Iterator[Settings]:
    """Settings whose broker takes connections and never says a word."""
    monkeypatch.setattr("app.broker.ANSWER_S", ANSWER_S)
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield Settings(broker_url=f"redis://127.0.0.1:{server.getsockname()[1]}/0")


def test_a_bell_for_a_frozen_broker_costs_one_timeout_and_raises_nothing(mute: Settings) -> None:
    bells = Bells(mute)
    began_at = time.monotonic()
    bells.ring(Bell("prefill", "u", 1))
    assert ANSWER_S <= time.monotonic() - began_at < 2 * ANSWER_S
    bells.close()


def test_what_is_wrong_with_a_frozen_broker_is_said_after_one_timeout(mute: Settings) -> None:
    bells = Bells(mute)
    began_at = time.monotonic()
    assert bells.fault().startswith("the broker takes no messages: ")
    assert ANSWER_S <= time.monotonic() - began_at < 2 * ANSWER_S
    bells.close()


def test_a_broker_that_answers_but_takes_no_messages_is_at_fault_until_it_takes_some(tmp_path: Path) -> None:
    server = EmbeddedValkey(tmp_path)
    server.start()
    bells = Bells(Settings(redis_url=server.url))
    try:
        with Redis.from_url(server.url) as raw:
            assert bells.fault() == ""
            raw.config_set("maxmemory", "1")
            assert "maxmemory" in bells.fault()
            raw.config_set("maxmemory", "0")
            assert bells.fault() == ""
            raw.replicaof("127.0.0.1", "1")
            assert "read only" in bells.fault()
            raw.replicaof("NO", "ONE")
            assert bells.fault() == ""
            assert {client["cmd"] for client in raw.client_list()} == {"client|list"}
    finally:
        bells.close()
        server.stop()


def test_a_worker_tries_to_connect_as_often_after_a_long_outage_as_at_its_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slept: list[float] = []
    monkeypatch.setattr("kombu.utils.functional.sleep", slept.append)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    pauses: list[float] = []
    tries = itertools.count()

    def failed(error: Exception, pause_s: float) -> None:
        pauses.append(pause_s)
        if next(tries) == 40:
            raise EOFError

    with pytest.raises(EOFError):
        BrokerConnection(f"redis://127.0.0.1:{port}/0").ensure_connection(failed)
    assert set(pauses) == {TRY_AGAIN_S}
    assert sum(slept) == 40 * TRY_AGAIN_S
