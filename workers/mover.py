"""The KV mover's work: seal a node's own blocks for a peer, check them, pull a peer's blocks into its own pool."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from app.errors import PullError
from app.protocol import effects as do
from app.protocol import events as on

if TYPE_CHECKING:
    from app.kv import KVTransport
    from workers.engine.engine import Engine


class Mover:
    """Runs on one lane: what it does for one handoff never overlaps with itself.

    ``between_steps(what)`` runs ``what`` on the engine's thread: only that one may touch a GPU's memory.
    """

    def __init__(
        self, engine: Engine, transport: KVTransport, between_steps: Callable[[Callable[[], None]], None]
    ) -> None:
        self._engine = engine
        self._transport = transport
        self._between_steps = between_steps

    def seal(self, job: do.Seal) -> on.Sealed:
        """Digest blocks, then re-read the generations at which they were taken (rule 6). A block that was sealed before
        keeps its digest: should its bytes have changed since, whoever pulls it finds out."""
        pool = self._engine.pool
        unknown = [block for block, digest in zip(job.blocks, job.known, strict=True) if not digest]
        if self._engine.staged and unknown:
            self._between_steps(lambda: self._engine.export(unknown))
        new = iter(pool.digest(unknown))
        digests = tuple(digest or next(new).hex() for digest in job.known)
        if tuple(int(pool.generations[block]) for block in job.blocks) != job.generations:
            return on.Sealed(job.key, None, error="a block was given to its next use before it was handed over")
        return on.Sealed(job.key, pool.location(), digests)

    def check(self, job: do.Check) -> on.Checked:
        """Digest what the blocks hold now; on a device, what lies there."""
        if self._engine.staged:
            self._between_steps(lambda: self._engine.export(job.blocks))
        return on.Checked(job.key, tuple(digest.hex() for digest in self._engine.pool.digest(job.blocks)))

    def move(self, job: do.Seal | do.Check | do.Pull) -> on.Sealed | on.Checked | on.Pulled:
        """Do one job."""
        match job:
            case do.Seal():
                return self.seal(job)
            case do.Check():
                return self.check(job)
            case do.Pull():
                return self.pull(job)

    def pull(self, job: do.Pull) -> on.Pulled:
        """Copy and validate. Returns only once nothing writes to the target blocks any more."""
        digests = [bytes.fromhex(digest) for digest in job.digests]
        try:
            self._transport.pull(job.location, job.source, job.generations, digests, self._engine.pool, job.target)
        except PullError as error:
            return on.Pulled(job.key, error.reason, str(error))
        if self._engine.staged:
            self._between_steps(lambda: self._engine.import_(job.target))
        return on.Pulled(job.key)
