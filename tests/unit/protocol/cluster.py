"""Prefill and decode machines over the memory twin, on a virtual clock, with an engine that reads what its blocks hold.

A token is a hash of the token ids found in the sequence's blocks plus the last one, so KV that is not the request's
own shows as a wrong token. Faults are injected by replacing ``deliver`` and ``ledger_fault``.
"""

from __future__ import annotations

import hashlib
import heapq
import itertools
import json
from collections.abc import Callable
from dataclasses import dataclass, field

from app.errors import LedgerUnknown
from app.ledger.memory import MemoryLedger
from app.protocol import effects as do
from app.protocol import events as on
from app.protocol.blocks import BlockPool
from app.protocol.commands import (
    Admit,
    AdmitAnswer,
    Bell,
    Command,
    Heartbeat,
    Limits,
    Register,
    Scan,
    Snapshot,
    SnapshotAnswer,
    Watcher,
)
from app.protocol.decode import DecodeNode
from app.protocol.holding import NodeConfig
from app.protocol.messages import Message
from app.protocol.prefill import PrefillNode
from app.protocol.tables import DECODE_BLOCK_STEPS, PREFILL_BLOCK_STEPS
from app.schemas import Gauges, KVLocation, NodeInfo, SamplingParams

BLOCK = 4
EOS = 0
TICK = 0.001
STEP = 0.01
LIMITS = Limits(
    max_attempts=3, max_queued=100, queue_timeout_ms=60_000, first_token_timeout_ms=20_000, record_ttl_ms=600_000
)


def next_token(context: tuple[int, ...]) -> int:
    """The model: 1..996, or EOS about once in 50 tokens."""
    number = int.from_bytes(hashlib.blake2b(json.dumps(context).encode(), digest_size=4).digest(), "big")
    return EOS if number % 50 == 0 else number % 997


def reference(prompt: tuple[int, ...], max_tokens: int) -> tuple[int, ...]:
    """The answer of an undisturbed run, computed without any of the code under test."""
    answer: tuple[int, ...] = ()
    while len(answer) < max_tokens and (not answer or answer[-1] != EOS):
        answer += (next_token(prompt + answer),)
    return answer


@dataclass
class Running:
    job: do.Start
    tokens: list[int]


@dataclass
class Runner:
    """A machine and its make-believe engine, mover and bells."""

    cluster: Cluster
    machine: PrefillNode | DecodeNode
    incarnation: str
    generations: list[int]
    memory: dict[int, tuple[int, ...]] = field(default_factory=dict)
    sequences: dict[str, Running] = field(default_factory=dict)
    outcomes: list[str] = field(default_factory=list)
    stepping: bool = False
    dead: bool = False
    log: list[do.Log] = field(default_factory=list)

    def feed(self, event: on.Event) -> None:
        if not self.dead:
            for effect in self.machine.receive(event, self.cluster.now):
                self.perform(effect)
            self.poll()

    def poll(self) -> None:
        if self.dead:
            return
        for effect in self.machine.poll(self.cluster.now):
            self.perform(effect)
        deadline = self.machine.next_deadline
        if deadline is not None:
            self.cluster.at(deadline, self.poll)

    def perform(self, effect: do.Effect) -> None:
        cluster = self.cluster
        match effect:
            case do.Ask():
                cluster.after(TICK, lambda: cluster.ask(self, effect))
            case do.Call():
                cluster.after(TICK, lambda: cluster.deliver(self, effect))
            case do.Ring() | do.RingSelf() | do.BellDone() | do.Log():
                self.tell(effect)
            case do.Start():
                self.start(effect)
            case do.Stop():
                cluster.after(STEP, lambda: self.stop(effect.key))
            case do.Seal():
                cluster.after(TICK, lambda: self.seal(effect))
            case do.Pull():
                cluster.after(TICK, lambda: self.pull(effect))
            case do.Register():
                cluster.register(self)
            case do.ReplyTo():
                cluster.replies[effect.call_id](effect.reply)

    def tell(self, effect: do.Ring | do.RingSelf | do.BellDone | do.Log) -> None:
        match effect:
            case do.Ring():
                self.cluster.ring(effect.bell)
            case do.RingSelf():
                self.cluster.after(TICK, lambda: self.feed(on.BellRang(self.cluster.draw(), "", 0)))
            case do.BellDone():
                self.outcomes.append(effect.outcome)
            case do.Log():
                self.log.append(effect)

    # engine

    def start(self, job: do.Start) -> None:
        tokens = [*job.work.prompt_ids, *job.work.output_ids]
        self.sequences[job.key] = Running(job, tokens)
        if not self.stepping:
            self.stepping = True
            self.cluster.after(STEP, self.step)

    def stop(self, key: str) -> None:
        self.sequences.pop(key, None)
        self.feed(on.Stopped(key))

    def step(self) -> None:
        self.stepping = False
        if self.dead:
            return
        samples = []
        for key, running in list(self.sequences.items()):
            work, blocks = running.job.work, running.job.blocks
            first = running.job.num_computed if running.job.one_token else len(running.tokens) - 1
            for position in range(first, len(running.tokens)):
                held = self.memory.get(blocks[position // BLOCK], ())[: position % BLOCK]
                self.memory[blocks[position // BLOCK]] = (*held, running.tokens[position])
            count = -(-len(running.tokens) // BLOCK)
            seen = tuple(itertools.chain.from_iterable(self.memory[block] for block in blocks[:count]))
            token = next_token(seen)
            running.tokens.append(token)
            index = len(running.tokens) - len(work.prompt_ids) - 1
            ends = (token == EOS and not work.sampling.ignore_eos, index + 1 >= work.sampling.max_tokens)
            finish = "stop" if ends[0] else "length" if ends[1] else None
            if finish is not None or running.job.one_token:
                del self.sequences[key]
            samples.append(on.Sample(key, index, token, finish))  # type: ignore[arg-type]
        if self.sequences:
            self.stepping = True
            self.cluster.after(STEP, self.step)
        self.feed(on.Stepped(tuple(samples)))

    # mover

    def digest(self, block: int) -> str:
        return hashlib.blake2b(json.dumps(self.memory.get(block, ())).encode(), digest_size=16).hexdigest()

    def seal(self, job: do.Seal) -> None:
        location = KVLocation(
            pid=1, fd=1, incarnation=self.incarnation, num_blocks=len(self.generations), block_bytes=1, layout="x"
        )
        kept = tuple(self.generations[block] for block in job.blocks) == job.generations
        digests = tuple(self.digest(block) for block in job.blocks)
        self.feed(on.Sealed(job.key, location, digests, "" if kept else "given away"))

    def pull(self, job: do.Pull) -> None:
        source = self.cluster.runners[job.location.incarnation]
        for theirs, ours in zip(job.source, job.target, strict=True):
            self.memory[ours] = source.memory.get(theirs, ())
        same = tuple(source.generations[block] for block in job.source) == job.generations
        right = tuple(self.digest(block) for block in job.target) == job.digests
        reason = "" if same and right else "generation" if not same else "digest"
        self.feed(on.Pulled(job.key, reason))


class Cluster:
    """``prefill`` and ``decode`` nodes named p0, p1, …, d0, d1, … and one ledger."""

    def __init__(self, prefill: int = 1, decode: int = 1, num_blocks: int = 16, max_num_seqs: int = 8) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._count = itertools.count()
        self.ledger = MemoryLedger(lambda: 1_000_000 + int(1000 * self.now))
        self.runners: dict[str, Runner] = {}
        self.replies: dict[str, Callable[[object], None]] = {}
        self.sent: list[Message] = []
        self.lose_bell: Callable[[Bell], bool] = lambda bell: False
        self.lose_message: Callable[[Message], bool] = lambda message: False
        self.lose_reply: Callable[[Message], bool] = lambda message: False
        self.ledger_fault: Callable[[Command], str] = lambda command: ""
        """"" = none, "lost" = never applied, "unanswered" = applied, but the answer is lost."""
        self.ledger.execute(Register(NodeInfo(incarnation="w", role="web", name="w", pid=1, host="h"), 10_000_000))
        for number in range(prefill):
            self._add("prefill", f"p{number}", num_blocks, max_num_seqs)
        for number in range(decode):
            self._add("decode", f"d{number}", num_blocks, max_num_seqs)
        self._beat()

    def _add(self, role: str, name: str, num_blocks: int, max_num_seqs: int) -> None:
        generations = [0] * num_blocks

        def bump(block: int) -> int:
            generations[block] += 1
            return generations[block]

        config = NodeConfig(
            incarnation=name,
            name=name,
            address=name,
            block_size_tokens=BLOCK,
            block_bytes=1,
            max_num_seqs=max_num_seqs,
            eos_token_ids=frozenset({EOS}),
            link_timeout_s=2.0,
            pull_min_bytes_per_s=1000.0,
            check_s=1.0,
            emit_buffer_tokens=6,
        )
        kind, steps = (PrefillNode, PREFILL_BLOCK_STEPS) if role == "prefill" else (DecodeNode, DECODE_BLOCK_STEPS)
        machine = kind(config, BlockPool(num_blocks, steps, bump), self.draw)
        self.runners[name] = Runner(self, machine, name, generations)
        self.register(self.runners[name])

    def register(self, runner: Runner) -> None:
        role = runner.machine.queue
        info = NodeInfo(
            incarnation=runner.incarnation,
            role="prefill" if role == "prefill" else "decode",
            name=runner.incarnation,
            pid=1,
            host="h",
            address=runner.incarnation,
            layout="x",
            num_blocks=len(runner.generations),
            block_size_tokens=BLOCK,
        )
        self.ledger.execute(Register(info, 5000))
        self.after(TICK, lambda: runner.feed(on.Registered()))

    # time

    def draw(self) -> str:
        return f"id{next(self._count)}"

    def at(self, when: float, what: Callable[[], None]) -> None:
        heapq.heappush(self._events, (max(when, self.now), next(self._count), what))

    def after(self, in_s: float, what: Callable[[], None]) -> None:
        self.at(self.now + in_s, what)

    def run(self, until: Callable[[], bool] | None = None, limit_s: float = 60.0) -> None:
        """Run until the condition holds (or, without one, for ``limit_s``); it must hold within ``limit_s``."""
        end = self.now + limit_s
        look_at = self.now
        while self._events and self._events[0][0] <= end:
            self.now, _, what = heapq.heappop(self._events)
            what()
            self.check()
            if until is not None and self.now >= look_at:
                if until():
                    return
                look_at = self.now + STEP / 2
        if until is not None:
            raise AssertionError(f"not reached in {limit_s} s: {[r.machine.table for r in self.runners.values()]}")
        self.now = end

    def check(self) -> None:
        """Invariants after every event: no block lost or held twice."""
        for runner in self.runners.values():
            runner.machine.audit()

    def _beat(self) -> None:
        self.ledger.execute(Heartbeat("w", Gauges()))
        for name, runner in self.runners.items():
            if not runner.dead:
                self.ledger.execute(Heartbeat(name, Gauges()))
        for bell in self.ledger.execute(Scan(500)).bells:
            self.ring(bell)
        self.after(0.5, self._beat)

    # wires

    def ring(self, bell: Bell) -> None:
        if self.lose_bell(bell):
            return
        living = [r for r in self.runners.values() if r.machine.queue == bell.queue and not r.dead]
        roomy = [r for r in living if r.machine.wants_bells] or living
        if roomy:
            runner = roomy[next(self._count) % len(roomy)]
            self.after(TICK, lambda: runner.feed(on.BellRang(self.draw(), bell.uid, bell.attempt)))

    def ask(self, runner: Runner, ask: do.Ask) -> None:
        fault = self.ledger_fault(ask.command)
        answer = None
        if fault != "lost":
            try:
                answer = self.ledger.execute(ask.command)
            except LedgerUnknown:
                answer = None
        if fault or answer is None:
            self.after(TICK, lambda: runner.feed(on.AskFailed(ask.tag, "fault")))
        else:
            self.after(TICK, lambda: runner.feed(on.Answered(ask.tag, answer)))

    def deliver(self, sender: Runner, call: do.Call) -> None:
        self.sent.append(call.message)
        peer = self.runners.get(call.incarnation)
        if peer is None or peer.dead or self.lose_message(call.message):
            self.after(call.timeout_s, lambda: sender.feed(on.CallEnded(call.tag, None, "lost")))
            return
        call_id = self.draw()
        self.after(call.timeout_s, lambda: sender.feed(on.CallEnded(call.tag, None, "no answer")))

        def replied(reply: object) -> None:
            if not self.lose_reply(call.message):
                self.after(TICK, lambda: sender.feed(on.CallEnded(call.tag, reply)))  # type: ignore[arg-type]

        self.replies[call_id] = replied
        peer.feed(on.Called(call_id, call.message))

    # requests

    def submit(self, prompt: tuple[int, ...], max_tokens: int = 10, client: str = "", **limits: int) -> str:
        """Admit a request and ring; returns its uid."""
        uid = self.draw()
        admit = Admit(
            uid=uid,
            client_id=client or uid,
            prompt_ids=prompt,
            sampling=SamplingParams(temperature=0, seed=1, max_tokens=max_tokens),
            watcher=Watcher("w", "c"),
            limits=Limits(**{**{f: getattr(LIMITS, f) for f in Limits.__slots__}, **limits}),
        )
        answer: AdmitAnswer = self.ledger.execute(admit)
        assert answer.status == "ADMITTED", answer
        self.ring(Bell("prefill", uid, 1))
        return uid

    def snapshot(self, uid: str) -> SnapshotAnswer:
        return self.ledger.execute(Snapshot(uid=uid))

    def ended(self, *uids: str) -> Callable[[], bool]:
        return lambda: all(self.snapshot(uid).state in ("FINISHED", "FAILED", "ABORTED", "EXPIRED") for uid in uids)

    def at_baseline(self) -> bool:
        """All blocks free, nothing in any table, no lease in the ledger."""
        living = [runner for runner in self.runners.values() if not runner.dead]
        return all(r.machine.idle and r.machine.pool.free == len(r.generations) for r in living)
