"""The bells of one node: those rung here, of which each is answered once, and those it rings."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from app.bells import Bells
from app.ids import draw_id
from app.protocol import events as on
from app.protocol.commands import Bell


class Doorbells:
    """Bells that were rung at this node, and whether another is wanted. Any thread may ring or ask.

    ``on_wanted`` is called, on the node's thread, when ``wanted`` has become true.
    """

    def __init__(self, on_wanted: Callable[[], None]) -> None:
        self.wanted = False
        """Whether this node has room for another piece of work."""
        self._on_wanted = on_wanted
        self._lock = threading.Lock()
        self._unseen = 0
        """Bells that were rung here and that the machine has not looked at yet."""
        self._shut = False
        self._answers: dict[str, Callable[[str], None]] = {}

    def rung(self, uid: str, attempt: int, done: Callable[[str], None]) -> on.BellRang:
        """A bell came in; none is wanted until it was looked at. ``done(outcome)``: see ``answer``."""
        bell = on.BellRang(draw_id(), uid, attempt)  # of its own, even when the broker delivers one message twice
        self._answers[bell.bell_id] = done
        with self._lock:
            self._unseen += 1
            self.wanted = False
        return bell

    def seen(self, events: Sequence[on.Event]) -> None:
        """The machine has received these events."""
        with self._lock:
            self._unseen -= sum(isinstance(event, on.BellRang) for event in events)

    def show(self, has_room: bool) -> None:
        """Say whether the machine has room, all that was seen considered."""
        with self._lock:
            wanted_before, self.wanted = self.wanted, has_room and not self._unseen and not self._shut
            found_room = self.wanted and not wanted_before
        if found_room:
            self._on_wanted()

    def answer(self, bell_id: str, outcome: str) -> None:
        """The work that this bell brought has left the node."""
        self._answers.pop(bell_id)(outcome)

    def shut(self) -> None:
        """Want none, whatever room there is."""
        with self._lock:
            self._shut, self.wanted = True, False


class NodeBells:
    """Rings for a node: a bell without a uid is for itself, on its direct queue."""

    def __init__(self, bells: Bells, nodename: str) -> None:
        self._bells = bells
        self._nodename = nodename

    def ring(self, bell: Bell) -> None:
        """Ring now; may wait for the broker."""
        if bell.uid:
            self._bells.ring(bell)
        else:
            self._bells.ring_node(bell.queue, self._nodename)

    def close(self) -> None:
        """Give the connections back."""
        self._bells.close()
