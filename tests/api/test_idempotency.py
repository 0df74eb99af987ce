"""Idempotency-Key: one key is one request; what makes it another one; and the client's id beside it."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from werkzeug.test import TestResponse

from tests.api.conftest import MakeRig, Rig, chunks
from tests.api.keyed import KEY, TEXT, Held, joined, read_rest, records, replayed, start, text_of, watchers
from tests.api.support import Fail, say
from tests.api.test_surface import error_of
from tests.waiting import wait_for


@pytest.mark.parametrize("stream", [False, True])
def test_of_twenty_at_once_with_one_key_one_is_admitted_and_all_get_its_answer(make_rig: MakeRig, stream: bool) -> None:
    held = Held()
    rig = make_rig(script=held)
    with ThreadPoolExecutor(20) as pool:
        futures = [pool.submit(rig.complete, headers=KEY, stream=stream) for _ in range(20)]
        wait_for(lambda: watchers(rig) == 20)
        held.go_on.set()
        answers = [future.result() for future in futures]
    assert [answer.status_code for answer in answers] == [200] * 20
    assert sum(map(replayed, answers)) == 19
    if stream:
        assert {joined(answer.text) for answer in answers} == {TEXT}
        assert len({(c["id"], c["created"]) for answer in answers for c in chunks(answer.text)[:-1]}) == 1
    else:
        assert text_of(answers[0]) == TEXT
        assert len({answer.data for answer in answers}) == 1
    assert len(held.seen) == len(records(rig)) == 1
    rig.check_all_given_back()


def test_two_at_once_are_one_request_however_they_race(make_rig: MakeRig) -> None:
    rig = make_rig(script=lambda work: say("x"))
    with ThreadPoolExecutor(2) as pool:
        for number in range(30):
            key = {"Idempotency-Key": f"k{number}"}
            both = [pool.submit(rig.complete, headers=key) for _ in range(2)]
            first, second = (future.result() for future in both)
            assert first.data == second.data
            assert first.status_code == 200
            assert len(records(rig)) == number + 1
    rig.check_all_given_back()


@pytest.mark.parametrize("route", ["complete", "chat"])
@pytest.mark.parametrize("with_ids", [False, True])
def test_a_finished_answer_is_replayed_to_the_byte(make_rig: MakeRig, route: str, with_ids: bool) -> None:
    rig = make_rig(script=lambda work: say(TEXT))
    ask: Callable[..., TestResponse] = getattr(rig, route)
    fields: Any = {"headers": KEY, "return_token_ids": with_ids, "stop": "界"}
    first, again, other_id = ask("r1", **fields), ask("r1", **fields), ask("r2", **fields)
    assert first.status_code == 200
    assert first.data == again.data == other_id.data
    assert (replayed(first), replayed(again), replayed(other_id)) == (False, True, True)
    assert other_id.headers["X-Request-Id"] == "r2"
    assert len(records(rig)) == 1
    rig.check_all_given_back()


@pytest.mark.parametrize("route", ["complete", "chat"])
def test_a_finished_stream_is_replayed_with_the_same_id_time_text_and_usage(make_rig: MakeRig, route: str) -> None:
    rig = make_rig(script=lambda work: say(TEXT))
    ask: Callable[..., TestResponse] = getattr(rig, route)
    fields: Any = {"headers": KEY, "stream": True, "stream_options": {"include_usage": True}}
    first, again = (chunks(ask(**fields).text) for _ in range(2))
    assert first[-1] == again[-1] == "[DONE]"
    assert first[-2] == again[-2]  # usage
    assert first[-3] == again[-3]  # finish reason
    assert first[0]["created"] == records(rig)[0].timeline["queued"] // 1000

    def content(got: list[Any]) -> str:
        choices = [c["choices"][0] for c in got[:-2]]
        return "".join(c["text"] if route == "complete" else c["delta"].get("content", "") for c in choices)

    assert content(first) == content(again) == TEXT
    assert len({(c["id"], c["created"]) for c in [*first[:-1], *again[:-1]]}) == 1
    assert len(records(rig)) == 1


def test_a_request_without_an_id_keeps_the_one_that_was_drawn_for_it(rig: Rig) -> None:
    first, again = rig.complete(headers=KEY), rig.complete(headers=KEY)
    assert first.headers["X-Request-Id"] == again.headers["X-Request-Id"]
    assert again.json["id"] == f"cmpl-{again.headers['X-Request-Id']}"  # type: ignore[index]


def test_another_body_is_refused_while_in_process_and_after(make_rig: MakeRig) -> None:
    held = Held()
    rig = make_rig(script=held)
    stream = start(rig)
    for fields in ({"prompt": "ho"}, {"max_tokens": 49}, {"seed": 1}):
        answer = rig.complete(headers=KEY, stream=True, **fields)
        error = error_of(answer, 422, "idempotency_key_reused")
        assert (error["type"], error["param"]) == ("invalid_request_error", "Idempotency-Key")
        assert answer.headers["x-should-retry"] == "false"
    held.go_on.set()
    assert joined(read_rest(stream)) == TEXT
    error_of(rig.complete(headers=KEY, prompt="ho"), 422, "idempotency_key_reused")
    error_of(rig.chat(headers=KEY), 422, "idempotency_key_reused")
    assert len(records(rig)) == 1
    rig.check_all_given_back()


def test_the_same_body_written_otherwise_is_the_same(rig: Rig) -> None:
    first = rig.post("/v1/completions", b'{"model":"toy","prompt":"hi","temperature":1, "stop":"x"}', headers=KEY)
    again = rig.post("/v1/completions", b'{"stop":["x"],"temperature":1.0,"prompt":"hi","model":"toy"}', headers=KEY)
    assert replayed(again)
    assert first.data == again.data


def test_the_route_is_part_of_the_body(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("web.openai_schemas.CompletionBody.model_dump", lambda self, **_: {})
    monkeypatch.setattr("web.openai_schemas.ChatBody.model_dump", lambda self, **_: {})
    assert rig.complete(headers=KEY).status_code == 200
    error_of(rig.chat(headers=KEY), 422, "idempotency_key_reused")


def test_a_key_belongs_to_the_api_key_it_came_with(rig: Rig) -> None:
    alice, bob = ({**KEY, "Authorization": f"Bearer {name}"} for name in ("alice", "bob"))
    answers = [rig.complete(headers=headers) for headers in (alice, bob, KEY)]
    assert [replayed(answer) for answer in answers] == [False] * 3
    assert len({answer.data for answer in answers}) == 3
    assert rig.complete(headers=bob).data == answers[1].data
    error_of(rig.complete(headers=alice, prompt="ho"), 422, "idempotency_key_reused")
    assert rig.complete(headers={"Idempotency-Key": "other"}, prompt="ho").status_code == 200


def test_another_model_under_the_same_name_does_not_get_the_tokens_of_the_first(make_rig: MakeRig) -> None:
    rig = make_rig()
    before = rig.complete(headers=KEY)
    object.__setattr__(rig.services.model, "fingerprint", "toy-2")
    after = rig.complete(headers=KEY)
    assert not replayed(after)
    assert before.data != after.data


@pytest.mark.parametrize("wrong", ["", "x" * 256, "ümlaut", "tab\there", "\x7f"])
def test_a_key_that_could_not_be_kept_is_refused_by_name(rig: Rig, wrong: str) -> None:
    error = error_of(rig.complete(headers={"Idempotency-Key": wrong}), 400, "invalid_value")
    assert error["param"] == "Idempotency-Key"
    assert "Idempotency-Key" in error["message"]
    rig.check_all_given_back()


@pytest.mark.parametrize("right", ["x", "x" * 255, "a b ~!{}", "550e8400-e29b-41d4-a716-446655440000"])
def test_any_printable_key_is_taken(rig: Rig, right: str) -> None:
    assert rig.complete(headers={"Idempotency-Key": right}).status_code == 200
    assert replayed(rig.complete(headers={"Idempotency-Key": right}))


def test_in_process_the_same_id_needs_the_same_key(make_rig: MakeRig) -> None:
    held = Held()
    rig = make_rig(script=held)
    stream = start(rig, request_id="r1")
    error_of(rig.complete("r1", stream=True), 409, "duplicate_request")
    error_of(rig.complete("r1", headers={"Idempotency-Key": "k2"}, stream=True), 409, "duplicate_request")
    again = start(rig, request_id="r1")
    assert (again.status_code, replayed(again)) == (200, True)
    held.go_on.set()
    assert joined(read_rest(again)) == joined(read_rest(stream)) == TEXT
    assert rig.complete("r1").status_code == 200  # free again: no window
    rig.check_all_given_back()


def test_with_a_window_the_id_of_a_finished_request_is_refused_and_the_error_says_so(make_rig: MakeRig) -> None:
    held = Held()
    rig = make_rig(script=held, dedup_window_s=0.5)
    stream = start(rig, request_id="r1")
    assert "in process" in error_of(rig.complete("r1"), 409, "duplicate_request")["message"]
    held.go_on.set()
    read_rest(stream)
    message = error_of(rig.complete("r1"), 409, "duplicate_request")["message"]
    assert "finished" in message
    assert "BATON_DEDUP_WINDOW_S" in message
    assert replayed(start(rig, request_id="r1"))
    wait_for(lambda: rig.complete("r1").status_code == 200)


def test_a_failure_is_replayed_as_the_same_error(make_rig: MakeRig) -> None:
    rig = make_rig(script=lambda work: [Fail("pull_failed", "digest")])
    first, again = rig.complete("r1", headers=KEY), rig.complete("r2", headers=KEY)
    assert first.status_code == again.status_code == 500
    assert first.data == again.data
    assert (replayed(first), replayed(again)) == (False, True)
    assert again.headers["X-Request-Id"] == "r2"
    assert len(records(rig)) == 1
    rig.check_all_given_back()


def test_a_cancellation_ends_every_watchers_stream_and_frees_the_key(make_rig: MakeRig) -> None:
    held = Held()
    rig = make_rig(script=held)
    with ThreadPoolExecutor(3) as pool:
        futures = [pool.submit(rig.complete, headers=KEY, stream=True) for _ in range(3)]
        wait_for(lambda: watchers(rig) == 3)
        (record,) = records(rig)
        rig.wait_state(record.client_id, "DECODING")
        rig.post(f"/v1/requests/{record.client_id}/cancel", b"")
        for future in futures:
            assert chunks(future.result().text)[-1]["error"]["code"] == "request_cancelled"
    held.go_on.set()
    again = rig.complete(headers=KEY, stream=True)
    assert (joined(again.text), replayed(again)) == (TEXT, False)
    rig.check_all_given_back()


def test_a_key_whose_request_expired_is_free_again(make_rig: MakeRig) -> None:
    rig = make_rig(script=None, queue_timeout_s=0.2)
    error_of(rig.complete(headers=KEY), 503, "request_expired")
    error_of(rig.complete(headers=KEY), 503, "request_expired")
    assert len(records(rig)) == 2
    rig.check_all_given_back()
