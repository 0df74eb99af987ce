"""The Celery pool of every worker: its role comes from ``-Q``; a bell in flight holds no thread.

A bell goes to the node at once and its task ends when the work it brought has left this node, so that Flower shows
what runs where and for how long. Celery's own trace runs only then, on one of a few finisher threads.
"""

from __future__ import annotations

import atexit
import logging
import os
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

from celery.concurrency.base import BasePool, apply_target
from celery.signals import worker_shutdown
from celery.worker import state
from kombu.exceptions import KombuError
from kombu.serialization import loads, prepare_accept_content

from app.crash import flush_logs
from app.errors import BatonError, LedgerUnavailable, StartupError
from app.ledger.redis import check_server
from app.log_lane import unblock
from app.settings import Settings, get_settings
from app.turns import take_short_turns

logger = logging.getLogger("baton.pool")

_FINISHERS = 4
_BELL = ".bell"
_ACCEPT = prepare_accept_content({"json"})
_OUTCOMES: dict[str, str] = {}


class Host(Protocol):
    """What a role gives the pool."""

    @property
    def wants_bells(self) -> bool: ...

    def start(self) -> None: ...
    def ring(self, uid: str, attempt: int, done: Callable[[str], None]) -> None: ...
    def drain(self, timeout_s: float) -> bool: ...
    def hand_back(self) -> None: ...
    def close(self) -> None: ...


def outcome_of(task_id: str) -> str:
    """What became of the bell whose task is ``task_id``. Called once, by the task itself."""
    return _OUTCOMES.pop(task_id, "lost")


class NodePool(BasePool):  # type: ignore[misc]
    """Hosts one node. ``limit`` bounds bells in flight; a node without room takes none."""

    signal_safe = False
    body_can_be_buffer = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # As early as it can be: what is registered later is still done before.
        atexit.register(end_without_teardown)
        self._finishers = ThreadPoolExecutor(_FINISHERS, thread_name_prefix="finisher")
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._host: Host | None = None

    def on_start(self) -> None:
        """Load the model and start the node. What cannot work ends the worker with one line."""
        take_short_turns()
        nodename = self.options["initargs"][1]
        unblock(logging.getLogger())
        try:
            self._host = make_host(role_of(self.app.amqp.queues.consume_from), nodename, self._wake)
            self._host.start()
        except BatonError as error:
            logger.critical("baton: %s", error)
            flush_logs()
            os._exit(1)

    def on_stop(self) -> None:
        """Drain: finish what fits, hand the rest back, leave the registry; then end the tasks in flight.

        SIGQUIT meanwhile: hand back at once. Celery's own answer to it, a cold shutdown, could not begin any more.
        """
        host, self._host = self._host, None
        if host is not None:
            signal.signal(signal.SIGQUIT, lambda *_: host.hand_back())
            host.drain(get_settings().drain_timeout_s)
            host.close()
        self._finishers.shutdown(wait=True)

    def on_terminate(self) -> None:
        """A cold shutdown: no drain. Whatever is in flight comes back through the ledger."""
        host, self._host = self._host, None
        if host is not None:
            host.drain(0.0)
            host.close()

    def terminate_job(self, pid: int, signum: int | None = None) -> None:
        """Nothing to kill: no task has a process or thread of its own. Celery's soft shutdown calls this."""

    @property
    def num_processes(self) -> int:
        """How many tasks may be in flight. As many as are now, when the node has no room: then it takes no more."""
        host = self._host
        if host is not None and host.wants_bells:
            return int(self.limit)
        return len(state.reserved_requests)

    def register_with_event_loop(self, hub: Any) -> None:
        """Let a finished task, or new room, wake the event loop, so that it looks at ``num_processes`` at once.

        A signal too: else SIGTERM waits for whatever the loop hears of next, up to a second.
        """
        hub.add_reader(self._wake_read, self._drain_wakes)
        if threading.current_thread() is threading.main_thread():
            signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)

    def on_apply(
        self,
        target: Callable[..., Any],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        callback: Callable[..., Any] | None = None,
        accept_callback: Callable[..., Any] | None = None,
        **_: Any,
    ) -> None:
        """Take a task. Its started event goes out now: that is when its work starts."""
        name, task_id, _request, body, content_type, content_encoding = args
        if accept_callback is not None:
            accept_callback(os.getpid(), time.monotonic())
        host = self._host
        if host is None or not name.endswith(_BELL):
            self._finishers.submit(self._finish, target, args, kwargs, callback)
            return

        def done(outcome: str) -> None:
            _OUTCOMES[task_id] = outcome
            self._finishers.submit(self._finish, target, args, kwargs, callback)

        try:
            (uid, attempt), *_rest = loads(body, content_type, content_encoding, accept=_ACCEPT)
            uid, attempt = str(uid), int(attempt)
        except (KombuError, ValueError, TypeError) as error:
            logger.error("bell %s is malformed: %s", task_id, error)
            done("malformed")
            return
        host.ring(uid, attempt, done)

    def _finish(self, target: Any, args: Any, kwargs: Any, callback: Any) -> None:
        try:
            apply_target(target, args, kwargs, callback)
        except Exception:
            logger.exception("task %s could not be finished", args[1])
            request = state.requests.get(args[1])
            if request is not None:  # else it would count as in flight for ever
                state.task_ready(request)
        finally:
            self._wake()

    def _wake(self) -> None:
        try:
            os.write(self._wake_write, b"\0")
        except BlockingIOError:
            return  # the loop has plenty of reasons to wake already

    def _drain_wakes(self) -> None:
        try:
            os.read(self._wake_read, 4096)
        except BlockingIOError:
            return


_exit_status: list[int] = []


@worker_shutdown.connect
def _has_shut_down(sender: Any, **_: Any) -> None:
    _exit_status[:] = [int(sender.exitcode or 0)]


def end_without_teardown() -> None:
    """The last step of a worker that has shut down: everything is closed and said. What Python would do now, taking
    Paddle and the pool's memory apart piece by piece, takes a second or two of CPU from those who still work."""
    if _exit_status:
        flush_logs()
        os._exit(_exit_status[0])


def role_of(queues: Any) -> str:
    """The role that ``-Q`` names.

    Raises:
        StartupError: it names none or several.
    """
    roles = [name for name in queues if not name.endswith(".dq2")]  # the worker's direct queue has no role
    if len(roles) != 1 or roles[0] not in ("prefill", "decode", "control"):
        raise StartupError(f"-Q {','.join(roles)}: a worker serves exactly one of prefill, decode, control")
    return str(roles[0])


def make_host(role: str, nodename: str, on_room: Callable[[], None]) -> Host:
    """The host of a role, ready to start. Loads the model for a role that computes.

    ``on_room`` is called, from any thread, when ``wants_bells`` has become true.
    """
    from workers import control, kv_node  # only now: neither beat nor Flower needs Paddle

    settings = get_settings()
    _check_ledger(settings, nodename)
    if role == "control":
        return control.make_host(settings, nodename)
    return kv_node.make_host(settings, "prefill" if role == "prefill" else "decode", nodename, on_room)


def _check_ledger(settings: Settings, nodename: str) -> None:
    """Refuse a server that cannot hold a ledger; one that is away is waited for: workers may come before Redis."""
    try:
        check_server(settings)
    except LedgerUnavailable as error:
        logger.warning("ledger (BATON_REDIS_URL) does not answer yet node=%s: %s", nodename, error)
