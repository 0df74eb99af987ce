"""``POST /v1/chat/completions``."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from flask import Blueprint, Response

from app.logprobs import TokenLogprobs
from web.admission import Job
from web.answer import Answer, Delta, usage
from web.body import read_body
from web.idempotency import read_key
from web.logprobs import chat_logprobs
from web.openai_schemas import ChatBody
from web.params import parse_body, prepare_chat
from web.served import ServedModel
from web.services import services
from web.sse import respond

blueprint = Blueprint("chat", __name__)


@blueprint.post("/v1/chat/completions")
def create_chat_completion() -> Response:
    model = services().model
    body = parse_body(read_body(), ChatBody)
    prepared = prepare_chat(body, model, services().settings)
    return respond(partial(ChatShape, model), prepared, read_key(body, model.fingerprint))


class ChatShape:
    """OpenAI's chat objects; token ids where vLLM puts them."""

    def __init__(self, model: ServedModel, job: Job) -> None:
        self._prepared = job.prepared
        self._prompt_ids = list(job.prepared.choices[0].prompt_ids)
        self._with_logprobs = job.prepared.choices[0].sampling.logprobs is not None
        self._tokenizer = model.tokenizer
        self._opened: set[int] = set()
        self._head = {"id": f"chatcmpl-{job.client_id}", "created": job.created, "model": model.name}

    def delta(self, delta: Delta) -> list[dict[str, Any]]:
        index = delta.index
        opening = [] if index in self._opened else [self._opening(index)]
        self._opened.add(index)
        with_ids = self._prepared.return_token_ids and bool(delta.token_ids)
        logprobs = self._logprobs(delta.token_ids, delta.logprobs) if delta.token_ids else None
        chunks = [self._chunk(index, {"content": delta.text})] if delta.text or with_ids or logprobs else []
        if with_ids:
            chunks[0]["choices"][0]["token_ids"] = list(delta.token_ids)
        if logprobs:
            chunks[0]["choices"][0]["logprobs"] = logprobs
        if delta.finish_reason is not None:
            chunks.append(self._chunk(index, {}, delta.finish_reason))
        return opening + chunks

    def usage(self, answers: Sequence[Answer]) -> dict[str, Any]:
        used = usage(answers, self._prepared.n)
        return {**self._head, "object": "chat.completion.chunk", "choices": [], "usage": used}

    def whole(self, answers: Sequence[Answer]) -> dict[str, Any]:
        choices, used = [self._choice(answer) for answer in answers], usage(answers, self._prepared.n)
        whole = {**self._head, "object": "chat.completion", "choices": choices, "usage": used}
        if self._prepared.return_token_ids:
            whole["prompt_token_ids"] = self._prompt_ids
        return whole

    def _choice(self, answer: Answer) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": answer.text, "refusal": None, "annotations": []}
        logprobs = self._logprobs(answer.token_ids, answer.logprobs)
        finish_reason = answer.finish_reason
        choice = {"index": answer.index, "message": message, "logprobs": logprobs, "finish_reason": finish_reason}
        if self._prepared.return_token_ids:
            choice["token_ids"] = answer.token_ids
        return choice

    def _opening(self, index: int) -> dict[str, Any]:
        chunk = self._chunk(index, {"role": "assistant", "content": ""})
        if self._prepared.return_token_ids:
            chunk["prompt_token_ids"] = self._prompt_ids
        return chunk

    def _logprobs(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> dict[str, Any] | None:
        if not self._with_logprobs:
            return None
        return chat_logprobs(self._tokenizer, token_ids, logprobs)

    def _chunk(self, index: int, delta: dict[str, str], finish_reason: str | None = None) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
        chunk: dict[str, Any] = {**self._head, "object": "chat.completion.chunk", "choices": [choice]}
        if self._prepared.include_usage:
            chunk["usage"] = None
        return chunk
