"""Guards of what a client is sent."""

from tests.mutants.mutant import Edit, Mutant

_FOLLOW = "tests/unit/web/test_follow.py::"
_FEED = "tests/unit/web/test_feed.py::"


def _follow(old: str, new: str) -> tuple[Edit, ...]:
    return (Edit("web/follow.py", old, new),)


def _feed(old: str, new: str) -> tuple[Edit, ...]:
    return (Edit("web/feed.py", old, new),)


WEB = (
    Mutant(
        "web-splice",
        "promise 1: a client is never sent an answer that is spliced from two",
        _follow("if list(tokens[: known - index]) != self.ids[index : min(known, end)] or", "if"),
        (f"{_FOLLOW}test_other_tokens_at_known_indexes_are_never_spliced",),
    ),
    Mutant(
        "web-shorter-end",
        "promise 1: an end that is shorter than what was sent is an error",
        _follow("or (finished and end < known):", ":"),
        (f"{_FOLLOW}test_an_end_that_is_shorter_than_what_was_handed_out_is_an_error",),
    ),
    Mutant(
        "web-gap",
        "a client is never sent a gap: on one the record is read",
        _follow(
            "if event.index > self.read_from or self.read_from < len(self.ids):", "if self.read_from < len(self.ids):"
        ),
        (f"{_FOLLOW}test_a_gap_asks_for_the_record_from_where_it_begins",),
    ),
    Mutant(
        "web-known-come-again",
        "while known tokens must come again, an event that may be older decides nothing",
        _follow(
            "if event.index > self.read_from or self.read_from < len(self.ids):", "if event.index > self.read_from:"
        ),
        (f"{_FOLLOW}test_while_known_tokens_must_come_again_an_event_only_asks_for_the_record",),
    ),
    Mutant(
        "web-doubt",
        "after a loss the end counts only with the whole answer before it",
        _follow("self.doubted = True", "pass"),
        (f"{_FOLLOW}test_after_a_loss_the_end_counts_only_with_the_whole_answer_before_it",),
    ),
    Mutant(
        "web-vanished",
        "never silence: a record that vanished becomes an error",
        _follow("if record.status is ReadStatus.UNKNOWN:", "if False:"),
        (f"{_FOLLOW}test_a_vanished_record_is_an_error",),
    ),
    Mutant(
        "web-quiet",
        "never silence: an event may be lost, so the record is read after a second of quiet",
        _feed("return self._ask() if self._clock() - self._heard_at >= QUIET_S else None", "return None"),
        (f"{_FEED}test_quiet_reads_the_record_and_sees_the_end",),
    ),
    Mutant(
        "web-distrust",
        "promise 1: after a rollback all that was sent is compared with what comes",
        _feed("self._follower.distrust()", "pass"),
        (f"{_FEED}test_after_a_rollback_another_answer_is_an_error_even_if_its_events_are_lost",),
    ),
    Mutant(
        "web-watches-again",
        "a ledger that lost writes may have lost the watcher: web attaches again",
        _feed("self._follower.distrust() self._watched = False", "self._follower.distrust()"),
        (f"{_FEED}test_a_changed_ledger_is_asked_to_watch_again_and_what_it_repeats_is_not_sent_twice",),
    ),
    Mutant(
        "web-unknown-admission",
        "rule 2: an admission of unknown outcome is aborted, whenever it may land",
        (Edit("web/admission.py", "services.node.say_farewell(farewell)", "pass"),),
        ("tests/api/test_answers.py::test_an_admission_of_unknown_outcome_is_aborted_and_rings_nothing",),
    ),
    Mutant(
        "web-farewell-repeated",
        "promise 3: that nobody waits any more is said until the ledger has heard it",
        (Edit("web/node.py", "if not said: self._farewells.append((command, until_ms))", "pass"),),
        ("tests/api/test_answers.py::test_a_farewell_is_repeated_until_the_ledger_has_heard_it",),
    ),
    Mutant(
        "web-farewell-repeated-again",
        "promise 3: and not only once",
        (
            Edit(
                "web/node.py",
                "if isinstance(answer, LedgerError) or not _heard(answer, until_ms):",
                "if False:",
            ),
        ),
        ("tests/api/test_answers.py::test_a_farewell_is_repeated_until_the_ledger_has_heard_it",),
    ),
    Mutant(
        "web-ledger-that-only-reads",
        "promise 2: no answer waits without an end for a ledger that takes no writes",
        (Edit("web/relay.py", "outage.look(services.node.ledger_faults(), now)", "pass"),),
        ("tests/api/test_answers.py::test_a_ledger_that_takes_no_writes_ends_a_running_answer_with_the_reason",),
    ),
    Mutant(
        "web-farewell-after-attach",
        "rule 2: an attachment that lands after it was given up is taken back",
        (Edit("web/node.py", "and answer.time_ms > until_ms", ""),),
        ("tests/api/test_reconnect.py::test_an_attachment_that_is_applied_after_it_was_given_up_is_taken_back",),
    ),
)
