"""A `World`: one ledger, twin or real, with the means to move its time and to look at everything it keeps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from app.ids import choice_uid
from app.ledger.api import Ledger
from app.protocol.commands import (
    Abort,
    AbortAnswer,
    Activate,
    ActivateAnswer,
    Admit,
    AdmitAnswer,
    Attach,
    AttachAnswer,
    Claim,
    ClaimAnswer,
    ClaimStatus,
    Detach,
    Emit,
    EmitAnswer,
    FailAnswer,
    FailAttempt,
    FailureKind,
    Heartbeat,
    IdempotencyKey,
    Limits,
    NodeAnswer,
    Register,
    ReportExit,
    ReserveAnswer,
    ReserveNext,
    Scan,
    ScanAnswer,
    Sibling,
    Snapshot,
    SnapshotAnswer,
    Stamp,
    StampAnswer,
    Watcher,
    Work,
)
from app.schemas import Gauges, NodeInfo, Role, SamplingParams
from app.versions import Versions

Dump = dict[str, Any]
LIMITS = Limits(
    max_attempts=3,
    max_queued=100,
    queue_timeout_ms=60_000,
    first_token_timeout_ms=300_000,
    record_ttl_ms=60_000,
)


class World:
    """One ledger under test. Ledger time moves with ``advance`` only, so that both kinds answer with the same times."""

    kind: str
    ledger: Ledger

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger

    # time

    def advance(self, ms: int) -> None:
        raise AssertionError

    def hold_time(self) -> None:
        """Keep the next heartbeat or scan from moving ledger time."""
        raise AssertionError

    def clock_was(self, ms_ago: int) -> None:
        """Let the last advance of ledger time have happened ``ms_ago`` by the server's clock."""
        raise AssertionError

    def wait_until(self, condition: Callable[[], bool]) -> None:
        """Let the server's clock (not ledger time) go on until ``condition`` holds."""
        raise AssertionError

    def dump(self) -> Dump:
        raise AssertionError

    def point(self, kind: str, name: str, uid: str) -> None:
        """Let a ``guard``, ``latest`` or ``idem`` string name another request: data that no command leaves behind."""
        raise AssertionError

    def impatient(self) -> Ledger:
        """The same ledger for a caller all of whose calls arrive after their not_after."""
        raise AssertionError

    def of_release(self, versions: Versions) -> Ledger:
        """The same ledger for a process of another release."""
        raise AssertionError

    def close(self) -> None:
        self.ledger.close()

    # commands with defaults

    def do(self, command: Any) -> Any:
        self.hold_time()
        return self.ledger.execute(command)

    def node(self, incarnation: str, role: Role, **more: Any) -> NodeAnswer:
        ttl = more.pop("ttl", 10_000_000)
        holds_kv = role in ("prefill", "decode")
        fields: dict[str, Any] = {
            "name": f"{incarnation}@host",
            "pid": 1,
            "host": "host",
            "address": f"tcp://{incarnation}",
            "model": "" if role == "control" else "model-1",
            "layout": "layout-1" if holds_kv else "",
            "num_blocks": 100 if holds_kv else 0,
            "block_size_tokens": 16,
        }
        answer: NodeAnswer = self.do(Register(NodeInfo(incarnation=incarnation, role=role, **(fields | more)), ttl))
        return answer

    def cluster(self) -> None:
        """web ``w``, prefill ``p``, decode ``d``."""
        self.node("w", "web")
        self.node("p", "prefill")
        self.node("d", "decode")

    def admit(
        self,
        uid: str,
        client: str = "",
        *,
        prompt: int = 20,
        max_tokens: int = 12,
        logprobs: int | None = None,
        web: str = "w",
        key: str = "",
        body: str = "body",
        salt: str = "",
        more: Sequence[int] = (),
        **limits: int,
    ) -> AdmitAnswer:
        """``more``: the lengths of the prompts of further sequences."""
        sampling = SamplingParams(
            seed=2**62 + 1, max_tokens=max_tokens, temperature=0.7, stop=("\n", "é"), logprobs=logprobs
        )
        answer: AdmitAnswer = self.do(
            Admit(
                uid,
                client or f"client-{uid}",
                tuple(range(prompt)),
                sampling,
                Watcher(web, f"connection-{uid}"),
                replace(LIMITS, **limits),
                IdempotencyKey(key, body) if key else None,
                salt,
                tuple(
                    Sibling(choice_uid(uid, i), tuple(range(length)), sampling.model_copy(update={"seed": i}))
                    for i, length in enumerate(more, 1)
                ),
            )
        )
        return answer

    def abort(self, uid: str = "u", reason: str = "user") -> AbortAnswer:
        answer: AbortAnswer = self.do(Abort(uid, reason))
        return answer

    def attach(self, uid: str = "u", connection: str = "other", web: str = "w") -> AttachAnswer:
        answer: AttachAnswer = self.do(Attach(uid, Watcher(web, connection)))
        return answer

    def detach(self, uid: str = "u", connection: str = "", web: str = "w") -> AbortAnswer:
        """By default the one that it was admitted with."""
        answer: AbortAnswer = self.do(Detach(uid, Watcher(web, connection or f"connection-{uid}")))
        return answer

    def claim(
        self, fence: str, hint: str = "", *, node: str = "p", free: int = 100, size: int = 16, stamp: bool = False
    ) -> ClaimAnswer:
        answer: ClaimAnswer = self.do(Claim(hint, node, fence, free, size, stamp))
        return answer

    def work(self, fence: str, hint: str = "", **more: Any) -> Work:
        """What a claim that must succeed gives."""
        answer = self.claim(fence, hint, **more)
        assert answer.work is not None, answer
        return answer.work

    def stamp(
        self, uid: str = "u", in_step: bool = True, *, fence: str = "f", node: str = "p", attempt: int = 1
    ) -> StampAnswer:
        answer: StampAnswer = self.do(Stamp(uid, attempt, fence, node, in_step))
        return answer

    def reserve(self, lease: str, hint: str = "", *, node: str = "d", free: int = 100, size: int = 16) -> ReserveAnswer:
        answer: ReserveAnswer = self.do(ReserveNext(hint, node, lease, free, size))
        return answer

    def emit(
        self,
        uid: str,
        index: int,
        *tokens: int,
        fence: str = "f",
        node: str = "p",
        attempt: int = 1,
        end: Any = None,
        logprobs: tuple[str, ...] = (),
        blocks: int = 0,
        cached: int = 0,
    ) -> EmitAnswer:
        answer: EmitAnswer = self.do(Emit(uid, attempt, fence, node, index, tokens, end, logprobs, blocks, cached))
        return answer

    def activate(
        self,
        uid: str,
        token: int = 7,
        *,
        index: int = 0,
        fence: str = "f",
        lease: str = "l",
        attempt: int = 1,
        **more: Any,
    ) -> ActivateAnswer:
        node = more.pop("node", "d")
        answer: ActivateAnswer = self.do(Activate(uid, attempt, fence, lease, node, index, token, **more))
        return answer

    def fail(
        self,
        uid: str,
        *,
        fence: str = "f",
        node: str = "p",
        lease: str = "",
        attempt: int = 1,
        kind: FailureKind = FailureKind.FAILURE,
        reason: str = "engine_error",
        avoid: bool = False,
    ) -> FailAnswer:
        answer: FailAnswer = self.do(FailAttempt(uid, attempt, fence, node, lease, kind, reason, "why", avoid))
        return answer

    def scan(self, min_age_ms: int = 0) -> ScanAnswer:
        answer: ScanAnswer = self.do(Scan(min_age_ms))
        return answer

    def beat(self, node: str, **gauges: Any) -> NodeAnswer:
        answer: NodeAnswer = self.do(Heartbeat(node, Gauges(**gauges)))
        return answer

    def exit(self, node: str) -> ScanAnswer:
        answer: ScanAnswer = self.do(ReportExit(node))
        return answer

    def read(self, uid: str = "", **more: Any) -> SnapshotAnswer:
        answer: SnapshotAnswer = self.do(Snapshot(uid, **more))
        return answer

    # shortcuts into a state

    def prefilling(self, uid: str = "u", fence: str = "f", **more: Any) -> None:
        self.admit(uid, **more)
        assert self.claim(fence, uid, free=10_000).status is ClaimStatus.CLAIMED

    def decoding(self, uid: str = "u", fence: str = "f", lease: str = "l", **more: Any) -> None:
        """Its first token is 7."""
        self.prefilling(uid, fence, **more)
        assert self.reserve(lease, uid, free=10_000).status == "RESERVED"
        assert self.emit(uid, 0, 7, fence=fence).status == "OK"
        assert self.activate(uid, fence=fence, lease=lease).status == "ACTIVATED"

    # looking

    def state(self, uid: str = "u") -> str:
        return self.read(uid).state

    def lease_state(self, lease: str = "l") -> str:
        return str(self.dump()["leases"][lease]["state"])

    def owned(self, node: str) -> set[str]:
        return set(self.dump()["owned"].get(node, {}))

    def events(self, web: str = "w") -> list[Any]:
        return [event for _, event in self.ledger.read_events(web, "0", 0)]
