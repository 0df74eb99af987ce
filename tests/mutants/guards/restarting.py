"""Guards of a drain and of a rolling restart: what is done to a cluster while it serves."""

from tests.mutants.mutant import Edit, Mutant

_DRAIN_API = "tests/api/test_drain.py::"
_DRAIN = "tests/unit/launcher/test_drain.py::"
_HOST = "tests/unit/test_host.py::"
_ROLLING = "tests/unit/launcher/test_rolling.py::"
_ROLLING_WEB = "tests/unit/launcher/test_rolling_web.py::"


def _web(old: str, new: str) -> tuple[Edit, ...]:
    return (Edit("web/drain.py", old, new),)


def _drain(old: str, new: str) -> tuple[Edit, ...]:
    return (Edit("app/launcher/drain.py", old, new),)


def _rolling(old: str, new: str) -> tuple[Edit, ...]:
    return (Edit("app/launcher/rolling.py", old, new),)


def _progress(old: str, new: str) -> tuple[Edit, ...]:
    return (Edit("app/launcher/progress.py", old, new),)


RESTARTING = (
    Mutant(
        "drain-the-living",
        "a drain reaches a node that lives, not the entry of a dead one that had its name",
        _web("if node.state in (ALIVE, DRAINING)]", "]"),
        (f"{_DRAIN_API}test_an_unknown_a_dead_and_an_ambiguous_name_are_refused_and_nothing_is_drained",),
        also=("KeyError",),
    ),
    Mutant(
        "drain-one-only",
        "a name that several nodes have drains none of them",
        _web("if len(found) > 1:", "if False:"),
        (f"{_DRAIN_API}test_an_unknown_a_dead_and_an_ambiguous_name_are_refused_and_nothing_is_drained",),
    ),
    Mutant(
        "drain-kv-nodes-only",
        "promise 5: a web process is not drained through the ledger, which would let it admit nothing more",
        _web("if node.node.role not in NEEDED_ROLES:", "if False:"),
        (f"{_DRAIN_API}test_web_and_control_have_nothing_to_drain",),
    ),
    Mutant(
        "drain-not-taken",
        "rule 2: a drain that the ledger refused as late is not reported as done",
        _web("if status is NodeStatus.LATE:", "if False:"),
        (f"{_DRAIN_API}test_a_drain_that_the_ledger_did_not_take_in_time_is_an_error_to_try_again_on",),
    ),
    Mutant(
        "drain-waits-until-empty",
        "`baton drain` ends when the node holds nothing, not when it has heard",
        _drain("not in (Health.DRAINED, GONE)", "not in (Health.DRAINED, GONE, Health.DRAINING)"),
        (f"{_DRAIN}test_a_drain_is_over_when_the_node_holds_nothing_and_not_before",),
    ),
    Mutant(
        "drain-by-incarnation",
        "a node that left is not confused with its successor of the same name",
        _drain('if node["incarnation"] == last["incarnation"]:', 'if node["name"] == last["name"]:'),
        (f"{_DRAIN}test_a_node_that_left_is_gone_though_its_successor_has_its_name",),
    ),
    Mutant(
        "drain-ledger-away",
        "a ledger that is away for a moment does not mean that a node holds nothing",
        _drain("return last  # the ledger is", 'return {**last, "health": GONE}'),
        (f"{_DRAIN}test_a_ledger_that_is_away_for_a_moment_is_no_end_of_a_drain",),
    ),
    Mutant(
        "drained-when-empty",
        "promise 5: a node says that it is drained only once it holds nothing",
        (Edit("workers/host.py", "return Health.DRAINED if self._idle else Health.DRAINING", "return Health.DRAINED"),),
        (f"{_HOST}test_a_node_is_drained_only_once_it_holds_nothing",),
    ),
    Mutant(
        "drain-leaves-nothing",
        "what the ledger gives a draining node late is handed back, not counted as lost with it",
        (
            Edit(
                "workers/host.py",
                "while self._say(Deregister(self._node.incarnation)) is NodeStatus.REFUSED and",
                "self._say(Deregister(self._node.incarnation))\n        while False and",
            ),
        ),
        (f"{_HOST}test_what_the_ledger_gives_a_draining_node_late_is_handed_back_before_it_leaves",),
    ),
    Mutant(
        "restart-one-at-a-time",
        "a rolling restart goes on only when the successor is back",
        _rolling('self._until(f"{name} to be ready again", lambda: self._serves(name))', "pass"),
        (f"{_ROLLING}test_each_is_restarted_only_when_the_one_before_it_is_back",),
    ),
    Mutant(
        "restart-serves",
        "a successor that runs and is not registered does not serve",
        _rolling("return incarnation is None or not missing_nodes(self._ledger, {name: incarnation})", "return True"),
        (f"{_ROLLING}test_a_successor_that_does_not_come_ends_the_restart_and_the_others_run_on",),
    ),
    Mutant(
        "restart-kills-the-stubborn",
        "a process that does not stop does not keep the old release running",
        _rolling("self._supervisor.kill(name)", "pass"),
        (f"{_ROLLING}test_one_that_does_not_stop_is_killed_and_the_restart_goes_on",),
        also=("RollingStopped",),
    ),
    Mutant(
        "restart-needs-the-ledger",
        "without a ledger nobody can see whether a successor serves, so nothing is stopped",
        _rolling("self._look_at_ledger() for", "for"),
        (f"{_ROLLING_WEB}test_without_a_ledger_nothing_is_restarted",),
        also=("RollingStopped",),
    ),
    Mutant(
        "restart-web-new-before-old",
        "no web worker that serves goes before its successor is registered",
        _rolling(
            'self._until("a new web worker", lambda: bool(self._registered(self._web_workers() - before)))', "pass"
        ),
        (f"{_ROLLING_WEB}test_a_new_web_worker_that_does_not_come_costs_none_that_serves",),
    ),
    Mutant(
        "restart-web-by-registration",
        "a new web worker that only runs cannot take a request",
        _rolling("bool(self._registered(self._web_workers() - before))", "bool(self._web_workers() - before)"),
        (f"{_ROLLING_WEB}test_a_new_web_worker_that_does_not_come_costs_none_that_serves",),
    ),
    Mutant(
        "restart-web-as-many-as-wanted",
        "a restart that waited in vain leaves no web worker too many behind for ever",
        _rolling("for _ in range(there - wanted):", "for _ in range(0):"),
        (f"{_ROLLING_WEB}test_a_new_web_worker_that_does_not_come_costs_none_that_serves",),
    ),
    Mutant(
        "restart-web-workers-only",
        "a process that reports an exit is not counted as a web worker that may go",
        _rolling("return EXIT_REPORT not in child.cmdline()", "return True"),
        (f"{_ROLLING_WEB}test_a_web_worker_goes_only_when_its_successor_serves",),
        also=("RollingStopped",),
    ),
    Mutant(
        "restart-one-only",
        "two who ask for a restart do not both follow one file",
        _progress("os.O_CREAT | os.O_EXCL | os.O_RDONLY", "os.O_CREAT | os.O_RDONLY"),
        (f"{_ROLLING}test_a_restart_is_asked_for_by_a_signal_and_followed_to_its_end",),
    ),
    Mutant(
        "restart-says-that-it-failed",
        "a restart that did not come to its end is not reported as done",
        _progress("if outcome != _DONE:", "if False:"),
        (f"{_ROLLING}test_a_restart_is_asked_for_by_a_signal_and_followed_to_its_end",),
    ),
    Mutant(
        "restart-again",
        "after a restart the next one can be asked for",
        _progress("finally: path.unlink(missing_ok=True)", "finally:\n            pass"),
        (f"{_ROLLING}test_a_restart_is_asked_for_by_a_signal_and_followed_to_its_end",),
    ),
    Mutant(
        "restart-launcher-gone",
        "never silence: who follows a restart hears that the launcher has ended",
        _progress('elif _launcher(run / "lock") != launcher:', "elif False:"),
        (f"{_ROLLING}test_a_restart_needs_a_launcher_and_notices_its_end",),
    ),
)
