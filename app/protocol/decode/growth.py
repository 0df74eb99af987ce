"""How a lease grows with its answer, and who gives way when no block is free.

A lease starts with the blocks of prompt + output and one more. A running sequence gets the next one from this node's
own pool, a step before it needs it if one is free. If none is free when it cannot go on, the youngest lease is
preempted: handed back as overload, so that its next attempt goes on where it was, here or on another node. So the
oldest always goes on.

Nobody goes in circles: a new lease leaves one block free for each of those that still grow, so that many blocks are
filled before somebody is preempted again; and one that comes back needs all blocks that it had and one more, which only
the end of another brings.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable

from app.protocol import effects as do
from app.protocol.commands import FailureKind
from app.protocol.decode.lease import Lease, Phase
from app.protocol.decode.receive import Receiving
from app.protocol.tables import BlockState, FailureReason


class Growing(Receiving):
    """Gives running sequences their next blocks, before anybody who waits for his first."""

    @abstractmethod
    def _resume_if_told(self, lease_id: str, lease: Lease) -> None:
        """It may have room now."""

    def _room(self) -> int:
        """What is free, less one block for each lease that still grows. Else a new lease would take what somebody needs
        in the next steps, and be preempted for it before it has begun. (vLLM's watermark is a share of the pool.)
        """
        growing = sum(len(lease.blocks) < lease.most_blocks for lease in self.table.values() if not self._leaves(lease))
        return self.pool.free - growing

    def _freed(self) -> None:
        self._make_room()
        super()._freed()

    def _grow(self, lease_id: str, lease: Lease) -> None:
        """It has one more token. A block comes a step early if one is free: the engine does not wait for it then."""
        if self._leaves(lease) or lease.stop_sent:
            return
        if lease.needed_blocks(self.config.block_size_tokens, ahead=1) > len(lease.blocks):
            if self.pool.free:
                self._extend(lease_id, lease)
            elif self._is_short(lease):
                self._make_room()

    def _is_short(self, lease: Lease) -> bool:
        """Whether it could step if it had another block."""
        if lease.phase is not Phase.RUNNING or self._leaves(lease):
            return False
        waits = not lease.stop_sent if lease.in_engine else lease.told_length == len(lease.output)
        return waits and lease.needed_blocks(self.config.block_size_tokens) > len(lease.blocks)

    def _extend(self, lease_id: str, lease: Lease) -> None:
        blocks = self.pool.take(1, lease_id, BlockState.READY)
        lease.blocks += blocks
        if lease.in_engine:
            self.pool.move(blocks, lease_id, BlockState.IN_STEP)
            self._out.append(do.Extend(lease_id, blocks))
        else:
            self._resume_if_told(lease_id, lease)

    def _make_room(self) -> None:
        """Serve those that cannot step, the oldest first. For whom no block is free or comes back anyway, preempt the
        youngest; never the only one. Its blocks are free when ledger and engine have let it go (rule 5)."""
        short = self._by_age(key for key, lease in self.table.items() if self._is_short(lease))
        while short and self.pool.free:
            key = short.pop(0)
            self._extend(key, self.table[key])
        coming = sum(len(lease.blocks) for lease in self.table.values() if self._leaves(lease))
        staying = self._by_age(key for key, lease in self.table.items() if not self._leaves(lease))
        while len(short) > coming and len(staying) > 1:
            youngest = staying.pop()
            if short[-1] == youngest:
                short.pop()
            lease = self.table[youngest]
            coming += len(lease.blocks)
            detail = f"no KV block is free on {self.config.name} (BATON_NUM_BLOCKS)"
            self._fail(youngest, lease, FailureKind.OVERLOAD, FailureReason.PREEMPTED, detail)

    @staticmethod
    def _leaves(lease: Lease) -> bool:
        return lease.ending or lease.finish is not None

    def _by_age(self, keys: Iterable[str]) -> list[str]:
        """The oldest request first."""
        return sorted(keys, key=lambda key: self.table[key].seq)
