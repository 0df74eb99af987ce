"""The Lua scripts as text and SHA-1, one per command plus ``hello``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from hashlib import sha1
from importlib.resources import files
from typing import get_args

from app.protocol.commands import Command
from app.versions import SPOKEN, Versions

LIBRARY = ("keys", "records", "nodes", "ends", "recovery")
"""The files of ``lua/_lib`` in the order in which each may use those before it."""


@dataclass(frozen=True, slots=True)
class Script:
    """One script with the library in front of it."""

    name: str
    text: bytes
    sha: str


@cache
def load_scripts(versions: Versions = SPOKEN) -> Mapping[str, Script]:
    """Every script by the ``name`` of its command. ``versions``: of the data that they read."""
    folder = files("app.ledger") / "lua"
    parts = [(folder / "_lib" / f"{part}.lua").read_bytes() for part in LIBRARY]
    library = b"\n".join(["local OLDEST, NEWEST = {}, {}".format(*versions).encode(), *parts, b""])
    scripts = {}
    for name in ("hello", *(command.name for command in get_args(Command))):
        text = library + (folder / f"{name}.lua").read_bytes()
        scripts[name] = Script(name, text, sha1(text, usedforsecurity=False).hexdigest())
    return scripts
