"""One structured line per state change: what happened, then ``name=value`` pairs. Never a prompt's text."""

from __future__ import annotations

import logging

LOGGER = logging.getLogger("web")


def log_event(level: int, what: str, **fields: object) -> None:
    """Log ``what`` with ``fields``, in the order given; values with spaces are quoted."""
    if LOGGER.isEnabledFor(level):
        LOGGER.log(level, "%s", " ".join([what, *(f"{name}={_quoted(value)}" for name, value in fields.items())]))


def _quoted(value: object) -> str:
    text = str(value)
    return repr(text) if not text or any(c.isspace() or not c.isprintable() for c in text) else text
