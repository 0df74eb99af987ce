"""The normal forms keep everything that matters: beside a search runs a cluster that knows none of them."""

from __future__ import annotations

from random import Random

import pytest

from tests.search.beside import Beside, Different
from tests.search.configuration import Configuration, Fault
from tests.search.configurations import ABORTED_AND_AGAIN, DRAINED, FROZEN, TWO_FAULTS, TWO_OF_EACH
from tests.search.draft import Draft
from tests.search.ledger_steps import Applied, LedgerSteps, Passed
from tests.search.moves import Move
from tests.search.process_steps import Happening, ProcessSteps
from tests.search.search import Search
from tests.search.values import VALUES

_WALKS = 150
_MOVES = 150
_FAULTS = frozenset(Fault)


def follow(monkeypatch: pytest.MonkeyPatch, beside: Beside) -> None:
    """Let ``beside`` do what every search does from now on."""
    hear, fresh_call, boot = Draft.hear, Draft._fresh_call, ProcessSteps.boot
    apply, pass_time = LedgerSteps.apply, LedgerSteps.pass_time

    def followed_hear(draft: Draft, place: int, happening: Happening, a: int = 0, b: int = 0) -> None:
        fresh, incarnation = draft.fresh(place), VALUES[draft.incarnation(place)]
        step = draft.cluster.processes.step(draft.slots[place].process, happening, a, b, lambda: fresh)
        beside.hear(place, (happening, a, b), step, incarnation, fresh)
        hear(draft, place, happening, a, b)

    def followed_call(draft: Draft) -> int:
        number = fresh_call(draft)
        beside.names.new(f"call-{number}")
        return number

    def followed_boot(steps: ProcessSteps, name: str, incarnation: str) -> int:
        beside.boot(name, incarnation)
        return boot(steps, name, incarnation)

    def followed_apply(steps: LedgerSteps, ledger: int, command: int, late: bool) -> Applied:
        applied = apply(steps, ledger, command, late)
        beside.apply(command, late, applied)
        return applied

    def followed_time(steps: LedgerSteps, ledger: int, ms: int, beating: tuple[str, ...]) -> Passed:
        passed = pass_time(steps, ledger, ms, beating)
        beside.pass_time(ms, beating, passed)
        beside.keep()
        return passed

    monkeypatch.setattr(Draft, "hear", followed_hear)
    monkeypatch.setattr(Draft, "_fresh_call", followed_call)
    monkeypatch.setattr(ProcessSteps, "boot", followed_boot)
    monkeypatch.setattr(LedgerSteps, "apply", followed_apply)
    monkeypatch.setattr(LedgerSteps, "pass_time", followed_time)


def walk(search: Search, beside: Beside, rng: Random) -> None:
    """A random path; faults come now and then."""
    state = search.start
    for _ in range(_MOVES):
        moves = search.moves(state)
        if not moves:
            return
        plain = [move for move in moves if move.kind not in _FAULTS]
        move: Move = rng.choice(plain if plain and rng.random() < 0.9 else moves)
        if move.kind == Fault.ROLLBACK:
            beside.roll_back()
        state, _ = search.after(state, move)


@pytest.mark.parametrize(
    "configuration", [TWO_FAULTS, ABORTED_AND_AGAIN, FROZEN, DRAINED, TWO_OF_EACH], ids=lambda one: one.name
)
def test_a_normal_form_behaves_as_all_that_it_stands_for(
    configuration: Configuration, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared = 0
    for seed in range(_WALKS):
        with monkeypatch.context() as patch:
            beside = Beside(configuration)
            follow(patch, beside)
            search = Search(configuration)
            beside.keep()
            try:
                walk(search, beside, Random(seed))
            except Different as different:
                pytest.fail(f"walk {seed}: {different}")
            compared += beside.compared
    assert compared > 1000
