"""Orders of a test to the processes of a running cluster: what to do to itself, where, and for which request.

An order is the file ``armed`` in the folder that ``BATON_FAILPOINTS`` names. The process that comes by takes it by
renaming it to ``<action>-<pid>``: one process takes it, once, and the test sees that this one stands there.
"""

from __future__ import annotations

import os
import signal
import threading
from enum import StrEnum
from pathlib import Path

from pydantic import ValidationError

from app.schemas import Frozen, Role

ARMED = "armed"


class Point(StrEnum):
    """Where in a request's life. A point that both nodes pass is told apart by the order's role."""

    BEFORE_CLAIM = "before-claim"
    """Prefill is about to send the claim. It is nobody's yet: an order for it names no request."""
    AFTER_CLAIM = "after-claim"
    """The ledger has given it to prefill, which does not know yet."""
    AFTER_RESERVE = "after-reserve"
    """The ledger has given decode the lease; GRANT is not sent."""
    AFTER_GRANT = "after-grant"
    """Prefill has received GRANT and not answered; or decode has received that answer."""
    HALF_PREFILLED = "half-prefilled"
    """Some chunks are computed, others are not."""
    AFTER_FIRST_TOKEN = "after-first-token"  # noqa: S105 - not a password
    """The ledger holds the first token, prefill does not know yet; COMMIT is not sent."""
    SEALED = "sealed"
    """The blocks are digested; COMMIT is not sent."""
    AFTER_COMMIT = "after-commit"
    """Prefill has the acknowledgement of COMMIT; or decode has acted on it, and its mover has not begun."""
    DURING_PULL = "during-pull"
    """Half of the blocks are copied."""
    AFTER_ACTIVATE = "after-activate"
    """The ledger has activated it, decode does not know yet."""
    MID_DECODE = "mid-decode"
    """A token in the middle of the answer is sampled, and told to nobody."""
    LAST_TOKEN = "last-token"  # noqa: S105 - not a password
    """The last token is sampled, and told to nobody."""
    AFTER_LAST_TOKEN = "after-last-token"  # noqa: S105 - not a password
    """The ledger has ended the request, decode does not know yet."""


class Action(StrEnum):
    """What the process does to itself there."""

    STOP = "stop"
    """Stop as a whole, until a signal continues or kills it."""
    CUT = "cut"
    """Go on, with all messages to and from other nodes lost until ``cut-<pid>`` is removed."""
    CORRUPT = "corrupt"
    """(SEALED) One bit of one block changes."""
    SWAPPED = "swapped"
    """(SEALED) A block holds another one's bytes."""
    SHORT = "short"
    """(SEALED) The pool named in COMMIT ends before its blocks do."""
    FOREIGN = "foreign"
    """(SEALED) The pool named in COMMIT is another node's."""


class Order(Frozen):
    """What one process shall do, once. An empty ``request_id`` stands for any."""

    point: Point
    action: Action
    role: Role
    request_id: str = ""


class Orders:
    """This process's view of the folder. Called from all threads of a node."""

    def __init__(self, folder: Path, role: Role) -> None:
        self._folder = folder
        self._role = role
        self._cut = folder / f"{Action.CUT}-{os.getpid()}"
        self._request_ids: dict[str, str] = {}

    def know(self, request_id: str, *keys: str) -> None:
        """Each of ``keys`` (uid, fence, lease id) stands for this request from now on."""
        self._request_ids.update(dict.fromkeys(keys, request_id))

    def reached(self, point: Point, key: str) -> Action | None:
        """The request of ``key`` has come to ``point``. STOP is done here; any other action is the caller's."""
        order = self._read()
        if order is None or (order.point, order.role) != (point, self._role):
            return None
        if order.request_id and self._request_ids.get(key) != order.request_id:
            return None
        try:
            (self._folder / ARMED).rename(self._folder / f"{order.action}-{os.getpid()}")
        except FileNotFoundError:
            return None  # another process was faster
        if order.action is Action.STOP:
            # To this very thread: it stops before its next instruction, and the kernel stops the others with it.
            signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)
        return order.action

    @property
    def cut(self) -> bool:
        """Whether this process's messages to and from other nodes are lost now."""
        return self._cut.exists()

    def _read(self) -> Order | None:
        try:
            return Order.model_validate_json((self._folder / ARMED).read_bytes())
        except (FileNotFoundError, ValidationError):
            return None
