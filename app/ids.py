"""Random ids: uids, incarnations, fences, lease ids, connections; request ids where the client gave none."""

from __future__ import annotations

from uuid import uuid4


def draw_id() -> str:
    """A fresh id: 32 hex digits, never a colon (ledger keys are made of ids)."""
    return uuid4().hex


def choice_uid(uid: str, index: int) -> str:
    """The uid of the ``index``-th sequence of the request ``uid``, which is the first one's."""
    return f"{uid}.{index}" if index else uid
