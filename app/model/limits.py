"""How long a request may be. Web refuses what is longer; blocks bound the rest."""

from __future__ import annotations

from dataclasses import dataclass

from app.errors import SettingsError
from app.model.config import ModelConfig
from app.settings import Settings


@dataclass(frozen=True, slots=True)
class LengthLimits:
    """Prompt and answer together, in tokens. The smaller limit holds; an error names the one that was met."""

    model_tokens: int
    """What the model was made for, or less if a person said so."""
    pool_tokens: int
    """What one node's KV pool holds: a longer request could never be placed."""

    @classmethod
    def of(cls, settings: Settings, config: ModelConfig) -> LengthLimits:
        """The limits of a process with these settings.

        Raises:
            SettingsError: a person asks for more than the model was made for.
        """
        positions = config.max_position_embeddings
        if settings.max_model_len_tokens > positions:
            raise SettingsError(
                f"BATON_MAX_MODEL_LEN_TOKENS={settings.max_model_len_tokens}: the model was made for {positions} tokens"
            )
        return cls(
            model_tokens=min(settings.max_model_len_tokens or positions, positions),
            pool_tokens=settings.num_blocks * settings.block_size_tokens,
        )

    @property
    def tokens(self) -> int:
        """The smaller of the two."""
        return min(self.model_tokens, self.pool_tokens)
