"""A node's sign of life, the same in every kind of process: a thread of its own, which nothing else can hold up."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from app.errors import LedgerError, LedgerForeign
from app.ledger import Ledger
from app.protocol.commands import Bell, Heartbeat, NodeStatus, Register, Scan
from app.schemas import Gauges, NodeInfo
from app.settings import Settings
from app.versions import SPOKEN

logger = logging.getLogger("baton.node")

_SCAN_OVERDUE_S = 2.0
"""Every node scans when nobody has for so long: beat and control workers may all be dead."""


def _nothing() -> None:
    """What most nodes do at most of these moments."""


class HeartbeatThread:
    """Registers the node (for as long as it takes), then beats every ``heartbeat_s``, and scans if nobody else does.

    A heartbeat is a write: one that was answered lately is the proof that the ledger can be written to.

    Everything given here runs on this thread, so none of it may block for longer than a ledger call: a beat that
    comes late lets a healthy node be declared dead. ``ring`` takes the bells of a scan; ``after_beat`` runs whenever
    the ledger has answered, and may raise a LedgerError; ``on_refused(detail)`` when the ledger has not had us for
    longer than nodes of an earlier life may need to be declared dead; ``on_lost`` when it does not know us any more
    (without one the node registers again at once; with one, when ``register`` is called); ``on_draining`` once, when
    somebody has asked the ledger to drain this node; ``on_ledger_restarted`` when its run id has changed;
    ``on_crash(thread, error)`` at this thread's unplanned end.
    """

    def __init__(
        self,
        settings: Settings,
        ledger: Ledger,
        node: NodeInfo,
        gauges: Callable[[], Gauges],
        *,
        ring: Callable[[Bell], None],
        on_crash: Callable[[str, BaseException], None],
        on_registered: Callable[[], None] = _nothing,
        on_lost: Callable[[], None] | None = None,
        on_refused: Callable[[str], None] = lambda detail: None,
        on_draining: Callable[[], None] = _nothing,
        on_ledger_restarted: Callable[[], None] = _nothing,
        after_beat: Callable[[], None] = _nothing,
    ) -> None:
        self._settings = settings
        self._ledger = ledger
        self._node = node
        self._gauges = gauges
        self._ring = ring
        self._on_crash = on_crash
        self._on_registered = on_registered
        self._on_lost = on_lost or self.register
        self._on_refused = on_refused
        self._on_draining = on_draining
        self._on_ledger_restarted = on_ledger_restarted
        self._after_beat = after_beat
        self._run_id = ""
        self._told_to_drain = False
        self._wants_registration = True
        self._registered = threading.Event()
        self._refusal = ""
        self._refused_since = 0.0
        self._refused_for_s = settings.node_ttl_s + 2.0
        self._version = SPOKEN.oldest
        self._answered_at = float("-inf")
        self._scan_at = 0.0
        self._silent = False
        self._trouble = ""
        self.name = "heartbeat"
        self.entered_at = 0.0
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name=self.name, daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def register(self) -> None:
        """Register (again) with the next beat: this node has let go of everything it held."""
        self._wants_registration = True

    def close(self) -> None:
        """End the thread. The node stays registered until it deregisters or its heartbeat is too old."""
        self._closing.set()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(timeout=5)

    @property
    def alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    @property
    def registered(self) -> bool:
        """Whether the ledger knew this node when it last answered."""
        return self._registered.is_set()

    @property
    def refusal(self) -> str:
        """Why the ledger will not have this node; empty if it never said so, or has it now."""
        return self._refusal

    @property
    def version(self) -> int:
        """How messages to other nodes are to be written: what the ledger said last."""
        return self._version

    @property
    def trouble(self) -> str:
        """Why the last beat was not taken; empty if it was."""
        return self._trouble

    @property
    def answered_at(self) -> float:
        """Monotonic time of the last registration or heartbeat that was taken; minus infinity before the first."""
        return self._answered_at

    def wait_registered(self, timeout_s: float) -> bool:
        """Wait for the registration; False if it has not come in time."""
        return self._registered.wait(timeout_s)

    def _run(self) -> None:
        try:
            while not self._closing.is_set():
                self.entered_at = time.monotonic()
                self._try_beat()
                self.entered_at = 0.0
                self._closing.wait(self._settings.heartbeat_s)
        except BaseException as error:  # noqa: BLE001 - whose process it is decides what follows
            self._on_crash(self.name, error)

    def _try_beat(self) -> None:
        gauges = self._gauges()
        try:
            self._beat(gauges)
            self._after_beat()
        except LedgerForeign as error:  # the data are of a release that this one does not read: no waiting cures it
            self._trouble = str(error)
            self._be_refused(str(error))
            return
        except LedgerError as error:
            self._refused_since = 0.0
            if not self._silent:
                logger.warning("ledger (BATON_REDIS_URL) does not answer node=%s: %s", self._node.name, error)
            self._silent = True
            self._trouble = str(error)
            return
        if not self._refusal:
            self._refused_since = 0.0
        if self._silent:
            logger.info("ledger answers again node=%s", self._node.name)
        self._silent = False
        self._trouble = ""

    def _beat(self, gauges: Gauges) -> None:
        if self._registered.is_set():
            self._say_alive(gauges)
        if self._wants_registration:
            self._register()
        if self._registered.is_set() and time.monotonic() >= self._scan_at:
            self._scan_at = time.monotonic() + _SCAN_OVERDUE_S / 2
            for bell in self._ledger.execute(Scan(min_age_ms=round(1000 * _SCAN_OVERDUE_S))).bells:
                self._ring(bell)

    def _say_alive(self, gauges: Gauges) -> None:
        answer = self._ledger.execute(Heartbeat(self._node.incarnation, gauges))
        if answer.status is NodeStatus.UNKNOWN:
            logger.warning("no longer registered node=%s: letting go of everything", self._node.name)
            self._registered.clear()
            self._on_lost()
            return
        self._answered_at = time.monotonic()
        self._version = answer.version
        self._refusal = ""
        if answer.status is NodeStatus.DRAINING and not self._told_to_drain:
            self._told_to_drain = True  # for good: a drain is not undone
            logger.info("asked to drain node=%s", self._node.name)
            self._on_draining()
        if answer.run_id != self._run_id:
            self._run_id = answer.run_id
            self._on_ledger_restarted()

    def _register(self) -> None:
        answer = self._ledger.execute(Register(self._node, round(1000 * self._settings.node_ttl_s)))
        if answer.status is not NodeStatus.OK:
            self._be_refused(answer.detail)
            return
        logger.info(
            "registered node=%s role=%s incarnation=%s", self._node.name, self._node.role, self._node.incarnation
        )
        self._wants_registration = False
        self._refusal = ""
        self._run_id = answer.run_id
        self._version = answer.version
        self._answered_at = time.monotonic()
        self._registered.set()
        self._on_registered()

    def _be_refused(self, detail: str) -> None:
        if detail != self._refusal:
            logger.error("refused node=%s: %s", self._node.name, detail)
        self._refusal = detail
        now = time.monotonic()
        self._refused_since = self._refused_since or now
        if now - self._refused_since >= self._refused_for_s:
            self._on_refused(detail)
