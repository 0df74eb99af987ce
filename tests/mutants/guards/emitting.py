"""Guards of ``emit``: tokens come in order, once, from the owner alone; and the end comes with the last of them."""

from tests.mutants.mutant import ledger, lua, twin

_TESTS = "tests/contract/ledger/test_emit.py::"
_LUA_NAMED = "if r.attempt ~= cmd.attempt or r.fence ~= cmd.fence or r.owner ~= cmd.incarnation then return says("
_TWIN_NAMED = "named = (command.attempt, command.fence, command.incarnation)"
_ONLY_THE_OWNER = f"{_TESTS}test_only_the_owner_with_the_fence_may_emit"

EMITTING = (
    ledger(
        "emit-fence",
        "rule 4: without the current fence no token lands",
        lua=(lua(_LUA_NAMED, "if r.attempt ~= cmd.attempt or r.owner ~= cmd.incarnation then return says("),),
        twin=(twin(_TWIN_NAMED, "named = (command.attempt, record.fence, command.incarnation)"),),
        tests=(_ONLY_THE_OWNER,),
    ),
    ledger(
        "emit-attempt",
        "rule 4: nothing of an earlier attempt lands",
        lua=(lua(_LUA_NAMED, "if r.fence ~= cmd.fence or r.owner ~= cmd.incarnation then return says("),),
        twin=(twin(_TWIN_NAMED, "named = (record.attempt, command.fence, command.incarnation)"),),
        tests=(_ONLY_THE_OWNER,),
    ),
    ledger(
        "emit-owner",
        "rule 4: prefill, with its true fence, says nothing after the activation",
        lua=(lua(_LUA_NAMED, "if r.attempt ~= cmd.attempt or r.fence ~= cmd.fence then return says("),),
        twin=(twin(_TWIN_NAMED, "named = (command.attempt, command.fence, record.owner)"),),
        tests=(_ONLY_THE_OWNER,),
    ),
    ledger(
        "emit-aborted",
        "a node learns of an abort with its next token",
        lua=(lua("if r.state == 'ABORTED' then return says('ABORTED') end", "", "emit.lua"),),
        twin=(twin("if record.state is RequestState.ABORTED: return says", "if False:\n        return says"),),
        tests=(f"{_TESTS}test_an_aborted_request_says_so",),
    ),
    ledger(
        "emit-ended",
        "promise 1: nothing is added to an answer that has ended",
        lua=(lua("if not computing(r) then", "if false then", "emit.lua"),),
        twin=(twin("if not record.computing: return says", "if False:\n        return says"),),
        tests=(f"{_TESTS}test_a_request_that_failed_meanwhile_is_fenced",),
    ),
    ledger(
        "emit-gap",
        "the token stream has no gap: GAP says from where to send again",
        lua=(lua("if cmd.index > have then return says('GAP') end", ""),),
        twin=(twin("if command.index > have: return says", "if False:\n        return says"),),
        tests=(f"{_TESTS}test_a_gap_says_from_where_to_send_again",),
    ),
    ledger(
        "emit-different",
        "promise 1: other tokens at known indexes are never taken for a repeat",
        lua=(lua("if not overlap_is_same() or (cmd.finish_reason", "if (cmd.finish_reason"),),
        twin=(twin("if not same or (command.finish_reason and", "if (command.finish_reason and"),),
        tests=(f"{_TESTS}test_other_tokens_are_refused",),
    ),
    ledger(
        "emit-early-end",
        "an answer does not end before tokens that were told already",
        lua=(lua("or (cmd.finish_reason ~= '' and stop < have) then return says", "then return says"),),
        twin=(twin("if not same or (command.finish_reason and stop < have):", "if not same:"),),
        tests=(f"{_TESTS}test_an_end_before_what_is_there_is_refused",),
    ),
    ledger(
        "emit-repeat",
        "exactly once: a repeated emission adds nothing (SAME)",
        lua=(lua("for i = have - cmd.index + 1, n do", "for i = 1, n do"),),
        twin=(twin("new, logprobs = command.tokens[have - command.index :],", "new, logprobs = command.tokens,"),),
        tests=(f"{_TESTS}test_the_same_tokens_again_are_written_once",),
    ),
    ledger(
        "emit-logprobs-once",
        "exactly once: the logprobs of a token that is there already are not added again",
        lua=(
            lua(
                "fresh_logprobs[#fresh_logprobs + 1] = cmd.logprobs[i] end end",
                "fresh_logprobs[#fresh_logprobs + 1] = cmd.logprobs[i] end end fresh_logprobs = cmd.logprobs",
            ),
        ),
        twin=(twin("command.logprobs[have - command.index :]", "command.logprobs"),),
        tests=(f"{_TESTS}test_logprobs_come_once_with_their_tokens",),
    ),
    ledger(
        "emit-end-in-two-steps",
        "rule 8: the last token and the end are one script",
        lua=(
            lua(
                "if cmd.finish_reason ~= '' then end_request", "if cmd.finish_reason ~= '' and n == 0 then end_request"
            ),
        ),
        twin=(
            twin(
                "if command.finish_reason: finish",
                "if command.finish_reason and not new:\n        finish",
            ),
        ),
        tests=(f"{_TESTS}test_the_last_token_and_the_end_are_one_step",),
    ),
    ledger(
        "emit-end-again",
        "rule 2: the last emission, repeated, answers as the first time",
        lua=(lua("local same = r.state == 'FINISHED' and", "local same = false and"),),
        twin=(twin("EmitStatus.SAME if same and", "EmitStatus.SAME if False and"),),
        tests=(f"{_TESTS}test_the_last_emission_again_is_recognised",),
    ),
)
