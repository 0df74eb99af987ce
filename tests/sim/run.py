"""One seed from beginning to end: faults, then calm, then the baseline, then canaries."""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from app.schemas import SamplingParams
from tests.sim.blame import SERVED, must_serve
from tests.sim.client import Stream, Wish
from tests.sim.control import Beat
from tests.sim.invariants import Violation
from tests.sim.node import KVNode
from tests.sim.scenario import FAULTS_END_S, Kind, Scenario, draw_scenario
from tests.sim.world import Note, World

_AUDIT_EVERY_S = 1.0
_LOOK_EVERY_S = 0.25
_CANARY_S = 5.0


@dataclass(slots=True)
class Result:
    """What came of a seed."""

    seed: int
    violation: str = ""
    uid: str = ""
    """The request it is about, if it is about one."""
    outcomes: Counter[str] = field(default_factory=Counter)
    counts: Counter[str] = field(default_factory=Counter)
    virtual_s: float = 0.0
    notes: list[Note] = field(default_factory=list)


def run_seed(seed: int, only: Sequence[Kind] | None = None) -> Result:
    """Run one seed; with ``only`` under these kinds of trouble."""
    return run_scenario(draw_scenario(seed, only))


def run_scenario(scenario: Scenario) -> Result:
    """Run one scenario; a violation, or an exception of the product's code, ends it."""
    world = World(scenario)
    result = Result(scenario.seed, outcomes=world.outcomes, counts=world.counts, notes=world.notes)
    try:
        _disturbed(world)
        _until_baseline(world)
        _check_served(world)
        _canaries(world)
    except Violation as violation:
        result.violation, result.uid = str(violation), violation.uid
    except Exception as error:  # noqa: BLE001 - whatever the product raises is a finding
        result.violation = f"{type(error).__name__}: {error}\n{traceback.format_exc(limit=-4)}"
    result.virtual_s = world.timeline.now
    return result


def _disturbed(world: World) -> None:
    moment = 0.0
    while moment < FAULTS_END_S:
        moment += _AUDIT_EVERY_S
        world.run(moment)
        world.checker.audit()
    world.faults.active = False
    world.disasters.stop()
    world.note("", "no more faults", "")


def _until_baseline(world: World) -> None:
    """Everything must come to rest within the bound."""
    bound_s = world.times.baseline_s + world.scenario.service_s
    end = world.timeline.now + bound_s
    look = 0
    while True:
        missing = not_at_rest(world)
        if not missing:
            break
        if world.timeline.now >= end:
            raise world.violation(f"not at rest {bound_s:.1f} s after the last fault: {missing}")
        look += 1
        world.run(world.timeline.now + _LOOK_EVERY_S)
        if look % 4 == 0:
            world.checker.audit()
    world.checker.audit()
    for node in world.nodes():
        node.audit()


def not_at_rest(world: World) -> str:
    """What is not at rest; empty if everything is."""
    if not world.clients.all_answered:
        waiting = [stream.uid or stream.wish.client_id for stream in world.clients.streams if not stream.outcome]
        return f"clients wait: {waiting}"
    store = world.ledger.store
    for name in (*world.scenario.nodes, *(f"w{n}" for n in range(world.scenario.webs)), "c0"):
        process = world.current(name)
        if not process.alive:
            return f"{name} is down"
        if not isinstance(process, Beat) and not process.at_rest:  # type: ignore[attr-defined]
            return f"{name} is not at rest" + (f": {process.machine.table}" if isinstance(process, KVNode) else "")
        entry = store.nodes.get(process.incarnation)
        beats_ms = 2000 * world.times.heartbeat_s
        if entry is None or entry.state != "alive" or store.time - entry.heartbeat > beats_ms:
            return f"{name} is not alive for the ledger"
    for set_name in ("queue", "waiters", "deadlines", "rings", "open_leases", "unwatched", "owned"):
        if getattr(store, set_name):
            return f"{set_name}: {getattr(store, set_name)}"
    if unended := [uid for uid, record in store.records.items() if record.in_process]:
        return f"in process: {unended}"
    return ""


def _check_served(world: World) -> None:
    """Harmless faults cost no client its answer."""
    if not must_serve(world.scenario) or world.times.queue_timeout_s < 60.0:
        return
    for stream in world.clients.streams:
        if stream.outcome not in SERVED:
            raise world.violation(
                f"nothing went wrong, and client {stream.wish.client_id} got {stream.outcome}", stream.uid
            )


def _canaries(world: World) -> None:
    """The next request works on every pair of nodes, with nobody touching anything."""
    prefill = [name for name in world.scenario.nodes if name.startswith("p")]
    decode = [name for name in world.scenario.nodes if name.startswith("d")]
    for p in prefill:
        for d in decode:
            world.broker.open_up(frozenset((p, d)))
            world.run(world.timeline.now + 2 * _LOOK_EVERY_S)  # bells that were on their way find nothing
            _until_baseline(world)
            _canary(world, p, d)
    world.broker.open_up(None)


def _canary(world: World, p: str, d: str) -> None:
    first = world.scenario.wishes[0]
    wish = Wish(
        at_s=world.timeline.now,
        web="w0",
        client_id=f"canary-{p}-{d}",
        prompt=(7, 8, 9, 10, 11),
        sampling=SamplingParams(temperature=0, seed=11, max_tokens=5, ignore_eos=True),
        limits=replace(first.limits, max_attempts=1, max_queued=100, first_token_timeout_ms=60_000),
    )
    stream = world.clients.add(wish)
    end = world.timeline.now + _CANARY_S + _avoided_s(world, p, d)
    while not (stream.outcome and not not_at_rest(world)):
        if world.timeline.now >= end:
            raise world.violation(f"the canary on {p} and {d} is not done: {stream.outcome} {not_at_rest(world)}")
        world.run(world.timeline.now + 0.05)
    _check_canary(world, stream, p, d)


def _avoided_s(world: World, p: str, d: str) -> float:
    """How long the ledger still keeps these two apart, since they had failed each other."""
    store = world.ledger.store
    pair = f"{world.current(p).incarnation}:{world.current(d).incarnation}"
    return max(0.0, (store.avoided.get(pair, 0) - store.time) / 1000)


def _check_canary(world: World, stream: Stream, p: str, d: str) -> None:
    record = world.ledger.store.records[stream.uid]
    if stream.outcome != "finished" or (record.prefill_node, record.decode_node, record.failures) != (p, d, 0):
        raise world.violation(f"the canary on {p} and {d}: {stream.outcome}, {record}", stream.uid)
