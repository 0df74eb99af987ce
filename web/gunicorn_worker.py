"""gunicorn's threaded worker, with a drain that leaves nobody hanging."""

from __future__ import annotations

from types import FrameType

from gunicorn.workers.gthread import ThreadWorker  # type: ignore[import-untyped]

from app.settings import get_settings


class DrainingWorker(ThreadWorker):  # type: ignore[misc]
    """On SIGTERM open answers get ``drain_timeout_s`` and then an explicit error; gunicorn would cut them off unsaid.

    It also keeps its listening sockets until the last answer is out, and whom the kernel lets in meanwhile hangs: here
    they are closed at once, so that a new client is refused and goes elsewhere. SIGQUIT and SIGINT (Ctrl-C) end open
    answers now, with that error.
    """

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


def _begin_drain(timeout_s: float) -> None:
    """Of the process as the worker has loaded it: this module is the arbiter's."""
    from web.process import PROCESS

    PROCESS.begin_drain(timeout_s)
