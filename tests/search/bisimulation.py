"""Whether two searches explore the same behaviour, state by state, whatever they call things."""

from __future__ import annotations

from collections.abc import Hashable

from tests.search.search import Search
from tests.search.state import State

_Edge = tuple[Hashable, int]


def same_behaviour(one: Search, other: Search) -> bool:
    """Whether their starts are bisimilar: each move of one has its like in the other, to states of which that is true
    again. Moves are alike by kind, place and the ms that pass; states must show the same records."""
    edges: list[list[_Edge]] = []
    classes: list[int] = []
    starts = [_explore(search, edges, classes) for search in (one, other)]
    count = 0
    while len(set(classes)) > count:
        count = len(set(classes))
        numbers: dict[Hashable, int] = {}
        classes = [
            numbers.setdefault(
                (classes[state], frozenset([(how, classes[target]) for how, target in moves])), len(numbers)
            )
            for state, moves in enumerate(edges)
        ]
    return classes[starts[0]] == classes[starts[1]]


def _explore(search: Search, edges: list[list[_Edge]], classes: list[int]) -> int:
    """Add all states of a search; answers the number of its start."""
    first = len(edges)
    numbers = {search.start: first}
    states = [search.start]
    for state in states:
        moves: list[_Edge] = []
        for move in search.moves(state):
            after, ms = search.after(state, move)
            if after not in numbers:
                numbers[after] = first + len(states)
                states.append(after)
            moves.append(((move.kind, move.at, ms), numbers[after]))
        edges.append(moves)
        classes.append(hash(_shown(search, state)))
    return first


def _shown(search: Search, state: State) -> Hashable:
    """What clients see of the records."""
    records = search.cluster.ledger.copy_of(state.ledger).records.values()
    return tuple(
        sorted((record.uid, record.state, tuple(record.tokens) if record.in_process else ()) for record in records)
    )
