"""What both ledgers demand of a command before it is applied."""

from __future__ import annotations

from app.ids import choice_uid
from app.protocol.commands import Admit, Command, Register

CALL_TTL_MS = 5000
"""A write's ``not_after`` lies this far behind the last seen ledger time (rule 2)."""


def check_ids(command: Command) -> None:
    """Refuse new ids that would be ambiguous in entries like ``w:uid:connection``, and a key that would count as none.

    Raises:
        ValueError: names the field.
    """
    fields: dict[str, str] = {}
    if isinstance(command, Admit):
        fields = {"uid": command.uid, "watcher.web": command.watcher.web}
        if any(each.uid != choice_uid(command.uid, index) for index, each in enumerate(command.more, 1)):
            raise ValueError(f"admit: more must be the choices of {command.uid}, in their order")
        if command.key and not command.key.scoped:
            raise ValueError("admit: key.scoped must not be empty")
    elif isinstance(command, Register):
        fields = {"node.incarnation": command.node.incarnation}
    for name, value in fields.items():
        if not value or ":" in value:
            raise ValueError(f"{command.name}: {name} must not be empty or contain a colon: {value!r}")
