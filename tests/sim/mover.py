"""A node's make-believe KV mover: one job after the other, block by block, so that much can happen in between."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from app.protocol import effects as do
from app.protocol import events as on
from app.protocol.tables import BlockState
from app.schemas import KVLocation
from tests.sim.kv_memory import KVMemory
from tests.sim.process import Part

if TYPE_CHECKING:
    from tests.sim.node import KVNode

Job = do.Seal | do.Check | do.Pull
_MAY_WRITE = (BlockState.PULLING,)


class Mover(Part):
    """Seals the node's own blocks, pulls a peer's."""

    process: KVNode

    def __init__(self, node: KVNode) -> None:
        self.process = node
        self.entered_at: float | None = None
        """When the running job began; what the watchdog looks at."""
        self.moving = ""
        """The handoff of the running job, or of the last one."""
        self.stuck = False
        """A job that is running, or begins, never ends."""
        self._jobs: deque[Job] = deque()

    def put(self, job: Job) -> None:
        """Hand over a job."""
        self._jobs.append(job)
        if self.entered_at is None:
            self._start()

    def get_stuck(self) -> None:
        """The running job, or the next one, never ends."""
        self.stuck = True

    def _start(self) -> None:
        world = self.process.world
        self.entered_at = world.timeline.now
        job = self._jobs.popleft()
        self.moving = job.key
        if not isinstance(job, do.Pull):
            self.after(len(job.blocks) * world.pace.block(), self._seal, job)
        else:
            self.after(world.pace.thread(), self._open, job)

    def _end(self, event: on.Sealed | on.Checked | on.Pulled) -> None:
        self.entered_at = None
        self.process.post(event)
        if self._jobs and self.entered_at is None:
            self._start()

    def _seal(self, job: do.Seal | do.Check) -> None:
        """Digest the blocks; of a seal, then re-read the generations at which they were taken (rule 6)."""
        if self.stuck:
            return
        node, memory = self.process, self.process.memory
        if isinstance(job, do.Check):
            self._end(on.Checked(job.key, tuple(memory.digest(block) for block in job.blocks)))
            return
        digests = tuple(known or memory.digest(block) for block, known in zip(job.blocks, job.known, strict=True))
        if tuple(memory.generations[block] for block in job.blocks) != job.generations:
            self._end(on.Sealed(job.key, None, error="a block was given to its next use before it was handed over"))
            return
        location = KVLocation(
            pid=1,
            fd=1,
            incarnation=node.incarnation,
            num_blocks=len(memory.blocks),
            block_bytes=1,
            layout="layout",
        )
        self._end(on.Sealed(job.key, location, digests))

    def _open(self, job: do.Pull) -> None:
        source = self.process.world.memory_of(job.location.incarnation)
        if source is None:
            self._end(on.Pulled(job.key, "gone", f"the pool of {job.location.incarnation} is gone"))
        else:
            self._copy(job, source, 0)

    def _copy(self, job: do.Pull, source: KVMemory, number: int) -> None:
        """Copy one block; validate after the last one."""
        if self.stuck:
            return
        node = self.process
        theirs, ours = job.source[number], job.target[number]
        node.check_writes(ours, job.key, _MAY_WRITE)
        node.memory.blocks[ours][:] = source.blocks[theirs]
        node.world.faults.copied(node.incarnation, node.memory, ours)
        if number + 1 < len(job.source):
            self.after(node.world.pace.block(), self._copy, job, source, number + 1)
        else:
            self._validate(job, source)

    def _validate(self, job: do.Pull, source: KVMemory) -> None:
        if tuple(source.generations[block] for block in job.source) != job.generations:
            self._end(on.Pulled(job.key, "generation", "a block was given to its next use"))
        elif tuple(self.process.memory.digest(block) for block in job.target) != job.digests:
            self._end(on.Pulled(job.key, "digest", "a block is not what was sealed"))
        else:
            self._end(on.Pulled(job.key))
