"""Generated command sequences that reach deep into the life of requests."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

from app.ids import choice_uid
from app.protocol.commands import (
    Abort,
    Activate,
    Admit,
    Attach,
    Claim,
    Cluster,
    Deregister,
    Detach,
    Drain,
    Emit,
    FailAttempt,
    FailureKind,
    Heartbeat,
    Holdings,
    IdempotencyKey,
    Limits,
    Register,
    ReportExit,
    ReserveNext,
    Scan,
    Sibling,
    Snapshot,
    Stamp,
    Watcher,
)
from app.protocol.tables import IN_PROCESS
from app.schemas import FinishReason, Gauges, NodeInfo, Role, SamplingParams
from tests.contract.ledger.support import Dump

NODES: dict[str, Role] = {"p0": "prefill", "p1": "prefill", "d0": "decode", "d1": "decode", "w0": "web", "w1": "web"}
BY_ROLE = {role: [inc for inc, its in NODES.items() if its == role] for role in ("prefill", "decode", "web")}
WEIGHTS = {
    "go": 60,
    "admit": 14,
    "claim": 18,
    "reserve": 18,
    "activate": 12,
    "emit": 22,
    "stamp": 4,
    "fail": 6,
    "abort": 1,
    "detach": 2,
    "attach": 2,
    "scan": 7,
    "advance": 10,
    "heartbeat": 10,
    "register": 10,
    "exit": 3,
    "drain": 1,
    "deregister": 1,
    "look": 2,
}


@dataclass(frozen=True)
class Choice:
    """One generated step; what the numbers choose depends on the state it meets."""

    command: str
    a: int
    b: int
    wrong: int
    """Below 8 in 10 the command names what is true; above, one detail is false."""


def plan_of(seed: int, length: int) -> list[Choice]:
    """The same choices for the same seed; a shorter plan is the beginning of a longer one, so that failures shrink."""
    drawn = random.Random(seed)
    names = list(WEIGHTS)
    weights = list(WEIGHTS.values())
    return [
        Choice(drawn.choices(names, weights)[0], drawn.randrange(840), drawn.randrange(840), drawn.randrange(10))
        for _ in range(length)
    ]


def told(record: Dump, *tokens: int) -> tuple[str, ...]:
    """What goes with these tokens of ``record``."""
    return tuple(f"-{token}.5;{token}:-{token}.5" for token in tokens) if record.get("with_logprobs") else ()


class Sequence:
    """Turns choices into commands that reach deep: most name the present fence, lease and index of a record."""

    def __init__(self) -> None:
        self.admissions = 0
        self.fences = 0
        self.leases = 0
        self.lives = dict.fromkeys(NODES, 0)

    def incarnation(self, node: str) -> str:
        """A node whose exit was reported comes back as another incarnation."""
        return f"{node}{'x' * self.lives[node]}"

    def one_of(self, role: str, number: int) -> str:
        return self.incarnation(BY_ROLE[role][number % 2])

    def build(self, choice: Choice, dump: Dump) -> Any:
        return getattr(self, choice.command)(choice, dump)

    def any_uid(self, choice: Choice) -> str:
        uid = f"u{self.admissions + (choice.wrong == 9) - choice.b % 4}"
        return choice_uid(uid, choice.a % 9 == 0)

    def admit(self, choice: Choice, _: Any) -> Any:
        self.admissions += choice.wrong < 9
        grace_ms, window_ms = (0, 0, 2_000)[choice.a % 3], (0, 0, 0, 10_000_000)[choice.b % 4]
        limits = Limits(1 + choice.a % 4, 6, 4_000, 6_000, 10_000_000, grace_ms, window_ms)
        key = IdempotencyKey(f"key{choice.b % 3}", f"body{choice.b % 2}") if choice.a % 4 == 0 else None
        prompt = tuple(range(1 + choice.b % 60))
        sampling = SamplingParams(
            seed=-(2**63) + choice.a, max_tokens=1 + choice.b % 24, logprobs=(None, 2)[choice.a % 2]
        )
        watcher = Watcher(self.one_of("web", choice.b), "x")
        salt = ("", "salt")[choice.b % 2]
        uid = f"u{self.admissions}"
        more = tuple(
            Sibling(choice_uid(uid, i), (prompt, (7,))[(choice.b + i) % 2], sampling.model_copy(update={"seed": i}))
            for i in range(1, (1, 1, 1, 2, 4)[choice.b % 5])
        )
        return Admit(uid, f"client{choice.a % 7}", prompt, sampling, watcher, limits, key, salt, more)

    def go(self, choice: Choice, dump: Dump) -> Any:
        """The next step in the life of a request that is in process."""
        running = [(uid, r) for uid, r in sorted(dump["records"].items()) if r["state"] in IN_PROCESS]
        if not running:
            return self.admit(choice, dump)
        uid, record = running[choice.a % len(running)]
        if record["state"] == "QUEUED":
            self.fences += 1
            return Claim(uid, self.one_of("prefill", choice.b), f"f{self.fences}", 7, 16, stamp=choice.b % 3 == 0)
        if record["state"] == "PREFILLING" and not record["lease"]:
            self.leases += 1
            return ReserveNext(uid, self.one_of("decode", choice.b), f"l{self.leases}", 7, 16)
        index, name = len(record["tokens"]), (uid, record["attempt"], record["fence"])
        if record["state"] == "PREFILLING" and choice.b % 3:
            node = dump["leases"][record["lease"]]["node"]
            (logprobs,) = told(record, 100 + index) or ("",)
            cached = choice.b % 3 * 16
            return Activate(*name, record["lease"], node, index, 100 + index, logprobs=logprobs, cached_tokens=cached)
        tokens = tuple(range(100 + index, 100 + index + (1, 1, 2, 17)[choice.b % 4]))
        reason: FinishReason | None = "stop" if choice.b % 8 == 0 else None
        logprobs_of = told(record, *tokens)
        return Emit(*name, record["owner"], index, tokens, reason, logprobs_of, choice.a % 4, choice.a % 3 * 16)

    def claim(self, choice: Choice, _: Any) -> Any:
        self.fences += choice.wrong < 8
        node = self.one_of("prefill", choice.a) if choice.wrong < 9 else "d0"
        hint = self.any_uid(choice) if choice.a % 3 else ""
        return Claim(hint, node, f"f{self.fences}", 1 + choice.b % 7, 16, stamp=choice.b % 2 == 0)

    def stamp(self, choice: Choice, dump: Dump) -> Any:
        uid, record = self._record(choice, dump)
        owner = "p1" if choice.wrong == 9 else record["owner"]
        fence = "f-none" if choice.wrong == 8 else record["fence"]
        return Stamp(uid, record["attempt"], fence, owner, choice.b % 3 > 0)

    def reserve(self, choice: Choice, _: Any) -> Any:
        self.leases += choice.wrong < 8
        node = self.one_of("decode", choice.a)
        return ReserveNext(self.any_uid(choice) if choice.a % 3 else "", node, f"l{self.leases}", 1 + choice.b % 7, 16)

    def _record(self, choice: Choice, dump: Dump, *, leased: bool = False) -> tuple[str, Dump]:
        """Most often one that is PREFILLING or DECODING; with ``leased`` one that waits to be activated."""
        nothing = {"attempt": 1, "fence": "f0", "owner": "p0", "lease": "l0", "tokens": [], "watchers": []}
        records = sorted(dump["records"].items())
        computing = [pair for pair in records if pair[1]["state"] in ("PREFILLING", "DECODING")]
        wanted = [pair for pair in computing if pair[1]["state"] == "PREFILLING" and pair[1]["lease"]] if leased else []
        chosen = (wanted or computing or records) if choice.a % 8 else records
        return chosen[choice.a % len(chosen)] if chosen else ("u9", nothing)

    def emit(self, choice: Choice, dump: Dump) -> Any:
        uid, record = self._record(choice, dump)
        index, n = len(record["tokens"]), (1, 2, 3, 5, 17)[choice.b % 5]
        index = max(0, index - choice.a % 3) if choice.wrong == 5 else index + (choice.wrong == 6)
        tokens = tuple(100 + index + i for i in range(n))
        fence = "f-none" if choice.wrong == 7 else record["fence"]
        tokens = tuple(token + 1 for token in tokens) if choice.wrong == 8 else tokens
        owner = "d1" if choice.wrong == 9 else record["owner"]
        reason: FinishReason | None = "stop" if choice.b % 7 == 0 else None
        return Emit(uid, record["attempt"], fence, owner, index, tokens, reason, told(record, *tokens), choice.a % 3)

    def activate(self, choice: Choice, dump: Dump) -> Any:
        uid, record = self._record(choice, dump, leased=True)
        lease, have = record["lease"], len(record["tokens"])
        node = dump["leases"].get(lease, {"node": "d0"})["node"]
        index = max(0, have - choice.b % 2) + (choice.wrong == 8)
        token = 100 + index + (choice.wrong == 9)
        (logprobs,) = told(record, token) or ("",)
        name = (uid, record["attempt"], record["fence"])
        return Activate(*name, lease, node, index, token, logprobs=logprobs)

    def fail(self, choice: Choice, dump: Dump) -> Any:
        uid, record = self._record(choice, dump, leased=choice.a % 2 == 0)
        kind = (*[FailureKind.FAILURE] * 3, FailureKind.OVERLOAD, FailureKind.FINAL)[choice.b % 5]
        lease = record["lease"] if choice.b % 2 else ""
        node = dump["leases"].get(lease, {"node": record["owner"]})["node"]
        attempt = record["attempt"] - (choice.wrong == 9)
        avoid = choice.a % 3 > 0
        return FailAttempt(uid, attempt, record["fence"], node, lease, kind, "engine_error", "detail", avoid)

    def abort(self, choice: Choice, _: Any) -> Any:
        return Abort(self.any_uid(choice), "user")

    def detach(self, choice: Choice, _: Any) -> Any:
        return Detach(self.any_uid(choice), Watcher(self.one_of("web", choice.a), "xy"[choice.b % 2]))

    def attach(self, choice: Choice, _: Any) -> Any:
        return Attach(self.any_uid(choice), Watcher(self.one_of("web", choice.a), "xy"[choice.b % 2]))

    def scan(self, choice: Choice, _: Any) -> Any:
        return Scan((0, 0, 500)[choice.a % 3])

    def heartbeat(self, choice: Choice, _: Any) -> Any:
        return Heartbeat(self.incarnation(list(NODES)[choice.a % 6]), Gauges(blocks={"free": choice.b}))

    def register(self, choice: Choice, dump: Dump) -> Any:
        missing = [node for node in NODES if self.incarnation(node) not in dump["nodes"]]
        node = (missing or list(NODES))[choice.a % (len(missing) or 6)]
        inc, role = self.incarnation(node), NODES[node]
        layout = "" if role == "web" else "layout-2" if choice.wrong == 9 else "layout-1"
        info = NodeInfo(
            incarnation=inc,
            role=role,
            name=f"{inc}@h",
            pid=1,
            host="h",
            address=inc,
            model="model-2" if choice.wrong == 8 else "model-1",
            layout=layout,
            num_blocks=3 + choice.b % 3,
            block_size_tokens=16,
        )
        return Register(info, 8_000)

    def exit(self, choice: Choice, dump: Dump) -> Any:
        """Most often of a node that computes something."""
        owner = self._record(choice, dump)[1]["owner"].rstrip("x")
        node = owner if owner and choice.b % 4 else ("p0", "p1", "d0", "d1", "w0")[choice.a % 5]
        gone = self.incarnation(node)
        self.lives[node] += 1
        return ReportExit(gone)

    def drain(self, choice: Choice, _: Any) -> Any:
        return Drain(self.incarnation(("p1", "d1", "w1")[choice.a % 3]))

    def look(self, choice: Choice, _: Any) -> Any:
        return (
            Cluster(),
            Holdings(self.incarnation(list(NODES)[choice.a % 6])),
            Snapshot(client_id=f"client{choice.a % 5}"),
        )[choice.b % 3]

    def deregister(self, choice: Choice, _: Any) -> Any:
        return Deregister(self.incarnation(("p1", "d1", "w1")[choice.a % 3]))
