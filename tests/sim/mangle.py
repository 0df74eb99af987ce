"""Messages that are not what was sent. Only what the receiver can tell is changed: names, counts, the kind."""

from __future__ import annotations

from random import Random

from app.protocol.messages import Commit, Grant, Message, PullResult


def mangle(message: Message, rng: Random) -> Message | None:
    """Another message, or None for bytes that are none."""
    ways = ["uid", "attempt", "fence", "lease_id", "kind", "nothing"]
    if isinstance(message, Commit):
        ways += ["blocks", "generations", "digests", "fence", "kind"]
    way = rng.choice(ways)
    if way == "nothing":
        return None
    if way == "kind":
        return _of_another_kind(message)
    value = getattr(message, way)
    if isinstance(value, tuple):
        changed: object = value[:-1]
    else:
        changed = value + 1 if isinstance(value, int) else f"{value}-not"
    return message.model_copy(update={way: changed})


def _of_another_kind(message: Message) -> Message:
    """One that the receiver's role does not take."""
    names = {name: getattr(message, name) for name in ("uid", "attempt", "fence", "lease_id")}
    if isinstance(message, Commit):
        return PullResult(**names, activated=True)
    if isinstance(message, Grant):
        return message.model_copy(update={"lease_id": f"{message.lease_id}-not"})
    return message.model_copy(update={"fence": f"{message.fence}-not"})
