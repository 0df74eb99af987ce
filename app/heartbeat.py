"""A node's sign of life: a thread of its own, which a busy engine cannot hold up."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from app.bells import Bells
from app.errors import LedgerError
from app.ledger import Ledger
from app.protocol.commands import Heartbeat, NodeStatus, Register, Scan
from app.schemas import Gauges, NodeInfo
from app.settings import Settings

logger = logging.getLogger("baton.node")

_SCAN_OVERDUE_S = 2.0
"""Every node scans when nobody has for so long: beat and control workers may all be dead."""


class HeartbeatThread:
    """Registers the node (for as long as it takes), then beats every ``heartbeat_s``.

    ``on_registered`` and ``on_lost`` run on this thread; ``on_refused(detail)`` when the ledger will not have us.
    """

    def __init__(
        self,
        settings: Settings,
        ledger: Ledger,
        bells: Bells,
        node: NodeInfo,
        gauges: Callable[[], Gauges],
        *,
        on_crash: Callable[[str, BaseException], None],
        on_registered: Callable[[], None] = lambda: None,
        on_lost: Callable[[], None] | None = None,
        on_refused: Callable[[str], None] = lambda detail: None,
        on_ledger_restarted: Callable[[], None] = lambda: None,
    ) -> None:
        self._settings = settings
        self._ledger = ledger
        self._bells = bells
        self._node = node
        self._gauges = gauges
        self._on_crash = on_crash
        self._on_registered = on_registered
        self._on_lost = on_lost or self.register
        self._on_refused = on_refused
        self._on_ledger_restarted = on_ledger_restarted
        self._run_id = ""
        self._wants_registration = True
        self._registered = False
        self._scan_at = 0.0
        self._silent = False
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def register(self) -> None:
        """Register (again) with the next beat: this node has let go of everything it held."""
        self._wants_registration = True

    def close(self) -> None:
        """End the thread."""
        self._closing.set()
        if self._thread.is_alive():
            self._thread.join(timeout=5)

    def _run(self) -> None:
        try:
            while not self._closing.is_set():
                self._try_beat()
                self._closing.wait(self._settings.heartbeat_s)
        except BaseException as error:  # noqa: BLE001 - ends the process
            self._on_crash("heartbeat", error)

    def _try_beat(self) -> None:
        gauges = self._gauges()
        try:
            self._beat(gauges)
        except LedgerError as error:
            if not self._silent:
                logger.warning("ledger does not answer node=%s: %s", self._node.name, error)
            self._silent = True
            return
        if self._silent:
            logger.info("ledger answers again node=%s", self._node.name)
        self._silent = False

    def _beat(self, gauges: Gauges) -> None:
        if self._wants_registration:
            self._register()
        if not self._registered:
            return
        answer = self._ledger.execute(Heartbeat(self._node.incarnation, gauges))
        if answer.status is NodeStatus.UNKNOWN:
            logger.warning("no longer registered node=%s: letting go of everything", self._node.name)
            self._registered = False
            self._on_lost()
            return
        if answer.run_id != self._run_id:
            self._run_id = answer.run_id
            self._on_ledger_restarted()
        if time.monotonic() >= self._scan_at:
            self._scan_at = time.monotonic() + _SCAN_OVERDUE_S / 2
            for bell in self._ledger.execute(Scan(min_age_ms=round(1000 * _SCAN_OVERDUE_S))).bells:
                self._bells.ring(bell)

    def _register(self) -> None:
        answer = self._ledger.execute(Register(self._node, round(1000 * self._settings.node_ttl_s)))
        if answer.status is not NodeStatus.OK:
            logger.error("registration refused node=%s: %s", self._node.name, answer.detail)
            self._on_refused(answer.detail)
            return
        logger.info(
            "registered node=%s role=%s incarnation=%s", self._node.name, self._node.role, self._node.incarnation
        )
        self._wants_registration = False
        self._registered = True
        self._run_id = answer.run_id
        self._on_registered()
