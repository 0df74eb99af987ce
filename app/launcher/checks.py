"""What must hold before anything is started. Each failure is one line that names the option at fault."""

from __future__ import annotations

import errno
import http.client
import json
import os
import socket
from dataclasses import dataclass
from pathlib import Path

import psutil

from app.errors import StartupError
from app.launcher.model_facts import ModelFacts
from app.launcher.readiness import http_get
from app.settings import Settings

_MIB = 2**20
_NODE_BYTES = 400 * _MIB
"""A KV worker without its weights and pool: Paddle alone takes 300 MB."""
_SERVICE_BYTES = 600 * _MIB
"""Everything else together: control worker, beat, web, Flower, Valkey."""


def free_port(host: str, port: int, option: str) -> int:
    """Check that we could listen on ``host:port``; port 0 becomes one that is free.

    Raises:
        StartupError: we could not; the message names ``option``.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as gunicorn and Flower do
            probe.bind(address)
            probe.listen(1)
            return int(probe.getsockname()[1])
    except socket.gaierror as error:
        raise StartupError(f"{host!r} is no address to listen on: {error.strerror}") from None
    except OSError as error:
        variable = "BATON_" + option.strip("-").replace("-", "_").upper()
        if error.errno == errno.EADDRINUSE:
            taken = "is taken, by a Baton that runs already" if _is_baton(host, port) else "is taken"
            raise StartupError(f"port {port} of {host} {taken}: choose another with {option} ({variable})") from None
        raise StartupError(f"cannot listen on {host}:{port} ({option}, {variable}): {error.strerror}") from None


def _is_baton(host: str, port: int) -> bool:
    try:
        answer = json.loads(http_get(host, port, "/ready", 1.0)[1])
    except (OSError, http.client.HTTPException, ValueError):
        return False
    return isinstance(answer, dict) and {"ready", "reasons"} <= answer.keys()


@dataclass(frozen=True)
class MemoryPlan:
    """What a cluster will need, in bytes."""

    kv_nodes: int
    pool_bytes: int
    """Of one node."""
    weight_bytes: int
    """Of one node."""
    table_bytes: int
    """Of one node: rotary tables."""

    @classmethod
    def of(cls, settings: Settings, model: ModelFacts, kv_nodes: int) -> MemoryPlan:
        pool_bytes = settings.num_blocks * model.block_bytes(settings.block_size_tokens)
        return cls(kv_nodes, pool_bytes, model.weight_bytes, model.table_bytes)

    @property
    def needed_bytes(self) -> int:
        each = self.pool_bytes + self.weight_bytes + self.table_bytes + _NODE_BYTES
        return self.kv_nodes * each + _SERVICE_BYTES

    def __str__(self) -> str:
        parts = (self.pool_bytes, self.weight_bytes, self.table_bytes, _NODE_BYTES, _SERVICE_BYTES, self.needed_bytes)
        pool, weights, tables, node, services, total = (f"{amount / _MIB:,.0f} MiB" for amount in parts)
        return (
            f"{self.kv_nodes} nodes x ({pool} KV + {weights} weights + {tables} rotary tables + {node})"
            f" + {services} = {total}"
        )


def check_memory(plan: MemoryPlan, available_bytes: int) -> None:
    """Refuse a cluster that would not fit: the kernel would kill one of its processes in the middle of a request.

    Raises:
        StartupError: it needs more than there is.
    """
    if plan.needed_bytes > available_bytes:
        raise StartupError(
            f"not enough memory: {plan}, and {available_bytes / _MIB:,.0f} MiB are available;"
            " lower --num-blocks, --prefill or --decode"
        )


def available_memory(cgroups: Path = Path("/sys/fs/cgroup"), membership: Path = Path("/proc/self/cgroup")) -> int:
    """Bytes that processes of ours may still take: the machine's, or our control group's if that is less."""
    available: int = psutil.virtual_memory().available
    for group in _memory_groups(cgroups, membership):
        for limit_file, usage_file in (("memory.max", "memory.current"), _CGROUP_V1_FILES):
            left = _left_in(group / limit_file, group / usage_file, group / "memory.stat")
            if left is not None:
                available = min(available, left)
    return available


_CGROUP_V1_FILES = ("memory.limit_in_bytes", "memory.usage_in_bytes")


def _memory_groups(cgroups: Path, membership: Path) -> list[Path]:
    """The folders of our control group and all that contain it: each may set a limit."""
    groups = [cgroups, cgroups / "memory"]  # inside a container our own group is often mounted as the root
    if not membership.exists():
        return groups
    for line in membership.read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        root = cgroups / "memory" if controllers else cgroups
        group = root / path.lstrip("/")
        groups += [folder for folder in (group, *group.parents) if root in folder.parents]
    return groups


def _left_in(limit_file: Path, usage_file: Path, stat_file: Path) -> int | None:
    """Bytes left under one limit; the page cache that can be dropped counts as free. None: no limit here."""
    try:
        limit = limit_file.read_text().strip()
        if limit == "max":
            return None
        usage = int(usage_file.read_text())
        stat = dict(line.split() for line in stat_file.read_text().splitlines())
    except OSError:  # no such group, or the other version of control groups
        return None
    droppable = int(stat.get("inactive_file", 0))
    return max(int(limit) - usage + droppable, 0)


def make_folders(*folders: Path) -> None:
    """Make folders that only this user can read.

    Raises:
        StartupError: we may not write there.
    """
    for folder in folders:
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError as error:
            raise StartupError(f"cannot make {folder}: {error.strerror}; choose another BATON_HOME") from None
        if not os.access(folder, os.W_OK | os.X_OK):
            raise StartupError(f"cannot write to {folder}: choose another BATON_HOME")
