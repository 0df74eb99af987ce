"""Rotary position tables."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from app.errors import ModelError

if TYPE_CHECKING:
    from app.model.config import ModelConfig

Floats = npt.NDArray[np.float32]


def rope_tables(config: ModelConfig, max_positions: int) -> tuple[Floats, Floats]:
    """``(cos, sin)``, each [max_positions, head_dim], for halves that are rotated against each other.

    The sine is negated in the first half: ``rotated = x * cos + roll(x, head_dim / 2) * sin``.
    Angles are formed in float32, as the reference implementations do.
    """
    frequencies = _frequencies(config)
    # YaRN makes rotated queries and keys a little larger, by this factor each.
    scale = np.float32((config.rope_scaling or {}).get("attention_factor", 1))
    angles = np.arange(max_positions, dtype=np.float32)[:, None] * frequencies[None, :]
    cos, sin = np.cos(angles) * scale, np.sin(angles) * scale
    return np.concatenate([cos, cos], axis=1), np.concatenate([-sin, sin], axis=1)


def _frequencies(config: ModelConfig) -> Floats:
    """[head_dim / 2]: radians per position of each pair."""
    exponents = np.arange(0, config.head_dim, 2, dtype=np.float32) / np.float32(config.head_dim)
    frequencies: Floats = (1.0 / np.power(np.float32(config.rope_theta), exponents)).astype(np.float32)
    scaling = config.rope_scaling
    if scaling is None:
        return frequencies
    if scaling["rope_type"] == "linear":
        return (frequencies / np.float32(scaling["factor"])).astype(np.float32)
    if scaling["rope_type"] == "llama3":
        return _llama3(frequencies, scaling)
    if scaling["rope_type"] == "yarn":
        return _yarn(frequencies, scaling, config.rope_theta)
    raise ModelError(f"rope_scaling of type {scaling['rope_type']!r} is not supported")


def _llama3(frequencies: Floats, scaling: dict[str, Any]) -> Floats:
    """Llama 3.1's scaling: long waves are stretched by ``factor``, short ones kept, those between blended."""
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    wavelengths = 2 * math.pi / frequencies
    blend = np.clip((scaling["original_max_position_embeddings"] / wavelengths - low) / (high - low), 0, 1)
    scaled: Floats = ((1 - blend) * frequencies / scaling["factor"] + blend * frequencies).astype(np.float32)
    return scaled


def _yarn(frequencies: Floats, scaling: dict[str, Any], theta: float) -> Floats:
    """YaRN (arXiv 2309.00071): pairs that turn often within the old length are kept, those that hardly do are
    stretched by ``factor``, and those between blended by their index."""
    head_dim = 2 * len(frequencies)

    def pair_that_turns(times: float) -> float:
        old_length = scaling["original_max_position_embeddings"]
        return head_dim * math.log(old_length / (times * 2 * math.pi)) / (2 * math.log(theta))

    low, high = pair_that_turns(scaling["beta_fast"]), pair_that_turns(scaling["beta_slow"])
    if scaling["truncate"]:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    ramp = (np.arange(len(frequencies), dtype=np.float32) - low) / ((high - low) or 0.001)
    stretched = np.clip(ramp, 0, 1)
    blended: Floats = (frequencies / scaling["factor"] * stretched + frequencies * (1 - stretched)).astype(np.float32)
    return blended
