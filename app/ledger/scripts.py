"""The Lua scripts as text and SHA-1, one per command plus ``hello``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from hashlib import sha1
from importlib.resources import files
from typing import get_args

from app.protocol.commands import Command

SCHEMA = 1
"""Version of the keys and fields that the scripts write. Raise it with every change that old processes misread."""


@dataclass(frozen=True, slots=True)
class Script:
    """One script with the library in front of it."""

    name: str
    text: bytes
    sha: str


@cache
def load_scripts() -> Mapping[str, Script]:
    """Every script by the ``name`` of its command."""
    folder = files("app.ledger") / "lua"
    library = (folder / "_lib.lua").read_bytes()
    scripts = {}
    for name in ("hello", *(command.name for command in get_args(Command))):
        text = library + (folder / f"{name}.lua").read_bytes()
        scripts[name] = Script(name, text, sha1(text, usedforsecurity=False).hexdigest())
    return scripts
