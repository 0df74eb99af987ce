"""``baton up``: what it was asked for, and everything around a launch: ports, folders, the lock, signals."""

from __future__ import annotations

import os
import shutil
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from app.errors import SettingsError
from app.launcher import checks
from app.launcher.launch import Launch, Say, Stopped
from app.launcher.lock import only_one
from app.launcher.plan import Nodes
from app.launcher.wakeup import Wakeup
from app.settings import Settings

_STOPPED_EARLY = 130  # what a shell reports for a program that Ctrl-C ended


@dataclass(frozen=True)
class Options:
    """What ``baton up`` was asked for beyond the settings."""

    nodes: Nodes
    start_timeout_s: float


def up(settings: Settings, options: Options, say: Say) -> int:
    """Bring a cluster up and keep it up until SIGINT or SIGTERM. Returns the exit status of the process.

    Raises:
        StartupError: it cannot be brought up; nothing is left running.
    """
    run = settings.home / "run"
    checks.make_folders(settings.home, run, run / "logs")
    with ExitStack() as stack:
        wakeup = stack.enter_context(Wakeup.listen())  # before anybody can know of us: `baton restart` sends a signal
        stack.enter_context(only_one(run / "lock"))  # before the rest: a second one shall not hear of taken ports
        settings = _decide(settings)
        _remove_leftovers(run)
        stack.callback(_remove_leftovers, run)
        try:
            Launch(settings, options.nodes, options.start_timeout_s, run, wakeup, say).run()
        except Stopped:
            say("stopped before it was ready")
            return _STOPPED_EARLY
    say("stopped; logs are in " + str(run / "logs"))
    return 0


def _decide(settings: Settings) -> Settings:
    """Fix what children, which run in another folder, must not decide again: ports and paths."""
    port = checks.free_port(settings.host, settings.port, "--port")
    flower_port = checks.free_port(settings.flower_host, settings.flower_port, "--flower-port")
    if port == flower_port:
        raise SettingsError(f"--port and --flower-port are both {port}: choose two")
    decided: dict[str, object] = {
        "home": settings.home,
        "model": _absolute(settings.model),
        "port": port,
        "flower_port": flower_port,
    }
    return settings.model_copy(update=decided)


def _absolute(model: str) -> str:
    """A model that is a path, made independent of the current folder; a name stays a name."""
    path = Path(model).expanduser()
    return str(path.absolute()) if os.sep in model or path.exists() else model


def _remove_leftovers(run: Path) -> None:
    """Empty the run folder, but for the logs and our own lock: a launcher that was killed could not do it."""
    for entry in run.iterdir():
        if entry.name in ("logs", "lock"):
            continue
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink(missing_ok=True)
