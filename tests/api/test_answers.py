"""Answers: streams and whole ones, their exact shape, and every way in which they can end."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
from werkzeug.test import TestResponse

from app.errors import LedgerError, LedgerUnavailable, LedgerUnknown
from app.ledger.api import Ledger
from app.protocol.commands import Abort, Admit, Cluster, Deregister, Detach, EmitStatus, Event, Heartbeat, Work
from tests.api.conftest import MakeRig, Rig, chunks
from tests.api.support import IM_END, Fail, Send, Step, Wait, ids, say
from tests.api.test_surface import error_of
from tests.waiting import wait_for

TEXT = "Grüße, 世界! 🙂 done"


class Around:
    """A ledger with something in front of it."""

    def __init__(self, inner: Ledger) -> None:
        self.inner: Any = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


class Deaf(Around):
    """No event ever arrives."""

    def read_events(self, web: str, after: str, block_ms: int) -> list[tuple[str, Event]]:
        self.inner.read_events(web, "0", 50)
        threading.Event().wait(0.05)
        return []


class Gappy(Around):
    """Every second event is lost and the others come twice."""

    def read_events(self, web: str, after: str, block_ms: int) -> list[tuple[str, Event]]:
        found = self.inner.read_events(web, after, block_ms)
        kept = [pair for pair in found if pair[1].index % 2 or pair[1].state]
        doubled = [pair for pair in kept for _ in range(2)]
        lost_end = [(found[-1][0], replace(found[-1][1], uid="nobody"))] if found else []
        return doubled + lost_end


class Forgetful(Around):
    """The answer to an admission is lost: after it was applied, or before."""

    applied = True

    def execute(self, command: Any) -> Any:
        if not isinstance(command, Admit):
            return self.inner.execute(command)
        if self.applied:
            self.inner.execute(command)
        raise LedgerUnknown("no answer", not_after_ms=0)


def test_a_chat_stream_has_exactly_the_shape_that_openai_sends(make_rig: MakeRig) -> None:
    rig = make_rig(script=lambda work: say("hé"))
    answer = rig.chat(request_id="r1", stream=True, stream_options={"include_usage": True})
    assert answer.headers["Content-Type"].startswith("text/event-stream")
    *got, usage, done = chunks(answer.text)
    head = {"id": "chatcmpl-r1", "created": got[0]["created"], "model": "toy", "object": "chat.completion.chunk"}

    def chunk(delta: dict[str, str], finish_reason: str | None = None) -> dict[str, Any]:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
        return {**head, "choices": [choice], "usage": None}

    opening = chunk({"role": "assistant", "content": ""})
    assert got == [opening, chunk({"content": "h"}), chunk({"content": "é"}), chunk({}, "stop")]
    prompt = len(ids("<user\nhi>\n<assistant\n"))
    tokens = {
        "prompt_tokens": prompt,
        "completion_tokens": 4,
        "total_tokens": prompt + 4,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    assert usage == {**head, "choices": [], "usage": tokens}
    assert done == "[DONE]"


def test_without_include_usage_no_chunk_has_usage(rig: Rig) -> None:
    for answer in (rig.chat(stream=True), rig.complete(stream=True, stream_options={"include_usage": False})):
        *got, done = chunks(answer.text)
        assert done == "[DONE]"
        assert all("usage" not in chunk for chunk in got)


def test_a_completion_stream(make_rig: MakeRig) -> None:
    rig = make_rig(script=lambda work: say("ab", "length", eos=False))
    *got, usage, done = chunks(rig.complete("r1", stream=True, stream_options={"include_usage": True}).text)
    assert done == "[DONE]"
    assert [c["choices"][0]["text"] for c in got] == ["a", "b", ""]
    assert [c["choices"][0]["finish_reason"] for c in got] == [None, None, "length"]
    assert {(c["id"], c["object"], c["model"]) for c in [*got, usage]} == {("cmpl-r1", "text_completion", "toy")}
    assert usage["choices"] == []
    totals = {"prompt_tokens": 2, "completion_tokens": 2, "total_tokens": 4}
    assert usage["usage"] == {**totals, "prompt_tokens_details": {"cached_tokens": 0}}


def test_usage_and_record_say_how_much_of_the_prompt_was_not_computed(make_rig: MakeRig) -> None:
    rig = make_rig(script=lambda work: [Send(ids("a"), cached_tokens=1), Send([IM_END], "stop")])
    whole: Any = rig.complete("whole").json
    assert whole["usage"]["prompt_tokens_details"] == {"cached_tokens": 1}
    options = {"include_usage": True}
    *_, usage, _ = chunks(rig.complete("stream", stream=True, stream_options=options).text)
    assert usage["usage"]["prompt_tokens_details"] == {"cached_tokens": 1}
    record: Any = rig.get("/v1/requests/whole").json
    assert record["cached_tokens"] == 1


def test_a_cache_salt_reaches_the_worker_as_a_digest(make_rig: MakeRig) -> None:
    salts: list[str] = []

    def script(work: Work) -> list[Step]:
        salts.append(work.salt)
        return say("a")

    rig = make_rig(script=script)
    for salt in ({}, {"cache_salt": "mine"}, {"cache_salt": "mine"}, {"cache_salt": "yours"}):
        assert rig.complete(**salt).status_code == 200
    none, mine, again, yours = salts
    assert none == "" and mine == again and len({none, mine, yours}) == 3
    assert "mine" not in mine


def test_a_whole_chat_answer(make_rig: MakeRig) -> None:
    rig = make_rig(script=lambda work: say(TEXT))
    body: Any = rig.chat().json
    message: Any = {"role": "assistant", "content": TEXT, "refusal": None, "annotations": []}
    assert body["choices"] == [{"index": 0, "message": message, "logprobs": None, "finish_reason": "stop"}]
    assert body["object"] == "chat.completion"
    assert body["usage"]["completion_tokens"] == len(TEXT.encode()) + 1


def test_a_whole_completion(make_rig: MakeRig) -> None:
    rig = make_rig(script=lambda work: say(TEXT))
    body: Any = rig.complete().json
    assert body["choices"] == [{"index": 0, "text": TEXT, "logprobs": None, "finish_reason": "stop"}]
    assert body["object"] == "text_completion"


@pytest.mark.parametrize("stop", [None, "done", ["世界", "x"], ["🙂 d"]])
def test_a_joined_stream_is_the_whole_answer(make_rig: MakeRig, stop: Any) -> None:
    rig = make_rig(script=lambda work: say(TEXT))
    whole: Any = rig.complete(stop=stop).json
    streamed = chunks(rig.complete(stop=stop, stream=True).text)[:-1]
    assert "".join(c["choices"][0]["text"] for c in streamed) == whole["choices"][0]["text"]
    expected = TEXT if stop is None else TEXT[: TEXT.index(stop if isinstance(stop, str) else stop[0])]
    assert whole["choices"][0]["text"] == expected


def test_token_ids_where_vllm_puts_them(make_rig: MakeRig) -> None:
    rig = make_rig(script=lambda work: say("é"))
    out = [*ids("é"), IM_END]
    whole: Any = rig.complete(return_token_ids=True).json["choices"][0]  # type: ignore[index]
    assert (whole["token_ids"], whole["prompt_token_ids"]) == (out, ids("hi"))
    streamed = [c["choices"][0] for c in chunks(rig.complete(return_token_ids=True, stream=True).text)[:-1]]
    assert [t for c in streamed for t in c.get("token_ids", [])] == out
    assert [c.get("prompt_token_ids") for c in streamed] == [ids("hi"), None, None, None]

    chat: Any = rig.chat(return_token_ids=True).json
    assert chat["choices"][0]["token_ids"] == out
    first, *rest = chunks(rig.chat(return_token_ids=True, stream=True).text)[:-1]
    assert first["prompt_token_ids"] == chat["prompt_token_ids"]
    assert [t for c in rest for t in c["choices"][0].get("token_ids", [])] == out
    assert all("prompt_token_ids" not in c for c in rest)


def test_what_the_worker_gets_is_what_the_client_asked_for(make_rig: MakeRig) -> None:
    seen: list[Work] = []

    def script(work: Work) -> list[Step]:
        seen.append(work)
        return say("x")

    rig = make_rig(script=script)
    options: Any = {"temperature": 0.5, "top_p": 0.9, "top_k": 5, "seed": -7, "max_tokens": 9, "ignore_eos": True}
    penalties: Any = {"presence_penalty": 0.5, "frequency_penalty": -1.5, "repetition_penalty": 1.25}
    tokens: Any = {"min_p": 0.1, "min_tokens": 2, "stop_token_ids": [9, 3], "logit_bias": {"7": -100, "5": 1.5}}
    rig.complete("r1", stop="END", logprobs=3, **options, **penalties, **tokens)
    (work,) = seen
    assert (work.client_id, list(work.prompt_ids), work.attempt) == ("r1", ids("hi"), 1)
    tokens |= {"stop_token_ids": (3, 9), "logit_bias": ((5, 1.5), (7, -100.0)), "stop": ("END",), "logprobs": 3}
    assert work.sampling.model_dump() == {**options, **penalties, **tokens}
    wait_for(lambda: rig.bells.rung)
    (bell,) = rig.bells.rung
    assert (bell.queue, bell.uid, bell.attempt) == ("prefill", work.uid, 1)


@pytest.mark.parametrize("wrap", [Deaf, Gappy])
def test_lost_and_doubled_events_change_nothing(make_rig: MakeRig, wrap: type[Around]) -> None:
    rig = make_rig(script=lambda work: say(TEXT), wrap=wrap)
    assert rig.complete().json["choices"][0]["text"] == TEXT  # type: ignore[index]
    streamed = chunks(rig.complete(stream=True).text)[:-1]
    assert "".join(c["choices"][0]["text"] for c in streamed) == TEXT


@pytest.mark.parametrize("stream", [False, True])
def test_an_error_before_the_first_token_is_a_status(make_rig: MakeRig, stream: bool) -> None:
    rig = make_rig(script=lambda work: [Fail("pull_failed", "from prefill1")])
    error = error_of(rig.complete(stream=stream), 500, "request_failed")
    assert "pull_failed: from prefill1" in error["message"]


def test_an_error_after_the_first_token_is_an_event_without_done(make_rig: MakeRig) -> None:
    rig = make_rig(script=lambda work: [Send(ids("a")), Fail("engine_error")])
    answer = rig.complete(stream=True, request_id="r1")
    assert answer.status_code == 200
    first, last = chunks(answer.text)
    assert first["choices"][0]["text"] == "a"
    assert set(last["error"]) == {"message", "type", "param", "code"}
    assert last["error"]["code"] == "request_failed"
    assert "r1" in last["error"]["message"]
    error_of(rig.complete(), 500, "request_failed")


def test_a_request_that_waits_too_long_expires(make_rig: MakeRig) -> None:
    from app.protocol.commands import Scan

    rig = make_rig(script=None, queue_timeout_s=0.2)
    answers: list[TestResponse] = []
    thread = threading.Thread(target=lambda: answers.append(rig.complete(request_id="r1")))
    thread.start()
    wait_for(lambda: rig.ledger.execute(Scan(0)) and rig.state("r1") == "EXPIRED")
    thread.join()
    error_of(answers[0], 503, "request_expired")
    assert answers[0].headers["x-should-retry"] == "true"


def test_of_fifty_with_one_id_one_is_served(make_rig: MakeRig, caplog: pytest.LogCaptureFixture) -> None:
    go_on = threading.Event()

    def script(work: Work) -> Iterator[Step]:
        yield Wait(go_on)
        yield from say("only one")

    rig = make_rig(script=script)
    with caplog.at_level(logging.ERROR, "web"), ThreadPoolExecutor(50) as pool:
        futures = [pool.submit(rig.complete, "same") for _ in range(50)]
        wait_for(lambda: sum(f.done() for f in futures) == 49)
        go_on.set()
        answers = [f.result() for f in futures]
    served = [a for a in answers if a.status_code == 200]
    refused = [a for a in answers if a.status_code != 200]
    assert len(served) == 1
    assert served[0].json["choices"][0]["text"] == "only one"  # type: ignore[index]
    for answer in refused:
        error_of(answer, 409, "duplicate_request")
        assert answer.headers["x-should-retry"] == "false"
    lines = [r.getMessage() for r in caplog.records if r.levelno == logging.ERROR]
    assert len(lines) == 49
    assert all("duplicate_request request_id=same" in line for line in lines)
    assert rig.complete("same").status_code == 200


def test_a_full_queue_and_full_seats_say_when_to_come_back(make_rig: MakeRig) -> None:
    for settings in ({"max_queued": 1}, {"web_threads": 1}):
        rig = make_rig(script=None, **settings)
        thread = threading.Thread(target=rig.complete, kwargs={"request_id": "first"})
        thread.start()
        rig.wait_state("first", "QUEUED")
        answer = rig.complete()
        error_of(answer, 429, "queue_full")
        assert int(answer.headers["Retry-After"]) >= 1
        assert answer.headers["x-should-retry"] == "true"
        rig.post("/v1/requests/first/cancel", b"")
        thread.join()
        for _ in range(rig.services.settings.web_threads):
            assert rig.services.seats.acquire(blocking=False), "a place was not given back"


@pytest.mark.parametrize("applied", [True, False])
def test_an_admission_of_unknown_outcome_is_aborted_and_rings_nothing(make_rig: MakeRig, applied: bool) -> None:
    rig = make_rig(script=None, wrap=Forgetful)
    rig.ledger.applied = applied  # type: ignore[attr-defined]
    error_of(rig.complete("r1"), 503, "service_unavailable")
    rig.services.bells.close()  # rings what waits
    assert rig.bells.rung == []
    assert rig.state("r1") == ("ABORTED" if applied else "UNKNOWN")


def test_a_client_that_closes_its_stream_aborts_the_request(make_rig: MakeRig) -> None:
    more = threading.Event()
    rig = make_rig(script=lambda work: [Send(ids("a")), Wait(more), Send(ids("b"))])
    body = {"model": "toy", "prompt": "hi", "stream": True}
    answer = rig.app.test_client().post("/v1/completions", json=body, headers={"X-Request-Id": "r1"}, buffered=False)
    assert b'"a"' in next(answer.iter_encoded())
    rig.wait_state("r1", "DECODING")
    answer.close()
    assert rig.state("r1") == "ABORTED"
    more.set()
    wait_for(lambda: rig.worker is not None and rig.worker.emitted[-1] is EmitStatus.ABORTED)
    assert len(rig.services.node.mailboxes) == 0


class Unreachable(Around):
    """The first farewells do not get through."""

    refusals = 3

    def __init__(self, inner: Ledger) -> None:
        super().__init__(inner)
        self.many: list[list[Any]] = []
        """What was said in one round trip each."""

    def execute_many(self, commands: Sequence[Any]) -> list[Any]:
        self.many.append(list(commands))
        return [self._try(command) for command in commands]

    def _try(self, command: Any) -> Any:
        try:
            return self.execute(command)
        except LedgerError as error:
            return error

    def execute(self, command: Any) -> Any:
        if isinstance(command, Abort | Detach) and self.refusals:
            self.refusals -= 1
            raise LedgerUnavailable("not now")
        return self.inner.execute(command)


def test_a_farewell_is_repeated_until_the_ledger_has_heard_it(make_rig: MakeRig) -> None:
    rig = make_rig(script=lambda work: [Send(ids("a")), Wait(threading.Event())], wrap=Unreachable)
    body = {"model": "toy", "prompt": "hi", "stream": True}
    answer = rig.app.test_client().post("/v1/completions", json=body, headers={"X-Request-Id": "r1"}, buffered=False)
    next(answer.iter_encoded())
    answer.close()
    rig.wait_state("r1", "ABORTED")


def test_farewells_that_piled_up_are_said_in_one_round_trip(make_rig: MakeRig) -> None:
    rig = make_rig(wrap=Unreachable)
    node, ledger = rig.services.node, rig.services.ledger
    assert isinstance(ledger, Unreachable)
    ledger.refusals = 300
    for number in range(250):
        node.say_farewell(Abort(f"u{number}", "gone"))
    ledger.refusals = 0
    calls = len(ledger.many)
    wait_for(lambda: sum(map(len, ledger.many[calls:])) >= 250)
    assert max(map(len, ledger.many[calls:])) == 250


class ReadOnly(Around):
    """Takes no heartbeat of web any more."""

    full = False

    def execute(self, command: Any) -> Any:
        if self.full and isinstance(command, Heartbeat) and not command.incarnation.startswith(("prefill", "decode")):
            raise LedgerUnavailable("ledger: OOM command not allowed")
        return self.inner.execute(command)


def test_a_ledger_that_takes_no_writes_ends_a_running_answer_with_the_reason(
    make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("web.relay.OUTAGE_S", 0.2)
    monkeypatch.setattr("web.relay.TICK_S", 0.05)
    rig = make_rig(script=lambda work: [Send(ids("a")), Wait(threading.Event())], wrap=ReadOnly, ledger_timeout_s=0.2)
    body = {"model": "toy", "prompt": "hi", "stream": True}
    answer = rig.app.test_client().post("/v1/completions", json=body, headers={"X-Request-Id": "r1"}, buffered=False)
    lines = answer.iter_encoded()
    assert b'"a"' in next(lines)
    assert isinstance(rig.services.ledger, ReadOnly)
    rig.services.ledger.full = True
    ended: queue.Queue[bytes] = queue.Queue()
    threading.Thread(target=lambda: ended.put(b"".join(lines)), daemon=True).start()
    try:
        rest = ended.get(timeout=10)
    except queue.Empty:
        pytest.fail("the answer does not end")
    assert b"service_unavailable" in rest
    assert b"OOM" in rest
    assert b"[DONE]" not in rest
    rig.wait_state("r1", "ABORTED")


def test_no_log_line_holds_the_prompt(make_rig: MakeRig, caplog: pytest.LogCaptureFixture) -> None:
    rig = make_rig(script=lambda work: say("my answer"))
    with caplog.at_level(logging.DEBUG):
        rig.complete("r1", prompt="my prompt")
        rig.complete("r2", prompt="my prompt", n=2)
    assert "request_id=r1" in caplog.text
    assert "my prompt" not in caplog.text
    assert "my answer" not in caplog.text


def test_pings_keep_a_quiet_stream_open_and_make_later_errors_events(
    make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("web.relay.PING_S", 0.1)
    monkeypatch.setattr("web.relay.TICK_S", 0.05)
    go_on = threading.Event()
    rig = make_rig(script=lambda work: [Wait(go_on), Fail("engine_error")])
    body = {"model": "toy", "prompt": "hi", "stream": True}
    answer = rig.app.test_client().post("/v1/completions", json=body, buffered=False)
    assert answer.status_code == 200
    parts = answer.iter_encoded()
    assert [next(parts) for _ in range(3)] == [b": ping\n\n"] * 3
    go_on.set()
    (last,) = chunks(b"".join(parts).decode())
    assert last["error"]["code"] == "request_failed"
    answer.close()


def test_a_web_node_that_the_ledger_no_longer_knows_registers_again(make_rig: MakeRig) -> None:
    go_on = threading.Event()
    rig = make_rig(script=lambda work: [Send(ids("a")), Wait(go_on), Send([*ids("b"), IM_END], "stop")])

    def webs() -> list[str]:
        return [n.node.incarnation for n in rig.ledger.execute(Cluster()).nodes if n.node.role == "web"]

    rig.ledger.execute(Deregister(rig.services.node.incarnation))
    wait_for(lambda: webs() == [rig.services.node.incarnation])
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(rig.complete, "r1")
        rig.wait_state("r1", "DECODING")
        go_on.set()
        assert future.result().json["choices"][0]["text"] == "ab"  # type: ignore[index]
