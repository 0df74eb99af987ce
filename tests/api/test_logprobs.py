"""Logprobs as the official client reads them, of both routes: whole, streamed, replayed, with all else beside them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from app.ledger.api import Ledger
from app.versions import LOGPROBS, SPOKEN
from tests.api.conftest import MakeRig, chunks
from tests.api.server import HI, StartWeb
from tests.api.support import IM_END, Send, ids, say
from tests.api.test_answers import Deaf, Gappy
from tests.api.test_surface import error_of

TEXT = "Grüße 🙂"
TOKENS = [*ids(TEXT), IM_END]


def names(tokens: list[int]) -> list[str]:
    """Each token of the toy model as text, pieces of characters as bytes written out."""
    special = {IM_END: "<|im_end|>"}
    return [special.get(t, chr(t) if t < 128 else f"\\x{t:02x}") for t in tokens]


def test_the_official_client_reads_logprobs_of_a_chat(start_web: StartWeb) -> None:
    client = start_web(lambda work: say(TEXT)).client()
    asked: Any = {"model": "toy", "messages": HI, "logprobs": True, "top_logprobs": 3}
    whole = client.chat.completions.create(**asked).choices[0]
    assert whole.message.content == TEXT
    assert whole.logprobs is not None
    content = whole.logprobs.content
    assert content is not None
    assert [entry.token for entry in content] == names(TOKENS)
    assert [entry.logprob for entry in content] == [-0.5 - i / 8 for i in range(len(TOKENS))]
    raw = [bytes(entry.bytes or []) for entry in content]
    assert b"".join(raw).decode() == TEXT + "<|im_end|>"
    for entry in content:
        assert [top.token for top in entry.top_logprobs] == [entry.token, "a", "b"]
        assert [top.logprob for top in entry.top_logprobs] == [-0.5, -1.5, -2.5]
        assert [top.bytes for top in entry.top_logprobs] == [entry.bytes, [97], [98]]
    streamed = [
        entry
        for chunk in client.chat.completions.create(**asked, stream=True)
        if (logprobs := chunk.choices[0].logprobs) is not None
        for entry in logprobs.content or []
    ]
    assert streamed == content


def test_the_official_client_reads_logprobs_of_a_completion(start_web: StartWeb) -> None:
    client = start_web(lambda work: say(TEXT)).client()
    whole = client.completions.create(model="toy", prompt="hi", logprobs=2).choices[0]
    assert (whole.text, whole.logprobs is not None) == (TEXT, True)
    assert whole.logprobs is not None
    named = [name if "\\" not in name else f"bytes:{name}" for name in names(TOKENS)]
    assert whole.logprobs.tokens == named
    assert whole.logprobs.token_logprobs == [-0.5 - i / 8 for i in range(len(TOKENS))]
    assert whole.logprobs.text_offset is not None
    starts = [0, 1, 2, 2, 3, 3, 4, 5, 6, 6, 6, 6, 7]
    assert whole.logprobs.text_offset == starts
    assert whole.logprobs.top_logprobs == [{name: -0.5, "a": -1.5} for name in named]
    joined: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "text_offset": [], "top_logprobs": []}
    for chunk in client.completions.create(model="toy", prompt="hi", logprobs=2, stream=True):
        if chunk.choices[0].logprobs is not None:
            for field, values in joined.items():
                values += getattr(chunk.choices[0].logprobs, field)
    assert joined == {field: getattr(whole.logprobs, field) for field in joined}


def test_zero_names_the_drawn_token_alone_and_nothing_asked_is_nothing(make_rig: MakeRig) -> None:
    rig = make_rig(script=lambda work: say("ab"))
    choice = rig.complete(logprobs=0).json["choices"][0]  # type: ignore[index]
    assert choice["logprobs"]["top_logprobs"] == [{"a": -0.5}, {"b": -0.625}, {"<|im_end|>": -0.75}]
    chat = rig.chat(logprobs=True).json["choices"][0]  # type: ignore[index]
    assert [entry["top_logprobs"] for entry in chat["logprobs"]["content"]] == [[], [], []]
    assert rig.complete().json["choices"][0]["logprobs"] is None  # type: ignore[index]
    assert rig.chat(logprobs=False).json["choices"][0]["logprobs"] is None  # type: ignore[index]
    assert all(c == "[DONE]" or c["choices"][0]["logprobs"] is None for c in chunks(rig.chat(stream=True).text))


@pytest.mark.parametrize("wrap", [Deaf, Gappy])
def test_lost_and_doubled_events_leave_no_gap(make_rig: MakeRig, wrap: Any) -> None:
    rig = make_rig(script=lambda work: say(TEXT), wrap=wrap)
    got = [c["choices"][0]["logprobs"] for c in chunks(rig.complete(stream=True, logprobs=1).text)[:-1]]
    told = [logprob for each in got if each for logprob in each["token_logprobs"]]
    assert told == [-0.5 - i / 8 for i in range(len(TOKENS))]


def test_an_answer_that_is_replayed_has_the_same_logprobs(make_rig: MakeRig) -> None:
    rig = make_rig(script=lambda work: say(TEXT))
    key = {"Idempotency-Key": "k"}
    first = rig.chat(logprobs=True, top_logprobs=2, headers=key)
    again = rig.chat(logprobs=True, top_logprobs=2, headers=key)
    assert again.headers["Idempotent-Replayed"] == "true"
    assert again.json == first.json


def test_logprobs_come_with_each_token_even_where_text_is_held_back(make_rig: MakeRig) -> None:
    rig = make_rig(script=lambda work: [Send(ids("a")), Send(ids("S")), Send(ids("T"), "stop")])
    got = chunks(rig.chat(logprobs=True, stop="ST", stream=True).text)[1:-2]
    assert [c["choices"][0]["delta"] for c in got] == [{"content": "a"}, {"content": ""}, {"content": ""}]
    assert [[e["token"] for e in c["choices"][0]["logprobs"]["content"]] for c in got] == [["a"], ["S"], ["T"]]


def test_a_stop_token_adds_no_text_and_its_logprob_is_told(make_rig: MakeRig) -> None:
    rig = make_rig(script=lambda work: [Send(ids("a")), Send(ids("b")), Send(ids("!"), "stop")])
    answer: Any = rig.complete(stop_token_ids=ids("!"), logprobs=0).json
    (choice,) = answer["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("ab", "stop")
    assert choice["logprobs"]["tokens"] == ["a", "b", "!"]
    assert answer["usage"]["completion_tokens"] == 3
    streamed = chunks(rig.complete(stop_token_ids=ids("!"), stream=True).text)[:-1]
    assert "".join(c["choices"][0]["text"] for c in streamed) == "ab"
    assert rig.complete().json["choices"][0]["text"] == "ab!"  # type: ignore[index]


class OfOldRelease:
    """A ledger that says with every beat that a node of the release before still runs."""

    def __init__(self, inner: Ledger) -> None:
        self.inner: Any = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def execute(self, command: Any) -> Any:
        answer = self.inner.execute(command)
        return replace(answer, version=SPOKEN.oldest) if getattr(answer, "version", 0) else answer


def test_what_an_old_node_cannot_compute_is_refused_while_one_runs(make_rig: MakeRig) -> None:
    assert SPOKEN.oldest < LOGPROBS
    rig = make_rig(script=lambda work: say("x"), wrap=OfOldRelease)
    for options in ({"logprobs": 1}, {"min_p": 0.1}, {"min_tokens": 1}, {"logit_bias": {"5": 1}}):
        assert "upgrade" in error_of(rig.complete(**options), 503, "service_unavailable")["message"]
    assert rig.complete().status_code == 200
