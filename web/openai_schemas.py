"""Bodies of the two generating routes, as OpenAI and vLLM define them. Strict: a bool is no number, a typo is an error.

A field that OpenAI or vLLM know and Baton does not serve is listed with the values that ask for nothing; any other
value is refused by name, so that no client believes in an option that was dropped in silence.
"""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, PlainValidator
from pydantic_core import PydanticCustomError

from app.logprobs import MAX_LOGPROBS

MAX_STOPS = 16
MAX_STOP_CHARACTERS = 1000
"""The engine looks for each of them with every token, between the tokens of others."""
MOST_TOKENS = 2**31 - 1
MAX_STOP_TOKENS = 1024
MAX_BIASES = 1024
"""They stand in the request's record, and are looked at with every token."""
_INT64 = 2**63
_TOKEN_ID = re.compile(r"0|[1-9][0-9]{0,18}")


def _only(*harmless: object) -> Any:
    """A field that is accepted only with a value that asks for nothing: null, or one of ``harmless``."""

    def check(value: object) -> object:
        same = (value == h and isinstance(value, bool) is isinstance(h, bool) for h in harmless)
        if value is None or any(same):
            return value
        raise PydanticCustomError("unsupported", "is not supported with this value; leave it out")

    return Annotated[Any, PlainValidator(check)]


def _check_stop(value: object) -> tuple[str, ...]:
    stops = [value] if isinstance(value, str) else value
    if stops is None:
        return ()
    if not isinstance(stops, list) or not all(isinstance(s, str) for s in stops):
        raise PydanticCustomError("stop", "must be a string or a list of strings")
    if len(stops) > MAX_STOPS:
        raise PydanticCustomError("stop", f"may hold {MAX_STOPS} strings at most")
    if not all(stops):
        raise PydanticCustomError("stop", "must not hold an empty string")
    if any(len(s) > MAX_STOP_CHARACTERS for s in stops):
        raise PydanticCustomError("stop", f"must not hold a string of more than {MAX_STOP_CHARACTERS} characters")
    return tuple(stops)


def _check_bias(value: object) -> tuple[tuple[int, float], ...]:
    """``{"50256": -100}`` → pairs in the order of their ids."""
    if value is None:
        return ()
    if not isinstance(value, dict) or not all(isinstance(key, str) and _TOKEN_ID.fullmatch(key) for key in value):
        raise PydanticCustomError("bias", "must be an object whose keys are token ids")
    if len(value) > MAX_BIASES:
        raise PydanticCustomError("bias", f"may hold {MAX_BIASES} token ids at most")
    if not all(type(bias) in (int, float) and -100 <= bias <= 100 for bias in value.values()):
        raise PydanticCustomError("bias", "must hold numbers from -100 to 100")
    return tuple(sorted((int(key), float(bias)) for key, bias in value.items()))


def _check_stop_tokens(value: object) -> tuple[int, ...]:
    if value is None:
        return ()
    if not isinstance(value, list) or not all(type(each) is int for each in value):
        raise PydanticCustomError("stop", "must be a list of token ids")
    if len(value) > MAX_STOP_TOKENS:
        raise PydanticCustomError("stop", f"may hold {MAX_STOP_TOKENS} token ids at most")
    return tuple(sorted(set(value)))


def _check_prompt(value: object) -> str | tuple[int, ...] | tuple[str | tuple[int, ...], ...]:
    """One prompt, text or token ids, or several; a list of one is that one."""
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        prompts = tuple(tuple(each) if isinstance(each, list) else each for each in value)
        if all(isinstance(each, str) for each in prompts) or all(_are_ids(each) for each in prompts):
            return prompts[0] if len(prompts) == 1 else prompts
        if _are_ids(prompts):
            return prompts
    raise PydanticCustomError("prompt", "must be a string, a list of token ids, or a list of either")


def _are_ids(value: object) -> bool:
    return isinstance(value, tuple) and all(type(each) is int for each in value)


def _check_content(value: object) -> object:
    """Text, null or a list of parts; ``app.model.chat`` checks the parts and names the wrong one."""
    if value is None or isinstance(value, str | list):
        return value
    raise PydanticCustomError("content", "must be a string, null or a list of text parts")


LogitBias = Annotated[Any, PlainValidator(_check_bias)]
StopTokens = Annotated[Any, PlainValidator(_check_stop_tokens)]
Stop = Annotated[Any, PlainValidator(_check_stop)]
Prompt = Annotated[Any, PlainValidator(_check_prompt)]
Content = Annotated[Any, PlainValidator(_check_content)]


def _check_role(value: str) -> str:
    if value in ("tool", "function"):
        raise PydanticCustomError("unsupported", "is not supported: tools are not served")
    if value not in ("system", "developer", "user", "assistant"):
        raise PydanticCustomError("role", "must be system, developer, user or assistant")
    return value


class Body(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class StreamOptions(Body):
    include_usage: bool | None = None
    include_obfuscation: _only(False) = None  # type: ignore[valid-type]
    continuous_usage_stats: _only(False) = None  # type: ignore[valid-type]


class Generation(Body):
    """What both routes share."""

    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = Field(None, ge=1, le=MOST_TOKENS)
    temperature: float | None = Field(None, ge=0, le=2, allow_inf_nan=False)
    top_p: float | None = Field(None, gt=0, le=1, allow_inf_nan=False)
    top_k: int | None = Field(None, ge=-1, lt=_INT64)
    presence_penalty: float | None = Field(None, ge=-2, le=2, allow_inf_nan=False)
    frequency_penalty: float | None = Field(None, ge=-2, le=2, allow_inf_nan=False)
    repetition_penalty: float | None = Field(None, gt=0, allow_inf_nan=False)
    seed: int | None = Field(None, ge=-_INT64, lt=_INT64)
    min_p: float | None = Field(None, ge=0, le=1, allow_inf_nan=False)
    logit_bias: LogitBias = ()
    min_tokens: int | None = Field(None, ge=0, le=MOST_TOKENS)
    stop: Stop = ()
    stop_token_ids: StopTokens = ()
    ignore_eos: bool | None = None
    return_token_ids: bool | None = None
    cache_salt: str | None = Field(None, min_length=1)
    """vLLM's: only requests with the same salt share cached KV."""
    n: int | None = Field(None, ge=1)
    user: str | None = None
    """A label of the client's; Baton does not use it."""

    bad_words: _only([]) = None  # type: ignore[valid-type]
    allowed_token_ids: _only() = None  # type: ignore[valid-type]
    prompt_logprobs: _only() = None  # type: ignore[valid-type]
    truncate_prompt_tokens: _only() = None  # type: ignore[valid-type]
    structured_outputs: _only() = None  # type: ignore[valid-type]
    skip_special_tokens: _only(True) = None  # type: ignore[valid-type]
    spaces_between_special_tokens: _only(True) = None  # type: ignore[valid-type]
    include_stop_str_in_output: _only(False) = None  # type: ignore[valid-type]
    response_format: _only({"type": "text"}) = None  # type: ignore[valid-type]


class CompletionBody(Generation):
    """``POST /v1/completions``."""

    prompt: Prompt
    best_of: int | None = Field(None, ge=1)
    """Only as many as ``n``: all that is computed is answered."""

    @property
    def prompts(self) -> tuple[str | tuple[int, ...], ...]:
        """One or more."""
        several = isinstance(self.prompt, tuple) and self.prompt and not isinstance(self.prompt[0], int)
        return self.prompt if several else (self.prompt,)

    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)

    echo: _only(False) = None  # type: ignore[valid-type]
    suffix: _only("") = None  # type: ignore[valid-type]


class Message(Body):
    role: Annotated[str, AfterValidator(_check_role)]
    content: Content = None
    name: str | None = None
    """A label that most templates ignore; it is handed to the template."""

    tool_calls: _only([]) = None  # type: ignore[valid-type]
    tool_call_id: _only() = None  # type: ignore[valid-type]
    function_call: _only() = None  # type: ignore[valid-type]
    audio: _only() = None  # type: ignore[valid-type]
    refusal: _only() = None  # type: ignore[valid-type]
    annotations: _only([]) = None  # type: ignore[valid-type]


class ChatBody(Generation):
    """``POST /v1/chat/completions``."""

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1, le=MOST_TOKENS)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None
    """Like ``user``: labels."""

    tools: _only([]) = None  # type: ignore[valid-type]
    tool_choice: _only("none", "auto") = None  # type: ignore[valid-type]
    parallel_tool_calls: _only(True, False) = None  # type: ignore[valid-type]
    functions: _only([]) = None  # type: ignore[valid-type]
    function_call: _only("none", "auto") = None  # type: ignore[valid-type]
    modalities: _only(["text"]) = None  # type: ignore[valid-type]
    audio: _only() = None  # type: ignore[valid-type]
    prediction: _only() = None  # type: ignore[valid-type]
    reasoning_effort: _only("none") = None  # type: ignore[valid-type]
    verbosity: _only("medium") = None  # type: ignore[valid-type]
    service_tier: _only("auto", "default") = None  # type: ignore[valid-type]
    store: _only(False) = None  # type: ignore[valid-type]
    metadata: _only({}) = None  # type: ignore[valid-type]
    moderation: _only() = None  # type: ignore[valid-type]
    prompt_cache_options: _only() = None  # type: ignore[valid-type]
    prompt_cache_retention: _only() = None  # type: ignore[valid-type]
    web_search_options: _only() = None  # type: ignore[valid-type]
    chat_template_kwargs: _only({}) = None  # type: ignore[valid-type]
    add_generation_prompt: _only(True) = None  # type: ignore[valid-type]
    continue_final_message: _only(False) = None  # type: ignore[valid-type]
