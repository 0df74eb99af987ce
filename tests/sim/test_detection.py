"""The simulator notices what it is there for: with one guard of the product taken away, some seed fails."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from app.ledger.memory import MemoryLedger, attempts, ledger, recovery, requests
from app.ledger.memory.state import Store
from app.protocol.commands import Admit, Claim, Command, Emit, FailAttempt, FailureKind, ReportExit, ScanAnswer, Watcher
from app.protocol.holding import Held, Holding
from app.protocol.prefill import compute
from app.protocol.prefill.attempt import Attempt
from app.protocol.prefix_cache import PrefixPool, block_keys
from tests.sim.disasters import Disaster
from tests.sim.faults import Fault
from tests.sim.invariants import Violation
from tests.sim.kv_memory import KVMemory
from tests.sim.model import BLOCK_TOKENS
from tests.sim.mover import Mover
from tests.sim.run import run_seed
from tests.sim.scenario import Kind, Shape, draw_scenario
from tests.sim.world import World
from web.follow import Follower

pytestmark = pytest.mark.timeout(600)


def first_violation(only: Sequence[Kind], seeds: int = 800) -> str:
    """Of seeds in which these kinds of trouble occur."""
    for seed in range(seeds):
        violation = run_seed(seed, only).violation
        if violation:
            return violation
    return ""


def test_an_emission_that_anybody_may_make(monkeypatch: pytest.MonkeyPatch) -> None:
    def emit(store: Store, command: Emit) -> Any:
        record = store.records[command.uid]
        command = replace(command, attempt=record.attempt, fence=record.fence, incarnation=record.owner)
        return attempts.emit(store, command)

    monkeypatch.setitem(ledger._HANDLERS, Emit, emit)
    scenario = draw_scenario(0, [Disaster.NODE_DRAINS])
    world = World(replace(scenario, nodes=dict.fromkeys(("p0", "p1", "d0"), Shape()), wishes=()))
    world.run(0.1)
    wish = replace(scenario.wishes[0], prompt=(1, 2, 3), key="")
    uid, old, token = "a request", "an old fence", wish.answer[0]

    def ask(command: Command) -> Any:
        return world.ledger.apply("test", command, world.ledger.time_ms() + 1000)

    world.submitted(uid, wish)
    ask(Admit(uid, wish.client_id, wish.prompt, wish.sampling, Watcher("w0.1", "c"), wish.limits))
    ask(Claim(uid, "p0.1", old, 16, BLOCK_TOKENS))
    ask(FailAttempt(uid, 1, old, "p0.1", "", FailureKind.OVERLOAD, "draining", ""))
    ask(Claim(uid, "p1.1", "the new fence", 16, BLOCK_TOKENS))
    with pytest.raises(Violation, match="under an old fence"):
        ask(Emit(uid, 1, old, "p0.1", 0, (token,)))


def test_a_write_that_is_applied_too_late(monkeypatch: pytest.MonkeyPatch) -> None:
    apply = MemoryLedger.apply
    monkeypatch.setattr(MemoryLedger, "apply", lambda self, command, not_after_ms: apply(self, command, 10**15))
    assert "until" in first_violation((Fault.LEDGER_CALL_LATE,))


def test_blocks_that_are_freed_while_the_mover_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    free_if_over = Holding._free_if_over

    def free(self: Holding[Any], key: str, held: Held) -> None:
        held.mover_busy = False
        free_if_over(self, key, held)

    monkeypatch.setattr(Holding, "_free_if_over", free)
    assert "writes to block" in first_violation((Disaster.WEB_CRASHES,))


def test_a_block_whose_next_use_nobody_can_tell_from_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KVMemory, "bump", lambda self, block: self.generations[block])
    assert "without a new generation" in first_violation(())


def test_a_copy_that_is_not_compared_with_what_was_sealed(monkeypatch: pytest.MonkeyPatch) -> None:
    validate = Mover._validate

    def trusting(self: Mover, job: Any, source: KVMemory) -> None:
        ours = tuple(self.process.memory.digest(block) for block in job.target)
        validate(self, replace(job, digests=ours), source)

    monkeypatch.setattr(Mover, "_validate", trusting)
    assert "tokens" in first_violation((Fault.KV_CORRUPTED,))


@pytest.mark.parametrize("direction", ["_let_go", "_hand_back"])
def test_a_comparison_in_one_direction_only(monkeypatch: pytest.MonkeyPatch, direction: str) -> None:
    monkeypatch.setattr(Holding, direction, lambda self, *given: None)
    kinds = (Fault.LEDGER_CALL_LATE, Disaster.LEDGER_ROLLS_BACK, Disaster.NODE_CUT_OFF)
    assert "not at rest" in first_violation(kinds)


def test_the_same_client_id_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    def admit(store: Store, command: Admit) -> Any:
        store.guards.pop(command.client_id, None)
        return requests.admit(store, command)

    monkeypatch.setitem(ledger._HANDLERS, Admit, admit)
    assert "same client id" in first_violation(())


def test_a_dead_node_from_which_nobody_takes_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recovery, "_recover", lambda store, recovered: ([], False))
    assert "still holds it" in first_violation((Disaster.NODE_CRASHES,))


def test_a_reported_exit_that_nobody_acts_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ledger._HANDLERS, ReportExit, lambda store, command: ScanAnswer(True, store.time))
    assert "before our eyes" in first_violation((Disaster.NODE_CRASHES,))


def test_an_answer_that_is_spliced_from_two(monkeypatch: pytest.MonkeyPatch) -> None:
    take = Follower._take

    def trusting(self: Follower, index: int, tokens: tuple[int, ...], *rest: Any) -> Any:
        self.ids[index : index + len(tokens)] = tokens[: len(self.ids) - index]
        return take(self, index, tokens, *rest)

    monkeypatch.setattr(Follower, "_take", trusting)
    kinds = (Fault.TOKEN_TIED, Disaster.LEDGER_ROLLS_BACK, Disaster.NODE_CRASHES)
    assert "got (" in first_violation(kinds)


def test_a_ledger_time_that_a_clock_step_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    def advance(self: Store) -> None:
        self.time, self.last = self.time + self.wall - self.last, self.wall

    monkeypatch.setattr(Store, "advance_clock", advance)
    assert first_violation((Disaster.CLOCK_STEPS,))


def test_a_prefix_cache_that_trusts_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PrefixPool, "intact", lambda self, blocks, found: len(blocks))
    assert "starts from KV that is not its own" in first_violation((Fault.KV_CORRUPTED,))


def test_a_prefix_cache_that_knows_no_salts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compute, "block_keys", lambda ids, size, salt: block_keys(ids, size, ""))
    assert "KV of another salt" in first_violation([])


def test_a_prefix_cache_that_takes_a_block_for_all_that_it_depends_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def keys(ids: Sequence[int], size: int, salt: str) -> tuple[str, ...]:
        blocks = (ids[start : start + size] for start in range(0, len(ids) - size + 1, size))
        return tuple(f"{salt} {sum(block) % 50}" for block in blocks)

    monkeypatch.setattr(compute, "block_keys", keys)
    assert "starts from KV that is not its own" in first_violation([])


def test_a_prefix_cache_that_knows_what_is_still_being_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    start = compute.Computing._start

    def publish_at_once(self: compute.Computing, fence: str, attempt: Attempt) -> None:
        start(self, fence, attempt)
        for block, key in zip(attempt.blocks, attempt.keys, strict=False):
            if key not in self.pool._block_of:
                self.pool._key[block], self.pool._block_of[key] = key, block

    monkeypatch.setattr(compute.Computing, "_start", publish_at_once)
    assert first_violation([])


def test_a_prefix_cache_that_frees_what_others_have_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    give_back = PrefixPool.give_back

    def for_all(self: PrefixPool, blocks: Sequence[int], owner: str) -> None:
        for block in blocks:
            self._holders[block] = (owner,)
        give_back(self, blocks, owner)

    monkeypatch.setattr(PrefixPool, "give_back", for_all)
    found = [run_seed(seed, []).violation for seed in range(60)]
    assert any("has not pinned" in one for one in found), "the simulation sees it, before anybody gives the block back"
    assert any("belongs to nobody, not to" in one for one in found), "and so does the pool itself"
