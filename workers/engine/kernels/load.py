"""Loads the compiled kernels into Paddle."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

from app.errors import StartupError


@cache
def load_kernels(library: Path) -> ctypes.CDLL:
    """Register the operators of ``library`` with Paddle, which is imported; once per process.

    Raises:
        StartupError: this Paddle cannot load it.
    """
    from paddle.base import core

    try:
        core.load_op_meta_info_and_register_op(str(library))
        loaded = ctypes.CDLL(str(library))
    except Exception as error:
        raise StartupError(f"{library}: Paddle cannot load these kernels: {' '.join(str(error).split())}") from error
    loaded.baton_level.restype = ctypes.c_char_p
    loaded.baton_set_level.restype = ctypes.c_bool
    return loaded


def level(library: Path) -> str:
    """The processor level in use: "portable", "avx2" or "avx512"."""
    return str(load_kernels(library).baton_level().decode())


def set_level(library: Path, name: str) -> bool:
    """Compute at another level than this processor's best; for tests. False: it cannot."""
    return bool(load_kernels(library).baton_set_level(name.encode()))
