"""Request bodies: what is accepted, what is refused, and under which field's name."""

from __future__ import annotations

import json
from typing import Any

import pytest

from app.errors import ApiError, InvalidRequest, ModelNotFound, PromptTooLong
from app.model.tokenizer import Tokenizer
from app.versions import GROUPS, LOGPROBS, SPOKEN
from tests.api.support import IM_END, IM_START, ids, toy_model, toy_settings
from web.openai_schemas import ChatBody, CompletionBody
from web.params import Choice, Prepared, choice_seed, parse_body, prepare_chat, prepare_completion

MODEL = toy_model(max_model_len_tokens=64, pool_tokens=4096)
SETTINGS = toy_settings(max_choices=6)


def completion(**fields: Any) -> Prepared:
    body = {"model": "toy", "prompt": "hello", **fields}
    return prepare_completion(parse_body(json.dumps(body).encode(), CompletionBody), MODEL, SETTINGS)


def chat(**fields: Any) -> Prepared:
    body = {"model": "toy", "messages": [{"role": "user", "content": "hi"}], **fields}
    return prepare_chat(parse_body(json.dumps(body).encode(), ChatBody), MODEL, SETTINGS)


BOTH_REFUSED = [
    ("n", 0),
    ("n", True),
    ("n", "1"),
    ("presence_penalty", 2.1),
    ("presence_penalty", True),
    ("frequency_penalty", -2.1),
    ("frequency_penalty", "1"),
    ("repetition_penalty", 0),
    ("repetition_penalty", -1.1),
    ("min_p", 1.1),
    ("min_p", -0.1),
    ("min_p", True),
    ("min_tokens", -1),
    ("min_tokens", 63),
    ("min_tokens", True),
    ("min_tokens", 1.0),
    ("logit_bias", {"5": 101}),
    ("logit_bias", {"5": -100.5}),
    ("logit_bias", {"5": True}),
    ("logit_bias", {"5": "1"}),
    ("logit_bias", {"258": 1}),
    ("logit_bias", {"-1": 1}),
    ("logit_bias", {"05": 1}),
    ("logit_bias", {"x": 1}),
    ("logit_bias", {str(i): 1 for i in range(1025)}),
    ("logit_bias", [5]),
    ("stop_token_ids", [258]),
    ("stop_token_ids", [-1]),
    ("stop_token_ids", [True]),
    ("stop_token_ids", ["1"]),
    ("stop_token_ids", 1),
    ("stop_token_ids", [1] * 1025),
    ("bad_words", ["x"]),
    ("response_format", {"type": "json_object"}),
    ("skip_special_tokens", False),
    ("include_stop_str_in_output", True),
    ("temperature", -0.1),
    ("temperature", 2.1),
    ("temperature", True),
    ("temperature", "1"),
    ("top_p", 0),
    ("top_p", 1.1),
    ("top_k", -2),
    ("top_k", 1.5),
    ("top_k", False),
    ("seed", 2**63),
    ("seed", "7"),
    ("seed", True),
    ("max_tokens", 0),
    ("max_tokens", -1),
    ("max_tokens", True),
    ("max_tokens", 3.0),
    ("max_tokens", "3"),
    ("stream", 1),
    ("stream", "true"),
    ("stop", [""]),
    ("stop", ""),
    ("stop", ["a"] * 17),
    ("stop", 5),
    ("stop", ["a", 5]),
    ("ignore_eos", 1),
    ("return_token_ids", "yes"),
    ("user", 5),
    ("cache_salt", ""),
    ("cache_salt", 5),
    ("model", None),
    ("model", 5),
    ("stream_options", {"include_usage": True}),
    ("stream_options", []),
    ("temprature", 1),
    ("request_id", "x"),
]
CHAT_REFUSED = [
    ("logprobs", 1),
    ("logprobs", "true"),
    ("top_logprobs", 2),
    ("top_logprobs", 21),
    ("top_logprobs", -1),
    ("top_logprobs", True),
    ("tools", [{"type": "function"}]),
    ("tool_choice", "required"),
    ("functions", [{}]),
    ("modalities", ["text", "audio"]),
    ("reasoning_effort", "high"),
    ("store", True),
    ("service_tier", "flex"),
    ("messages", []),
    ("messages", "hi"),
    ("messages", None),
    ("prompt", "x"),
    ("max_completion_tokens", 0),
    ("best_of", 1),
]
COMPLETION_REFUSED = [
    ("logprobs", -1),
    ("logprobs", 21),
    ("logprobs", True),
    ("top_logprobs", 1),
    ("echo", True),
    ("suffix", "end"),
    ("best_of", 0),
    ("best_of", 2),
    ("prompt", ["a", 1]),
    ("prompt", ["a", [1]]),
    ("prompt", [[1], [True]]),
    ("prompt", ""),
    ("prompt", []),
    ("prompt", [[]]),
    ("prompt", None),
    ("prompt", 7),
    ("prompt", [True]),
    ("prompt", [1.0]),
    ("prompt", [1, "a"]),
    ("prompt", [258]),
    ("prompt", [0, -1]),
    ("messages", []),
    ("max_completion_tokens", 4),
]


@pytest.mark.parametrize(("field", "value"), BOTH_REFUSED + CHAT_REFUSED)
def test_chat_refuses_by_name(field: str, value: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        chat(**{field: value})
    assert caught.value.param == field
    assert field in str(caught.value)


@pytest.mark.parametrize(("field", "value"), BOTH_REFUSED + COMPLETION_REFUSED)
def test_completion_refuses_by_name(field: str, value: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        completion(**{field: value})
    assert caught.value.param == field
    assert field in str(caught.value)


NO_OPS: dict[str, Any] = {
    "n": 1,
    "presence_penalty": 0.0,
    "frequency_penalty": 0,
    "repetition_penalty": 1.0,
    "min_p": 0,
    "min_tokens": 0,
    "logit_bias": {},
    "stop_token_ids": [],
    "response_format": {"type": "text"},
    "stop": None,
    "stream": False,
    "stream_options": None,
    "temperature": None,
    "top_p": None,
    "seed": None,
    "user": "somebody",
}


def test_values_that_ask_for_nothing_are_accepted() -> None:
    more_chat = {"logprobs": False, "top_logprobs": 0, "tools": None, "tool_choice": "auto", "store": False}
    more_completion = {"logprobs": None, "echo": False, "best_of": 1, "suffix": None}
    assert chat(**NO_OPS, **more_chat).choices[0].sampling.temperature == 1.0
    assert completion(**NO_OPS, **more_completion).choices[0].sampling.temperature == 1.0
    for asks_for_nothing in (chat(**NO_OPS, **more_chat), completion(**NO_OPS, **more_completion)):
        assert asks_for_nothing.choices[0].sampling.needs_version == SPOKEN.oldest
        assert asks_for_nothing.choices[0].sampling.logprobs is None


@pytest.mark.parametrize(
    ("field", "value", "kept"),
    [
        ("min_p", 0.25, 0.25),
        ("min_tokens", 3, 3),
        ("stop_token_ids", [9, 3, 9], (3, 9)),
        ("logit_bias", {"9": -100, "3": 0.5}, ((3, 0.5), (9, -100.0))),
    ],
)
def test_options_that_only_nodes_of_this_release_know(field: str, value: Any, kept: Any) -> None:
    for prepared in (chat(max_tokens=9, **{field: value}), completion(max_tokens=9, **{field: value})):
        assert getattr(prepared.choices[0].sampling, field) == kept
        assert prepared.choices[0].sampling.needs_version == LOGPROBS


def test_logprobs_are_asked_for_in_the_way_of_each_route() -> None:
    assert completion(logprobs=0).choices[0].sampling.logprobs == 0
    assert completion(logprobs=20).choices[0].sampling.logprobs == 20
    assert chat(logprobs=True).choices[0].sampling.logprobs == 0
    assert chat(logprobs=True, top_logprobs=5).choices[0].sampling.logprobs == 5
    assert chat(logprobs=True).choices[0].sampling.needs_version == LOGPROBS


def test_min_tokens_is_compared_with_the_max_tokens_that_hold() -> None:
    with pytest.raises(InvalidRequest, match="17 is more than max_tokens 16") as caught:
        completion(min_tokens=17)
    assert caught.value.param == "min_tokens"
    assert completion(min_tokens=17, max_tokens=17).choices[0].sampling.min_tokens == 17


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "tool", "content": "x"}, "messages[0].role"),
        ({"role": "robot", "content": "x"}, "messages[0].role"),
        ({"content": "x"}, "messages[0].role"),
        ({"role": "user", "content": 5}, "messages[0].content"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": {}}]}, "messages[0].content[0].type"),
        ({"role": "user", "content": "x", "tool_calls": [{}]}, "messages[0].tool_calls"),
        ({"role": "user", "content": "x", "contents": 1}, "messages[0].contents"),
    ],
)
def test_a_wrong_message_is_named_by_its_path(message: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        chat(messages=[message])
    assert caught.value.param == param


@pytest.mark.parametrize(
    "raw", [b"", b"{", b"[]", b"null", b"\xff", b'{"model":"\xff"}', b'{"prompt":"\\ud800"}', b"[" * 5000]
)
def test_a_body_that_is_no_json_object_is_refused(raw: bytes) -> None:
    with pytest.raises(InvalidRequest):
        parse_body(raw, CompletionBody)


def test_nan_is_no_temperature() -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse_body(b'{"model":"toy","prompt":"x","temperature":NaN}', CompletionBody)
    assert caught.value.param == "temperature"


def test_prompts_become_ids() -> None:
    assert completion(prompt="hé").choices[0].prompt_ids == tuple(ids("hé"))
    assert completion(prompt=["hé"]).choices[0].prompt_ids == tuple(ids("hé"))
    assert completion(prompt=[1, 257]).choices[0].prompt_ids == (1, 257)
    assert completion(prompt=[[1, 257]]).choices[0].prompt_ids == (1, 257)


def test_chat_goes_through_the_template() -> None:
    expected = [IM_START, *ids("system\nbe brief"), IM_END, *ids("\n"), IM_START, *ids("user\nhi"), IM_END, *ids("\n")]
    messages = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]},
    ]
    assert chat(messages=messages).choices[0].prompt_ids == (*expected, IM_START, *ids("assistant\n"))


def test_defaults_of_max_tokens() -> None:
    assert completion().choices[0].sampling.max_tokens == 16
    assert completion(prompt=[1] * 60).choices[0].sampling.max_tokens == 4
    prepared = chat()
    assert prepared.choices[0].sampling.max_tokens == 64 - len(prepared.choices[0].prompt_ids)


def test_max_tokens_has_two_names_in_chat() -> None:
    assert chat(max_tokens=3).choices[0].sampling.max_tokens == 3
    assert chat(max_completion_tokens=3).choices[0].sampling.max_tokens == 3
    assert chat(max_completion_tokens=3, max_tokens=3).choices[0].sampling.max_tokens == 3
    with pytest.raises(InvalidRequest, match="differ"):
        chat(max_completion_tokens=3, max_tokens=4)


def test_sampling_options_arrive() -> None:
    sampling = (
        completion(temperature=0, top_p=0.5, top_k=7, seed=-(2**63), stop=["a", "b"], ignore_eos=True, max_tokens=5)
        .choices[0]
        .sampling
    )
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.seed) == (0, 0.5, 7, -(2**63))
    assert (sampling.stop, sampling.ignore_eos, sampling.max_tokens) == (("a", "b"), True, 5)
    assert completion(top_k=-1).choices[0].sampling.top_k == 0
    assert (
        not completion(presence_penalty=None, frequency_penalty=0, repetition_penalty=1)
        .choices[0]
        .sampling.has_penalties
    )
    for prepared in (
        completion(presence_penalty=-2, frequency_penalty=0.5, repetition_penalty=1.1),
        chat(presence_penalty=-2, frequency_penalty=0.5, repetition_penalty=1.1),
    ):
        sampling = prepared.choices[0].sampling
        assert (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty) == (-2, 0.5, 1.1)
    assert completion(stop="x").choices[0].sampling.stop == ("x",)


def test_each_request_without_a_seed_gets_its_own() -> None:
    assert len({completion().choices[0].sampling.seed for _ in range(20)}) == 20


@pytest.mark.parametrize(
    ("prompt_tokens", "max_tokens", "fits"), [(63, 1, True), (63, 2, False), (64, None, False), (48, 16, True)]
)
def test_prompt_and_answer_must_fit(prompt_tokens: int, max_tokens: int | None, fits: bool) -> None:
    if fits:
        assert (
            completion(prompt=[1] * prompt_tokens, max_tokens=max_tokens).choices[0].sampling.max_tokens == max_tokens
        )
        return
    with pytest.raises(PromptTooLong) as caught:
        completion(prompt=[1] * prompt_tokens, max_tokens=max_tokens)
    assert caught.value.code == "context_length_exceeded"
    assert "64" in str(caught.value)


def test_text_that_cannot_fit_is_refused_without_tokenising_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tokenizer, "encode", lambda *args, **kwargs: pytest.fail("it was tokenised"))
    text = "x" * (64 * 12 + 1)
    with pytest.raises(PromptTooLong):
        completion(prompt=text)
    with pytest.raises(PromptTooLong):
        chat(messages=[{"role": "user", "content": text}])


def test_what_no_pool_can_hold_is_refused() -> None:
    small = toy_model(max_model_len_tokens=64, pool_tokens=32)
    body = parse_body(json.dumps({"model": "toy", "prompt": [1] * 30, "max_tokens": 3}).encode(), CompletionBody)
    with pytest.raises(PromptTooLong, match="32"):
        prepare_completion(body, small, SETTINGS)


def test_another_model_is_not_found() -> None:
    with pytest.raises(ModelNotFound) as caught:
        completion(model="gpt-4")
    assert (caught.value.status, caught.value.param) == (404, "model")


def test_no_error_repeats_the_prompt() -> None:
    secret = "my secret prompt"
    for body in (
        {"prompt": secret, "n": 7},
        {"prompt": [secret, secret], "n": 4},
        {"prompt": [secret, [1]]},
        {"prompt": [[secret]]},
        {"prompt": {secret: 1}},
    ):
        with pytest.raises(ApiError) as caught:
            completion(**body)
        assert secret not in str(caught.value)


def test_the_answers_stand_by_prompt_each_with_a_seed_of_its_own() -> None:
    prepared = completion(prompt=["one", "two"], n=2, seed=7)
    prompts = [bytes(choice.prompt_ids).decode() for choice in prepared.choices]
    assert prompts == ["one", "one", "two", "two"]
    first, second, *others = [choice.sampling.seed for choice in prepared.choices]
    assert (first, others) == (7, [first, second])
    assert second != first
    assert {choice.sampling.model_copy(update={"seed": 0}) for choice in prepared.choices} == {
        completion(seed=0).choices[0].sampling
    }


def test_each_answer_to_a_prompt_is_that_of_a_request_for_it_alone() -> None:
    def alone(prompt: Any) -> tuple[Choice, ...]:
        return completion(prompt=prompt, n=3, seed=-5).choices

    assert completion(prompt=["one", "two"], n=3, seed=-5).choices == (*alone("one"), *alone("two"))
    assert completion(prompt=[[1, 2], [3]], n=3, seed=-5).choices == (*alone([1, 2]), *alone([3]))
    assert (
        completion(prompt="one", n=1, seed=-5).choices == alone("one")[:1] == completion(prompt="one", seed=-5).choices
    )
    assert chat(n=3, seed=-5).choices[:1] == chat(seed=-5).choices


def test_without_a_seed_no_two_answers_are_drawn_alike() -> None:
    choices = (*completion(prompt=["one", "one"], n=3).choices, *chat(n=3).choices)
    assert len({choice.sampling.seed for choice in choices}) == 9


@pytest.mark.parametrize("seed", [0, -(2**63), 2**63 - 1])
def test_seeds_are_64_bits_and_differ(seed: int) -> None:
    seeds = [choice_seed(seed, index) for index in range(128)]
    assert seeds[0] == seed
    assert len(set(seeds)) == 128
    assert all(-(2**63) <= each < 2**63 for each in seeds)


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"n": 7}, "n", "7 answers; 6 at most (BATON_MAX_CHOICES)"),
        ({"n": 4, "prompt": ["a", "b"]}, "n", "2 prompts with n 4 ask for 8 answers"),
        ({"prompt": ["a"] * 7}, "prompt", "7 answers"),
    ],
)
def test_more_answers_than_one_request_may_have_are_refused_by_name(
    fields: dict[str, Any], param: str, words: str
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        completion(**fields)
    assert caught.value.param == param
    assert words in str(caught.value)
    completion(n=6)
    completion(n=3, prompt=["a", "b"], best_of=3)


def test_more_answers_than_could_ever_be_queued_at_once_are_refused_by_name() -> None:
    body = parse_body(b'{"model": "toy", "messages": [{"role": "user", "content": "hi"}], "n": 3}', ChatBody)
    with pytest.raises(InvalidRequest, match=r"2 at most \(BATON_MAX_QUEUED\)"):
        prepare_chat(body, MODEL, toy_settings(max_queued=2))


@pytest.mark.parametrize(
    ("prompt", "param"), [(["a", ""], "prompt[1]"), ([[1], [258]], "prompt[1]"), (["a" * 70, "b"], "prompt[0]")]
)
def test_of_several_prompts_the_wrong_one_is_named(prompt: Any, param: str) -> None:
    with pytest.raises(ApiError) as caught:
        completion(prompt=prompt)
    assert caught.value.param == param  # type: ignore[attr-defined]


def test_several_answers_need_nodes_that_know_of_groups() -> None:
    for several in (completion(n=2), chat(n=2), completion(prompt=["a", "b"])):
        assert several.needs_version == GROUPS
    assert completion(prompt=["a"]).needs_version == SPOKEN.oldest
    assert completion(prompt=["a"], min_p=0.1).needs_version == LOGPROBS
