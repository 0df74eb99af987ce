"""What a node holds: its table, how a piece of work ends, and the comparison with what the ledger gives (rule 3)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeVar

from app.protocol import effects as do
from app.protocol.asking import Asking
from app.protocol.blocks import BlockPool
from app.protocol.commands import (
    Bell,
    FailAnswer,
    FailAttempt,
    FailStatus,
    FailureKind,
    HeldClaim,
    HeldLease,
    Holdings,
    HoldingsAnswer,
    ReadStatus,
)
from app.protocol.messages import Refusal, Reply, refused
from app.protocol.tables import FailureReason


@dataclass(frozen=True, slots=True)
class NodeConfig:
    """What a machine needs to know of its node. Seconds, bytes and tokens as the names say."""

    incarnation: str
    name: str
    address: str
    block_size_tokens: int
    block_bytes: int
    max_num_seqs: int
    eos_token_ids: frozenset[int]
    link_timeout_s: float
    pull_min_bytes_per_s: float
    check_s: float
    grant_timeout_s: float = 30.0
    max_num_batched_tokens: int = 512
    """Tokens of one prefill step."""
    emit_buffer_tokens: int = 256
    """Tokens that a sequence may run ahead of the ledger before it pauses."""
    prefix_cache: bool = True
    """Whether a prefill node keeps the KV of prompts for those that begin alike."""

    def pull_timeout_s(self, num_blocks: int) -> float:
        """Time in which a pull of ``num_blocks`` must have ended and been answered."""
        return self.link_timeout_s + num_blocks * self.block_bytes / self.pull_min_bytes_per_s


@dataclass(slots=True, kw_only=True)
class Held:
    """One piece of work in a node's table, and who must still stop before its blocks are free."""

    uid: str
    client_id: str
    attempt: int
    fence: str
    lease_id: str = ""
    """The decode node's lease; empty on the prefill side."""
    blocks: tuple[int, ...]
    bell_id: str
    in_engine: bool = False
    stop_sent: bool = False
    mover_busy: bool = False
    ending: bool = False
    """The ledger is being told, or only engine and mover have still to stop."""
    overload: bool = False
    """It is ending through nobody's fault: a peer that hears of it must not count a failure."""
    told: bool = False
    """The ledger knows that this is over for us (or never gave it to us)."""
    outcome: str = ""


H = TypeVar("H", bound=Held)


class Holding(Asking, ABC, Generic[H]):
    """The table of a node, keyed by fence (prefill) or lease id (decode), and the blocks of what is in it."""

    def __init__(self, config: NodeConfig, pool: BlockPool) -> None:
        super().__init__()
        self.config = config
        self.pool = pool
        self.table: dict[str, H] = {}
        self._asking_for_work = False
        """A question is on its way that may bring work: the table may soon hold what the ledger gives already."""
        self._checking = False
        self._check_due = 0
        """The check that is due next; a timer of an earlier one finds itself superseded."""

    def audit(self) -> None:
        """Check the block pool against the table; raises IllegalStep when a block is lost or held twice."""
        self.pool.audit({key: held.blocks for key, held in self.table.items()})

    # what a role or the node adds

    @abstractmethod
    def _given(self, answer: HoldingsAnswer) -> Iterable[HeldClaim | HeldLease]:
        """What the ledger gives this node in its role."""

    @abstractmethod
    def _waits(self, answer: HoldingsAnswer) -> bool:
        """Whether the ledger has work waiting for this role."""

    @abstractmethod
    def _work_waits(self) -> None:
        """The ledger has work waiting for this role."""

    @abstractmethod
    def _freed(self) -> None:
        """Blocks came back."""

    @abstractmethod
    def _done(self, bell_id: str, outcome: str) -> None:
        """The bell that brought a piece of work is over."""

    @abstractmethod
    def _lost_registration(self) -> None:
        """The ledger does not know this node."""

    def _decides_itself(self, held: H) -> bool:
        """Whether a call that is in flight will say how ``held`` ended: the comparison leaves it alone then."""
        return held.ending

    def _reconsider(self, key: str, held: H, given: HeldClaim | HeldLease) -> None:
        """What a role does about work that it holds and that the ledger gives it, once a second."""

    def _failing(self, key: str, held: H, kind: FailureKind, reason: FailureReason, detail: str) -> None:
        """What else a role does when an attempt fails here."""

    # ends

    def _fail(
        self, key: str, held: H, kind: FailureKind, reason: FailureReason, detail: str = "", *, hop: bool = False
    ) -> None:
        """End the attempt in the ledger. FENCED means that it is somebody else's by now, or ended: just as good.

        ``hop``: it was the way between prefill and decode node that failed.
        """
        self._failing(key, held, kind, reason, detail)
        held.ending = True
        held.overload = kind is FailureKind.OVERLOAD
        self._stop(key, held)
        self._log("attempt failed", held, "warning", reason=reason, detail=detail)
        fail = FailAttempt(
            held.uid,
            held.attempt,
            held.fence,
            self.config.incarnation,
            held.lease_id,
            kind,
            reason,
            detail,
            avoid_pair=hop and kind is FailureKind.FAILURE,
        )
        self._ask(fail, partial(self._failed, key, held, reason))

    @staticmethod
    def _is_ending(held: Held) -> Reply:
        """The refusal of a message about work that is on its way out."""
        return refused(Refusal.HANDED_BACK if held.overload else Refusal.WRONG_PHASE, "ending")

    def _failed(self, key: str, held: H, reason: str, answer: FailAnswer) -> None:
        if answer.status is FailStatus.REQUEUED:
            self._ring(Bell("prefill", held.uid, answer.attempt))
        self._over(key, held, reason)

    def _over(self, key: str, held: H, outcome: str) -> None:
        """It is over for this node: free its blocks as soon as nobody here works on them."""
        if self.table.get(key) is not held or held.told:
            return
        held.ending = held.told = True
        held.outcome = outcome
        self._stop(key, held)
        self._free_if_over(key, held)

    def _stop(self, key: str, held: H) -> None:
        if held.in_engine and not held.stop_sent:
            held.stop_sent = True
            self._out.append(do.Stop(key))

    def _free_if_over(self, key: str, held: H) -> None:
        if held.told and not held.in_engine and not held.mover_busy:
            del self.table[key]
            self.pool.give_back(held.blocks, key)
            self._done(held.bell_id, held.outcome)
            self._freed()

    def _hand_back_all(self) -> None:
        for key, held in list(self.table.items()):
            if not held.ending:
                self._fail(key, held, FailureKind.OVERLOAD, FailureReason.DRAINING)

    # holdings (rule 3)

    def _holds(self) -> frozenset[str]:
        return frozenset(key for key, held in self.table.items() if not held.told)

    def _check_holdings(self) -> None:
        """Compare now and once every ``check_s``, in both directions."""
        if self._checking:
            return
        self._checking = True
        self._check_due += 1
        held_before = self._holds()
        asking_before = self._asking_for_work
        self._ask(
            Holdings(self.config.incarnation),
            partial(self._compare, held_before, asking_before),
            tries=0,
        )

    def _check_if_due(self, due: int) -> None:
        if due == self._check_due:
            self._check_holdings()

    def _compare(self, held_before: frozenset[str], asking_before: bool, answer: HoldingsAnswer | None) -> None:
        """Acts only on what was held, or absent with no call in flight, both before the read and after its answer."""
        self._checking = False
        self._at(self.config.check_s, partial(self._check_if_due, self._check_due))
        if answer is None:
            return
        if answer.status is ReadStatus.UNKNOWN:
            self._lost_registration()
            return
        given = {_key(one): one for one in self._given(answer)}
        held_now = self._holds()
        for key in sorted((held_before & held_now) - given.keys()):
            self._let_go(key)
        if not (asking_before or self._asking_for_work):
            for key in sorted(given.keys() - held_before - held_now):
                self._hand_back(given[key])
        for key in sorted(given.keys() & self.table.keys()):
            self._reconsider(key, self.table[key], given[key])
        if self._waits(answer):
            self._work_waits()

    def _let_go(self, key: str) -> None:
        """The ledger no longer gives us ``key``: stop its work and free its blocks when that has stopped."""
        held = self.table.get(key)
        if held is not None and not self._decides_itself(held):
            self._log("let go", held)
            self._over(key, held, "let go")

    def _hand_back(self, given: HeldClaim | HeldLease) -> None:
        """The ledger gives us what we do not have (our call was applied late): somebody else shall do it."""
        fail = FailAttempt(
            given.uid,
            given.attempt,
            given.fence,
            self.config.incarnation,
            given.lease_id if isinstance(given, HeldLease) else "",
            FailureKind.OVERLOAD,
            FailureReason.HANDED_BACK,
            "given to a node that does not hold it",
        )
        self._ask(fail, partial(self._handed_back, given), tries=0)

    def _handed_back(self, given: HeldClaim | HeldLease, answer: FailAnswer | None) -> None:
        if answer is not None and answer.status is FailStatus.REQUEUED:
            self._out.append(do.Log("handed back", given.uid, {"attempt": given.attempt}, "warning"))
            self._ring(Bell("prefill", given.uid, answer.attempt))

    def _ring(self, bell: Bell) -> None:
        self._out.append(do.Ring(bell))

    def _log(self, event: str, held: H, level: str = "info", **fields: str | int) -> None:
        who: dict[str, str | int] = {"request_id": held.client_id, "attempt": held.attempt}
        self._out.append(do.Log(event, held.uid, who | fields, level))


def _key(given: HeldClaim | HeldLease) -> str:
    return given.lease_id if isinstance(given, HeldLease) else given.fence
