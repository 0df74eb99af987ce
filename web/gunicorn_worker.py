"""gunicorn's threaded worker, with a drain that leaves nobody hanging, and no client that keeps a thread for ever."""

from __future__ import annotations

import socket
import time
from types import FrameType
from typing import TYPE_CHECKING, Any

from gunicorn.workers.gthread import ThreadWorker  # type: ignore[import-untyped]

from app.settings import get_settings
from app.turns import take_short_turns

if TYPE_CHECKING:
    from web.arrivals import Arrivals

SILENT_S = 5.0
"""A new connection on which nothing comes is closed so long after no thread waits for it any more."""


class DrainingWorker(ThreadWorker):  # type: ignore[misc]
    """On SIGTERM open answers get ``drain_timeout_s`` and then an explicit error; gunicorn would cut them off unsaid.

    It also keeps its listening sockets until the last answer is out, and whom the kernel lets in meanwhile hangs: here
    they are closed at once, so that a new client is refused and goes elsewhere. SIGQUIT and SIGINT (Ctrl-C) end open
    answers now, with that error.

    gunicorn waits for the rest of a head without end; here it has a time, see ``web.arrivals``.
    """

    def init_process(self) -> None:
        take_short_turns()
        self._arrivals = _arrivals()
        super().init_process()

    def handle(self, conn: Any) -> Any:
        # Late, it is closed: nobody knows yet what to answer.
        self._arrivals.expect_head(conn, lambda: conn.sock.shutdown(socket.SHUT_RDWR))
        try:
            return super().handle(conn)
        finally:
            self._arrivals.is_here(conn)

    def handle_request(self, req: Any, conn: Any) -> Any:
        self._arrivals.is_here(conn)
        return super().handle_request(req, conn)

    def finish_request(self, conn: Any, fs: Any) -> None:
        super().finish_request(conn, fs)
        if self.pending_conns and self.pending_conns[-1] is conn:
            conn.timeout = time.monotonic() + SILENT_S

    def murder_pending(self) -> None:
        super().murder_pending()
        self._arrivals.cut_late(draining=not self.alive)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        _begin_drain(get_settings().drain_timeout_s)
        super().handle_exit(sig, frame)

    def handle_quit(self, sig: int, frame: FrameType | None) -> None:
        _begin_drain(0.0)
        super().handle_exit(sig, frame)

    def set_accept_enabled(self, enabled: bool) -> None:
        super().set_accept_enabled(enabled)
        if not enabled and not self.alive:
            for listener in self.sockets:
                listener.close()


def _arrivals() -> Arrivals:
    """Of the process as the worker has loaded it, as below."""
    from web.arrivals import ARRIVALS

    return ARRIVALS


def _begin_drain(timeout_s: float) -> None:
    """Of the process as the worker has loaded it: this module is the arbiter's."""
    from web.process import PROCESS

    PROCESS.begin_drain(timeout_s)
