"""How long a request may be: the smaller of what the model and the pool can hold."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from app.errors import SettingsError
from app.model.limits import LengthLimits
from app.settings import load_settings


@pytest.mark.parametrize(
    ("asked", "positions", "blocks", "model", "both"),
    [
        (0, 2048, 1000, 2048, 2048),
        (0, 2048, 10, 2048, 160),
        (500, 2048, 1000, 500, 500),
        (2048, 2048, 1000, 2048, 2048),
    ],
)
def test_the_smallest_limit_holds(asked: int, positions: int, blocks: int, model: int, both: int) -> None:
    config: Any = SimpleNamespace(max_position_embeddings=positions)
    settings = load_settings(max_model_len_tokens=asked, num_blocks=blocks, block_size_tokens=16)
    limits = LengthLimits.of(settings, config)
    assert (limits.model_tokens, limits.pool_tokens, limits.tokens) == (model, blocks * 16, both)


def test_more_than_the_model_was_made_for_is_refused_and_named() -> None:
    config: Any = SimpleNamespace(max_position_embeddings=2048)
    with pytest.raises(SettingsError, match="BATON_MAX_MODEL_LEN_TOKENS=2049: the model was made for 2048 tokens"):
        LengthLimits.of(load_settings(max_model_len_tokens=2049), config)
