"""One `baton up` on a server of its own, what is done to that server, and what may be seen of it outside.

The ledger is reached directly, the broker through a proxy: what is done to the server strikes both, what is done at the
proxy strikes the broker alone.
"""

from __future__ import annotations

import os
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from celery import Celery
from redis import Redis

from app.broker import broker_options
from app.settings import Settings
from app.valkey import EmbeddedValkey
from tests.chaos.asked import Asked
from tests.chaos.baseline import in_use, left_in_ledger
from tests.integration.baton import Baton
from tests.integration.by_hand import free_port
from tests.integration.proxy import Proxy

OPTIONS = ("--prefill", "1", "--decode", "1", "--num-blocks", "64", "--max-num-seqs", "8")
WORKERS = {"prefill1", "decode1", "control1"}
_LOOK_EVERY_S = 0.2


class Cluster:
    """The cluster, its server, and the proxy before the broker."""

    def __init__(self, home: Path, folder: Path) -> None:
        self._folder = folder / "valkey"
        self.server = EmbeddedValkey(self._folder, port=0)
        self.server.start()
        self.redis = Redis.from_url(self.server.url, decode_responses=True)
        self.broker = Proxy(int(self.server.url.rsplit(":", 1)[1].split("/")[0]))
        urls = {"BATON_REDIS_URL": self.server.url, "BATON_BROKER_URL": f"redis://127.0.0.1:{self.broker.port}/0"}
        self.baton = Baton(home, folder / "output", *OPTIONS, **urls)

    def close(self) -> None:
        self.baton.stop()
        self.broker.close()
        self.redis.close()
        self.server.stop()

    # what is done to the server

    @contextmanager
    def killed(self) -> Iterator[None]:
        """SIGKILL; it comes back with what its append-only file holds."""
        self._kill()
        try:
            yield
        finally:
            self.server.start()

    @contextmanager
    def killed_and_emptied(self) -> Iterator[None]:
        """SIGKILL; it comes back without its data."""
        self._kill()
        shutil.rmtree(self._folder / "appendonlydir")
        try:
            yield
        finally:
            self.server.start()

    def _kill(self) -> None:
        os.kill(self.server.pid, signal.SIGKILL)
        self.server.stop()

    @contextmanager
    def frozen(self) -> Iterator[None]:
        os.kill(self.server.pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(self.server.pid, signal.SIGCONT)

    @contextmanager
    def read_only(self) -> Iterator[None]:
        """A replica of a server that is not there."""
        self.redis.replicaof("127.0.0.1", free_port())
        try:
            yield
        finally:
            self.redis.replicaof("NO", "ONE")

    @contextmanager
    def out_of_memory(self) -> Iterator[None]:
        self.redis.config_set("maxmemory", "1")
        try:
            yield
        finally:
            self.redis.config_set("maxmemory", "0")

    @contextmanager
    def flushed(self) -> Iterator[None]:
        """All keys are gone, those of the broker too; the server lives on."""
        self.redis.flushall()
        yield

    @contextmanager
    def reset(self) -> Iterator[None]:
        """Every connection ends, three times in a second."""
        for _ in range(3):
            for kind in ("normal", "pubsub"):
                self.redis.client_kill_filter(_type=kind, skipme=True)
            time.sleep(0.3)
        yield

    # what is done to the broker alone

    @contextmanager
    def broker_frozen(self) -> Iterator[None]:
        self.broker.freeze()
        try:
            yield
        finally:
            self.broker.thaw()

    @contextmanager
    def broker_half_open(self) -> Iterator[None]:
        """Every connection to it is dead, and nobody tells those who hold them."""
        self.broker.forget()
        yield

    @contextmanager
    def broker_reset(self) -> Iterator[None]:
        for _ in range(3):
            self.broker.reset()
            time.sleep(0.3)
        yield

    @contextmanager
    def broker_restarted_empty(self) -> Iterator[None]:
        """Nobody listens; then somebody does, and every message and binding is gone."""
        self.broker.refuse()
        try:
            yield
        finally:
            for key in self.redis.scan_iter("baton:broker:*"):
                self.redis.delete(key)
            self.broker.accept()

    # what can be seen

    def ask(self, case: int, max_tokens: int, *, streams: bool = True) -> Asked:
        return Asked(self.baton.port, case, max_tokens, streams=streams)

    def left(self) -> list[str]:
        """What an idle cluster does not have."""
        return in_use(self.baton) + left_in_ledger(self.redis)

    def pids(self) -> dict[str, int]:
        """Of everything below the launcher, by what it is."""
        return {f"{' '.join(process.cmdline()[1:7])}": process.pid for process in self.baton.processes()}

    def scans(self) -> int:
        """Scans that beat has ordered and the control worker has run; -1 where it does not answer."""
        with self._celery() as (app, connection):
            replies = app.control.inspect(timeout=1, connection=connection).stats() or {}
        totals = [reply["total"].get("control.scan", 0) for name, reply in replies.items() if "control" in name]
        return totals[0] if totals else -1

    def consuming(self) -> set[str]:
        """The workers that answer a broadcast."""
        with self._celery() as (app, connection):
            replies = app.control.ping(timeout=1, connection=connection)
        return {name.split("@")[0] for reply in replies for name in reply}

    @contextmanager
    def _celery(self) -> Iterator[tuple[Any, Any]]:
        """On a connection of its own: those in kombu's pools may have been cut by an earlier fault."""
        settings = Settings(redis_url=self.server.url)
        with Celery("looker", broker=settings.effective_broker_url, set_as_current=False) as app:
            app.conf.broker_transport_options = broker_options(settings)
            with app.connection_for_write() as connection:
                yield app, connection


@dataclass(frozen=True)
class Look:
    """One answer of ``/ready``."""

    at: float
    took_s: float
    ready: bool
    reasons: list[str]


@dataclass
class ReadyWatch:
    """Asks ``/ready`` over and over."""

    cluster: Cluster
    looks: list[Look] = field(default_factory=list)

    def since(self, at: float) -> list[Look]:
        """The answers to questions that were asked after ``at``."""
        return [look for look in list(self.looks) if look.at >= at]

    def is_ready(self, since: float) -> bool:
        return any(look.ready for look in self.since(since))

    def names(self, what: str, since: float) -> bool:
        """Whether it said 503 with a reason that has ``what`` in it."""
        return any(what in reason for look in self.since(since) if not look.ready for reason in look.reasons)

    @contextmanager
    def watching(self) -> Iterator[ReadyWatch]:
        over = threading.Event()
        thread = threading.Thread(target=self._watch, args=(over,), name="ready", daemon=True)
        thread.start()
        try:
            yield self
        finally:
            over.set()
            thread.join()

    def _watch(self, over: threading.Event) -> None:
        while not over.wait(_LOOK_EVERY_S):
            at = time.monotonic()
            status, body = self.cluster.baton.get("/ready")
            assert (status == 200) == body["ready"]
            self.looks.append(Look(at, time.monotonic() - at, body["ready"], body["reasons"]))
