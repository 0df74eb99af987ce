"""``n`` and lists of prompts: several sequences that a client sees as one request."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest

from app.errors import LedgerUnavailable
from app.ledger.wire import encode
from app.protocol.commands import Admit, Limits, Watcher, Work
from app.schemas import SamplingParams
from app.versions import GROUPS, SPOKEN
from tests.api.conftest import MakeRig, Rig, chunks
from tests.api.support import IM_END, Fail, Send, Step, Wait, ids, say
from tests.api.test_answers import Around, Deaf, Forgetful, Gappy
from tests.api.test_surface import error_of

KEY = {"Idempotency-Key": "k"}


def prompt_of(work: Work) -> str:
    return bytes(work.prompt_ids).decode()


def tell_seed(work: Work) -> list[Step]:
    """What a sequence answers depends on its prompt and its seed, as a sampled one does."""
    return say(f"{prompt_of(work)}{work.sampling.seed % 1000:03}é")


def texts(answer: Any) -> list[str]:
    assert [choice["index"] for choice in answer["choices"]] == list(range(len(answer["choices"])))
    return [choice["text"] for choice in answer["choices"]]


def joined(got: Sequence[Any], of: str) -> dict[int, str]:
    """The text of each choice of a stream; checks that each ends once, with its last chunk."""
    parts: dict[int, list[str]] = defaultdict(list)
    ended: set[int] = set()
    for chunk in got:
        (choice,) = chunk["choices"]
        index = choice["index"]
        assert index not in ended, "a chunk after the end of its choice"
        parts[index].append(choice["delta"].get("content", "") if of == "delta" else choice[of])
        if choice["finish_reason"]:
            ended.add(index)
    assert ended == set(parts)
    return {index: "".join(each) for index, each in parts.items()}


@pytest.mark.parametrize("wrap", [lambda ledger: ledger, Deaf, Gappy], ids=["all events", "no events", "some events"])
def test_streamed_or_whole_each_choice_is_the_answer_of_a_request_for_it_alone(make_rig: MakeRig, wrap: Any) -> None:
    rig = make_rig(script=tell_seed, wrap=wrap)
    asked: dict[str, Any] = {"prompt": ["ab", "c"], "n": 2, "seed": 7}
    whole: Any = rig.complete(**asked).json
    *got, usage, done = chunks(rig.complete(stream=True, stream_options={"include_usage": True}, **asked).text)
    assert done == "[DONE]"
    assert joined(got, "text") == dict(enumerate(texts(whole)))
    assert len(set(texts(whole))) == 4
    if wrap is Deaf:
        return  # a second each
    alone = [texts(rig.complete(prompt=prompt, n=2, seed=7).json) for prompt in asked["prompt"]]
    assert texts(whole) == [text for each in alone for text in each]
    assert [each[0] for each in alone] == [texts(rig.complete(prompt=p, seed=7).json)[0] for p in asked["prompt"]]
    tokens = sum(len(ids(text)) + 1 for text in texts(whole))
    counted = {"prompt_tokens": 3, "completion_tokens": tokens, "total_tokens": 3 + tokens}
    assert whole["usage"] == usage["usage"] == {**counted, "prompt_tokens_details": {"cached_tokens": 0}}
    assert usage["choices"] == []
    rig.check_all_given_back()


def test_each_choice_of_a_chat_opens_and_ends_and_their_deltas_interleave(make_rig: MakeRig) -> None:
    turns = [threading.Event() for _ in range(5)]

    def script(work: Work) -> Iterator[Step]:
        for letter in range(2):
            yield Wait(turns[2 * letter + (work.sampling.seed != 3)])
            yield Send(ids("ab"[letter]))
        yield Wait(turns[4])
        yield Send([IM_END], "stop")

    rig = make_rig(script=script)
    turns[0].set()
    lines = rig.chat("r1", buffered=False, stream=True, n=2, seed=3).iter_encoded()
    assert [bell.uid.partition(".")[2] for bell in rig.bells.rung] == ["", "1"]
    heard = chunks(next(lines).decode())
    for turn in turns[1:4]:
        turn.set()
        heard += chunks(next(lines).decode())
    turns[4].set()
    *rest, done = chunks(b"".join(lines).decode())
    told = [(c["choices"][0]["index"], c["choices"][0]["delta"]) for c in heard]
    opening = {"role": "assistant", "content": ""}
    expected = [(0, opening), (0, {"content": "a"}), (1, opening), (1, {"content": "a"})]
    assert told == [*expected, (0, {"content": "b"}), (1, {"content": "b"})]
    assert joined([*heard, *rest], "delta") == {0: "ab", 1: "ab"}
    assert {c["id"] for c in (*heard, *rest)} == {"chatcmpl-r1"}
    assert done == "[DONE]"


def test_a_whole_chat_has_its_choices_in_order(make_rig: MakeRig) -> None:
    rig = make_rig(script=lambda work: say(f"{work.sampling.seed % 1000}"))
    answer: Any = rig.chat(n=3, seed=5, return_token_ids=True, logprobs=True).json
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    contents = [choice["message"]["content"] for choice in answer["choices"]]
    assert contents[0] == "5"
    assert len(set(contents)) == 3
    assert [choice["token_ids"] for choice in answer["choices"]] == [[*ids(text), IM_END] for text in contents]
    for choice, text in zip(answer["choices"], contents, strict=True):
        assert [each["token"] for each in choice["logprobs"]["content"]] == [*text, "<|im_end|>"]


def test_prompt_ids_and_offsets_are_those_of_each_choice(make_rig: MakeRig) -> None:
    rig = make_rig(script=tell_seed)
    asked: dict[str, Any] = {"prompt": [[97, 98], [99]], "seed": 7, "return_token_ids": True, "logprobs": 0}
    whole: Any = rig.complete(**asked).json
    *got, _ = chunks(rig.complete(stream=True, **asked).text)
    for index, prompt in enumerate(asked["prompt"]):
        choice = whole["choices"][index]
        assert choice["prompt_token_ids"] == prompt
        assert choice["logprobs"]["text_offset"][:3] == [0, 1, 2]
        parts = [c["choices"][0] for c in got if c["choices"][0]["index"] == index]
        assert [part["prompt_token_ids"] for part in parts if "prompt_token_ids" in part] == [prompt]
        offsets = [offset for part in parts if part["logprobs"] for offset in part["logprobs"]["text_offset"]]
        assert offsets == choice["logprobs"]["text_offset"]


def test_usage_says_of_each_prompt_what_no_choice_computed(make_rig: MakeRig) -> None:
    rig = make_rig(
        script=lambda work: [Send(ids("a"), cached_tokens=2 * (work.sampling.seed != 7)), Send([IM_END], "stop")]
    )
    answer: Any = rig.complete("r1", prompt="abc", n=3, seed=7).json
    assert answer["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 6,
        "total_tokens": 9,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    shown: Any = rig.get("/v1/requests/r1").json
    assert [choice["cached_tokens"] for choice in shown["choices"]] == [0, 2, 2]


def one_fails(work: Work) -> list[Step]:
    return [Send(ids("x")), Fail()] if prompt_of(work) == "bad" else [Send(ids("a")), Wait(threading.Event())]


@pytest.mark.parametrize("stream", [False, True])
def test_one_that_fails_ends_all_with_one_clear_error(make_rig: MakeRig, stream: bool) -> None:
    rig = make_rig(script=one_fails)
    answer = rig.complete("r1", prompt=["a", "bad", "b"], stream=stream)
    if stream:
        *_, end = chunks(answer.text)
        error = end["error"]
        assert "[DONE]" not in answer.text
        assert answer.text.count('"error"') == 1
    else:
        error = error_of(answer, 500, "request_failed")
    assert "engine_error: scripted" in error["message"]
    shown: Any = rig.get("/v1/requests/r1").json
    assert (shown["state"], shown["error"]["code"]) == ("FAILED", "engine_error")
    assert [choice["state"] for choice in shown["choices"]] == ["FAILED"] * 3
    nothing_left(rig)


def nothing_left(rig: Rig) -> None:
    """Neither the process nor the ledger holds anything of any request."""
    rig.check_all_given_back()
    ledger: Any = rig.ledger
    store = ledger.store
    assert not any(record.in_process for record in store.records.values())
    assert [store.guards, store.queue, store.waiters, store.open_leases, store.unwatched] == [{}] * 5
    assert not any(store.owned.values())


def test_a_client_that_goes_ends_all(make_rig: MakeRig) -> None:
    rig = make_rig(script=lambda work: [Send(ids("a")), Wait(threading.Event())])
    answer = rig.complete("r1", buffered=False, stream=True, n=3)
    next(answer.iter_encoded())
    answer.close()
    rig.wait_state("r1", "ABORTED")
    nothing_left(rig)


def test_a_client_that_goes_when_the_first_has_finished_ends_the_others(make_rig: MakeRig) -> None:
    rig = make_rig(
        script=lambda work: say("a") if prompt_of(work) == "x" else [Send(ids("b")), Wait(threading.Event())]
    )
    answer = rig.complete("r1", buffered=False, stream=True, prompt=["x", "y"])
    lines = answer.iter_encoded()
    heard = ""
    while "stop" not in heard or '"index":1' not in heard:
        heard += next(lines).decode()
    answer.close()
    rig.wait_state("r1", "ABORTED")
    shown: Any = rig.get("/v1/requests/r1").json
    assert [choice["state"] for choice in shown["choices"]] == ["FINISHED", "ABORTED"]
    nothing_left(rig)


def test_cancelling_cancels_all(make_rig: MakeRig) -> None:
    rig = make_rig(script=lambda work: [Send(ids("a")), Wait(threading.Event())])
    answer = rig.complete("r1", buffered=False, stream=True, n=2)
    lines = answer.iter_encoded()
    next(lines)
    shown: Any = rig.post("/v1/requests/cmpl-r1/cancel", {}).json
    assert (shown["state"], [c["state"] for c in shown["choices"]]) == ("ABORTED", ["ABORTED"] * 2)
    *_, end = chunks(b"".join(lines).decode())
    assert end["error"]["code"] == "request_cancelled"
    nothing_left(rig)


def test_an_admission_of_unknown_outcome_is_aborted_as_a_whole(make_rig: MakeRig) -> None:
    rig = make_rig(script=None, wrap=Forgetful)
    error_of(rig.complete("r1", n=3), 503, "service_unavailable")
    assert rig.bells.rung == []
    rig.wait_state("r1", "ABORTED")
    shown: Any = rig.get("/v1/requests/r1").json
    assert [choice["state"] for choice in shown["choices"]] == ["ABORTED"] * 3


def test_the_queue_takes_all_or_none(make_rig: MakeRig) -> None:
    rig = make_rig(script=None, max_queued=4)
    watcher = Watcher(rig.services.node.incarnation, "other")
    limits = Limits(1, 4, 60_000, 60_000, 60_000)
    for uid in ("u1", "u2"):
        rig.ledger.execute(Admit(uid, uid, (1,), SamplingParams(seed=1, max_tokens=1), watcher, limits))
    assert "no place for 3 more" in error_of(rig.complete("r2", n=3), 429, "queue_full")["message"]
    assert rig.state("r2") == "UNKNOWN"
    assert rig.bells.rung == []


def test_a_duplicate_of_a_group_is_refused_until_its_last_choice_has_ended(make_rig: MakeRig) -> None:
    go_on = threading.Event()
    rig = make_rig(
        script=lambda work: say("a") if prompt_of(work) == "x" else [Wait(go_on), *say("b")], dedup_window_s=60
    )
    answer = rig.complete("r1", buffered=False, stream=True, prompt=["x", "y"])
    lines = answer.iter_encoded()
    while "stop" not in next(lines).decode():
        pass
    assert "in process" in error_of(rig.complete("r1", n=2), 409, "duplicate_request")["message"]
    go_on.set()
    b"".join(lines)
    assert "was finished" in error_of(rig.complete("r1", n=2), 409, "duplicate_request")["message"]


def test_a_key_replays_all_choices_or_attaches_to_them(make_rig: MakeRig) -> None:
    go_on = threading.Event()
    rig = make_rig(script=lambda work: [Send(ids("a")), Wait(go_on), *tell_seed(work)])
    asked: dict[str, Any] = {"prompt": ["x", "y"], "n": 2, "seed": 1}
    first = rig.complete("r1", KEY, buffered=False, stream=True, **asked)
    lines = first.iter_encoded()
    head = next(lines).decode()
    again = rig.complete("r2", KEY, buffered=False, stream=True, **asked)
    go_on.set()
    *got, _ = chunks(head + b"".join(lines).decode())
    *attached, _ = chunks(again.get_data(as_text=True))
    replayed: Any = rig.complete("r3", KEY, n=2, prompt=["x", "y"], seed=1, stream=True)
    *at_once, _ = chunks(replayed.text)
    assert replayed.headers["Idempotent-Replayed"] == "true"
    assert joined(got, "text") == joined(attached, "text") == joined(at_once, "text")
    assert sorted(joined(got, "text")) == [0, 1, 2, 3]
    error_of(rig.complete("r4", KEY, prompt=["x", "y"], n=1, seed=1), 422, "idempotency_key_reused")
    nothing_left(rig)


class OldRelease(Around):
    """A node of the release before still runs."""

    def execute(self, command: Any) -> Any:
        answer = self.inner.execute(command)
        return replace(answer, version=GROUPS - 1) if getattr(answer, "version", 0) else answer


def test_while_a_node_runs_that_knows_no_groups_they_are_refused(make_rig: MakeRig) -> None:
    rig = make_rig(wrap=OldRelease)
    assert SPOKEN.oldest < GROUPS
    error = error_of(rig.complete(n=2), 503, "service_unavailable")
    assert "release before" in error["message"]
    assert rig.complete(n=1).status_code == 200


class HalfAttached(Around):
    """The second attachment of a group gets no answer."""

    attached = 0

    def execute(self, command: Any) -> Any:
        if command.name == "attach":
            self.attached += 1
            if self.attached == 2:
                raise LedgerUnavailable("not now")
        return self.inner.execute(command)


def test_a_client_that_could_attach_to_a_part_only_leaves_no_watcher_behind(make_rig: MakeRig) -> None:
    go_on = threading.Event()
    rig = make_rig(script=lambda work: [Send(ids("a")), Wait(go_on), *say("b")], wrap=HalfAttached)
    first = rig.complete("r1", KEY, buffered=False, stream=True, n=2)
    lines = first.iter_encoded()
    head = next(lines).decode()
    error_of(rig.complete("r2", KEY, n=2, stream=True), 503, "service_unavailable")
    ledger: Any = rig.ledger
    assert [len(record.watchers) for record in ledger.store.records.values()] == [1, 1]
    go_on.set()
    *got, _ = chunks(head + b"".join(lines).decode())
    assert joined(got, "text") == {0: "ab", 1: "ab"}
    nothing_left(rig)


def test_the_prompt_of_a_group_goes_over_the_wire_once(make_rig: MakeRig) -> None:
    sent: list[Admit] = []

    class Listening(Around):
        def execute(self, command: Any) -> Any:
            if isinstance(command, Admit):
                sent.append(command)
            return self.inner.execute(command)

    rig = make_rig(wrap=Listening)
    rig.complete(prompt="many words", n=4)
    (admit,) = sent
    assert len(admit.more) == 3
    assert encode(admit).count(",".join(map(str, ids("many words")))) == 1
