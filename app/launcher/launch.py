"""One launch: prepare the model, start the ledger and the cluster, wait until it serves, supervise it, stop it."""

from __future__ import annotations

import json
import os
import secrets
import time
from collections.abc import Callable
from pathlib import Path

from app.bells import BellLane, Bells
from app.errors import LedgerError, LedgerForeign, StartupError
from app.launcher import checks
from app.launcher.child import ChildExit, last_lines
from app.launcher.ledger_child import UNIX, embedded_server, fits_unix_socket
from app.launcher.model_facts import ModelFacts
from app.launcher.plan import (
    SOURCE_ROOT,
    Nodes,
    child_environment,
    cluster_specs,
    hurry_after_s,
    ledger_spec,
    prepare_spec,
    share_processors,
    stop_budgets_s,
)
from app.launcher.prepare import ERROR, PROGRESS, RESULT
from app.launcher.progress import told
from app.launcher.readiness import answers, http_url, missing_nodes
from app.launcher.reporter import ExitReporter
from app.launcher.rolling import Rolling, RollingStopped
from app.launcher.supervisor import Supervisor
from app.launcher.wakeup import Deadline, Wakeup
from app.ledger.redis import check_server, connect
from app.protocol.commands import Cluster
from app.settings import Settings

Say = Callable[[str], None]

_LOOK_EVERY_S = 0.25
_STILL_WAITING_S = 5.0
_LAST_REPORTS_S = 0.5
_IDLE_S = 60.0


class Stopped(Exception):
    """Somebody asked to stop before the cluster was ready, or during a restart."""


class Launch:
    """The steps of one launch, in the order of ``run``. The caller holds the lock and cleans up files."""

    def __init__(
        self, settings: Settings, nodes: Nodes, start_timeout_s: float, run: Path, wakeup: Wakeup, say: Say
    ) -> None:
        self._data = settings.home / "ledger"
        self._embedded_port = ""
        if "redis_url" not in settings.model_fields_set:
            self._embedded_port = UNIX if fits_unix_socket(self._data) else str(checks.free_port("127.0.0.1", 0, ""))
            url = embedded_server(self._data, self._embedded_port).url
            settings = settings.model_copy(update={"redis_url": url})
        settings = share_processors(settings, nodes)
        self._settings = settings
        self._nodes = nodes
        self._start_timeout_s = start_timeout_s
        self._run = run
        self._wakeup = wakeup
        self._say = say
        # Passed on as it is; what Baton itself reads of it is read in settings.py.
        self._environment = child_environment(os.environ, settings)
        self._bells = BellLane(Bells(settings), self._lane_died)
        self._bells.start()
        self._ledger = connect(settings)
        self._reporter = ExitReporter(lambda: connect(settings), self._bells.ring)
        self._names: list[str] = []
        self._supervisor = Supervisor(wakeup, SOURCE_ROOT, run / "logs", self._report, say)

    def run(self) -> None:
        """Do everything, until somebody asks to stop.

        Raises:
            StartupError: it cannot be brought up.
            Stopped: the request to stop came before it was ready.
        """
        began_at = time.monotonic()
        try:
            if not self._embedded_port:
                self._check_server()
            model = self._prepare_model()
            self._check_memory(model)
            start = Deadline(self._start_timeout_s)
            if self._embedded_port:
                self._start_ledger(start)
            login = f"baton:{secrets.token_urlsafe(12)}"
            self._start_cluster(login)
            self._wait_until_none(self._missing, start)
            self._say_ready(model, login, time.monotonic() - began_at)
            self._supervise()
        finally:
            if self._supervisor.pids:
                self._say("stopping (Ctrl-C again: at once)")
            hurry_s = hurry_after_s(self._settings)
            drain_s = self._settings.drain_timeout_s if hurry_s is None else hurry_s
            self._supervisor.stop(stop_budgets_s(drain_s), hurry_s)
            self._reporter.close(_LAST_REPORTS_S)
            self._ledger.close()
            self._bells.close(_LAST_REPORTS_S)

    def _lane_died(self, name: str, error: BaseException) -> None:
        self._say(f"{name}: {type(error).__name__}: {error}; bells are left to the scan")

    def _report(self, ended: ChildExit) -> None:
        if ended.incarnation:
            self._reporter.report(ended.incarnation)

    def _prepare_model(self) -> ModelFacts:
        """Have the model fetched and converted, and say how that goes."""
        self._say(f"model {self._settings.model}")
        spec = prepare_spec(self._environment)
        self._supervisor.start(spec)
        log = self._supervisor.log_of(spec.name)
        reader, result, error = LineReader(log), "", ""
        exits: list[ChildExit] = []
        while not exits:
            self._pause()
            exits = self._supervisor.poll(restart=False)
            for line in reader.new_lines():
                if line.startswith(PROGRESS):
                    self._say(line.removeprefix(PROGRESS))
                result = line.removeprefix(RESULT) if line.startswith(RESULT) else result
                error = line.removeprefix(ERROR) if line.startswith(ERROR) else error
        if result:
            return ModelFacts.model_validate_json(result)
        raise StartupError(error) if error else self._failed_start(exits[0])

    def _check_memory(self, model: ModelFacts) -> None:
        settings = self._settings
        plan = checks.MemoryPlan.of(settings, model, self._nodes.kv)
        self._say(
            f"{self._nodes.prefill} prefill and {self._nodes.decode} decode on {settings.device}, each with"
            f" {settings.num_blocks} KV blocks of {settings.block_size_tokens} tokens"
            f" ({settings.num_blocks * settings.block_size_tokens:,} tokens)"
            f" and {settings.num_threads} thread{'s' if settings.num_threads > 1 else ''}"
        )
        self._say(f"memory: {plan}")
        checks.check_memory(plan, checks.available_memory())

    def _check_server(self) -> None:
        try:
            check_server(self._settings)
        except LedgerError as error:  # a worker would wait for it to come
            raise StartupError(
                f"the ledger cannot be reached ({error}): start the server that BATON_REDIS_URL names,"
                " or unset it, and `baton up` starts its own"
            ) from None

    def _start_ledger(self, start: Deadline) -> None:
        """Start the embedded Valkey; while it loads what the last run left it does not answer yet."""
        spec = ledger_spec(self._environment, self._data, self._embedded_port, self._start_timeout_s)
        self._supervisor.start(spec)
        self._wait_until_none(lambda: [] if self._ledger_answers() else [spec.name], start)
        self._check_server()

    def _ledger_answers(self) -> bool:
        try:
            self._ledger.execute(Cluster())
        except LedgerForeign as error:
            raise StartupError(str(error)) from None
        except LedgerError:
            return False
        return True

    def _start_cluster(self, flower_login: str) -> None:
        specs = cluster_specs(self._settings, self._nodes, self._environment, self._run, flower_login)
        self._names = [spec.name for spec in specs]
        self._say("starting " + ", ".join(spec.name for spec in specs))
        for spec in specs:
            self._supervisor.start(spec)

    def _wait_until_none(self, missing_now: Callable[[], list[str]], start: Deadline) -> None:
        """Wait until no child is missing any more, and say who is."""
        said_at, missing_before = time.monotonic(), list[str]()
        while missing := missing_now():
            if start.passed:
                for name in missing:
                    self._say_log(name)
                raise StartupError(f"not ready after {self._start_timeout_s:g} s: waiting for {', '.join(missing)}")
            now = time.monotonic()
            if missing != missing_before or now - said_at > _STILL_WAITING_S:
                self._say(f"{self._start_timeout_s - start.left_s:5.1f} s  waiting for {', '.join(missing)}")
                missing_before, said_at = missing, now
            self._watch_start()

    def _missing(self) -> list[str]:
        """Nodes that are not registered, web while it is not ready, Flower while it does not answer."""
        settings = self._settings
        missing = missing_nodes(self._ledger, self._supervisor.incarnations)
        if not answers(settings.host, settings.port, "/ready"):
            missing.append("web")
        if not answers(settings.flower_host, settings.flower_port, "/healthcheck"):
            missing.append("flower")
        return missing

    def _watch_start(self) -> None:
        """Pause; a child that ends, or a request to stop, ends the start."""
        self._pause()
        for ended in self._supervisor.poll(restart=False):
            raise self._failed_start(ended)

    def _pause(self) -> None:
        if self._wakeup.stops == 0:
            self._supervisor.wait(_LOOK_EVERY_S)
        if self._wakeup.stops:
            raise Stopped

    def _failed_start(self, ended: ChildExit) -> StartupError:
        self._say_log(ended.name)
        log = self._supervisor.log_of(ended.name)
        return StartupError(f"{ended.name} ended while it was starting ({ended.reason}); its log is {log}")

    def _say_log(self, name: str) -> None:
        self._say(f"the last lines of {name}'s log:")
        for line in last_lines(self._supervisor.log_of(name)):
            self._say(f"    {line}")

    def _supervise(self) -> None:
        restarts_done = 0
        while not self._wakeup.stops:
            self._supervisor.poll(restart=True)
            if self._wakeup.restarts > restarts_done:
                restarts_done = self._wakeup.restarts
                self._restart_all()
            else:
                self._supervisor.wait(_IDLE_S)

    def _restart_all(self) -> None:
        """Everything but the ledger, one by one. A request to stop, or a failure, ends it where it is."""
        try:
            with told(self._run, self._say) as tell:
                rolling = Rolling(
                    self._supervisor, self._ledger, self._settings, self._start_timeout_s, self._look, tell
                )
                rolling.restart(self._names)
        except Stopped:
            return
        except RollingStopped as error:
            self._say(f"restart: {error}; what was not restarted runs on as before")
        else:
            self._say("everything is restarted")

    def _look(self, at_most_s: float) -> None:
        if self._wakeup.stops:
            raise Stopped
        self._supervisor.poll(restart=True)
        self._supervisor.wait(at_most_s)

    def _say_ready(self, model: ModelFacts, flower_login: str, took_s: float) -> None:
        settings = self._settings
        url = http_url(settings.host, settings.port)
        name = settings.served_model_name or model.name
        messages = [{"role": "user", "content": "What is a relay race?"}]
        body = json.dumps({"model": name, "messages": messages, "max_tokens": 100, "temperature": 0})
        self._say(f"ready: {url}  ({took_s:.0f} s)")
        self._say(
            f"  Flower  {http_url(settings.flower_host, settings.flower_port)}  (user and password: {flower_login})"
        )
        self._say(f"  Redis   {settings.redis_url}  (BATON_REDIS_URL for further workers on this machine)")
        self._say(f"  try it  curl {url}/v1/chat/completions -H 'content-type: application/json' -d '{body}'")


class LineReader:
    """Reads a file that another process is appending to, whole line by whole line."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0

    def new_lines(self) -> list[str]:
        """Lines that were completed since the last call."""
        with self._path.open("rb") as file:
            file.seek(self._offset)
            complete, newline, _ = file.read().rpartition(b"\n")
        self._offset += len(complete) + len(newline)
        return complete.decode(errors="replace").splitlines()
