"""What every route has in common: OpenAI's error object, the request id, health, models, lookup and cancellation."""

from __future__ import annotations

import json
import threading
from typing import Any

import pytest
from werkzeug.test import TestResponse

from app.ledger.api import Ledger
from app.ledger.memory import MemoryLedger
from app.protocol.commands import ReadStatus, Register, SnapshotAnswer
from app.schemas import NodeInfo
from tests.api.conftest import MakeRig, Rig, wall_ms
from tests.api.support import IM_END, Fail, ScriptedWorker, Send, Wait, ids, say
from tests.waiting import wait_for
from web.requests_api import _describe


def error_of(answer: TestResponse, status: int, code: str) -> dict[str, Any]:
    """The error object, after checks of what all of them have."""
    assert answer.status_code == status, answer.text
    body: Any = answer.json
    assert list(body) == ["error"]
    error = body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] == code
    assert answer.headers["X-Request-Id"] in error["message"]
    assert answer.headers["x-should-retry"] in ("true", "false")
    return dict(error)


def test_an_unknown_route_and_a_wrong_method(rig: Rig) -> None:
    assert "GET /v1/nothing" in error_of(rig.get("/v1/nothing"), 404, "unknown_url")["message"]
    answer = rig.get("/v1/completions")
    error_of(answer, 405, "method_not_allowed")
    assert "POST" in answer.headers["Allow"]


def test_a_body_that_is_no_json_and_one_too_large(make_rig: MakeRig) -> None:
    rig = make_rig(max_body_bytes=2000)
    error_of(rig.post("/v1/completions", b"{"), 400, "invalid_value")
    error_of(rig.complete(prompt="x" * 3000), 413, "body_too_large")


def test_a_wrong_field_is_the_param(rig: Rig) -> None:
    error = error_of(rig.complete(temperature="hot"), 400, "invalid_value")
    assert (error["type"], error["param"]) == ("invalid_request_error", "temperature")


def test_stop_strings_have_a_length_and_numbers_a_size(rig: Rig) -> None:
    error = error_of(rig.complete(stop=["x" * 1001]), 400, "invalid_value")
    assert (error["param"], "1000 characters" in error["message"]) == ("stop", True)
    huge = b'{"model": "toy", "prompt": "hi", "max_tokens": ' + b"9" * 4299 + b"}"
    assert error_of(rig.post("/v1/completions", huge), 400, "invalid_value")["param"] == "max_tokens"


def test_an_error_does_not_repeat_all_that_was_sent(rig: Rig) -> None:
    assert len(error_of(rig.complete(model="m" * 100_000), 404, "model_not_found")["message"]) < 1200


def test_a_prompt_that_is_too_long_and_an_unknown_model(rig: Rig) -> None:
    error_of(rig.complete(max_tokens=100_000), 400, "context_length_exceeded")
    error_of(rig.complete(model="other"), 404, "model_not_found")


def test_an_unexpected_exception_is_logged_and_kept_from_the_client(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    @rig.app.get("/broken")
    def broken() -> str:
        raise RuntimeError("a secret detail")

    error = error_of(rig.get("/broken"), 500, "internal_error")
    assert "secret" not in error["message"]
    assert "a secret detail" in caplog.text


def test_the_request_id_is_taken_or_drawn_and_always_echoed(rig: Rig) -> None:
    given = rig.complete(request_id="my.id:1_-")
    assert given.headers["X-Request-Id"] == "my.id:1_-"
    assert given.json["id"] == "cmpl-my.id:1_-"  # type: ignore[index]
    assert rig.chat(request_id="c1").json["id"] == "chatcmpl-c1"  # type: ignore[index]
    assert rig.get("/health").headers["X-Request-Id"] != rig.get("/health").headers["X-Request-Id"]


@pytest.mark.parametrize("wrong", ["", "with space", "x" * 129, "ümlaut", "a/b", "..", "cmpl-of-another"])
def test_a_request_id_that_could_not_be_kept_is_refused(rig: Rig, wrong: str) -> None:
    assert error_of(rig.complete(request_id=wrong), 400, "invalid_value")["param"] == "X-Request-Id"


def test_models(rig: Rig) -> None:
    listed: Any = rig.get("/v1/models").json
    assert (listed["object"], [m["id"] for m in listed["data"]]) == ("list", ["toy"])
    assert rig.get("/v1/models/toy").json == listed["data"][0]
    error_of(rig.get("/v1/models/other"), 404, "model_not_found")


def test_ready_names_what_is_missing(make_rig: MakeRig) -> None:
    rig = make_rig(script=None)
    assert rig.get("/health").status_code == 200
    answer = rig.get("/ready")
    assert answer.status_code == 503
    assert answer.json == {"ready": False, "reasons": ["no healthy prefill node", "no healthy decode node"]}


def test_ready_with_both_roles(rig: Rig) -> None:
    answer = rig.get("/ready")
    assert (answer.status_code, answer.json) == (200, {"ready": True, "reasons": []})


def test_cluster_shows_nodes_and_leases(make_rig: MakeRig) -> None:
    go_on = threading.Event()
    rig = make_rig(script=lambda work: [Send(ids("a")), Wait(go_on), Send([IM_END], "stop")])
    thread = threading.Thread(target=rig.complete, kwargs={"request_id": "r1"})
    thread.start()
    rig.wait_state("r1", "DECODING")
    body: Any = rig.get("/cluster").json
    go_on.set()
    thread.join()
    nodes = {n["role"]: n for n in body["nodes"]}
    assert set(nodes) == {"web", "prefill", "decode"}
    assert {"name", "role", "pid", "host", "incarnation", "health", "blocks", "sequences"} <= set(nodes["decode"])
    assert nodes["decode"]["blocks"] == {"total": 256, "free": 200, "cached": 3}
    assert nodes["decode"]["health"] == "healthy"
    assert set(nodes["decode"]["sequences"]) == {"running", "waiting"}
    (lease,) = body["leases"]
    assert (lease["request_id"], lease["attempt"], lease["node"], lease["state"]) == ("r1", 1, "decode1", "ACTIVE")
    assert {"uid", "age_s", "blocks"} <= set(lease)
    assert (body["queued"], body["waiting_for_grant"]) == (0, 0)


def test_a_web_of_another_model_takes_nothing_and_says_why(make_rig: MakeRig) -> None:
    other = MemoryLedger(wall_ms)
    other.execute(
        Register(NodeInfo(incarnation="p", role="prefill", name="p1", pid=1, host="h", model="other"), 60_000)
    )
    rig = make_rig(script=None, wrap=lambda _: other, wait_registered=False)
    wait_for(lambda: "other (p1)" in rig.get("/ready").text)
    assert rig.get("/ready").status_code == 503
    assert "other (p1)" in error_of(rig.complete(), 503, "service_unavailable")["message"]


def test_what_no_running_node_can_hold_is_refused_at_once(make_rig: MakeRig) -> None:
    rig = make_rig(script=None)
    rig.worker = ScriptedWorker(rig.ledger, lambda work: say("hello"), num_blocks=4)
    assert rig.complete(prompt="x" * 14, max_tokens=50).status_code == 200
    error = error_of(rig.complete(prompt="x" * 15, max_tokens=50), 400, "context_length_exceeded")
    assert "64 tokens" in error["message"]
    assert rig.complete(prompt="x" * 14, max_tokens=50).status_code == 200  # its place was given back


def test_a_web_alone_ends_what_nobody_takes(make_rig: MakeRig) -> None:
    rig = make_rig(script=None, queue_timeout_s=0.2)
    answer = rig.complete(request_id="r1")
    error_of(answer, 503, "request_expired")
    assert rig.state("r1") == "EXPIRED"


def test_a_broker_that_hangs_delays_no_answer(make_rig: MakeRig) -> None:
    leave = threading.Event()
    rig = make_rig()
    rig.bells.ring = lambda bell: assert_soon(leave)  # type: ignore[method-assign]
    try:
        assert rig.complete().status_code == 200
        assert rig.complete().status_code == 200
        assert rig.get("/health").status_code == 200
    finally:
        leave.set()


def test_a_broker_that_is_away_is_a_reason_not_to_be_ready_and_ends_no_request(rig: Rig) -> None:
    rig.bells.broker_fault = "the broker takes no messages: Timeout"
    answer = rig.get("/ready")
    assert (answer.status_code, answer.json) == (
        503,
        {"ready": False, "reasons": ["the broker takes no messages: Timeout"]},
    )
    assert rig.complete().status_code == 200
    rig.bells.broker_fault = ""
    assert rig.get("/ready").status_code == 200


def assert_soon(event: threading.Event) -> None:
    assert event.wait(10)


def test_the_timeline_is_in_the_order_of_a_requests_life(rig: Rig) -> None:
    rig.complete(request_id="r1")
    timeline = json.loads(rig.get("/v1/requests/r1").data)["timeline"]
    # Of the twin the scripted worker's order would be another: it emits token 0 before it has a lease.
    assert list(timeline) == [p for p in LIFE if p in timeline]
    assert len(timeline) >= 5
    shuffled = SnapshotAnswer(ReadStatus.FOUND, 0, timeline=dict.fromkeys(reversed(LIFE), 1))
    assert list(_describe([shuffled])["timeline"]) == LIFE


LIFE = ["queued", "claimed", "granted", "first_token", "committed", "activated", "finished"]


def test_an_ended_request_can_be_looked_up(rig: Rig) -> None:
    rig.complete(request_id="r1")
    record: Any = rig.get("/v1/requests/r1").json
    assert (record["id"], record["state"], record["attempt"], record["error"]) == ("r1", "FINISHED", 1, None)
    assert record["nodes"] == {"prefill": "prefill1", "decode": "decode1"}
    assert {"queued", "claimed", "first_token", "finished"} <= set(record["timeline"])
    assert record["prompt_tokens"] == 2
    error_of(rig.get("/v1/requests/r2"), 404, "request_not_found")
    error_of(rig.get("/v1/requests/r%202"), 400, "invalid_value")


def test_a_failed_request_can_be_looked_up(make_rig: MakeRig) -> None:
    rig = make_rig(script=lambda work: [Fail("pull_failed", "digest")])
    rig.complete(request_id="r1")
    record: Any = rig.get("/v1/requests/r1").json
    assert (record["state"], record["error"]) == ("FAILED", {"code": "pull_failed", "detail": "digest"})


def test_cancelling_ends_the_answer_with_an_error(make_rig: MakeRig) -> None:
    rig = make_rig(script=lambda work: [Send(ids("a")), Wait(threading.Event())])
    answers: list[TestResponse] = []
    thread = threading.Thread(target=lambda: answers.append(rig.complete(request_id="r1")))
    thread.start()
    rig.wait_state("r1", "DECODING")
    cancelled: Any = rig.post("/v1/requests/r1/cancel", b"").json
    assert cancelled["state"] == "ABORTED"
    thread.join()
    error_of(answers[0], 499, "request_cancelled")
    assert rig.post("/v1/requests/r1/cancel", b"").json["state"] == "ABORTED"  # type: ignore[index]
    error_of(rig.post("/v1/requests/unknown/cancel", b""), 404, "request_not_found")


def test_cancelling_what_has_finished_changes_nothing(rig: Rig) -> None:
    rig.complete(request_id="r1")
    assert rig.post("/v1/requests/r1/cancel", b"").json["state"] == "FINISHED"  # type: ignore[index]


def test_what_reaches_a_draining_process_is_served_until_its_time_is_over(rig: Rig) -> None:
    """It listens no more: what still comes, came before that, and its client may not try again."""
    rig.services.process.begin_drain(30)
    try:
        assert rig.complete().status_code == 200
        rig.services.process.begin_drain(0)
        answer = rig.complete()
        error_of(answer, 503, "service_unavailable")
        assert "Retry-After" in answer.headers
        assert rig.get("/ready").status_code == 503
        assert rig.get("/health").status_code == 200
    finally:
        rig.services.process.drain_deadline = float("inf")


def test_the_ledger_away_is_said_by_ready_and_by_each_answer(make_rig: MakeRig) -> None:
    gate = LedgerGate()
    rig = make_rig(wrap=gate.around, ledger_timeout_s=0.1)
    gate.closed = True
    answer = rig.complete()
    error_of(answer, 503, "service_unavailable")
    assert answer.headers["x-should-retry"] == "true"
    ready = rig.get("/ready")
    assert ready.status_code == 503
    assert any("cannot be read" in reason for reason in ready.json["reasons"])  # type: ignore[index]
    error_of(rig.get("/cluster"), 503, "service_unavailable")
    error_of(rig.get("/v1/requests/r1"), 503, "service_unavailable")
    gate.closed = False
    assert rig.complete().status_code == 200


class LedgerGate:
    """A ledger that can be out of reach."""

    def __init__(self) -> None:
        self.closed = False
        self.inner: Any = None

    def around(self, ledger: Ledger) -> Ledger:
        self.inner = ledger
        return self

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def execute(self, command: Any) -> Any:
        from app.errors import LedgerUnavailable
        from app.protocol.commands import Claim, Heartbeat

        workers = isinstance(command, Claim) or (isinstance(command, Heartbeat) and "free" in command.gauges.blocks)
        if self.closed and not workers:
            raise LedgerUnavailable("the gate is closed")
        return self.inner.execute(command)


def test_say_is_one_token_per_event() -> None:
    assert [list(step.tokens) for step in say("ab") if isinstance(step, Send)] == [[97], [98], [IM_END]]
