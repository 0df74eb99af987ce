"""Guards that both machines share: late writers, the comparison with the ledger, repeated questions, the block pool."""

from tests.mutants.mutant import Edit, Mutant

_COMPARISON = "tests/unit/protocol/test_comparison.py::"
_WRITERS = "tests/unit/protocol/test_late_writers.py::"
_BLOCKS = "tests/unit/protocol/test_blocks.py::"
_FREE = "if held.told and not held.in_engine and not held.mover_busy:"


def _protocol(old: str, new: str) -> tuple[Edit, ...]:
    return (Edit("app/protocol/*.py", old, new),)


HOLDING = (
    Mutant(
        "pulling-until-the-mover-stops",
        "rule 5: blocks in PULLING come free only when the mover says so",
        _protocol(_FREE, "if held.told and not held.in_engine:"),
        (
            f"{_WRITERS}test_blocks_that_are_being_pulled_into_are_nobody_elses_before_the_mover_stops",
            f"{_WRITERS}test_blocks_that_are_being_digested_are_kept_until_the_mover_stops",
        ),
    ),
    Mutant(
        "in-step-until-the-engine-stops",
        "rule 5: blocks of a running step come free only when the engine says so",
        _protocol(_FREE, "if held.told and not held.mover_busy:"),
        (f"{_WRITERS}test_blocks_that_a_step_may_write_are_nobody_elses_before_the_engine_stops",),
    ),
    Mutant(
        "freed-when-the-ledger-knows",
        "rule 2: nothing is freed while the ledger may still give it to us",
        _protocol(_FREE, "if held.ending and not held.in_engine and not held.mover_busy:"),
        (f"{_WRITERS}test_blocks_of_a_failure_that_the_ledger_does_not_know_are_kept",),
    ),
    Mutant(
        "comparison-forward",
        "rule 3: a node lets go of what the ledger no longer gives it",
        _protocol("for key in sorted((held_before & held_now) - given.keys()):", "for key in ():"),
        (f"{_COMPARISON}test_what_the_ledger_took_away_is_let_go_within_a_second",),
    ),
    Mutant(
        "comparison-reverse",
        "rule 3: a node hands back what the ledger gives it and it does not hold",
        _protocol("for key in sorted(given.keys() - held_before - held_now):", "for key in ():"),
        (f"{_COMPARISON}test_a_claim_that_was_applied_late_is_handed_back_though_nobody_asks_for_it",),
    ),
    Mutant(
        "comparison-held-before",
        "rule 3: only what was held before the read was sent is let go",
        _protocol(
            "for key in sorted((held_before & held_now) - given.keys()):", "for key in sorted(held_now - given.keys()):"
        ),
        (f"{_COMPARISON}test_what_came_after_the_read_is_not_let_go_by_its_late_answer",),
    ),
    Mutant(
        "comparison-in-flight",
        "rule 3: what a call in flight may have brought is not handed back",
        _protocol("if not (asking_before or self._asking_for_work):", "if True:"),
        (f"{_COMPARISON}test_a_claim_whose_answer_is_on_its_way_is_not_handed_back",),
    ),
    Mutant(
        "comparison-in-flight-now",
        "rule 3: a call that was sent after the read counts as in flight too",
        _protocol("if not (asking_before or self._asking_for_work):", "if not asking_before:"),
        (f"{_COMPARISON}test_a_claim_that_was_sent_after_the_read_and_came_before_it_is_not_handed_back",),
    ),
    Mutant(
        "comparison-after-restart",
        "a restarted or failed-over ledger is compared with at once",
        _protocol(
            "case on.LedgerRestarted(): self._check_holdings()", "case on.LedgerRestarted():\n                pass"
        ),
        (f"{_COMPARISON}test_a_ledger_that_restarted_is_compared_with_at_once",),
    ),
    Mutant(
        "unknown-node-lets-go",
        "a node that was declared dead registers again by itself",
        _protocol("if answer.status is ReadStatus.UNKNOWN:", "if False:"),
        (f"{_COMPARISON}test_a_node_that_was_declared_dead_lets_go_and_comes_back",),
    ),
    Mutant(
        "register-with-empty-hands",
        "rule 4: a node comes back only when nothing of its former life is left",
        _protocol(
            "if self.idle: self._out.append(do.Register())", "if True:\n            self._out.append(do.Register())"
        ),
        (f"{_COMPARISON}test_a_node_that_the_ledger_does_not_know_lets_go_before_it_registers",),
    ),
    Mutant(
        "unknown-is-asked-again",
        "rule 2: a call without an answer is made again until it is answered",
        _protocol("question.tries -= 1", "return"),
        ("tests/unit/protocol/test_silent_ledger.py::test_an_unknown_outcome_is_asked_again_until_it_is_known",),
    ),
    Mutant(
        "late-is-asked-again",
        "rule 2: LATE changed nothing, and decides nothing",
        _protocol('if getattr(event.answer, "status", "") == "LATE":', "if False:"),
        ("tests/unit/protocol/test_lost_writes.py::test_a_call_that_came_late_has_changed_nothing_and_is_made_again",),
    ),
    Mutant(
        "hand-back-is-nobodys-failure",
        "a message that meets a hand-back costs the request nothing",
        _protocol("Refusal.HANDED_BACK if held.overload else Refusal.WRONG_PHASE", "Refusal.WRONG_PHASE"),
        ("tests/unit/protocol/test_drain.py::test_a_hand_back_by_decode_in_any_phase_is_nobodys_failure",),
    ),
    Mutant(
        "hop-names-its-pair",
        "a broken link does not use up a request's attempts",
        _protocol("avoid_pair=hop and kind is FailureKind.FAILURE", "avoid_pair=False"),
        (
            "tests/unit/protocol/test_whose_failure.py::test_a_decode_node_whose_link_is_cut_does_not_use_up_a_requests_attempts",
        ),
    ),
    Mutant(
        "one-question-at-a-time",
        "room is counted once: one question for work is in flight",
        _protocol("if self._asking_for_work or not self._bells: return", "if not self._bells:\n            return"),
        ("tests/unit/protocol/test_bells_and_grants.py::test_two_bells_at_once_are_not_promised_the_same_blocks",),
    ),
    Mutant(
        "generation-bump",
        "rule 6: a block's generation moves on before the first write of its next use",
        _protocol("self._generation[block] = self._on_take(block)", "self._generation[block] += 1"),
        (f"{_BLOCKS}test_a_block_is_bumped_before_its_next_use_and_only_then",),
    ),
    Mutant(
        "block-owner",
        "nobody frees or moves a block of somebody else",
        _protocol("if self._owner[block] != owner:", "if False:"),
        (f"{_BLOCKS}test_nothing_is_freed_twice_or_by_a_stranger",),
    ),
    Mutant(
        "block-steps",
        "a block changes its state along the table only",
        _protocol("if state not in self._steps.get(old, frozenset()):", "if False:"),
        ("tests/unit/protocol/test_block_steps.py::test_a_decode_block_does_not_leave_its_table",),
    ),
)
