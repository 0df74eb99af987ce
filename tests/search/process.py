"""One node's process: the real machine, and the least of an engine, a mover and a KV memory that can do its effects.

Each method is one happening of this process. It leaves in ``out`` what the process wants from the rest of the world.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from app.protocol import effects as do
from app.protocol import events as on
from app.protocol.blocks import BlockPool
from app.protocol.commands import Bell
from app.protocol.decode import DecodeNode
from app.protocol.holding import NodeConfig
from app.protocol.prefill import PrefillNode
from app.protocol.prefix_cache import PrefixPool
from app.protocol.tables import DECODE_BLOCK_STEPS, BlockState
from app.schemas import KVLocation
from tests.search.configuration import CHECK_S, LINK_TIMEOUT_S, Configuration
from tests.search.violation import Violation
from tests.sim.kv_memory import KVMemory
from tests.sim.model import BLOCK_TOKENS, EOS, NOTHING_YET, kv_of, next_token

Outgoing = do.Ask | do.Call | do.ReplyTo | do.Ring | do.Register
BELL_ID = "bell"
"""Of every bell in flight: a process counts them, and nothing else about them matters."""
_COMPUTED_IN = (BlockState.RUNNING, BlockState.IN_STEP)
_LARGE = 10**6
View = tuple[tuple[tuple[int, ...], ...], tuple[int, ...]]
"""Contents and generations of some blocks."""


class Supply:
    """Fresh ids and generations for what a process does next; given from outside, so that unused ones come back."""

    def __init__(self) -> None:
        self.name = ""
        self.generation = 0
        self.used = False

    def draw(self) -> str:
        """The fresh id. One happening never needs two."""
        self.used = True
        name, self.name = self.name, ""
        if not name:
            raise Violation("one happening draws two ids")
        return name


class Memory(KVMemory):
    """KV blocks whose generations are drawn from the supply."""

    def __init__(self, num_blocks: int, supply: Supply) -> None:
        super().__init__(num_blocks)
        self.writers = [""] * num_blocks
        """Who has written since the block was taken."""
        self._supply = supply

    def bump(self, block: int) -> int:
        self._supply.used = True
        self.generations[block] = self._supply.generation
        self.writers[block] = ""
        return self.generations[block]

    def view(self, blocks: Sequence[int]) -> View:
        """What a reader of these blocks sees."""
        return (
            tuple(tuple(self.blocks[block]) for block in blocks),
            tuple(self.generations[block] for block in blocks),
        )


@dataclass(slots=True)
class Running:
    """A sequence in the engine."""

    job: do.Start
    tokens: list[int]
    num_computed: int
    table: list[int]
    """Its blocks; those that it got later too."""

    @property
    def has_room(self) -> bool:
        """Whether its blocks hold one more position."""
        return self.num_computed < BLOCK_TOKENS * len(self.table)


class Process:
    """One life of a prefill or decode node."""

    def __init__(self, configuration: Configuration, name: str, incarnation: str) -> None:
        prefill = name.startswith("p")
        num_blocks = configuration.prefill_blocks if prefill else configuration.decode_blocks
        self.incarnation = incarnation
        self.supply = Supply()
        self.memory = Memory(num_blocks, self.supply)
        config = NodeConfig(
            incarnation=incarnation,
            name=name,
            address=name,
            block_size_tokens=BLOCK_TOKENS,
            block_bytes=0,
            max_num_seqs=num_blocks,
            eos_token_ids=frozenset({EOS}),
            link_timeout_s=LINK_TIMEOUT_S,
            pull_min_bytes_per_s=1.0,
            check_s=CHECK_S,
            grant_timeout_s=configuration.grant_timeout_s,
        )
        self.machine = (
            PrefillNode(config, PrefixPool(num_blocks, self.memory.bump), self.supply.draw)
            if prefill
            else DecodeNode(config, BlockPool(num_blocks, DECODE_BLOCK_STEPS, self.memory.bump), self.supply.draw)
        )
        self.inbox: list[do.Start | do.Extend | do.Stop] = []
        self.running: dict[str, Running] = {}
        """Sequences of the engine; while it has any, a step runs unless it stands ``between`` two."""
        self.between = True
        self.jobs: list[do.Seal | do.Check | do.Pull] = []
        self.copied = False
        """The mover has copied what its first job pulls, and not yet validated it."""
        self.bells = 0
        """Bells in flight."""
        self.now = 0.0
        """Seconds on this process's clock."""
        self.out: list[Outgoing] = []

    # the machine

    def hear(self, event: on.Event) -> None:
        """Something happened to this node."""
        self.bells += isinstance(event, on.BellRang)
        self._perform(self.machine.receive(event, self.now))

    def poll(self) -> None:
        """A timer of the machine is due."""
        self._perform(self.machine.poll(self.now))

    def _perform(self, effects: list[do.Effect]) -> None:
        for effect in effects:
            match effect:
                case do.Start() | do.Extend() | do.Stop():
                    self.inbox.append(effect)
                case do.Seal() | do.Check() | do.Pull():
                    self.jobs.append(effect)
                case do.BellDone():
                    self.bells -= 1
                    if self.bells < 0:
                        raise Violation(f"{self.incarnation}: a bell's task ends that is not in flight")
                case do.RingSelf():
                    self.out.append(do.Ring(Bell(self.machine.queue, "", 0)))
                case do.Log():
                    pass
                case _:
                    self.out.append(effect)
                    self._stop_waiting(effect)

    def _stop_waiting(self, effect: do.Effect) -> None:
        """Of a call or question whose outcome the machine does not care about: it ends here and now."""
        machine: Any = self.machine
        if isinstance(effect, do.Call) and _is_nothing(machine._calls[effect.tag]):
            self.hear(on.CallEnded(effect.tag, None))
        elif isinstance(effect, do.Ask) and _is_nothing(machine._questions[effect.tag].then):
            self.hear(on.AskFailed(effect.tag, ""))

    # the engine

    @property
    def engine_works(self) -> bool:
        """Whether a step runs, or the engine has something in its inbox to look at."""
        return bool(self.inbox) or (bool(self.running) and not self.between)

    def engine_moves(self) -> None:
        """The running step ends; or, between two, the engine takes what is in its inbox and begins the next."""
        if not self.between:
            self.between = True
            samples = tuple(self._compute(running) for running in list(self.running.values()) if running.has_room)
            self.hear(on.Stepped(samples))
            if self.inbox:
                return
        inbox, self.inbox = self.inbox, []
        for job in inbox:
            if isinstance(job, do.Stop):
                self.running.pop(job.key, None)
                self.hear(on.Stopped(job.key))
            elif isinstance(job, do.Extend):
                if job.key in self.running:
                    self.running[job.key].table += job.blocks
            else:
                tokens = [*job.work.prompt_ids, *job.work.output_ids]
                self.running[job.key] = Running(job, tokens, job.num_computed, list(job.blocks))
        self.between = not any(running.has_room for running in self.running.values())

    def _compute(self, running: Running) -> on.Sample:
        """Write the KV of the next positions, and draw a token from all KV as the blocks hold it."""
        job, memory, tokens, table = running.job, self.memory, running.tokens, running.table
        before = NOTHING_YET
        if running.num_computed:
            position = running.num_computed - 1
            before = memory.blocks[table[position // BLOCK_TOKENS]][position % BLOCK_TOKENS]
        for position in range(running.num_computed, len(tokens)):
            block = table[position // BLOCK_TOKENS]
            self._may_write(block, job.key, _COMPUTED_IN)
            before = memory.blocks[block][position % BLOCK_TOKENS] = kv_of(before, tokens[position])
        running.num_computed = len(tokens)
        held = list(chain.from_iterable(memory.blocks[block] for block in table))
        index = len(tokens) - len(job.work.prompt_ids)
        token = next_token(held[: len(tokens)], job.work.sampling.seed, index)
        tokens.append(token)
        finish = index + 1 >= job.work.sampling.max_tokens
        if finish or job.one_token:
            del self.running[job.key]
        return on.Sample(job.key, index, token, "length" if finish else None)

    # the mover

    def seal(self) -> None:
        """Digest the blocks of the first job; of a seal, then read their generations again (rule 6)."""
        job = self.jobs.pop(0)
        if isinstance(job, do.Check):
            self.hear(on.Checked(job.key, tuple(self.memory.digest(block) for block in job.blocks)))
            return
        assert isinstance(job, do.Seal)
        digests = tuple(known or self.memory.digest(block) for block, known in zip(job.blocks, job.known, strict=True))
        if self.memory.view(job.blocks)[1] != job.generations:
            self.hear(on.Sealed(job.key, None, error="a block was given to its next use before it was handed over"))
            return
        location = KVLocation(
            pid=1, fd=1, incarnation=self.incarnation, num_blocks=_LARGE, block_bytes=1, layout="layout"
        )
        self.hear(on.Sealed(job.key, location, digests))

    def copy(self, source: View | None) -> None:
        """Copy the first job's blocks; ``source`` is None when their owner is gone."""
        job = self._pull()
        if source is None:
            self.jobs.pop(0)
            self.hear(on.Pulled(job.key, "gone", "the pool is gone"))
            return
        for contents, block in zip(source[0], job.target, strict=True):
            self._may_write(block, job.key, (BlockState.PULLING,))
            self.memory.blocks[block][:] = contents
        self.copied = True

    def validate(self, source: View | None) -> None:
        """Compare generations, then digests, of what was copied. A memory whose owner is gone changes no more."""
        job = self._pull()
        self.jobs.pop(0)
        self.copied = False
        if source is not None and source[1] != job.generations:
            self.hear(on.Pulled(job.key, "generation"))
        elif tuple(self.memory.digest(block) for block in job.target) != job.digests:
            self.hear(on.Pulled(job.key, "digest"))
        else:
            self.hear(on.Pulled(job.key))

    def _pull(self) -> do.Pull:
        job = self.jobs[0]
        assert isinstance(job, do.Pull)
        return job

    def _may_write(self, block: int, key: str, states: tuple[BlockState, ...]) -> None:
        """Is this block the writer's, and would a reader of its last use notice?"""
        owner, state = self.machine.pool.owner_of(block)
        if owner != key or state not in states:
            raise Violation(f"{self.incarnation}: {key} writes to block {block}, which is {state} of {owner or '-'}")
        if self.memory.writers[block] not in ("", key):
            raise Violation(f"{self.incarnation}: {key} writes to block {block} without a new generation")
        self.memory.writers[block] = key

    # what others see

    @property
    def at_rest(self) -> bool:
        """Registered, nothing held, nothing on its way, no bell in flight."""
        machine = self.machine
        busy = self.engine_works or self.running or self.jobs or self.bells or machine.draining
        return machine.registered and machine.idle and not busy and machine.pool.free == machine.pool.num_blocks

    @property
    def timer_ms(self) -> int | None:
        """When the machine's next timer is due, from now."""
        deadline = self.machine.next_deadline
        return None if deadline is None else round(1000 * (deadline - self.now))


def _is_nothing(then: Any) -> bool:
    return getattr(then, "__name__", "") == "_whatever"
