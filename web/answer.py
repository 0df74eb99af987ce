"""Output tokens → what a client reads. One path for streams and whole answers, so that both hold the same text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from app.logprobs import TokenLogprobs
from app.model.tokenizer import Tokenizer
from app.schemas import FinishReason, SamplingParams
from app.text import StopTruncator
from web.follow import Progress


@dataclass(frozen=True, slots=True)
class Delta:
    """What one piece of progress adds to a choice.

    ``text`` may be empty: half a character, or what may become a stop string.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()
    """Of each of ``token_ids``, if the client asks for them."""
    index: int = 0
    """Of the choice."""


class Answer:
    """One choice while it grows."""

    def __init__(
        self, tokenizer: Tokenizer, prompt_ids: Sequence[int], sampling: SamplingParams, index: int = 0
    ) -> None:
        self.index = index
        self.prompt_ids = prompt_ids
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprobs] = []
        self._stop_token_ids = frozenset(sampling.stop_token_ids)
        self._text = StopTruncator(sampling.stop, tokenizer, sampling.min_tokens)
        self._parts: list[str] = []
        self.finish_reason: FinishReason | None = None
        self.cached_tokens = 0

    def add(self, progress: Progress) -> Delta:
        """Take the next tokens; the last ones carry the finish reason and release all text that was held back."""
        tokens = progress.tokens
        if progress.finish_reason == "stop" and tokens and tokens[-1] in self._stop_token_ids:
            tokens = tokens[:-1]  # a stop token adds no text, as in vLLM
        text = self._text.push(tokens)
        if progress.finish_reason is not None:
            text += self._text.flush()
        logprobs = tuple(map(TokenLogprobs.unpack, progress.logprobs))
        self.logprobs.extend(logprobs)
        self.token_ids.extend(progress.tokens)
        self._parts.append(text)
        self.finish_reason = progress.finish_reason
        self.cached_tokens = progress.cached_tokens
        return Delta(text, progress.tokens, progress.finish_reason, logprobs, self.index)

    @property
    def text(self) -> str:
        """All text so far."""
        return "".join(self._parts)


def usage(answers: Sequence[Answer], n: int) -> dict[str, Any]:
    """OpenAI's usage object of a request, ``n`` answers to each of its prompts.

    A prompt counts once; of its tokens those as cached that none of its answers had to compute. Every output token
    counts, EOS and those of a stop string too, as in vLLM.
    """
    by_prompt = [answers[start : start + n] for start in range(0, len(answers), n)]
    prompt = sum(len(of_prompt[0].prompt_ids) for of_prompt in by_prompt)
    completion = sum(len(answer.token_ids) for answer in answers)
    cached = sum(min(answer.cached_tokens for answer in of_prompt) for of_prompt in by_prompt)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }
