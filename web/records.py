"""Looks records up without their tokens."""

from __future__ import annotations

from app.ledger.api import Ledger
from app.protocol.commands import Snapshot, SnapshotAnswer

_NO_TOKENS = 2**31 - 1
"""A ``from_index`` past the end of every answer."""


def look_up(ledger: Ledger, *, uid: str = "", client_id: str = "") -> SnapshotAnswer:
    """The record ``uid``, or the latest of ``client_id``. Raises LedgerError."""
    return ledger.execute(Snapshot(uid=uid, client_id=client_id, from_index=_NO_TOKENS))
