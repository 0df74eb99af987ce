"""Looks records up without their tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from app.errors import LedgerError
from app.ids import choice_uid
from app.ledger.api import Ledger
from app.protocol.commands import ReadStatus, Snapshot, SnapshotAnswer
from app.protocol.tables import IN_PROCESS, RequestState

_NO_TOKENS = 2**31 - 1
"""A ``from_index`` past the end of every answer."""


def look_up(ledger: Ledger, *, uid: str = "", client_id: str = "") -> SnapshotAnswer:
    """The record ``uid``, or the latest of ``client_id`` (of a group the first). Raises LedgerError."""
    return ledger.execute(Snapshot(uid=uid, client_id=client_id, from_index=_NO_TOKENS))


def look_up_all(ledger: Ledger, *, uid: str = "", client_id: str = "") -> list[SnapshotAnswer]:
    """All records of a request in the order of its choices; empty if there is none. Raises LedgerError."""
    first = look_up(ledger, uid=uid, client_id=client_id)
    reads = [Snapshot(uid=choice_uid(first.uid, index), from_index=_NO_TOKENS) for index in range(1, first.choices)]
    records = [first]
    for answer in ledger.execute_many(reads):
        if isinstance(answer, LedgerError):
            raise answer
        records.append(cast(SnapshotAnswer, answer))
    return [record for record in records if record.status is ReadStatus.FOUND]


def state_of(records: Sequence[SnapshotAnswer]) -> str:
    """Of the whole request: how it ended, if not all records have finished; else that of one that has not, if any."""
    states = [record.state for record in records]
    ends = [state for state in states if state not in IN_PROCESS and state != RequestState.FINISHED]
    running = [state for state in states if state in IN_PROCESS]
    return next(iter((*ends, *running, *states)), "")
