"""Loads the compiled kernels into Paddle."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from app.errors import StartupError

if TYPE_CHECKING:
    from workers.engine.thread_board import ThreadBoard


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


def set_threads(library: Path, own: int, board: ThreadBoard | None = None) -> None:
    """Compute on ``own`` threads, that of the caller included, and with ``board`` on what others leave idle, too.

    For the whole process, from the next operation on.
    """
    loaded = load_kernels(library)
    if board is None:
        loaded.baton_set_threads(own, 0, own, None, 0, 0)
    else:
        borrowed = max(0, board.processors - own)
        loaded.baton_set_threads(own, borrowed, board.processors, board.members, len(board.members), board.slot)


def threads_now(library: Path) -> int:
    """On how many threads the next operation may compute: the own ones, and what others leave idle."""
    return int(load_kernels(library).baton_threads_now())


def level(library: Path) -> str:
    """The processor level in use: "portable", "avx2" or "avx512"."""
    return str(load_kernels(library).baton_level().decode())


def set_level(library: Path, name: str) -> bool:
    """Compute at another level than this processor's best; for tests. False: it cannot."""
    return bool(load_kernels(library).baton_set_level(name.encode()))
