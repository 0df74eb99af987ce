"""What both ledgers demand of a command before it is applied."""

from __future__ import annotations

from app.ledger.commands import Admit, Command, Detach, Register

CALL_TTL_MS = 5000
"""A write's ``not_after`` lies this far behind the last seen ledger time (rule 2)."""

_SEPARATED = ("uid", "incarnation", "lease_id", "fence")


def check_ids(command: Command) -> None:
    """Refuse ids that would be ambiguous in a key or in ``owned`` entries.

    Raises:
        ValueError: names the field.
    """
    values = {name: getattr(command, name) for name in _SEPARATED if hasattr(command, name)}
    if isinstance(command, Admit | Detach):
        values["watcher.web"] = command.watcher.web
    if isinstance(command, Register):
        values["node.incarnation"] = command.node.incarnation
    for name, value in values.items():
        if ":" in value:
            raise ValueError(f"{command.name}: {name} must not contain a colon: {value!r}")
