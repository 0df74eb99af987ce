"""gunicorn's configuration: ``gunicorn -c python:web.gunicorn_conf 'web:create_app()'``.

Bare gunicorn would run one synchronous worker, in which one open stream blocks every other request.
"""

from __future__ import annotations

import logging
import math
import signal
import subprocess
import sys
from typing import Any

from app.ids import draw_id
from app.parent_death import tie_to_parent
from app.settings import get_settings

SPARE_THREADS = 16
"""Threads that no answer can occupy, so that health checks, cancellations and refusals are always served."""
OURS = ("app", "web")
CLOSING_S = 1.0
"""What ending the open answers may take after the drain: half a second until each looks, and the writing."""

_settings = get_settings()

bind = f"[{_settings.host}]:{_settings.port}" if ":" in _settings.host else f"{_settings.host}:{_settings.port}"
worker_class = "web.gunicorn_worker.DrainingWorker"
workers = _settings.web_workers
threads = _settings.web_threads + SPARE_THREADS
worker_connections = 2 * threads
backlog = 2048
keepalive = 30
graceful_timeout = math.ceil(_settings.drain_timeout_s + CLOSING_S)
preload_app = False
control_socket_disable = True
accesslog = None
loglevel = _settings.log_level.lower()


def pre_fork(server: Any, worker: Any) -> None:
    """Draw the worker's incarnation where its exit will be seen."""
    worker.baton_incarnation = draw_id()


def post_fork(server: Any, worker: Any) -> None:
    """Begin the worker's own life; it ends with its arbiter, which alone would report and replace it.

    It loads our modules itself, as they are now: after an upgrade those of the arbiter are of the release before.
    """
    for name in [name for name in sys.modules if name.partition(".")[0] in OURS]:
        del sys.modules[name]
    from app.log_lane import unblock
    from web.process import PROCESS

    tie_to_parent(worker.ppid, signal.SIGKILL)
    PROCESS.incarnation = worker.baton_incarnation
    logging.basicConfig(level=_settings.log_level, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    for logger in (logging.getLogger(), worker.log.error_log):
        unblock(logger)


def post_worker_init(worker: Any) -> None:
    """Accept nothing before the ledger knows this worker: it would have to refuse what another one could take.

    A ledger that is away is not waited for any longer than for any answer of it: web itself says that it is away.
    """
    from web.services import KEY

    worker.wsgi.extensions[KEY].node.wait_registered(_settings.ledger_timeout_s)


def child_exit(server: Any, worker: Any) -> None:
    """Tell the ledger at once that nobody reads this worker's streams any more.

    In a process of its own: the arbiter must not hold a connection that a fork would share, nor be of another release
    than the ledger's data.
    """
    subprocess.Popen([sys.executable, "-m", "web.report_exit", worker.baton_incarnation])
