"""Which processes make up a cluster on one machine: command lines, environments, and the order in which they stop."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

from app.launcher.child import ChildSpec
from app.processors import available_processors
from app.settings import Settings

SOURCE_ROOT = Path(__file__).resolve().parents[2]
"""Where ``celery_config``, ``workers`` and ``web`` are importable."""


class StopStage(IntEnum):
    """Web first, so that nothing new comes in; the ledger last, so that the others can say goodbye to it."""

    WEB = 0
    WORKERS = 1
    LEDGER = 2


QUICK_DRAIN_S = 1.0
"""What open requests get when ``baton up`` stops and BATON_DRAIN_TIMEOUT_S is not set: a person is waiting."""


def hurry_after_s(settings: Settings) -> float | None:
    """When to hurry children that stop (SIGQUIT); None if they shall take the drain's time that was asked for."""
    return None if "drain_timeout_s" in settings.model_fields_set else QUICK_DRAIN_S


def stop_budgets_s(drain_timeout_s: float) -> dict[int, float]:
    """Seconds per stage until it is killed: the drain, then what ending takes on a machine that is busy with other
    things. With the quick drain 9 s in all."""
    return {StopStage.WEB: drain_timeout_s + 2.0, StopStage.WORKERS: drain_timeout_s + 3.5, StopStage.LEDGER: 1.5}


@dataclass(frozen=True)
class Nodes:
    """How many workers of each kind."""

    prefill: int = 1
    decode: int = 1

    @property
    def kv(self) -> int:
        """Nodes that hold weights and a KV pool."""
        return self.prefill + self.decode


def child_environment(inherited: Mapping[str, str], settings: Settings) -> dict[str, str]:
    """The launcher's environment, with everything that its options and checks decided written into it."""
    environment = {name: value for name, value in inherited.items() if name != "BATON_INCARNATION"}
    for name in settings.model_fields_set - {"incarnation"}:
        environment[f"BATON_{name.upper()}"] = str(getattr(settings, name))
    environment["PYTHONUNBUFFERED"] = "1"  # a log that ends before the crash explains nothing
    return environment


def share_processors(settings: Settings, nodes: Nodes) -> Settings:
    """Settings in which each node has its share of the processors, one thread at least, unless they say how many."""
    if settings.num_threads:
        return settings
    share = len(settings.core_numbers) or max(1, available_processors() // max(1, nodes.kv))
    return settings.model_copy(update={"num_threads": share})


def prepare_spec(environment: Mapping[str, str]) -> ChildSpec:
    """The process that makes the model ready."""
    argv = (sys.executable, "-m", "app.launcher.prepare")
    return ChildSpec("model", argv, environment, StopStage.WORKERS)


def ledger_spec(environment: Mapping[str, str], folder: Path, port: str, start_timeout_s: float) -> ChildSpec:
    """The embedded Valkey; its data stay in ``folder`` from one ``baton up`` to the next."""
    argv = (sys.executable, "-m", "app.launcher.ledger_child", str(folder), port, str(start_timeout_s))
    return ChildSpec("valkey", argv, environment, StopStage.LEDGER)


def cluster_specs(
    settings: Settings, nodes: Nodes, environment: Mapping[str, str], run: Path, flower_login: str
) -> list[ChildSpec]:
    """Everything but the ledger, in the order in which it is started: what takes longest first."""
    level = settings.log_level
    specs = [
        _worker(f"{role}{number}", role, environment, level)
        for role, count in (("prefill", nodes.prefill), ("decode", nodes.decode), ("control", 1))
        for number in range(1, count + 1)
    ]
    beat = (*_celery(), "beat", "-l", level, "-s", str(run / "beat-schedule"))
    specs.append(ChildSpec("beat", beat, environment, StopStage.WORKERS))
    gunicorn = (sys.executable, "-m", "gunicorn", "-c", "python:web.gunicorn_conf", "web:create_app()")
    specs.append(ChildSpec("web", gunicorn, environment, StopStage.WEB, hurries=True))
    flower = (*_celery(), "flower", f"--address={settings.flower_host}", f"--port={settings.flower_port}")
    # A command line can be read by every user of the machine, an environment cannot.
    specs.append(ChildSpec("flower", flower, {**environment, "FLOWER_BASIC_AUTH": flower_login}, StopStage.WORKERS))
    return specs


def _celery() -> tuple[str, ...]:
    return (sys.executable, "-m", "celery", "-A", "celery_config")


def _worker(name: str, queue: str, environment: Mapping[str, str], level: str) -> ChildSpec:
    # %h: two machines may each have a prefill1. Without a name of its own Flower would merge two workers of a host.
    argv = (*_celery(), "worker", "-Q", queue, "-n", f"{name}@%h", "-l", level)
    return ChildSpec(name, argv, environment, StopStage.WORKERS, is_node=True, hurries=True)
