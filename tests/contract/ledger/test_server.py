"""What only a real server can show: races, lost answers, restarts, refusals, foreign data."""

from __future__ import annotations

import itertools
import os
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import redis
from redis.connection import AbstractConnection

from app.errors import LedgerForeign, LedgerUnavailable, LedgerUnknown, StartupError
from app.ledger.redis import check_server, connect
from app.protocol.commands import (
    Abort,
    Admit,
    AdmitStatus,
    Claim,
    Cluster,
    Deregister,
    Drain,
    Emit,
    EmitStatus,
    Heartbeat,
    Limits,
    ReadStatus,
    Register,
    ReserveNext,
    Scan,
    Snapshot,
    Watcher,
)
from app.schemas import Gauges, NodeInfo, SamplingParams
from app.settings import Settings

LIMITS = Limits(3, 1000, 60_000, 300_000, 60_000)
SAMPLING = SamplingParams(seed=1, max_tokens=8)


def register(ledger: Any, incarnation: str, role: Any) -> Any:
    info = NodeInfo(incarnation=incarnation, role=role, name=incarnation, pid=1, host="h", num_blocks=100)
    return ledger.execute(Register(info, 10_000_000))


def test_of_fifty_that_admit_one_client_id_at_once_one_is_admitted(real: Any) -> None:
    real.cluster()
    start = threading.Barrier(50)

    def admit(i: int) -> Any:
        start.wait()
        return real.ledger.execute(Admit(f"u{i}", "same", (1, 2), SAMPLING, Watcher("w", str(i)), LIMITS))

    with ThreadPoolExecutor(50) as pool:
        answers = list(pool.map(admit, range(50)))
    admitted = [answer for answer in answers if answer.status is AdmitStatus.ADMITTED]
    assert len(admitted) == 1
    assert {answer.uid for answer in answers} == {admitted[0].uid}


@pytest.mark.parametrize("side", ["claim", "reserve"])
def test_eight_that_take_from_a_hundred_never_take_one_twice(real: Any, side: str) -> None:
    real.cluster()
    for i in range(100):
        real.admit(f"u{i}")
        if side == "reserve":
            real.claim(f"f{i}")

    def take(thread: int) -> list[str]:
        got = []
        for i in range(100):
            name = f"x{thread}-{i}"
            command = Claim("", "p", name, 1000, 16) if side == "claim" else ReserveNext("", "d", name, 1000, 16)
            answer = real.ledger.execute(command)
            uid = (answer.work.uid if answer.work else "") if side == "claim" else answer.uid
            if not uid:
                break
            got.append(uid)
        return got

    with ThreadPoolExecutor(8) as pool:
        taken = [uid for got in pool.map(take, range(8)) for uid in got]
    assert sorted(taken) == sorted(f"u{i}" for i in range(100))


def test_a_caller_that_was_idle_asks_for_the_time_before_it_writes(real: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    real.cluster()
    real.admit("u")
    real.raw.hincrby(f"{real.prefix}clock", "time", 60_000)
    assert real.claim("f").status == "LATE"
    real.raw.hincrby(f"{real.prefix}clock", "time", 60_000)
    monkeypatch.setattr("app.ledger.connection._STALE_AFTER_S", 0.0)
    assert real.claim("f").status == "CLAIMED"


def test_many_commands_in_one_round_trip_are_applied_in_order(real: Any) -> None:
    real.cluster()
    real.decoding("u", "f", "l")
    emits = [Emit("u", 1, "f", "d", i, (7 + i,)) for i in range(1, 4)]
    answers = real.ledger.execute_many([*emits, emits[0], Snapshot("u")])
    assert [answer.status for answer in answers[:4]] == [EmitStatus.OK] * 3 + [EmitStatus.SAME]
    assert answers[4].output_ids == (7, 8, 9, 10)
    assert real.ledger.execute_many([]) == []


def test_a_reader_is_woken_by_an_event(real: Any) -> None:
    real.cluster()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(real.ledger.read_events, "w", "0", 5_000)
        real.admit("u")
        real.do(Abort("u", "user"))
        ((position, event),) = waiting.result(5)
    assert event.state == "ABORTED"
    assert real.ledger.read_events("w", position, 30) == []


def test_an_event_stream_does_not_grow_without_end(real: Any) -> None:
    real.cluster()
    real.raw.eval(
        "for i = 1, 120000 do redis.call('XADD', KEYS[1], '*', 'e', i) end return 1", 1, f"{real.prefix}events:w"
    )
    real.decoding()
    real.emit("u", 1, 8, node="d")
    real.emit("u", 2, 9, node="d")  # each event trims some ten thousand old ones
    assert real.raw.xlen(f"{real.prefix}events:w") < 101_000


def test_no_key_is_left_of_ended_requests_and_gone_nodes_except_what_expires(real: Any) -> None:
    real.cluster()
    real.decoding("u", "f", "l", logprobs=1)
    real.emit("u", 1, 8, node="d", end="stop", logprobs=("-1",))
    real.prefilling("v", "g")
    real.do(Abort("v", "user"))
    for node in ("w", "p", "d"):
        real.node(node, "web" if node == "w" else "prefill" if node == "p" else "decode")
        assert real.do(Deregister(node)).status == "OK"
    lasting = {key.removeprefix(real.prefix) for key in real.raw.scan_iter(f"{real.prefix}*") if real.raw.ttl(key) < 0}
    assert lasting == {"clock", "seq"}


def test_what_only_computing_needs_goes_when_a_request_ends(real: Any) -> None:
    real.cluster()
    real.decoding("u", "f", "l")
    large = {"prompt", "sampling"}
    assert large <= set(real.raw.hkeys(f"{real.prefix}rec:u"))
    real.emit("u", 1, 8, node="d", end="stop")
    assert not large & set(real.raw.hkeys(f"{real.prefix}rec:u"))
    assert real.read("u").output_ids == (7, 8)


def test_flushed_scripts_are_loaded_again(real: Any) -> None:
    real.cluster()
    real.raw.script_flush()
    assert real.admit("u").status is AdmitStatus.ADMITTED
    real.raw.script_flush()
    answers = real.ledger.execute_many([Snapshot("u"), Scan(0), Heartbeat("p", Gauges())])
    assert answers[0].status is ReadStatus.FOUND


def test_a_server_that_is_not_there_means_not_applied(open_ledger: Any, tmp_path: Path) -> None:
    for url in (f"unix://{tmp_path}/none.sock", f"redis://127.0.0.1:{_free_port()}/0"):
        ledger = open_ledger(url)
        for command in (Abort("u", "user"), Snapshot("u")):
            with pytest.raises(LedgerUnavailable):
                ledger.execute(command)
        with pytest.raises(LedgerUnavailable):
            ledger.read_events("w", "0", 10)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_a_frozen_server_leaves_a_write_unknown_and_the_write_may_land_later(own: Any, open_ledger: Any) -> None:
    ledger = open_ledger(own.url)
    seen = ledger.execute(Cluster()).time_ms
    os.kill(own.pid, signal.SIGSTOP)
    try:
        began = time.monotonic()
        with pytest.raises(LedgerUnknown) as unknown:
            ledger.execute(Abort("u", "user"))
        assert time.monotonic() - began < 1.0  # no silent retries
        assert unknown.value.not_after_ms == seen + 5_000
        with pytest.raises(LedgerUnavailable):  # a read changes nothing
            ledger.execute(Snapshot("u"))
    finally:
        os.kill(own.pid, signal.SIGCONT)
    register(ledger, "w", "web")
    answer = ledger.execute(Admit("u", "c", (1,), SAMPLING, Watcher("w", "x"), LIMITS))
    assert answer.status is AdmitStatus.TOMBSTONED


def test_a_killed_server_comes_back_with_the_same_data_and_another_life(own: Any, open_ledger: Any) -> None:
    ledger = open_ledger(own.url, timeout_s=2)
    first = register(ledger, "w", "web")
    ledger.execute(Admit("u", "c", (1,), SAMPLING, Watcher("w", "x"), LIMITS))
    own.stop()
    with pytest.raises(LedgerUnavailable):
        ledger.execute(Snapshot("u"))
    own.start()
    assert ledger.execute(Snapshot("u")).state == "QUEUED"
    assert ledger.execute(Heartbeat("w", Gauges())).run_id not in ("", first.run_id)


def test_refusals_of_the_server_mean_not_applied_and_say_why(own: Any, open_ledger: Any) -> None:
    ledger = open_ledger(own.url, timeout_s=2)
    register(ledger, "w", "web")
    admission = Admit("u", "c", tuple(range(1000)), SAMPLING, Watcher("w", "x"), LIMITS)
    with redis.Redis.from_url(own.url) as raw:
        raw.config_set("maxmemory", "1")
        with pytest.raises(LedgerUnavailable, match="maxmemory"):
            ledger.execute(admission)
        raw.config_set("maxmemory", "0")
        raw.replicaof("127.0.0.1", _free_port())
        with pytest.raises(LedgerUnavailable, match="read only"):
            ledger.execute(admission)
        assert [type(result) for result in ledger.execute_many([admission, Drain("w")])] == [LedgerUnavailable] * 2
        raw.replicaof("NO", "ONE")
    assert ledger.execute(Snapshot("u")).status is ReadStatus.UNKNOWN
    assert ledger.execute(admission).status is AdmitStatus.ADMITTED


def test_out_of_memory_never_leaves_half_a_step(own: Any, open_ledger: Any) -> None:
    ledger = open_ledger(own.url, timeout_s=2)
    for node, role in (("w", "web"), ("p", "prefill")):
        register(ledger, node, role)
    ledger.execute(Admit("u", "c", (1, 2), SAMPLING, Watcher("w", "x"), LIMITS))
    ledger.execute(Claim("u", "p", "f", 100, 16))
    with redis.Redis.from_url(own.url) as raw:
        raw.config_set("maxmemory", "1")
        for command in (Emit("u", 1, "f", "p", 0, (7,), "stop"), Abort("u", "user")):
            with pytest.raises(LedgerUnavailable):
                ledger.execute(command)
        assert ledger.execute(Snapshot("u")).state == "PREFILLING"
        raw.config_set("maxmemory", "0")
    assert ledger.execute(Emit("u", 1, "f", "p", 0, (7,), "stop")).status is EmitStatus.OK


def test_two_namespaces_do_not_meet(own: Any, open_ledger: Any) -> None:
    one, two = open_ledger(own.url, "one"), open_ledger(own.url, "two")
    register(one, "w", "web")
    assert two.execute(Cluster()).nodes == ()


def test_a_server_that_may_evict_is_refused_at_the_start(own: Any, tmp_path: Path) -> None:
    settings = Settings(redis_url=own.url, namespace="start")
    check_server(settings)
    with redis.Redis.from_url(own.url) as raw:
        raw.config_set("maxmemory-policy", "allkeys-lru")
        with pytest.raises(StartupError, match="allkeys-lru"):
            check_server(settings)
        raw.acl_setuser("limited", enabled=True, nopass=True, keys="*", commands=["+@all", "-config"])
    url = own.url.replace("unix://", "unix://limited:any@")
    with pytest.raises(StartupError, match="allkeys-lru"):
        check_server(Settings(redis_url=url, namespace="start"))


def test_a_server_that_is_not_there_yet_is_told_from_one_that_will_never_do(own: Any, tmp_path: Path) -> None:
    with pytest.raises(LedgerUnavailable):
        check_server(Settings(redis_url=f"unix://{tmp_path}/none.sock"))
    with redis.Redis.from_url(own.url) as raw:
        raw.config_set("requirepass", "secret")
        with pytest.raises(StartupError, match="BATON_REDIS_URL"):
            check_server(Settings(redis_url=own.url))
        raw.config_set("requirepass", "")
        raw.set("taken:{0}:clock", "hello")
    with pytest.raises(StartupError, match="another program"):
        check_server(Settings(redis_url=own.url, namespace="taken"))


def test_a_command_that_fails_leaves_its_neighbours_their_answers(real: Any, caplog: pytest.LogCaptureFixture) -> None:
    real.cluster()
    real.decoding("u", "f", "l")
    real.raw.set(f"{real.prefix}rec:broken", "no record")  # a script trips over it
    real.prefilling("v", "g")
    real.raw.hset(f"{real.prefix}rec:v", "sampling", '{"seed": 1, "max_tokens": 4, "from_the_future": 1}')
    for _ in range(2):
        tripped, emitted, unread, last = real.ledger.execute_many(
            [Abort("broken", "user"), Emit("u", 1, "f", "d", 1, (8,)), Claim("v", "p", "g", 100, 16), Snapshot("u")]
        )
        assert isinstance(tripped, LedgerForeign)
        assert emitted.status in (EmitStatus.OK, EmitStatus.SAME)
        assert isinstance(unread, LedgerForeign)
        assert "from_the_future" in str(unread)
        assert last.output_ids == (7, 8)
    assert caplog.text.count("from_the_future") == caplog.text.count("another program") == 1


def test_an_emission_that_fails_leaves_those_of_the_same_step_their_answers(real: Any) -> None:
    real.cluster()
    uids = [f"u{number}" for number in range(70)]
    for number, uid in enumerate(uids):
        real.decoding(uid, f"f{number}", f"l{number}")
    real.raw.delete(f"{real.prefix}tok:u3")
    real.raw.set(f"{real.prefix}tok:u3", "no list")  # the script trips over it
    emits = [Emit(uid, 1, f"f{number}", "d", 1, (8,)) for number, uid in enumerate(uids)]
    answers = real.ledger.execute_many([*emits[:5], Snapshot("u0"), *emits[5:], emits[1]])
    assert answers.pop(5).output_ids == (7, 8)
    assert isinstance(answers.pop(3), LedgerForeign)
    assert [answer.status for answer in answers] == [EmitStatus.OK] * 69 + [EmitStatus.SAME]
    assert [answer.length for answer in answers] == [2] * 70
    assert real.ledger.execute(Snapshot("u69")).output_ids == (7, 8)


def test_a_connection_that_breaks_in_the_middle_costs_only_what_was_not_answered(
    real: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    real.cluster()
    read = AbstractConnection.read_response
    replies = itertools.count()

    def hang_up(connection: Any, *args: Any, **kwargs: Any) -> Any:
        if next(replies) == 1:
            connection.disconnect()
            raise redis.ConnectionError("cut")
        return read(connection, *args, **kwargs)

    monkeypatch.setattr(AbstractConnection, "read_response", hang_up)
    first, second, third = real.ledger.execute_many([Abort("u", "user"), Abort("v", "user"), Snapshot("u")])
    assert first.status == "TOMBSTONED"
    assert isinstance(second, LedgerUnknown)
    assert second.not_after_ms == first.time_ms + 5_000
    assert isinstance(third, LedgerUnavailable)  # a read changes nothing


def test_a_ledger_is_made_from_settings_without_a_server(tmp_path: Path) -> None:
    connect(Settings(redis_url=f"unix://{tmp_path}/none.sock")).close()
