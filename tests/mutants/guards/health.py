"""Guards of an honest health: what makes a node unhealthy, what does not, and what it does then."""

from tests.mutants.mutant import Edit, Mutant

_WATCHDOG = "tests/unit/test_watchdog.py::"
_WORDS = "tests/unit/test_last_words.py::"
_HOST = "tests/unit/test_host.py::"


def _watchdog(old: str, new: str) -> tuple[Edit, ...]:
    return (Edit("workers/watchdog.py", old, new),)


def _words(old: str, new: str) -> tuple[Edit, ...]:
    return (Edit("workers/last_words.py", old, new),)


def _host(old: str, new: str) -> tuple[Edit, ...]:
    return (Edit("workers/host.py", old, new),)


HEALTH = (
    Mutant(
        "health-progress",
        "a long but progressing prefill never makes its node unhealthy",
        _watchdog("if entered_at and entered_at == before else 0.0", "if entered_at else 0.0"),
        (f"{_WATCHDOG}test_each_new_stamp_is_progress_however_long_all_of_it_takes",),
    ),
    Mutant(
        "health-frozen",
        "time in which the process did not run makes nothing stuck",
        _watchdog("min(passed_s, 2 * self._look_s)", "passed_s"),
        (f"{_WATCHDOG}test_time_in_which_the_process_did_not_run_makes_nothing_stuck",),
    ),
    Mutant(
        "health-dead-thread",
        "a dead part is noticed though nothing is stuck",
        _watchdog("if not part.alive:", "if False:"),
        (f"{_WATCHDOG}test_a_part_whose_thread_is_gone_is_found_with_the_next_look",),
    ),
    Mutant(
        "health-blame-the-handoff",
        "a poison handoff ends: what the mover is stuck at has failed",
        _words("blamed = moving == (lease_id or held.fence)", "blamed = False"),
        (f"{_WORDS}test_a_stuck_seal_is_the_failure_of_its_own_handoff_only",),
    ),
    Mutant(
        "health-blame-no-other",
        "a stuck mover is no failure of the answers that are running",
        _words("moving is None or not isinstance", "True or not isinstance"),
        (f"{_WORDS}test_a_stuck_pull_is_not_the_failure_of_the_answers_that_are_running",),
    ),
    Mutant(
        "health-all-of-it",
        "promise 2: everything goes back, however much it is",
        _words("more = left.more", "more = False"),
        (f"{_WORDS}test_everything_goes_back_however_much_it_is_and_the_node_gets_nothing_more",),
    ),
    Mutant(
        "health-takes-nothing",
        "an unhealthy node takes no bells",
        (Edit("workers/doorbells.py", " and not self._shut", ""),),
        (f"{_HOST}test_a_ledger_that_is_away_does_not_keep_a_broken_node_alive",),
    ),
    Mutant(
        "health-last-resort",
        "last words have an end, whoever else still runs",
        (Edit("workers/emergency.py", "if not self.unhealthy and not self._closed: end_in(", "if True: end_in("),),
        (f"{_HOST}test_a_ledger_that_is_away_does_not_keep_a_broken_node_alive",),
    ),
    Mutant(
        "health-says-so",
        "a node that is unhealthy says so",
        _host('{"health": Health.UNHEALTHY} if self._emergency.unhealthy else {}', "{}"),
        (f"{_HOST}test_a_lane_without_progress_ends_the_process_though_heartbeats_go_on",),
    ),
)
