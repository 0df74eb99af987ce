"""What an idle cluster holds: blocks, leases, keys of the ledger, threads and sockets. After a fault it is the same."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

import psutil
from redis import Redis

from tests.chaos.records import PREFIX
from tests.integration.baton import Baton

ALWAYS = frozenset(
    {"clock", "seq", "nodes", "room:prefill", "room:decode", "model_nodes", "tombstones", "exited", "avoided"}
    | {"avoided_times"}
)
"""Ledger keys that stay without a TTL, whatever went on; their members have their own ends."""

LAZY = 3
"""Threads and sockets that come when they are first needed at the same time: a worker finishes its tasks on up to four
threads, and its connection pools grow; web's up to one connection to the ledger for each of its threads. What leaks
with each fault passes that soon."""


@dataclass(frozen=True)
class Usage:
    """What one process has open."""

    threads: int
    sockets: int


def usage(process: psutil.Process) -> Usage:
    return Usage(process.num_threads(), len(process.net_connections(kind="all")))


def usages(baton: Baton) -> dict[str, Usage]:
    """By node name, the workers and web."""
    return {name: usage(psutil.Process(node["pid"])) for name, node in baton.nodes().items()}


def in_use(baton: Baton) -> list[str]:
    """What /cluster shows that an idle cluster does not have."""
    cluster = baton.get("/cluster")[1]
    found = [f"{node['name']} is {node['health']}" for node in cluster["nodes"] if node["health"] != "healthy"]
    for node in cluster["nodes"]:
        blocks, sequences = node["blocks"], node["sequences"]
        if blocks["free"] + blocks["cached"] != blocks["total"] or any(sequences.values()):
            found.append(f"{node['name']} has {blocks} {sequences}")
    found += [f"lease {lease}" for lease in cluster["leases"]]
    found += [f"{cluster[name]} {name}" for name in ("queued", "waiting_for_grant") if cluster[name]]
    return found


def left_in_ledger(redis: Redis) -> list[str]:
    """Keys of the ledger that belong to no living node and would stay for ever."""
    living = {str(member) for member in redis.zrange(f"{PREFIX}nodes", 0, -1)}
    found = []
    for key in sorted(str(each) for each in redis.scan_iter(f"{PREFIX}*", count=1000)):
        name = key.removeprefix(PREFIX)
        of_node = re.fullmatch(r"(?:node|events):(.*)", name)
        if name in ALWAYS or (of_node and of_node[1] in living):
            continue
        if redis.pttl(key) == -1:
            found.append(name)
    return found


def grown(before: Mapping[str, Usage], now: Mapping[str, Usage]) -> list[str]:
    """Processes that have more open than before. One that was started anew may have less: it has done less."""
    found = []
    for name, old in before.items():
        new = now.get(name, old)
        most = Usage(old.threads + LAZY, max(old.sockets + LAZY, old.threads))
        if new.threads > most.threads or new.sockets > most.sockets:
            found.append(f"{name}: {old} -> {new}")
    return found
