"""What ``config.json`` says about rotary embeddings."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from app.errors import ModelError
from app.model.fields import positive_float

_SUPPORTED = ("default", "linear", "dynamic", "llama3", "yarn")


def read_rope(config: Mapping[str, Any], max_positions: int) -> tuple[float, dict[str, Any] | None]:
    """Return theta and the scaling: None, or its ``rope_type`` (linear, llama3, yarn) and that type's parameters.

    Older files hold them in ``rope_theta`` and ``rope_scaling``, newer ones both in ``rope_parameters``; where both
    are given transformers takes ``rope_scaling``.

    Raises:
        ModelError: a type or value that is not supported, by name.
    """
    stated = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(stated, dict):
        raise ModelError(f"config: rope_scaling must be an object, not {stated!r}")
    per_layer = [key for key, value in stated.items() if isinstance(value, dict)]
    if per_layer:
        raise ModelError(f"config: rope_parameters.{per_layer[0]}: rotary embeddings by layer type are not supported")
    theta = positive_float({"rope_theta": stated.get("rope_theta", config.get("rope_theta"))}, "rope_theta", 10000.0)
    if stated.get("partial_rotary_factor", 1) not in (1, None):
        raise ModelError("config: rope_parameters.partial_rotary_factor other than 1 is not supported")
    rope_type = stated.get("rope_type", stated.get("type", "default"))
    match rope_type:
        case "default":
            return theta, None
        case "linear":
            return theta, {"rope_type": rope_type, "factor": positive_float(stated, "factor", None)}
        case "dynamic":
            _check_dynamic(stated, max_positions)
            return theta, None
        case "llama3":
            return theta, {"rope_type": rope_type, **_llama3(config, stated, max_positions)}
        case "yarn":
            return theta, {"rope_type": rope_type, **_yarn(config, stated, max_positions, theta)}
    raise ModelError(f"config: rope type {rope_type!r} is not supported; supported: {', '.join(_SUPPORTED)}")


def _check_dynamic(stated: Mapping[str, Any], max_positions: int) -> None:
    """Dynamic scaling begins beyond ``max_position_embeddings``, where no request gets: up to there it is none."""
    positive_float(stated, "factor", None)
    original = positive_float(stated, "original_max_position_embeddings", max_positions)
    if original != max_positions:
        raise ModelError(
            "config: rope type 'dynamic' with an original_max_position_embeddings other than max_position_embeddings"
            f" ({original:g}, {max_positions}) is not supported"
        )


def _original_positions(config: Mapping[str, Any], stated: Mapping[str, Any], max_positions: int) -> float:
    field = "original_max_position_embeddings"
    return positive_float(config if config.get(field) is not None else stated, field, max_positions)


def _llama3(config: Mapping[str, Any], stated: Mapping[str, Any], max_positions: int) -> dict[str, Any]:
    names = ("factor", "low_freq_factor", "high_freq_factor")
    values = {name: positive_float(stated, name, None) for name in names}
    if values["high_freq_factor"] <= values["low_freq_factor"]:
        raise ModelError("config: rope high_freq_factor must be above low_freq_factor")
    return values | {"original_max_position_embeddings": _original_positions(config, stated, max_positions)}


def _yarn(config: Mapping[str, Any], stated: Mapping[str, Any], max_positions: int, theta: float) -> dict[str, Any]:
    """YaRN (arXiv 2309.00071) with the options that transformers gives it."""
    if theta <= 1:
        raise ModelError(f"config: rope type 'yarn' needs a rope_theta above 1, not {theta:g}")
    factor = positive_float(stated, "factor", None)
    numerator = denominator = None
    if stated.get("mscale") and stated.get("mscale_all_dim"):
        numerator, denominator = positive_float(stated, "mscale", None), positive_float(stated, "mscale_all_dim", None)
    attention = _magnitude(factor, numerator or 1) / (_magnitude(factor, denominator) if denominator else 1)
    truncate = stated.get("truncate", True)
    if not isinstance(truncate, bool):
        raise ModelError(f"config: rope truncate must be true or false, not {truncate!r}")
    return {
        "factor": factor,
        "original_max_position_embeddings": _original_positions(config, stated, max_positions),
        "attention_factor": positive_float(stated, "attention_factor", attention),
        "beta_fast": positive_float(stated, "beta_fast", 32.0),
        "beta_slow": positive_float(stated, "beta_slow", 1.0),
        "truncate": truncate,
    }


def _magnitude(factor: float, scale: float) -> float:
    return 0.1 * scale * math.log(factor) + 1 if factor > 1 else 1.0
