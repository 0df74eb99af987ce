"""Clients that lost their connection and ask again with the same key, whatever happens in the ledger or a process."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from werkzeug.test import TestResponse

from app.errors import LedgerUnavailable, LedgerUnknown
from app.protocol.commands import Abort, Admit, AdmitStatus, Attach, Cluster, Detach, ReportExit, Scan
from tests.api.conftest import MakeRig, Rig, chunks
from tests.api.keyed import KEY, TEXT, Held, joined, read_rest, records, replayed, start, text_of, watchers
from tests.api.support import IM_END, Send, Wait, ids
from tests.api.test_answers import Around
from tests.api.test_surface import error_of
from tests.waiting import wait_for
from web import admission


def test_a_client_that_lost_its_stream_gets_everything_once_when_it_asks_again(make_rig: MakeRig) -> None:
    held = Held()
    rig = make_rig(script=held)
    stream = start(rig, request_id="r1")
    rig.wait_state("r1", "DECODING")
    stream.close()
    assert watchers(rig) == 0
    assert rig.state("r1") == "DECODING"
    again = start(rig, request_id="r1")
    held.go_on.set()
    assert joined(read_rest(again)) == TEXT
    assert replayed(again)
    assert len(held.seen) == 1
    rig.check_all_given_back()


def test_a_client_that_went_before_the_end_gets_the_finished_answer(make_rig: MakeRig) -> None:
    held = Held()
    rig = make_rig(script=held)
    start(rig, request_id="r1").close()
    held.go_on.set()
    rig.wait_state("r1", "FINISHED")
    again = start(rig)
    assert joined(read_rest(again)) == TEXT
    assert len(held.seen) == 1
    rig.check_all_given_back()


def test_one_of_several_that_goes_leaves_the_others_undisturbed(make_rig: MakeRig) -> None:
    held = Held()
    rig = make_rig(script=held)
    first, second, third = (start(rig) for _ in range(3))
    first.close()
    third.close()
    wait_for(lambda: watchers(rig) == 1)
    held.go_on.set()
    assert joined(read_rest(second)) == TEXT
    rig.check_all_given_back()


def test_unwatched_past_its_grace_it_is_aborted_and_the_key_is_free_again(make_rig: MakeRig) -> None:
    held = Held()
    rig = make_rig(script=held, idempotency_grace_s=0.1)
    start(rig, request_id="r1").close()
    assert rig.state("r1") != "ABORTED"
    wait_for(lambda: rig.ledger.execute(Scan(0)) and rig.state("r1") == "ABORTED")
    held.go_on.set()
    again = rig.complete("r2", headers=KEY, stream=True)
    assert (joined(again.text), replayed(again)) == (TEXT, False)
    assert len(held.seen) == 2
    rig.check_all_given_back()


def test_a_client_that_came_back_in_time_ends_the_grace(make_rig: MakeRig) -> None:
    held = Held()
    rig = make_rig(script=held, idempotency_grace_s=0.2)
    start(rig, request_id="r1").close()
    again = start(rig)
    in_time_ms = rig.ledger.execute(Scan(0)).time_ms + 300
    wait_for(lambda: rig.ledger.execute(Scan(0)).time_ms > in_time_ms)
    held.go_on.set()
    assert joined(read_rest(again)) == TEXT


def test_without_a_key_or_without_grace_the_last_one_gone_aborts_at_once(make_rig: MakeRig) -> None:
    for headers, settings in (({}, {}), (KEY, {"idempotency_grace_s": 0})):
        rig = make_rig(script=Held(), **settings)
        rig.complete("r1", headers=headers, stream=True, buffered=False).close()
        assert rig.state("r1") == "ABORTED"


def test_a_web_process_that_dies_leaves_the_request_to_another_one(make_rig: MakeRig) -> None:
    held = Held()
    rig = make_rig(script=held)
    other = make_rig(script=None, wrap=lambda _: rig.ledger)
    stream = start(rig, request_id="r1")
    again = start(other)
    rig.services.node.stop()
    rig.ledger.execute(ReportExit(rig.services.node.incarnation))
    assert watchers(other) == 1
    held.go_on.set()
    assert joined(read_rest(again)) == TEXT
    read_rest(stream)
    other.check_all_given_back()


class Between(Around):
    """Something happens to the request after its key was found and before it is attached to."""

    happens: Callable[[Attach], Any] | None = None

    def execute(self, command: Any) -> Any:
        if isinstance(command, Attach) and self.happens is not None:
            return self.happens(command)
        return self.inner.execute(command)


def between(rig: Rig) -> Between:
    assert isinstance(rig.ledger, Between)
    return rig.ledger


def running(make_rig: MakeRig) -> tuple[Rig, Held, TestResponse]:
    held = Held()
    rig = make_rig(script=held, wrap=Between)
    return rig, held, start(rig, request_id="r1")


def test_what_was_aborted_before_it_could_be_attached_to_is_admitted_again(make_rig: MakeRig) -> None:
    rig, held, stream = running(make_rig)

    def abort_first(command: Attach) -> Any:
        rig.ledger.execute(Abort(command.uid, "cancelled"))
        return between(rig).inner.execute(command)

    between(rig).happens = abort_first
    again = start(rig)
    held.go_on.set()
    assert (joined(read_rest(again)), replayed(again)) == (TEXT, False)
    assert chunks(read_rest(stream))[-1]["error"]["code"] == "request_cancelled"
    rig.check_all_given_back()


def test_what_is_gone_when_attached_to_is_tried_again_and_then_given_up(make_rig: MakeRig) -> None:
    rig, _, stream = running(make_rig)
    asked: list[Attach] = []

    def gone(command: Attach) -> Any:
        asked.append(command)
        return between(rig).inner.execute(Attach("another", command.watcher))

    between(rig).happens = gone
    answer = rig.complete(headers=KEY, stream=True)
    error_of(answer, 503, "service_unavailable")
    assert answer.headers["x-should-retry"] == "true"
    assert len(asked) == admission.KEY_TRIES
    stream.close()
    rig.check_all_given_back()


def test_a_ledger_that_goes_away_before_the_attachment_is_an_error_to_try_again_on(make_rig: MakeRig) -> None:
    rig, held, stream = running(make_rig)

    def away(command: Attach) -> Any:
        raise LedgerUnavailable("away")

    between(rig).happens = away
    answer = rig.complete(headers=KEY, stream=True)
    error_of(answer, 503, "service_unavailable")
    assert "Retry-After" in answer.headers
    assert watchers(rig) == 1
    held.go_on.set()
    assert joined(read_rest(stream)) == TEXT
    rig.check_all_given_back()


def test_an_attachment_that_is_applied_after_it_was_given_up_is_taken_back(make_rig: MakeRig) -> None:
    rig, _, stream = running(make_rig)
    late: list[Attach] = []

    def lose(command: Attach) -> Any:
        late.append(command)
        raise LedgerUnknown("no answer", not_after_ms=rig.ledger.execute(Cluster()).time_ms + 300)

    between(rig).happens = lose
    error_of(rig.complete(headers=KEY, stream=True), 503, "service_unavailable")
    between(rig).inner.execute(late[0])
    assert watchers(rig) == 2
    wait_for(lambda: watchers(rig) == 1)
    stream.close()
    rig.check_all_given_back()


class LosesAdmissions(Around):
    """Admissions are applied, and their answers lost."""

    loses = True

    def execute(self, command: Any) -> Any:
        answer = self.inner.execute(command)
        if isinstance(command, Admit) and self.loses and answer.status is AdmitStatus.ADMITTED:
            raise LedgerUnknown("no answer", not_after_ms=0)
        return answer


def test_an_admission_of_unknown_outcome_waits_for_the_same_key_to_come_again(make_rig: MakeRig) -> None:
    held = Held()
    rig = make_rig(script=held, wrap=LosesAdmissions)
    error_of(rig.complete(headers=KEY), 503, "service_unavailable")
    assert watchers(rig) == 0
    held.go_on.set()
    again = rig.complete(headers=KEY)
    assert (text_of(again), replayed(again)) == (TEXT, True)
    assert len(held.seen) == len(records(rig)) == 1
    rig.check_all_given_back()


class KeepsFarewells(Around):
    """Farewells do not get through while ``away``; admissions are applied, and their answers lost."""

    away = True

    def execute(self, command: Any) -> Any:
        if self.away and isinstance(command, Abort | Detach):
            raise LedgerUnavailable("away")
        answer = self.inner.execute(command)
        if self.away and isinstance(command, Admit) and answer.status is AdmitStatus.ADMITTED:
            raise LedgerUnknown("no answer", not_after_ms=0)
        return answer


def test_a_late_farewell_does_not_end_what_somebody_attached_to_meanwhile(make_rig: MakeRig) -> None:
    held = Held()
    rig = make_rig(script=held, wrap=KeepsFarewells)
    error_of(rig.complete(headers=KEY, stream=True), 503, "service_unavailable")
    again = start(rig)
    rig.ledger.away = False  # type: ignore[attr-defined]
    wait_for(lambda: watchers(rig) == 1)
    held.go_on.set()
    assert joined(read_rest(again)) == TEXT
    rig.check_all_given_back()


def test_a_web_process_that_was_taken_for_dead_watches_again_what_has_a_key(make_rig: MakeRig) -> None:
    held = Held()
    rig = make_rig(script=held)
    with ThreadPoolExecutor(2) as pool:
        keyed = pool.submit(rig.complete, "r1", headers=KEY)
        plain = pool.submit(rig.complete, "r2")
        for request_id in ("r1", "r2"):
            rig.wait_state(request_id, "DECODING")
        exit_and_come_back(rig)
        wait_for(lambda: watchers(rig) == 1)
        held.go_on.set()
        assert text_of(keyed.result()) == TEXT
        error = error_of(plain.result(), 503, "service_unavailable")
    assert "this web process was taken for dead" in error["message"]
    assert plain.result().headers["x-should-retry"] == "true"
    rig.check_all_given_back()


def exit_and_come_back(rig: Rig) -> None:
    """The ledger buries this process, as for its silence, and its heartbeat registers it again."""
    ledger: Any = rig.ledger
    incarnation = rig.services.node.incarnation
    with ledger._changed:
        ledger.store.nodes[incarnation].fresh_until = ledger.store.nodes[incarnation].heartbeat = 0
    rig.ledger.execute(Scan(0))
    wait_for(lambda: any(n.node.incarnation == incarnation for n in rig.ledger.execute(Cluster()).nodes))


def test_when_the_drains_time_is_over_nothing_is_attached(make_rig: MakeRig) -> None:
    held = Held()
    rig = make_rig(script=held)
    stream = start(rig)
    rig.services.process.begin_drain(0)
    try:
        error_of(rig.complete(headers=KEY, stream=True), 503, "service_unavailable")
    finally:
        rig.services.process.drain_deadline = float("inf")
    assert watchers(rig) == 1
    held.go_on.set()
    assert joined(read_rest(stream)) == TEXT
    rig.check_all_given_back()


def test_at_the_end_of_a_drain_the_request_goes_on_for_another_process(make_rig: MakeRig) -> None:
    held = Held()
    rig = make_rig(script=held)
    other = make_rig(script=None, wrap=lambda _: rig.ledger)
    stream = start(rig, request_id="r1")
    rig.services.process.begin_drain(0)
    try:
        assert chunks(read_rest(stream))[-1]["error"]["code"] == "service_unavailable"
    finally:
        rig.services.process.drain_deadline = float("inf")
    assert rig.state("r1") == "DECODING"
    held.go_on.set()
    assert joined(read_rest(start(other))) == TEXT
    assert len(held.seen) == 1


def test_an_attached_answer_takes_a_place_as_every_other(make_rig: MakeRig) -> None:
    held = Held()
    rig = make_rig(script=held, web_threads=2)
    first, second = start(rig), start(rig)
    error_of(rig.complete(headers=KEY, stream=True), 429, "queue_full")
    second.close()
    third = start(rig)
    held.go_on.set()
    assert joined(read_rest(third)) == joined(read_rest(first)) == TEXT
    for _ in range(5):  # replays and refusals give theirs back, too
        assert joined(rig.complete(headers=KEY, stream=True).text) == TEXT
        error_of(rig.complete(headers=KEY, prompt="ho"), 422, "idempotency_key_reused")
    rig.check_all_given_back()


def test_an_attached_answer_is_looked_up_by_the_id_in_it(make_rig: MakeRig) -> None:
    held = Held()
    rig = make_rig(script=held)
    first, second = start(rig, request_id="r1"), start(rig, request_id="r2")
    held.go_on.set()
    read_rest(first)
    answer_id = chunks(read_rest(second))[0]["id"]
    assert rig.get(f"/v1/requests/{answer_id}").json["id"] == "r1"  # type: ignore[index]
    error_of(rig.get("/v1/requests/r2"), 404, "request_not_found")


def test_halves_of_a_character_and_of_a_stop_string_join_over_the_place_of_attachment(make_rig: MakeRig) -> None:
    go_on = threading.Event()
    head, tail = ids("a STé")[:-1], ids("é STOP x")[1:]
    rig = make_rig(script=lambda work: [Send(head), Wait(go_on), Send(tail), Send([IM_END], "stop")])
    first = start(rig, request_id="r1", stop="STOP")
    rig.wait_state("r1", "DECODING")
    wait_for(lambda: len(records(rig)[0].tokens) == len(head))
    second = start(rig, stop="STOP")
    go_on.set()
    assert joined(read_rest(first)) == joined(read_rest(second)) == "a STé "
    assert joined(read_rest(start(rig, stop="STOP"))) == "a STé "


def test_an_answer_that_cannot_go_on_leaves_nobody_computing_it(make_rig: MakeRig) -> None:
    held = Held()
    rig = make_rig(script=held)
    stream = rig.complete("r1", stream=True, buffered=False)
    rig.wait_state("r1", "DECODING")
    wait_for(lambda: bool(records(rig)[0].tokens))
    events = stream.iter_encoded()
    next(events)
    ledger: Any = rig.ledger
    for record in ledger.store.records.values():  # as if a rolled-back ledger had been filled with another answer
        record.tokens[0] = (record.tokens[0] + 1) % 200
    rig.services.node.mailboxes.wake_all()
    assert b"different_tokens" in b"".join(events)
    stream.close()
    wait_for(lambda: rig.state("r1") == "ABORTED")
    held.go_on.set()
    rig.check_all_given_back()
