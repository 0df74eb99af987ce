"""A prefill or decode worker process: the real machine, and make-believe parts that do its effects.

Acts as ``workers.host`` does: the machine's thread takes all events that wait, one after the other; questions to the
ledger go out in one round trip; heartbeats carry the watchdog; a bell is in flight until its work has left the node.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import chain
from typing import TYPE_CHECKING, Any, Literal

from app.errors import LedgerError
from app.protocol import effects as do
from app.protocol import events as on
from app.protocol.blocks import BlockPool
from app.protocol.commands import Bell, Deregister, Drain
from app.protocol.decode import DecodeNode
from app.protocol.holding import NodeConfig
from app.protocol.prefill import PrefillNode
from app.protocol.prefix_cache import PrefixPool
from app.protocol.tables import DECODE_BLOCK_STEPS, BlockState, IllegalStep
from app.schemas import NodeInfo
from tests.sim.engine import Engine
from tests.sim.heartbeat import Beats
from tests.sim.kv_memory import KVMemory
from tests.sim.last_words import LastWords
from tests.sim.ledger_client import LedgerClient, Results
from tests.sim.model import BLOCK_TOKENS, EOS, NOTHING_YET, kv_of
from tests.sim.mover import Mover
from tests.sim.process import Part, Process
from tests.sim.times import LAST_WORDS_S
from tests.sim.wires import Link

if TYPE_CHECKING:
    from tests.sim.scenario import Shape
    from tests.sim.world import World

Role = Literal["prefill", "decode"]
_AUDIT_EVERY = 16
_CACHE_COUNTS = {"evicted_blocks": "cached block evicted", "corrupted_blocks": "corrupted block dropped"}


class LedgerLane(Part):
    """A thread that asks: all questions that wait in one round trip, then the next ones."""

    process: KVNode

    def __init__(self, node: KVNode) -> None:
        self.process = node
        self._waiting: list[do.Ask] = []
        self._asked: list[do.Ask] = []
        self.busy = False

    def put(self, question: do.Ask) -> None:
        self._waiting.append(question)
        if not self.busy:
            self.busy = True
            self.after(self.process.world.pace.thread(), self._ask)

    def _ask(self) -> None:
        self._asked, self._waiting = self._waiting, []
        self.process.client.call(tuple(question.command for question in self._asked), self._answered)

    def _answered(self, results: Results) -> None:
        for question, result in zip(self._asked, results, strict=True):
            if isinstance(result, LedgerError):
                self.process.post(on.AskFailed(question.tag, str(result)))
            else:
                self.process.post(on.Answered(question.tag, result))
        if self._waiting:
            self._ask()
        else:
            self.busy = False


class KVNode(Process):
    """One life of a node. ``machine`` is the code under test."""

    def __init__(self, world: World, name: str, life: int, role: Role, shape: Shape) -> None:
        super().__init__(world, name, life)
        self.role: Role = role
        self.memory = KVMemory(shape.num_blocks)
        self.client = LedgerClient(self)
        self.engine = Engine(self, shape.max_num_seqs, shape.max_num_batched_tokens)
        self.mover = Mover(self)
        self.link = Link(self)
        self._lanes = [LedgerLane(self) for _ in range(world.scenario.ledger_lanes)]
        self.machine = self._make_machine(shape)
        self.beats = Beats(self, self, self._info(shape), self.client)
        self.last_words = LastWords(self)
        self.leaving = False
        self._inbox: list[on.Event] = []
        self._looking = False
        self._looks = 0
        self._cache_counts: Mapping[str, int] = {}
        self._alarm: float | None = None
        self._bells: set[str] = set()
        """Bells in flight."""
        self._refused_since: float | None = None
        self._perform: dict[type, Callable[[Any], None]] = {
            do.Ask: self._ask,
            do.Start: self.engine.put,
            do.Extend: self.engine.put,
            do.Stop: self.engine.put,
            do.Seal: self.mover.put,
            do.Check: self.mover.put,
            do.Pull: self.mover.put,
            do.Call: self.link.call,
            do.ReplyTo: self._reply,
            do.Ring: self._ring,
            do.RingSelf: self._ring_self,
            do.BellDone: self._bell_done,
            do.Register: self._register,
            do.Log: self._log,
        }

    def _make_machine(self, shape: Shape) -> PrefillNode | DecodeNode:
        times = self.world.times
        config = NodeConfig(
            incarnation=self.incarnation,
            name=self.name,
            address=self.name,
            block_size_tokens=BLOCK_TOKENS,
            block_bytes=1,
            max_num_seqs=shape.max_num_seqs,
            eos_token_ids=frozenset({EOS}),
            link_timeout_s=times.link_timeout_s,
            pull_min_bytes_per_s=times.pull_min_blocks_per_s,  # a block has one byte here
            check_s=times.check_s,
            grant_timeout_s=times.grant_timeout_s,
            max_num_batched_tokens=shape.max_num_batched_tokens,
            emit_buffer_tokens=shape.emit_buffer_tokens,
        )
        if self.role == "prefill":
            return PrefillNode(config, PrefixPool(shape.num_blocks, self.memory.bump), self.draw)
        return DecodeNode(config, BlockPool(shape.num_blocks, DECODE_BLOCK_STEPS, self.memory.bump), self.draw)

    def _info(self, shape: Shape) -> NodeInfo:
        return NodeInfo(
            incarnation=self.incarnation,
            role=self.role,
            name=self.name,
            pid=1,
            host="host",
            address=self.name,
            model="model",
            layout="layout",
            num_blocks=shape.num_blocks,
            block_size_tokens=BLOCK_TOKENS,
        )

    # the machine's thread

    def post(self, event: on.Event) -> None:
        """Something happened; the machine hears of it soon."""
        self._inbox.append(event)
        if not self._looking:
            self._looking = True
            self.after(self.world.pace.thread(), self._look)

    def _look(self) -> None:
        self._looking = False
        machine, now = self.machine, self.world.timeline.now
        inbox, self._inbox = self._inbox, []
        try:
            for event in inbox:
                for effect in machine.receive(event, now):
                    self._perform[type(effect)](effect)
            for effect in machine.poll(now):
                self._perform[type(effect)](effect)
        except IllegalStep as error:
            raise self.world.violation(f"{self.name}: {error}") from error
        self._count_cache()
        deadline = machine.next_deadline
        if deadline is not None and (self._alarm is None or deadline < self._alarm):
            self._alarm = deadline
            self.after(max(0.0, deadline - now), self._wake, deadline)
        self._looks += 1
        if self._looks % _AUDIT_EVERY == 0 or (machine.idle and not self._bells):
            self.audit()
        if machine.wants_bells and not self._inbox and not self.last_words.begun:
            self.world.broker.listens(self)

    def _count_cache(self) -> None:
        counts = self.machine.cache_counts()
        for name, what in _CACHE_COUNTS.items():
            self.world.counts[what] += counts.get(name, 0) - self._cache_counts.get(name, 0)
        self._cache_counts = counts

    def _wake(self, alarm: float) -> None:
        if self._alarm == alarm:
            self._alarm = None
            self._look()

    def _ask(self, effect: do.Ask) -> None:
        lane = next((lane for lane in self._lanes if not lane.busy), self._lanes[0])
        lane.put(effect)

    def _reply(self, effect: do.ReplyTo) -> None:
        self.link.reply(effect)

    def _ring(self, effect: do.Ring) -> None:
        self.world.broker.ring(self, effect.bell)

    def _ring_self(self, effect: do.RingSelf) -> None:
        self.world.broker.ring(self, Bell(self.role, "", 0))

    def _bell_done(self, effect: do.BellDone) -> None:
        if effect.bell_id not in self._bells:
            raise self.world.violation(f"{self.name}: a bell's task ends that is not in flight")
        self._bells.discard(effect.bell_id)

    def _register(self, effect: do.Register) -> None:
        self.beats.register()

    def _log(self, effect: do.Log) -> None:
        self.world.count_log(effect)
        self.world.note(self.name, "log", effect.uid, effect)

    # bells

    def hears(self, bell: Bell) -> None:
        """A bell from the broker."""
        self.world.note(self.name, "hears", bell.uid, bell)
        bell_id = self.draw()
        self._bells.add(bell_id)
        self.world.faults.rots(self)
        self.post(on.BellRang(bell_id, bell.uid, bell.attempt))

    # what the heartbeats tell

    def on_beat(self) -> None:
        """The watchdog: a part that is stuck ends the process, after some last words."""
        for part in () if self.last_words.begun else (self.engine, self.mover):
            entered_at = part.entered_at
            if entered_at is not None and self.world.timeline.now - entered_at > self.world.times.engine_stall_s:
                moving = self.mover.moving if part is self.mover else None
                self.last_words.say(f"the {type(part).__name__.lower()} is stuck", moving)
                return

    def on_registered(self) -> None:
        self._refused_since = None
        self.post(on.Registered())

    def on_registration_lost(self) -> None:
        self.world.note(self.name, "is no longer registered", "")
        self.post(on.RegistrationLost())

    def on_refused(self) -> None:
        now = self.world.timeline.now
        self._refused_since = now if self._refused_since is None else self._refused_since
        if now - self._refused_since >= self.world.times.node_ttl_s + 2.0:
            self.crash("the cluster will not have it")

    def on_draining(self) -> None:
        self.post(on.DrainAsked(self.world.times.drain_timeout_s))

    def on_ledger_restarted(self) -> None:
        self.post(on.LedgerRestarted())

    def after_beat(self) -> None:
        """Nothing to do."""

    # ends

    def drain(self) -> None:
        """SIGTERM: finish or hand back what is here, leave the registry, exit."""
        if self.leaving:
            return
        self.leaving = True
        self.post(on.DrainAsked())
        self.client.call((Drain(self.incarnation),), self._nothing)
        self.after(0.05, self._wait_idle, self.world.timeline.now + self.world.times.drain_timeout_s, False)

    def _wait_idle(self, deadline: float, asked_back: bool) -> None:
        if self.machine.draining and self.machine.idle:
            self._leave()
        elif self.world.timeline.now < deadline:
            self.after(0.05, self._wait_idle, deadline, asked_back)
        elif not asked_back:
            self.post(on.HandBackAsked())
            self.after(0.05, self._wait_idle, self.world.timeline.now + LAST_WORDS_S, True)
        else:
            self._leave()

    def _leave(self) -> None:
        self.beats.close()
        self.client.call((Deregister(self.incarnation),), self._left)

    def _left(self, results: Results) -> None:
        self.crash("drained")

    def _nothing(self, results: Results) -> None:
        """Others find out by themselves what we wanted to say."""

    def crash(self, why: str) -> None:
        """The process ends here."""
        self.world.end_process(self, why)

    # checks

    def check_writes(self, block: int, key: str, states: tuple[BlockState, ...]) -> None:
        """Engine or mover write to ``block`` for ``key``: is it theirs, and would a reader of its last use notice?"""
        owner, state = self.machine.pool.owner_of(block)
        if owner != key or state not in states:
            raise self.world.violation(
                f"{self.name}: {key} writes to block {block}, which is {state} of {owner or '-'}"
            )
        if not self.memory.is_new_use(block, key):
            raise self.world.violation(f"{self.name}: {key} writes to block {block} without a new generation")

    def check_starts(self, job: do.Start, tokens: list[int]) -> None:
        """A prompt that is not computed from its first token: is what it starts from the KV of its own tokens and its
        own salt, and pinned for it; and is its last token left to compute?"""
        if not job.num_computed:
            return
        self.world.count("prompt found in the cache")
        known = job.blocks[: job.num_computed // BLOCK_TOKENS]
        before, expected = NOTHING_YET, []
        for token in tokens[: job.num_computed]:
            before = kv_of(before, token)
            expected.append(before)
        found = list(chain.from_iterable(self.memory.blocks[block] for block in known))
        if found != expected or job.num_computed >= len(tokens):
            raise self.world.violation(f"{self.name}: {job.key} starts from KV that is not its own", job.work.uid)
        pool = self.machine.pool
        for block in known:
            if self.memory.salts[block] != job.work.salt:
                raise self.world.violation(f"{self.name}: {job.key} starts from KV of another salt", job.work.uid)
            if pool.owner_of(block)[1] is not BlockState.HELD or job.key not in pool.holders_of(block):
                raise self.world.violation(f"{self.name}: {job.key} has not pinned block {block}", job.work.uid)
        if any(len(pool.holders_of(block)) > 1 for block in known):
            self.world.count("cached block shared")

    def audit(self) -> None:
        """Blocks by state sum to the pool, none is held twice."""
        try:
            self.machine.audit()
        except IllegalStep as error:
            raise self.world.violation(f"{self.name}: {error}") from error

    @property
    def at_rest(self) -> bool:
        """Registered, with nothing held, nothing on its way and no bell in flight."""
        machine = self.machine
        return (
            self.beats.registered
            and machine.registered
            and machine.idle
            and machine.pool.free == machine.pool.num_blocks
            and not self._bells
        )
