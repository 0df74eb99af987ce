"""The trace of a run, for people: of one request, or of all."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from app.protocol import effects as do
from app.protocol.commands import Heartbeat, Holdings, Register, Scan
from tests.sim.world import Note

_NOISE = (Heartbeat, Holdings, Register, Scan)


def lines(notes: list[Note], uid: str = "", node: str = "") -> Iterator[str]:
    """Readable lines; with ``uid`` only what concerns it, and what may have disturbed it."""
    for when, who, what, whose, details in notes:
        if node and node not in who:
            continue
        if uid and whose != uid and not (whose == "" and _concerns_all(what, details, uid)):
            continue
        yield f"{when:9.4f}  {who:<9} {_say(what, details)}" + (f"   [{whose}]" if whose and whose != uid else "")


def _concerns_all(what: str, details: tuple[Any, ...], uid: str) -> bool:
    if what == "ledger":
        command, answer = details
        return uid in repr(answer) if not isinstance(command, _NOISE) else _touches(answer, uid)
    return what not in ("fault", "rings", "hears")


def _touches(answer: Any, uid: str) -> bool:
    return uid in (*getattr(answer, "expired", ()), *getattr(answer, "recovered", ())) or any(
        bell.uid == uid for bell in getattr(answer, "bells", ())
    )


def _say(what: str, details: tuple[Any, ...]) -> str:
    if what == "ledger":
        command, answer = details
        return f"asks {_value(command)} -> {_value(answer)}"
    if what == "log":
        log: do.Log = details[0]
        fields = " ".join(f"{name}={value}" for name, value in log.fields.items() if value != "")
        return f"says: {log.event} {fields}"
    return f"{what} {' '.join(_value(detail) for detail in details)}".rstrip()


def _value(value: Any) -> str:
    if hasattr(value, "__dataclass_fields__"):
        fields = {name: getattr(value, name) for name in value.__dataclass_fields__ if name not in ("time_ms", "name")}
        shown = " ".join(
            f"{name}={_short(field)}" for name, field in fields.items() if field not in ("", (), None, 0, False)
        )
        return f"{type(value).__name__}({shown})"
    return _short(value)


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 160 else text[:157] + "..."
