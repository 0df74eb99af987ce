"""How long a request may be: the smaller of what the model and the pool can hold."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from app.errors import SettingsError
from app.launcher import prepare
from app.model.folder import open_folder
from app.model.limits import LengthLimits, check_room
from app.settings import load_settings
from web.served import load_served_model


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
    config: Any = SimpleNamespace(max_position_embeddings=positions, max_context_tokens=positions)
    settings = load_settings(max_model_len_tokens=asked, num_blocks=blocks, block_size_tokens=16)
    limits = LengthLimits.of(settings, config)
    assert (limits.model_tokens, limits.pool_tokens, limits.tokens) == (model, blocks * 16, both)


def test_more_than_the_model_was_made_for_is_refused_and_named() -> None:
    config: Any = SimpleNamespace(max_position_embeddings=2048, max_context_tokens=2048)
    with pytest.raises(SettingsError, match="BATON_MAX_MODEL_LEN_TOKENS=2049: the model was made for 2048 tokens"):
        LengthLimits.of(load_settings(max_model_len_tokens=2049), config)


def test_more_than_a_sliding_window_holds_is_refused_and_nothing_asked_for_means_up_to_it() -> None:
    config: Any = SimpleNamespace(max_position_embeddings=2048, max_context_tokens=512)
    with pytest.raises(SettingsError, match="BATON_MAX_MODEL_LEN_TOKENS=513: the model's sliding_window is 512 tokens"):
        LengthLimits.of(load_settings(max_model_len_tokens=513), config)
    assert LengthLimits.of(load_settings(max_model_len_tokens=512), config).model_tokens == 512
    assert LengthLimits.of(load_settings(max_model_len_tokens=0), config).model_tokens == 512


@pytest.mark.parametrize(
    ("template", "needed"),
    [
        (None, 2),
        ("{% for message in messages %}<|start|>{{ message.content }}<|end|>{% endfor %}<|start|>", 4),
        ("{{ raise_exception('I want a system message') }}", 2),
    ],
)
def test_room_for_less_than_the_shortest_request_is_refused_with_what_to_set(
    hf_folder: Callable[..., Path], template: str | None, needed: int
) -> None:
    path = hf_folder()
    if template is not None:
        (path / "chat_template.jinja").write_text(template)
    folder = open_folder(path)
    tokenizer = folder.tokenizer()
    enough = {"num_blocks": needed, "block_size_tokens": 1}
    check_room(load_settings(**enough), folder, tokenizer)
    check_room(load_settings(max_model_len_tokens=needed), folder, tokenizer)
    with pytest.raises(SettingsError, match=rf"^BATON_NUM_BLOCKS={needed - 1}: .* takes {needed} tokens"):
        check_room(load_settings(**enough | {"num_blocks": needed - 1}), folder, tokenizer)
    with pytest.raises(SettingsError, match=rf"^BATON_MAX_MODEL_LEN_TOKENS={needed - 1}: .* takes {needed} tokens"):
        check_room(load_settings(max_model_len_tokens=needed - 1), folder, tokenizer)


def test_room_is_looked_at_before_anything_is_started_and_by_web_itself(
    hf_folder: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = load_settings(model=str(hf_folder()), num_blocks=1, block_size_tokens=1)
    monkeypatch.setattr(prepare, "get_settings", lambda: settings)
    assert prepare.main() == 1
    assert capsys.readouterr().out.startswith("error: BATON_NUM_BLOCKS=1: ")
    with pytest.raises(SettingsError, match="BATON_NUM_BLOCKS=1"):
        load_served_model(settings)
