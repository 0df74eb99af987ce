"""The forward pass against a plain numpy Llama without cache, batches or chunks."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from app.errors import ModelError
from app.model.config import ModelConfig
from workers.engine.rope import rope_tables

from .conftest import TINY, Driver, TinyFolder, greedy

if TYPE_CHECKING:
    from workers.engine.engine import Engine

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64.0,
}


def scaled_frequency(config: ModelConfig, pair: int) -> float:
    """Radians per position of one pair, as Llama 3.1's model card code computes it, one number at a time."""
    frequency = config.rope_theta ** (-2 * pair / config.head_dim)
    scaling = config.rope_scaling
    if scaling is None:
        return frequency
    if scaling["rope_type"] == "linear":
        return frequency / scaling["factor"]
    old_length, wavelength = scaling["original_max_position_embeddings"], 2 * math.pi / frequency
    if wavelength < old_length / scaling["high_freq_factor"]:
        return frequency
    if wavelength > old_length / scaling["low_freq_factor"]:
        return frequency / scaling["factor"]
    smooth = (old_length / wavelength - scaling["low_freq_factor"]) / (
        scaling["high_freq_factor"] - scaling["low_freq_factor"]
    )
    return (1 - smooth) * frequency / scaling["factor"] + smooth * frequency


def rotate(config: ModelConfig, vector: np.ndarray, position: int) -> np.ndarray:
    half = config.head_dim // 2
    rotated = vector.copy()
    for pair in range(half):
        angle = position * scaled_frequency(config, pair)
        one, other = vector[pair], vector[pair + half]
        rotated[pair] = one * math.cos(angle) - other * math.sin(angle)
        rotated[pair + half] = other * math.cos(angle) + one * math.sin(angle)
    return rotated


def plain_logits(folder: TinyFolder, token_ids: list[int]) -> np.ndarray:
    """Float64 logits [vocab] after the last token."""
    config = folder.config
    weights = {name: values.astype(np.float64) for name, values in folder.weights.items()}

    def norm(x: np.ndarray, name: str) -> np.ndarray:
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + config.rms_norm_eps) * weights[name]

    x = weights["model.embed_tokens.weight"][token_ids]
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}."
        normed = norm(x, prefix + "input_layernorm.weight")
        heads: dict[str, Any] = {}
        for name, count in (("q", config.num_heads), ("k", config.num_kv_heads), ("v", config.num_kv_heads)):
            split = (normed @ weights[f"{prefix}self_attn.{name}_proj.weight"].T).reshape(len(x), count, -1)
            if name != "v":
                split = np.array([[rotate(config, head, p) for head in token] for p, token in enumerate(split)])
            heads[name] = split
        mixed = np.zeros((len(x), config.num_heads, config.head_dim))
        for head in range(config.num_heads):
            kv_head = head // (config.num_heads // config.num_kv_heads)
            for p in range(len(x)):
                scores = heads["k"][: p + 1, kv_head] @ heads["q"][p, head] / math.sqrt(config.head_dim)
                chances = np.exp(scores - scores.max())
                mixed[p, head] = chances / chances.sum() @ heads["v"][: p + 1, kv_head]
        x = x + mixed.reshape(len(x), -1) @ weights[prefix + "self_attn.o_proj.weight"].T
        normed = norm(x, prefix + "post_attention_layernorm.weight")
        gate = normed @ weights[prefix + "mlp.gate_proj.weight"].T
        inner = gate / (1 + np.exp(-gate)) * (normed @ weights[prefix + "mlp.up_proj.weight"].T)
        x = x + inner @ weights[prefix + "mlp.down_proj.weight"].T
    head = "model.embed_tokens.weight" if config.tie_word_embeddings else "lm_head.weight"
    return norm(x, "model.norm.weight")[-1] @ weights[head].T


@pytest.mark.parametrize("compiled", [True, False], ids=["compiled", "pure Paddle"])
@pytest.mark.parametrize("weight_dtype", ["float16", "float32"])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tie_word_embeddings": True},
        {"num_heads": 2, "num_kv_heads": 2, "head_dim": 24},
        {"rope_scaling": LLAMA3},
        {"rope_scaling": {"rope_type": "linear", "factor": 4.0}},
    ],
    ids=["untied", "tied", "no-groups", "llama3-rope", "linear-rope"],
)
def test_logits_equal_a_plain_implementation(
    changes: dict[str, Any],
    weight_dtype: str,
    compiled: bool,
    tiny_folder: Callable[..., TinyFolder],
    new_engine: Callable[..., Engine],
    drive: Callable[..., Driver],
    kernels: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = tiny_folder(**changes)
    options: dict[str, Any] = {"weight_dtype": weight_dtype, "kernels": kernels if compiled else None}
    engine = new_engine(folder, num_blocks=64, max_num_seqs=4, max_num_batched_tokens=50, **options)
    if weight_dtype == "float16":
        folder.weights = {
            name: values if values.ndim == 1 else values.astype(np.float16) for name, values in folder.weights.items()
        }
    seen: dict[tuple[str, int], np.ndarray] = {}
    forward = engine._model.forward

    def recording(batch: Any) -> np.ndarray:
        logits = forward(batch)
        for chunk, row in zip(batch.sampling_chunks, logits, strict=True):
            seen[chunk.sequence.key, len(chunk.sequence.output_ids)] = row
        return logits

    monkeypatch.setattr(engine._model, "forward", recording)
    prompts = {key: [(n * 31 + 7 * i) % 97 for i in range(n)] for key, n in (("a", 1), ("b", 40), ("c", 101))}
    driver = drive(engine, reserve_tokens=4)
    for key, prompt in prompts.items():
        driver.add(key, prompt, greedy(3))
    answers = driver.run()
    assert len(seen) == 9
    for (key, index), logits in seen.items():
        reference = plain_logits(folder, prompts[key] + answers[key][:index])
        np.testing.assert_allclose(logits, reference, rtol=0, atol=2e-4)
    engine.close()


def test_rope_tables_rotate_by_position() -> None:
    cos, sin = rope_tables(TINY, 300)
    angle = 299 * scaled_frequency(TINY, 1)
    half = TINY.head_dim // 2
    np.testing.assert_allclose([cos[299, 1], cos[299, 1 + half]], math.cos(angle), atol=1e-4)
    np.testing.assert_allclose([-sin[299, 1], sin[299, 1 + half]], math.sin(angle), atol=1e-4)


@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        (lambda weights: weights.pop("model.layers.1.mlp.up_proj.weight"), r"1 tensors are missing.*layers\.1\.mlp"),
        (
            lambda weights: weights.update({"model.layers.0.self_attn.q_proj.bias": np.zeros(3, np.float32)}),
            r"q_proj\.bias",
        ),
        (
            lambda weights: weights.update({"model.norm.weight": np.zeros(3, np.float32)}),
            r"model\.norm\.weight is \[3\]",
        ),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_refused_by_tensor(
    break_it: Callable[[dict[str, np.ndarray]], object],
    message: str,
    tiny_folder: Callable[..., TinyFolder],
    new_engine: Callable[..., Engine],
) -> None:
    folder = tiny_folder()
    break_it(folder.weights)
    with pytest.raises(ModelError, match=message):
        new_engine(folder, num_blocks=4)


def test_weights_that_half_precision_cannot_hold_are_refused_by_tensor(
    tiny_folder: Callable[..., TinyFolder], new_engine: Callable[..., Engine]
) -> None:
    folder = tiny_folder()
    folder.weights["model.layers.2.mlp.down_proj.weight"][3, 4] = 65520
    with pytest.raises(ModelError, match=r"layers\.2\.mlp\.down_proj.*set BATON_WEIGHT_DTYPE=float32"):
        new_engine(folder, num_blocks=4, weight_dtype="float16")
    new_engine(folder, num_blocks=4, weight_dtype="float32").close()
