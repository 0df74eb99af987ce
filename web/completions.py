"""``POST /v1/completions``."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from flask import Blueprint, Response

from web.admission import Job
from web.answer import Answer, Delta, usage
from web.body import read_body
from web.idempotency import read_key
from web.logprobs import CompletionLogprobs
from web.openai_schemas import CompletionBody
from web.params import parse_body, prepare_completion
from web.served import ServedModel
from web.services import services
from web.sse import respond

blueprint = Blueprint("completions", __name__)


@blueprint.post("/v1/completions")
def create_completion() -> Response:
    model = services().model
    body = parse_body(read_body(), CompletionBody)
    prepared = prepare_completion(body, model, services().settings)
    return respond(partial(CompletionShape, model), prepared, read_key(body, model.fingerprint))


class CompletionShape:
    """OpenAI's completion objects; token ids where vLLM puts them: in the choice."""

    def __init__(self, model: ServedModel, job: Job) -> None:
        self._prepared = job.prepared
        choices = job.prepared.choices
        with_logprobs = choices[0].sampling.logprobs is not None
        self._logprobs = [CompletionLogprobs(model.tokenizer) for _ in choices] if with_logprobs else None
        self._prompt_ids_sent: set[int] = set()
        self._head = {
            "id": f"cmpl-{job.client_id}",
            "object": "text_completion",
            "created": job.created,
            "model": model.name,
        }

    def delta(self, delta: Delta) -> list[dict[str, Any]]:
        index = delta.index
        with_ids = self._prepared.return_token_ids and bool(delta.token_ids)
        with_logprobs = self._logprobs is not None and bool(delta.token_ids)
        chunks = [self._chunk(index, delta.text)] if delta.text or with_ids or with_logprobs else []
        if self._logprobs is not None and delta.token_ids:
            chunks[0]["choices"][0]["logprobs"] = self._logprobs[index].add(delta.token_ids, delta.logprobs)
        if with_ids:
            choice = chunks[0]["choices"][0]
            choice["token_ids"] = list(delta.token_ids)
            if index not in self._prompt_ids_sent:
                choice["prompt_token_ids"] = self._prompt_ids(index)
                self._prompt_ids_sent.add(index)
        if delta.finish_reason is not None:
            chunks.append(self._chunk(index, "", delta.finish_reason))
        return chunks

    def usage(self, answers: Sequence[Answer]) -> dict[str, Any]:
        return {**self._head, "choices": [], "usage": usage(answers, self._prepared.n)}

    def whole(self, answers: Sequence[Answer]) -> dict[str, Any]:
        choices = [self._choice(answer) for answer in answers]
        return {**self._head, "choices": choices, "usage": usage(answers, self._prepared.n)}

    def _choice(self, answer: Answer) -> dict[str, Any]:
        index = answer.index
        choice: dict[str, Any] = {
            "index": index,
            "text": answer.text,
            "logprobs": self._logprobs and self._logprobs[index].add(answer.token_ids, answer.logprobs),
            "finish_reason": answer.finish_reason,
        }
        if self._prepared.return_token_ids:
            choice["token_ids"] = answer.token_ids
            choice["prompt_token_ids"] = self._prompt_ids(index)
        return choice

    def _prompt_ids(self, index: int) -> list[int]:
        return list(self._prepared.choices[index].prompt_ids)

    def _chunk(self, index: int, text: str, finish_reason: str | None = None) -> dict[str, Any]:
        choice = {"index": index, "text": text, "logprobs": None, "finish_reason": finish_reason}
        chunk: dict[str, Any] = {**self._head, "choices": [choice]}
        if self._prepared.include_usage:
            chunk["usage"] = None
        return chunk
