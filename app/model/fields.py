"""Fields of ``config.json``, each read with its type or refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from app.errors import ModelError


def positive_int(config: Mapping[str, Any], field: str, default: int | None = None) -> int:
    """The field as an int above 0; ``default`` where it is absent or null."""
    value = config.get(field)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
        raise ModelError(f"config: {field} must be a positive integer, not {value!r}")
    return value


def positive_float(config: Mapping[str, Any], field: str, default: float | None) -> float:
    """The field as a finite number above 0; ``default`` where it is absent or null."""
    value = config.get(field)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < float("inf"):
        raise ModelError(f"config: {field} must be a positive number, not {value!r}")
    return float(value)


def switch(config: Mapping[str, Any], field: str) -> bool:
    """The field as a bool; False where it is absent or null."""
    value = config.get(field)
    if value is not None and not isinstance(value, bool):
        raise ModelError(f"config: {field} must be true or false, not {value!r}")
    return bool(value)


def token_ids(value: Any, field: str, vocab_size: int) -> tuple[int, ...]:
    """One id, a list of ids, or none."""
    ids = value if isinstance(value, list) else [] if value is None else [value]
    for token_id in ids:
        if isinstance(token_id, bool) or not isinstance(token_id, int) or not 0 <= token_id < vocab_size:
            raise ModelError(f"config: {field} holds {token_id!r}, no token id below vocab_size {vocab_size}")
    return tuple(ids)
