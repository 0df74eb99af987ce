"""Guards of the prefill node's machine."""

from tests.mutants.mutant import Edit, Mutant

_HANDOFF = "tests/unit/protocol/test_handoff.py::"
_STALE = "tests/unit/protocol/test_stale_messages.py::"
_FAILURE = "tests/unit/protocol/test_whose_failure.py::"
_WRITERS = "tests/unit/protocol/test_late_writers.py::"
_DRAIN = "tests/unit/protocol/test_drain.py::"
_REFUSED = "tests/unit/protocol/test_hops.py::test_a_refused_hop_is_the_error_and_brings_the_blocks_back_at_once"
_GRANTS = "tests/unit/protocol/test_bells_and_grants.py::"


def _prefill(old: str, new: str) -> tuple[Edit, ...]:
    return (Edit("app/protocol/prefill/*.py", old, new),)


PREFILL = (
    Mutant(
        "grant-rings-again",
        "a lost bell costs seconds: prefill rings decode after 1, 2, 4, then every 4 s",
        _prefill("self._at(_RING_AGAIN_S[min(attempt.rings", "0 and self._at(_RING_AGAIN_S[min(attempt.rings"),
        (f"{_GRANTS}test_decode_is_rung_for_again_after_1_2_4_and_then_every_4_seconds",),
    ),
    Mutant(
        "grant-before-claim",
        "a grant that overtakes the answer to the claim is taken",
        _prefill("if message.fence not in self.table and self._asking_for_work:", "if False:"),
        (f"{_GRANTS}test_a_grant_that_overtakes_the_answer_to_our_claim_is_taken",),
    ),
    Mutant(
        "grant-before-claim-is-answered",
        "a grant that waits for a silent ledger is answered in time: nobody's failure",
        _prefill("self._at(self.config.link_timeout_s / 2, partial(self._answer_early, call))", "pass"),
        (f"{_FAILURE}test_a_grant_that_waits_for_a_slow_claim_is_nobodys_failure",),
    ),
    Mutant(
        "commit-refusal-is-nobodys",
        "a lease that a rollback forgot, or whose process is gone, is nobody's failure",
        _prefill("kind = FailureKind.OVERLOAD if ended.reply.reason in NOBODYS else", "kind ="),
        (
            f"{_FAILURE}test_a_lease_that_the_ledger_forgot_is_nobodys_failure_whoever_finds_out",
            f"{_FAILURE}test_a_peer_that_has_started_anew_is_nobodys_failure",
        ),
    ),
    Mutant(
        "pull-result-says-what-it-means",
        "what no retry heals is final whichever side tells the ledger first",
        _prefill("attempt, result.failure, reason", "attempt, FailureKind.FAILURE, reason"),
        (
            "tests/unit/protocol/test_engine_outcomes.py::test_what_no_retry_heals_is_final_whichever_side_tells_the_ledger_first",
        ),
    ),
    Mutant(
        "grant-uid",
        "a message is taken for the attempt that it names only: uid",
        _prefill("attempt is None or attempt.uid != message.uid or", "attempt is None or"),
        (
            f"{_STALE}test_a_stale_message_is_refused_by_name_and_counted",
            f"{_STALE}test_a_stale_word_about_a_pull_frees_nothing",
        ),
    ),
    Mutant(
        "grant-attempt",
        "a message is taken for the attempt that it names only: attempt",
        _prefill("attempt.uid != message.uid or attempt.attempt != message.attempt:", "attempt.uid != message.uid:"),
        (
            f"{_STALE}test_a_stale_message_is_refused_by_name_and_counted",
            f"{_STALE}test_a_stale_word_about_a_pull_frees_nothing",
        ),
    ),
    Mutant(
        "second-grant",
        "an attempt goes to one lease: a second grant is refused",
        _prefill(
            "return ACCEPTED if attempt.grant == grant else refused(Refusal.OTHER_LEASE, attempt.grant.lease_id)",
            "pass",
        ),
        (f"{_STALE}test_a_stale_message_is_refused_by_name_and_counted",),
    ),
    Mutant(
        "grant-at-the-end",
        "a grant that meets an end at the first token costs nothing",
        _prefill("if attempt.finishing: return ACCEPTED", "if False:\n            return ACCEPTED"),
        (f"{_GRANTS}test_a_grant_that_meets_an_end_at_the_first_token_costs_nothing",),
    ),
    Mutant(
        "commit-acknowledged",
        "a COMMIT that is not acknowledged in its deadline fails the attempt",
        _prefill(
            "if ended.reply is None: reason =", "if ended.reply is None:\n            return\n            reason ="
        ),
        (f"{_HANDOFF}test_out_of_attempts_the_client_is_told_which_hop_failed",),
    ),
    Mutant(
        "commit-refused",
        "a refused COMMIT fails the attempt at once",
        _prefill("elif not ended.reply.accepted:", "elif False:"),
        (_REFUSED,),
    ),
    Mutant(
        "pull-overdue",
        "rule 7: prefill does not wait for ever for the result of a pull",
        _prefill("self._at(patience_s, partial(self._pull_overdue, fence, attempt, attempt.patience))", "pass"),
        (f"{_WRITERS}test_a_pull_that_is_never_acknowledged_does_not_hold_them_for_ever",),
    ),
    Mutant(
        "hold-until-pulled",
        "prefill holds its blocks until the pull is acknowledged or overdue",
        _prefill(
            "self._await_pull(fence, attempt) def _await_pull",
            "self._over(fence, attempt, 'sent')\n\n    def _await_pull",
        ),
        (f"{_WRITERS}test_prefill_holds_its_blocks_until_the_pull_is_acknowledged",),
    ),
    Mutant(
        "activating-is-patience",
        "a silent ledger is not taken for a silent decode node",
        _prefill("if attempt.phase is Phase.COMMITTED: self._await_pull(message.fence, attempt)", "pass"),
        (f"{_FAILURE}test_a_ledger_that_is_silent_to_decode_during_activation_is_nobodys_failure",),
    ),
    Mutant(
        "result-lease",
        "the result of a pull counts under the lease that got the COMMIT only",
        _prefill(
            "if attempt.grant is None or attempt.grant.lease_id != message.lease_id:", "if attempt.grant is None:"
        ),
        (f"{_STALE}test_a_stale_word_about_a_pull_frees_nothing",),
    ),
    Mutant(
        "result-phase",
        "the result of a pull counts after its COMMIT only",
        _prefill("if attempt.phase not in (Phase.COMMITTING, Phase.COMMITTED):", "if False:"),
        (f"{_STALE}test_a_word_about_a_pull_before_there_was_a_commit_frees_nothing",),
    ),
    Mutant(
        "stamp-before-step",
        "what a node's loss may have killed is known: nothing enters the engine unstamped",
        _prefill(
            "if attempt.stamped and not attempt.mover_busy:",
            "if not attempt.mover_busy:",
        ),
        (f"{_FAILURE}test_what_the_engine_computes_was_stamped_before",),
    ),
    Mutant(
        "stamp-after-step",
        "what waits for a grant is not blamed for its node",
        _prefill("self._ask(self._stamp(attempt, in_step=False), self._whatever, tries=0)", "pass"),
        (f"{_FAILURE}test_a_computed_prompt_that_waits_for_a_grant_is_not_blamed_for_its_node",),
    ),
    Mutant(
        "one-step-at-a-time",
        "what stands in line is not in the running step",
        _prefill("if not self._line or self._engine_busy():", "if not self._line:"),
        (f"{_FAILURE}test_a_prefill_node_that_dies_costs_only_those_in_its_step_an_attempt",),
    ),
    Mutant(
        "claim-after-drain",
        "what is given after a drain began is handed back",
        _prefill("if self.draining: # asked before the drain, answered after it", "if False:"),
        (f"{_DRAIN}test_what_is_given_after_the_drain_began_is_done_by_another_node",),
    ),
    Mutant(
        "drain-hands-back",
        "a draining prefill node hands ungranted waiters back at once",
        _prefill(
            "if attempt.grant is None and not attempt.ending: self._fail", "if False:\n                self._fail"
        ),
        (f"{_DRAIN}test_a_computed_prompt_without_a_grant_is_handed_back_at_once",),
    ),
    Mutant(
        "grant-timeout",
        "KV without a grant does not block an older request for ever",
        _prefill("if still_waits and overdue and idle and", "if False and"),
        (f"{_GRANTS}test_without_a_grant_the_kv_is_kept_unless_an_older_request_needs_the_room",),
    ),
    Mutant(
        "grant-patience",
        "KV without a grant is kept until grant_timeout_s",
        _prefill("overdue = self._now - held.claimed_at > self.config.grant_timeout_s", "overdue = True"),
        (f"{_GRANTS}test_without_a_grant_the_kv_is_kept_unless_an_older_request_needs_the_room",),
    ),
)
