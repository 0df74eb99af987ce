"""More requests than can be served: what waits too long, and what is refused, however it is to be answered."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from tests.api.conftest import MakeRig, Rig, chunks
from tests.api.support import ScriptedWorker, say
from tests.api.test_surface import error_of
from tests.waiting import wait_for


def test_a_request_that_expires_after_its_headers_went_out_ends_with_an_error_event(
    make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("web.relay.PING_S", 0.1)
    rig = make_rig(script=None, queue_timeout_s=2.0)
    answer = rig.complete(stream=True)
    assert answer.status_code == 200
    assert answer.text.startswith(": ping\n\n")
    (event,) = chunks(answer.text)
    assert (event["error"]["code"], event["error"]["type"]) == ("request_expired", "overloaded_error")
    rig.check_all_given_back()


@pytest.mark.parametrize("stream", [False, True])
def test_a_full_queue_refuses_at_once_and_takes_again_what_fits(make_rig: MakeRig, stream: bool) -> None:
    rig = make_rig(script=None, max_queued=2)
    answers: list[Any] = []
    waiting = [threading.Thread(target=lambda: answers.append(rig.complete(stream=stream))) for _ in range(2)]
    for thread in waiting:
        thread.start()
    wait_for(lambda: queued(rig) == 2)
    refused = rig.complete(stream=stream)
    assert "2 requests wait" in error_of(refused, 429, "queue_full")["message"]
    assert int(refused.headers["Retry-After"]) >= 1
    rig.worker = ScriptedWorker(rig.ledger, lambda work: say("at last"))
    for thread in waiting:
        thread.join()
    assert [answer.status_code for answer in answers] == [200, 200]
    assert rig.complete(stream=stream).status_code == 200
    rig.check_all_given_back()


def test_no_more_answers_are_open_than_there_are_places(make_rig: MakeRig) -> None:
    rig = make_rig(web_threads=1)
    assert rig.services.seats.acquire(blocking=False)
    assert "all 1 places" in error_of(rig.complete(), 429, "queue_full")["message"]
    rig.services.seats.release()
    assert rig.complete().status_code == 200
    rig.check_all_given_back()


def test_what_expired_frees_its_place_in_the_queue_and_is_never_computed(make_rig: MakeRig) -> None:
    rig = make_rig(script=None, max_queued=1, queue_timeout_s=0.2)
    error_of(rig.complete(request_id="late"), 503, "request_expired")
    assert queued(rig) == 0
    seen: list[str] = []
    rig.worker = ScriptedWorker(rig.ledger, lambda work: seen.append(work.client_id) or say("x"))  # type: ignore[func-returns-value]
    assert rig.complete(request_id="next").status_code == 200
    assert seen == ["next"]


def queued(rig: Rig) -> int:
    return int(rig.get("/cluster").json["queued"])  # type: ignore[index]
