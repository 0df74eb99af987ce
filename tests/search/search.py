"""The exhaustive search: every state that a configuration can get into, and that each of them comes to rest.

Breadth first, so that the path to a violation is a shortest one. Time passes only where nothing is due (or as a fault),
so in a graph without a cycle every path comes to its end, and the longest way to it is known exactly.
"""

from __future__ import annotations

import gc
from array import array
from collections import deque
from dataclasses import dataclass

from tests.search.clock import keeps_copies, may_pass, pass_time
from tests.search.configuration import Configuration, Fault
from tests.search.draft import Cluster, Draft
from tests.search.faults import Faults, do_fault
from tests.search.moves import Move, Possible, admit
from tests.search.prompt import Prompt
from tests.search.shortcuts import Shortcuts
from tests.search.state import CALL, REGISTERED, WANTS_REGISTRATION, Slot, State, Wishes
from tests.search.values import VALUES
from tests.search.violation import Violation

_TIME = "time"
_FAULT_KINDS = frozenset(Fault)
_FAULT_MS = 0xFFFF
"""Length of an edge that is a fault or free: it is on nobody's way to rest."""


@dataclass(slots=True)
class Result:
    """What a search has found."""

    configuration: Configuration
    states: int = 0
    transitions: int = 0
    at_rest: int = 0
    longest_ms: int = 0
    """The longest time from any state to rest when nothing more goes wrong."""
    violation: str = ""
    path: tuple[Move, ...] = ()
    exhausted: bool = False


class Search:
    """One search."""

    def __init__(self, configuration: Configuration, cluster: Cluster | None = None) -> None:
        self.configuration = configuration
        self.cluster = cluster or Cluster(configuration)
        self._shortcuts = Shortcuts(self.cluster)
        self._possible = Possible(self.cluster)
        self._faults = Faults(self.cluster)
        self.prompt = Prompt(self.cluster)
        self.start = self._start()

    # moves

    def moves(self, state: State) -> list[Move]:
        """Everything that can happen in a state."""
        prompt = self.prompt.move(state)
        if prompt is not None:
            return [prompt, *self._faults.with_item(state, prompt.which)]
        due = self._possible.due(state)
        moves = due + self._possible.free(state) + self._faults.moves(state, bool(due))
        if not due:
            draft = Draft(self.cluster, state)
            if may_pass(draft) and not self._is_an_end(draft):
                moves.append(Move(_TIME))
        return moves

    def after(self, state: State, move: Move) -> tuple[State, int]:
        """The state after a move and whatever need not wait then, and how many ms have passed."""
        ms = 0
        if move.kind == _TIME or move.kind in _FAULT_KINDS:
            draft = Draft(self.cluster, state)
            ms = pass_time(draft) if move.kind == _TIME else do_fault(draft, move)
            state = draft.state()
        else:
            state = self._shortcuts.after(state, move)
        while (prompt := self.prompt.move(state)) is not None and not self._faults.with_item(state, prompt.which):
            state = self._shortcuts.after(state, prompt)
        return state, ms

    def _is_an_end(self, draft: Draft) -> bool:
        """At rest, and nothing that is still on its way will become too late."""
        alive = any(item[0] == CALL and item[2] >= 0 for item in draft.net)
        return not alive and self.at_rest(draft)

    def at_rest(self, draft: Draft) -> bool:
        """Whether everything is as if nothing had ever been asked: all ended, all blocks free, nothing held."""
        present = frozenset(VALUES[draft.incarnation(at)] for at in range(len(draft.slots)))
        if self.cluster.ledger.facts[draft.ledger].at_rest_with != present:
            return False
        return all(self._slot_at_rest(slot) for slot in draft.slots) and all(item[-1] for item in draft.net)

    def _slot_at_rest(self, slot: Slot) -> bool:
        busy = slot.calls or slot.answers or slot.open or slot.frozen_ms >= 0
        return slot.beats == REGISTERED and not busy and self.cluster.processes.facts[slot.process].at_rest

    def _start(self) -> State:
        """All nodes have registered and looked for work; then the first requests are sent."""
        configuration, cluster = self.configuration, self.cluster
        slots = []
        for at, name in enumerate(cluster.nodes):
            process = cluster.processes.boot(name, VALUES[cluster.incarnation(at, 1)])
            slots.append(cluster.slots.number(Slot(1, process, beats=WANTS_REGISTRATION)))
        wishes = Wishes(configuration.faults, 0, sum(r.may_be_aborted for r in configuration.requests), 0)
        state = State(cluster.ledger.empty(), -1, cluster.nets.number(()), cluster.wishes.number(wishes), tuple(slots))
        while moves := self._possible.due(state):
            state, _ = self.after(state, moves[0])
        draft = Draft(cluster, state)
        if not self.at_rest(draft):
            raise Violation("the cluster does not come to rest after its start")
        for which, request in enumerate(configuration.requests):
            if not request.after:
                admit(draft, -1, which)
        draft.wishes = draft.wishes._replace(drains=configuration.drains)
        if keeps_copies(configuration.kinds, configuration.faults):
            draft.saved = draft.ledger
        return draft.state()

    # the search

    def run(self, most_states: int) -> Result:
        """Search until nothing is left, a violation is found, or ``most_states`` are known."""
        collects = gc.isenabled()
        gc.disable()  # nothing here is a cycle, and looking for some takes a tenth of the time
        try:
            return self._run(most_states)
        finally:
            if collects:
                gc.enable()

    def _run(self, most_states: int) -> Result:
        graph = _Graph()
        result = Result(self.configuration)
        number = {self.start: 0}
        waiting = deque([self.start])
        graph.add_state(-1, 0)
        origin = -1
        while waiting and len(number) <= most_states:
            state = waiting.popleft()
            origin += 1
            moves = self.moves(state)
            graph.begin(origin)
            if not moves:
                result.at_rest += 1
            for which, move in enumerate(moves):
                try:
                    after, ms = self.after(state, move)
                except Violation as violation:
                    result.violation = str(violation)
                    result.path = (*self.path_to(graph.way_to(origin)), move)
                    break
                target = number.get(after)
                if target is None:
                    target = number[after] = len(number)
                    waiting.append(after)
                    graph.add_state(origin, which)
                graph.add_edge(target, ms if self._leads_to_rest(move) else _FAULT_MS)
            if result.violation:
                break
        result.states, result.transitions = len(number), len(graph.targets)
        if not result.violation and not waiting:
            self._check_rest(graph, result)
        return result

    @staticmethod
    def _leads_to_rest(move: Move) -> bool:
        return move.kind not in _FAULT_KINDS

    def _check_rest(self, graph: _Graph, result: Result) -> None:
        result.exhausted = True
        cycle, result.longest_ms = graph.longest_way()
        if cycle >= 0:
            result.violation = "it never comes to rest"
            result.path = self.path_to(graph.way_to(cycle))

    def path_to(self, way: list[int]) -> tuple[Move, ...]:
        """The moves of a way."""
        state, path = self.start, []
        for which in way:
            move = self.moves(state)[which]
            path.append(move)
            state, _ = self.after(state, move)
        return tuple(path)


class _Graph:
    """States by number, where each was first reached from, and all transitions."""

    def __init__(self) -> None:
        self.parents = array("i")
        self.by = array("H")
        self.starts = array("I")
        self.targets = array("I")
        self.lengths = array("H")

    def add_state(self, parent: int, by: int) -> None:
        self.parents.append(parent)
        self.by.append(by)

    def begin(self, origin: int) -> None:
        """The transitions of ``origin`` follow."""
        assert len(self.starts) == origin
        self.starts.append(len(self.targets))

    def add_edge(self, target: int, ms: int) -> None:
        self.targets.append(target)
        self.lengths.append(ms)

    def way_to(self, state: int) -> list[int]:
        """Which move of each state on the way to ``state``, from the start."""
        way: list[int] = []
        while self.parents[state] >= 0:
            way.append(self.by[state])
            state = self.parents[state]
        return way[::-1]

    def longest_way(self) -> tuple[int, int]:
        """A state on a cycle, or -1; and the longest way of all, not counting what follows a fault."""
        unseen, open_, closed = 0, 1, 2
        count = len(self.starts)
        self.starts.append(len(self.targets))
        marks = bytearray(count)
        ways = array("I", bytes(4 * count))
        for root in range(count):
            if marks[root] != unseen:
                continue
            stack = [(root, self.starts[root])]
            marks[root] = open_
            while stack:
                state, edge = stack.pop()
                if edge < self.starts[state + 1]:
                    stack.append((state, edge + 1))
                    target = self.targets[edge]
                    if marks[target] == open_:
                        return target, 0
                    if marks[target] == unseen:
                        marks[target] = open_
                        stack.append((target, self.starts[target]))
                    continue
                marks[state] = closed
                for edge in range(self.starts[state], self.starts[state + 1]):
                    if self.lengths[edge] != _FAULT_MS:
                        ways[state] = max(ways[state], ways[self.targets[edge]] + self.lengths[edge])
        return -1, max(ways)
