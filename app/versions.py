"""One number says how ledger data and messages between nodes are written, so that two releases can run side by side.

A program reads every version from ``SPOKEN.oldest`` to ``SPOKEN.newest`` and writes the one that the ledger names. An
empty ledger begins at the newest of whoever comes first. A scan raises it once every node that is not declared dead
reads a newer one; from then on a process that does not read it is refused by name, with every call.

To add something in version n: raise ``newest``, give a new field of a message (not of what is inside it) a default and
``Since(n)``, let scripts write what older ones misread only where ``VERSION >= n``, and let web refuse what only nodes
of n can compute while the ledger names an older one. Raise ``oldest`` one release later.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from pydantic import BaseModel


class Versions(NamedTuple):
    """What a program reads."""

    oldest: int
    newest: int

    def __contains__(self, version: object) -> bool:
        return isinstance(version, int) and self.oldest <= version <= self.newest


LOGPROBS = 4
"""From this version on a record may hold logprobs beside its tokens, and the sampling options that came with them."""

GROUPS = 5
"""From this version on a request may have several records."""

SPOKEN = Versions(oldest=3, newest=5)


@dataclass(frozen=True, slots=True)
class Since:
    """Marks a field of a message that older versions do not know: ``Annotated[str, Since(4)] = ""``."""

    version: int


def written_as(model: BaseModel, version: int) -> dict[str, Any]:
    """``model`` as JSON values for readers of ``version``: with that version in its ``v``, without fields that are
    newer."""
    newer = {
        name
        for name, field in type(model).model_fields.items()
        if any(isinstance(mark, Since) and mark.version > version for mark in field.metadata)
    }
    return model.model_dump(mode="json", exclude=newer) | {"v": version}
