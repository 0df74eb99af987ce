"""The model as web needs it: names, limits, tokenizer and chat template. No weights."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from app.model.chat import ChatTemplate
from app.model.folder import ModelFolder
from app.model.limits import LengthLimits, check_room
from app.model.resolve import resolve_model
from app.model.tokenizer import Tokenizer
from app.settings import Settings
from web.logs import LOGGER


@dataclass(frozen=True)
class ServedModel:
    """One model under the name that the API answers to."""

    name: str
    fingerprint: str
    """Of weights, config and tokenizer: nodes with another one would make other tokens of the same text."""
    vocab_size: int
    limits: LengthLimits
    longest_token_bytes: int
    """No token stands for more text than this."""
    tokenizer: Tokenizer
    chat: ChatTemplate
    created: int = field(default_factory=lambda: int(time.time()))

    @classmethod
    def from_folder(cls, folder: ModelFolder, settings: Settings) -> ServedModel:
        tokenizer = folder.tokenizer()
        return cls(
            name=settings.served_model_name or folder.name,
            fingerprint=folder.fingerprint,
            vocab_size=folder.config.vocab_size,
            limits=LengthLimits.of(settings, folder.config),
            longest_token_bytes=max(len(tokenizer.token_bytes(i)) for i in range(tokenizer.vocab_size)),
            tokenizer=tokenizer,
            chat=folder.chat(),
        )

    def describe(self) -> dict[str, Any]:
        """This model as ``/v1/models`` shows it; ``max_model_len`` as vLLM names it."""
        return {
            "id": self.name,
            "object": "model",
            "created": self.created,
            "owned_by": "baton",
            "max_model_len": self.limits.tokens,
        }


def load_served_model(settings: Settings) -> ServedModel:
    """The model of ``settings``, fetched and converted first if need be. Raises ModelError, SettingsError."""
    folder = resolve_model(settings.model, settings.home, lambda line: LOGGER.info("model %s", line))
    model = ServedModel.from_folder(folder, settings)
    check_room(settings, folder, model.tokenizer)
    return model
