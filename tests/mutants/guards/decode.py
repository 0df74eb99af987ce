"""Guards of the decode node's machine."""

from tests.mutants.mutant import Edit, Mutant

_HANDOFF = "tests/unit/protocol/test_handoff.py::"
_STALE = "tests/unit/protocol/test_stale_messages.py::"
_FAILURE = "tests/unit/protocol/test_whose_failure.py::"
_LOST = "tests/unit/protocol/test_lost_writes.py::"
_DRAIN = "tests/unit/protocol/test_drain.py::"
_REFUSED = "tests/unit/protocol/test_hops.py::test_a_refused_hop_is_the_error_and_brings_the_blocks_back_at_once"
_FINAL = "self._fail(lease_id, lease, FailureKind.FINAL, FailureReason.DIFFERENT_TOKENS, detail)"
_STALE_COMMIT = f"{_STALE}test_a_stale_commit_starts_no_pull"


def _decode(old: str, new: str) -> tuple[Edit, ...]:
    return (Edit("app/protocol/decode/*.py", old, new),)


DECODE = (
    Mutant(
        "grant-acknowledged",
        "a GRANT that is not acknowledged in its deadline fails the attempt, blocks back",
        _decode(
            "if ended.reply is None: reason =", "if ended.reply is None:\n            return\n            reason ="
        ),
        (f"{_HANDOFF}test_out_of_attempts_the_client_is_told_which_hop_failed",),
    ),
    Mutant(
        "grant-refused",
        "a refused GRANT gives the blocks back at once",
        _decode("elif not ended.reply.accepted:", "elif False:"),
        (_REFUSED,),
    ),
    Mutant(
        "grant-refusal-is-nobodys",
        "what the ledger gave to a node that does not hold it is nobody's failure",
        _decode("kind = FailureKind.OVERLOAD if ended.reply.reason in NOBODYS else", "kind ="),
        (
            f"{_FAILURE}test_a_peer_that_has_started_anew_is_nobodys_failure",
            f"{_FAILURE}test_a_lease_that_the_ledger_forgot_is_nobodys_failure",
        ),
    ),
    Mutant(
        "grant-not-yet",
        "a GRANT that came before the answer to the claim is sent again, not a reason to begin anew",
        _decode("elif ended.reply.reason is Refusal.NOT_YET:", "elif False:"),
        (f"{_FAILURE}test_claims_that_are_always_answered_late_make_no_request_go_round_and_round",),
    ),
    Mutant(
        "commit-uid",
        "a COMMIT is taken for the attempt that it names only: uid",
        _decode("if lease is None or lease.uid != message.uid or", "if lease is None or"),
        (_STALE_COMMIT,),
    ),
    Mutant(
        "commit-attempt",
        "a COMMIT is taken for the attempt that it names only: attempt",
        _decode("lease.uid != message.uid or lease.attempt != message.attempt:", "lease.uid != message.uid:"),
        (_STALE_COMMIT,),
    ),
    Mutant(
        "commit-fence",
        "rule 4: a COMMIT of another fence starts no pull",
        _decode("if lease.fence != message.fence:", "if False:"),
        (_STALE_COMMIT,),
    ),
    Mutant(
        "second-commit",
        "a second COMMIT does not write into blocks that the first is pulled into",
        _decode("if lease.commit is not None and not lease.ending:", "if False:"),
        (f"{_STALE}test_a_second_commit_for_a_lease_does_not_replace_the_first",),
    ),
    Mutant(
        "commit-counts",
        "a COMMIT whose lists do not fit is refused by name",
        _decode(
            "if not len(commit.blocks) == len(commit.generations) == len(commit.digests) == needed <=",
            "if False and needed <=",
        ),
        ("tests/unit/protocol/test_commit_and_pull.py::test_a_commit_with_unequal_lists_is_refused",),
    ),
    Mutant(
        "pull-failed",
        "promise 1: KV that failed its validation is never activated",
        _decode("elif event.reason:", "elif False:"),
        ("tests/unit/protocol/test_commit_and_pull.py::test_corrupted_kv_is_caught_and_the_attempt_retried",),
    ),
    Mutant(
        "kv-of-all-tokens",
        "promise 1: what is decoded has the KV of exactly the tokens that the ledger holds",
        _decode("if computed != lease.commit.num_tokens:", "if False:"),
        (f"{_STALE}test_blocks_that_hold_other_tokens_than_the_ledger_are_never_decoded",),
    ),
    Mutant(
        "activating-is-said",
        "decode says that it waits for the ledger, so that prefill does not give it up",
        _decode(
            "self._at(self.config.link_timeout_s / 2, partial(self._still_activating, lease_id, lease))",
            "pass",
        ),
        (f"{_FAILURE}test_a_ledger_that_is_silent_to_decode_during_activation_is_nobodys_failure",),
    ),
    Mutant(
        "emit-resends",
        "tokens that a rollback lost are told again (GAP)",
        _decode("case EmitStatus.GAP:", 'case "no such answer":'),
        (f"{_LOST}test_tokens_that_a_rollback_lost_are_told_again",),
    ),
    Mutant(
        "emit-never-splices",
        "promise 1: an answer whose ledger holds other tokens ends in an error",
        _decode(
            "case EmitStatus.OK | EmitStatus.SAME:", "case EmitStatus.OK | EmitStatus.SAME | EmitStatus.DIFFERENT:"
        ),
        (f"{_LOST}test_an_answer_whose_ledger_holds_other_tokens_ends_in_an_error",),
    ),
    Mutant(
        "different-is-final",
        "a retry does not help an answer that would be spliced",
        _decode(
            f"{_FINAL} return case _:",
            f"{_FINAL.replace('FINAL', 'FAILURE', 1)}\n                return\n            case _:",
        ),
        (f"{_LOST}test_an_answer_whose_ledger_holds_other_tokens_ends_in_an_error",),
    ),
    Mutant(
        "end-with-the-last-token",
        "rule 8: the last token and the end are told in one step",
        _decode(
            "lease.told_length, tokens, lease.finish, tuple",
            "lease.told_length, tokens, None if tokens else lease.finish, tuple",
        ),
        (f"{_LOST}test_whoever_sees_the_last_token_sees_the_end",),
    ),
    Mutant(
        "emit-bounded",
        "a sequence pauses when the ledger is away: what is not told is bounded",
        _decode("if len(lease.output) - lease.told_length > self.config.emit_buffer_tokens:", "if False:"),
        (
            "tests/unit/protocol/test_silent_ledger.py::test_a_ledger_that_is_away_pauses_the_sequence_and_loses_no_token",
        ),
    ),
    Mutant(
        "engine-index",
        "the engine's token is taken at the index that comes next only",
        _decode("if sample.index != len(lease.output):", "if False:"),
        ("tests/unit/protocol/test_lost_writes.py::test_a_token_that_is_not_the_next_fails_the_attempt",),
    ),
    Mutant(
        "lease-after-drain",
        "what is given after a drain began is handed back",
        _decode("if self.draining: # asked before the drain, answered after it", "if False:"),
        (f"{_DRAIN}test_what_is_given_after_the_drain_began_is_done_by_another_node",),
    ),
)
