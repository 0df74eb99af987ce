"""How long a request may be. Web refuses what is longer; blocks bound the rest."""

from __future__ import annotations

from dataclasses import dataclass

from app.errors import InvalidRequest, SettingsError
from app.model.config import ModelConfig
from app.model.folder import ModelFolder
from app.model.tokenizer import Tokenizer
from app.settings import Settings


@dataclass(frozen=True, slots=True)
class LengthLimits:
    """Prompt and answer together, in tokens. The smaller limit holds; an error names the one that was met."""

    model_tokens: int
    """What the model was made for (up to its sliding window, if it has one), or less if a person said so."""
    pool_tokens: int
    """What one node's KV pool holds: a longer request could never be placed."""

    @classmethod
    def of(cls, settings: Settings, config: ModelConfig) -> LengthLimits:
        """The limits of a process with these settings.

        Raises:
            SettingsError: a person asks for more than the model was made for.
        """
        asked, longest = settings.max_model_len_tokens, config.max_context_tokens
        if asked > config.max_position_embeddings:
            raise SettingsError(
                f"BATON_MAX_MODEL_LEN_TOKENS={asked}: the model was made for {config.max_position_embeddings} tokens"
            )
        if asked > longest:
            raise SettingsError(
                f"BATON_MAX_MODEL_LEN_TOKENS={asked}: the model's sliding_window is {longest} tokens, and attention"
                " that leaves tokens behind is not supported"
            )
        return cls(
            model_tokens=asked or longest,
            pool_tokens=settings.num_blocks * settings.block_size_tokens,
        )

    @property
    def tokens(self) -> int:
        """The smaller of the two."""
        return min(self.model_tokens, self.pool_tokens)


def check_room(settings: Settings, folder: ModelFolder, tokenizer: Tokenizer) -> None:
    """Refuse settings under which not even the shortest request could be served.

    Raises:
        SettingsError: it says what to set.
    """
    limits, needed = LengthLimits.of(settings, folder.config), _shortest_request_tokens(folder, tokenizer)
    why = f"the shortest request to this model takes {needed} tokens, the first of its answer included"
    if limits.pool_tokens < needed:
        raise SettingsError(
            f"BATON_NUM_BLOCKS={settings.num_blocks}: with BATON_BLOCK_SIZE_TOKENS={settings.block_size_tokens} a node"
            f" holds {limits.pool_tokens} tokens, and {why}"
        )
    if 0 < settings.max_model_len_tokens < needed:
        raise SettingsError(f"BATON_MAX_MODEL_LEN_TOKENS={settings.max_model_len_tokens}: {why}; 0: as long as fits")


def _shortest_request_tokens(folder: ModelFolder, tokenizer: Tokenizer) -> int:
    """A chat in which nothing is said, and one token of its answer; without a template a prompt of one token."""
    try:
        text = folder.chat().render([{"role": "user", "content": ""}])
    except InvalidRequest:  # no template, or one that wants more than that
        return 2
    return len(tokenizer.encode(text, add_special_tokens=False)) + 1
