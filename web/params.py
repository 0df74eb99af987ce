"""Request body → prompt ids and sampling parameters, or one clear error that names the field."""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from pydantic import ValidationError

from app.errors import InvalidRequest, ModelNotFound, PromptTooLong
from app.schemas import SamplingParams
from app.settings import Settings
from app.versions import GROUPS
from web.openai_schemas import ChatBody, CompletionBody, Generation
from web.served import ServedModel

COMPLETION_MAX_TOKENS = 16
"""OpenAI's default of ``max_tokens`` for completions."""
SEED_BITS = 63


@dataclass(frozen=True)
class Choice:
    """One sequence to be computed."""

    prompt_ids: tuple[int, ...]
    sampling: SamplingParams


@dataclass(frozen=True)
class Prepared:
    """A request that the model can serve."""

    choices: tuple[Choice, ...]
    """By their index in the answer: ``n`` for the first prompt, then those for the next."""
    n: int
    stream: bool
    include_usage: bool
    return_token_ids: bool
    salt: str
    """Only requests with the same one share cached KV; empty: those without one."""

    @property
    def needs_version(self) -> int:
        """The oldest version (``app.versions``) of whose nodes all can serve it."""
        options = self.choices[0].sampling.needs_version
        return max(options, GROUPS) if len(self.choices) > 1 else options


BodyT = TypeVar("BodyT", bound=Generation)


def parse_body(raw: bytes, schema: type[BodyT]) -> BodyT:
    """Parse and check a JSON body. Raises InvalidRequest with the first wrong field as ``param``."""
    try:
        return schema.model_validate_json(raw)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    param = _field(first["loc"])
    match first["type"]:
        case "json_invalid":
            raise InvalidRequest(f"the body is not valid JSON ({first['msg'].removeprefix('Invalid JSON: ')})")
        case "extra_forbidden":
            raise InvalidRequest(f"{param}: unknown field", param=param)
        case "missing":
            raise InvalidRequest(f"{param}: required field is missing", param=param)
        case _ if not param:
            raise InvalidRequest("the body must be a JSON object")
        case _:
            raise InvalidRequest(f"{param}: {first['msg'][0].lower()}{first['msg'][1:]}", param=param)


def prepare_completion(body: CompletionBody, model: ServedModel, settings: Settings) -> Prepared:
    """Raises InvalidRequest, PromptTooLong, ModelNotFound."""
    _check_model(body, model)
    _check_count(body, len(body.prompts), settings)
    if body.best_of not in (None, body.n or 1):
        raise InvalidRequest("best_of: must be n, if given: every answer that is computed is sent", param="best_of")
    choices: list[Choice] = []
    for number, prompt in enumerate(body.prompts):
        param = f"prompt[{number}]" if len(body.prompts) > 1 else "prompt"
        if isinstance(prompt, str):
            ids = _encode(prompt, model, param, add_special_tokens=True) if prompt else ()
        else:
            ids = prompt
            _check_ids(ids, model, param)
        default = min(COMPLETION_MAX_TOKENS, _room(ids, model, param))
        choices += _choices(body, model, ids, body.max_tokens, default, "max_tokens", body.logprobs)
    return _prepared(body, choices)


def prepare_chat(body: ChatBody, model: ServedModel, settings: Settings) -> Prepared:
    """Raises InvalidRequest, PromptTooLong, ModelNotFound."""
    _check_model(body, model)
    _check_count(body, 1, settings)
    messages = [_template_message(m.model_dump(include={"role", "content", "name"})) for m in body.messages]
    ids = _encode(model.chat.render(messages), model, "messages", add_special_tokens=False)
    given, field = body.max_completion_tokens, "max_completion_tokens"
    if given is None:
        given, field = body.max_tokens, "max_tokens"
    elif body.max_tokens not in (None, given):
        raise InvalidRequest("max_tokens and max_completion_tokens differ; give one of them", param="max_tokens")
    if body.top_logprobs and not body.logprobs:
        raise InvalidRequest("top_logprobs: allowed only with logprobs true", param="top_logprobs")
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    choices = _choices(body, model, ids, given, _room(ids, model, "messages"), field, logprobs)
    return _prepared(body, choices)


def _encode(text: str, model: ServedModel, param: str, *, add_special_tokens: bool) -> tuple[int, ...]:
    """Token ids of ``text``. One that is too long by far is refused unread: 8 MB would take a core for 25 s."""
    if len(text) > model.limits.tokens * model.longest_token_bytes:
        raise PromptTooLong(f"{len(text)} characters cannot fit; {_limit(model)}", param=param)
    return tuple(model.tokenizer.encode(text, add_special_tokens=add_special_tokens))


def _check_count(body: Generation, num_prompts: int, settings: Settings) -> None:
    """All answers of a request are admitted at once, so they must fit into the queue when it is empty."""
    n = body.n or 1
    most, setting = min((settings.max_choices, "BATON_MAX_CHOICES"), (settings.max_queued, "BATON_MAX_QUEUED"))
    if n * num_prompts > most:
        param = "n" if n > 1 else "prompt"
        asked = f"{num_prompts} prompts with n {n}" if num_prompts > 1 else f"n {n}"
        raise InvalidRequest(
            f"{param}: {asked} ask for {n * num_prompts} answers; {most} at most ({setting})", param=param
        )


def _choices(
    body: Generation,
    model: ServedModel,
    ids: tuple[int, ...],
    given: int | None,
    default: int,
    field: str,
    logprobs: int | None,
) -> list[Choice]:
    """The ``n`` sequences of one prompt."""
    if body.stream_options is not None and not body.stream:
        raise InvalidRequest("stream_options: allowed only with stream", param="stream_options")
    max_tokens = default if given is None else given
    if len(ids) + max_tokens > model.limits.tokens:
        raise PromptTooLong(
            f"{len(ids)} prompt tokens and {field} {max_tokens} are {len(ids) + max_tokens}; {_limit(model)}",
            param=field,
        )
    min_tokens = body.min_tokens or 0
    if min_tokens > max_tokens:
        raise InvalidRequest(f"min_tokens: {min_tokens} is more than {field} {max_tokens}", param="min_tokens")
    _check_ids(body.stop_token_ids, model, "stop_token_ids")
    _check_ids([token_id for token_id, _ in body.logit_bias], model, "logit_bias")
    seed = secrets.randbits(SEED_BITS) if body.seed is None else body.seed
    sampling = SamplingParams(
        temperature=1.0 if body.temperature is None else body.temperature,
        top_p=1.0 if body.top_p is None else body.top_p,
        top_k=max(0, body.top_k or 0),
        min_p=body.min_p or 0.0,
        logit_bias=body.logit_bias,
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        repetition_penalty=1.0 if body.repetition_penalty is None else body.repetition_penalty,
        seed=seed,
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        stop=body.stop,
        stop_token_ids=body.stop_token_ids,
        ignore_eos=bool(body.ignore_eos),
        logprobs=logprobs,
    )
    seeds = (choice_seed(seed, index) for index in range(body.n or 1))
    return [Choice(ids, sampling.model_copy(update={"seed": each})) for each in seeds]


def choice_seed(seed: int, index: int) -> int:
    """What the ``index``-th of the ``n`` answers to a prompt is drawn with: the first one's is the request's own seed,
    so that it is the answer of a request for one."""
    if index == 0:
        return seed
    digest = hashlib.sha256(f"{seed}/{index}".encode()).digest()
    return int.from_bytes(digest[:8], "big", signed=True)


def _prepared(body: Generation, choices: Sequence[Choice]) -> Prepared:
    return Prepared(
        choices=tuple(choices),
        n=body.n or 1,
        stream=bool(body.stream),
        include_usage=body.stream_options is not None and bool(body.stream_options.include_usage),
        return_token_ids=bool(body.return_token_ids),
        salt=cache_salt(tenant="", given=body.cache_salt),
    )


def _check_ids(ids: Sequence[int], model: ServedModel, param: str) -> None:
    wrong = next((i for i in ids if not 0 <= i < model.vocab_size), None)
    if wrong is not None:
        raise InvalidRequest(f"{param}: token id {wrong} is not in the vocabulary of {model.vocab_size}", param=param)


def cache_salt(*, tenant: str, given: str | None) -> str:
    """What keeps the cached KV of one tenant, and of one ``cache_salt`` of theirs, apart from everybody else's.

    A hit shows in the time to the first token, and in usage: whoever shares can find out what others have asked. A
    digest, since the record is no place for a secret. ``tenant``: empty until requests carry the name of one.
    """
    if not tenant and given is None:
        return ""
    return hashlib.sha256(json.dumps([tenant, given]).encode()).hexdigest()


def _room(ids: tuple[int, ...], model: ServedModel, param: str) -> int:
    """Tokens that fit after the prompt: at least one, or an error (vLLM's rule)."""
    if not ids:
        raise InvalidRequest(f"{param}: the prompt has no tokens", param=param)
    if len(ids) >= model.limits.tokens:
        raise PromptTooLong(f"{len(ids)} prompt tokens leave no room for an answer; {_limit(model)}", param=param)
    return model.limits.tokens - len(ids)


def _limit(model: ServedModel) -> str:
    if model.limits.pool_tokens < model.limits.model_tokens:
        return f"a node's KV pool holds {model.limits.pool_tokens} tokens (BATON_NUM_BLOCKS x BATON_BLOCK_SIZE_TOKENS)"
    return f"the model's maximum is {model.limits.model_tokens} tokens"


def _check_model(body: Generation, model: ServedModel) -> None:
    if body.model != model.name:
        raise ModelNotFound(f"the model {body.model!r} does not exist; this server has {model.name!r}", param="model")


def _template_message(message: dict[str, object]) -> dict[str, object]:
    """OpenAI's ``developer`` is ``system`` for models that do not know it; an absent name stays absent."""
    if message["role"] == "developer":
        message["role"] = "system"
    if message["name"] is None:
        del message["name"]
    return message


def _field(loc: tuple[int | str, ...]) -> str | None:
    """``("messages", 0, "role")`` → ``messages[0].role``, as OpenAI writes it."""
    path = ""
    for part in loc:
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else part
    return path or None
