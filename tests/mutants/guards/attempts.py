"""Guards of ``claim`` and ``fail_attempt``, and of how an attempt ends."""

from tests.mutants.mutant import Mutant, ledger, lua, twin

_TESTS = "tests/contract/ledger/test_claim.py::"
_CLOCK = "tests/contract/ledger/test_clock_step.py::"
_WHO_HOLDS = f"{_TESTS}test_only_who_holds_the_attempt_may_fail_it"
_LUA_FAIL = "if not computing(r) or r.attempt ~= cmd.attempt or r.fence ~= cmd.fence then return false end"
_TWIN_FAIL = "if not record.computing or (record.attempt, record.fence) != (command.attempt, command.fence):"

ATTEMPTS = (
    ledger(
        "claim-state",
        "one attempt at a time: a doubled bell does not claim what is claimed",
        lua=(lua("if c[1] ~= 'QUEUED' then return nil end", "if not c[1] then return nil end", "claim.lua"),),
        twin=(twin("if record is None or record.state is not RequestState.QUEUED or (", "if record is None or ("),),
        tests=(f"{_TESTS}test_without_a_hint_that_can_be_taken_the_oldest_that_fits_is",),
    ),
    ledger(
        "claim-again",
        "rule 2: a claim repeated with its fence answers 'already yours'",
        lua=(
            lua(
                "if r and r.fence == cmd.fence and r.owner == cmd.incarnation and r.state == 'PREFILLING' then",
                "if false then",
            ),
        ),
        twin=(twin("and _owner(record) == (command.fence, command.incarnation)", "and False"),),
        tests=(f"{_TESTS}test_the_same_fence_again_answers_with_the_same_work",),
    ),
    ledger(
        "claim-used-fence",
        "rule 2: a fence starts one attempt, never two",
        lua=(lua("local claimed = redis.call('GET', P .. 'fence:' .. cmd.fence)", "local claimed = nil"),),
        twin=(twin("claimed = store.fences.get(command.fence)", "claimed = None"),),
        tests=(f"{_TESTS}test_a_fence_whose_attempt_has_ended_claims_nothing_more",),
    ),
    ledger(
        "claim-head",
        "nothing passes a head that has waited for long: a large prompt does not starve",
        lua=(lua("if c and c.could and not c.fits and not head and", "if false and"),),
        twin=(twin("elif head and waited_long(record):", "elif False:"),),
        tests=(f"{_TESTS}test_once_the_head_has_waited_over_two_seconds_blocks_are_kept_free_for_it",),
    ),
    Mutant(
        "claim-fence-kept-by-the-server",
        "rule 2: a fence is remembered for as long as its attempt goes on",
        (
            lua(
                "redis.call('SET', P .. 'fence:' .. cmd.fence, uid)",
                "redis.call('SET', P .. 'fence:' .. cmd.fence, uid, 'PX', CLOSED_TTL_MS)",
            ),
        ),
        (f"{_CLOCK}test_the_server_keeps_a_fence_for_as_long_as_its_attempt_goes_on",),
    ),
    Mutant(
        "claim-fence-kept-by-the-twin",
        "rule 2: a fence is remembered for as long as its attempt goes on",
        (
            twin(
                "store.fences[command.fence] = uid",
                'store.fences[command.fence] = uid\n    store.expire(600_000, "fences", command.fence)',
            ),
        ),
        (f"{_CLOCK}test_the_twin_keeps_a_fence_for_as_long_as_its_attempt_goes_on",),
    ),
    ledger(
        "claim-fits",
        "a node is given no more than its free blocks hold",
        lua=(lua("fits = could and need <= cmd.free_blocks", "fits = could", "claim.lua"),),
        twin=(twin("return blocks(record.total, command.block_size_tokens) <= command.free_blocks", "return True"),),
        tests=(f"{_TESTS}test_a_node_without_room_gets_nothing",),
    ),
    ledger(
        "work-for-the-silent",
        "claim and reserve demand a node whose heartbeat is fresh",
        lua=(
            lua(
                "if not fresh(incarnation) then return nil end",
                "if not redis.call('ZSCORE', P .. 'nodes', incarnation) then return nil end",
            ),
        ),
        twin=(twin("if node is None or not self.fresh(incarnation) or", "if node is None or"),),
        tests=(
            f"{_TESTS}test_only_a_living_prefill_node_may_claim",
            "tests/contract/ledger/test_reserve_and_activate.py::test_only_a_living_decode_node_may_reserve",
        ),
    ),
    ledger(
        "work-for-the-draining",
        "a draining node gets nothing new",
        lua=(lua("if n[1] ~= role or n[2] ~= 'alive' then return nil end", "if n[1] ~= role then return nil end"),),
        twin=(twin('or node.state != "alive": return None', ":\n            return None"),),
        tests=(
            f"{_TESTS}test_only_a_living_prefill_node_may_claim",
            "tests/contract/ledger/test_reserve_and_activate.py::test_only_a_living_decode_node_may_reserve",
        ),
    ),
    ledger(
        "fail-fence",
        "rule 4: without the current fence no attempt is failed",
        lua=(lua(_LUA_FAIL, "if not computing(r) or r.attempt ~= cmd.attempt then return false end"),),
        twin=(twin(_TWIN_FAIL, "if not record.computing or record.attempt != command.attempt:"),),
        tests=(_WHO_HOLDS,),
    ),
    ledger(
        "fail-attempt",
        "rule 4: who speaks of another attempt fails none",
        lua=(lua(_LUA_FAIL, "if not computing(r) or r.fence ~= cmd.fence then return false end"),),
        twin=(twin(_TWIN_FAIL, "if not record.computing or record.fence != command.fence:"),),
        tests=(_WHO_HOLDS,),
    ),
    ledger(
        "fail-ended",
        "what has ended does not come back to life",
        lua=(lua(_LUA_FAIL, "if r.attempt ~= cmd.attempt or r.fence ~= cmd.fence then return false end"),),
        twin=(twin(_TWIN_FAIL, "if (record.attempt, record.fence) != (command.attempt, command.fence):"),),
        tests=(f"{_TESTS}test_an_ended_request_cannot_fail",),
    ),
    ledger(
        "fail-owner",
        "rule 4: prefill's fail_attempt passes only while the attempt is its own",
        lua=(
            lua(
                "if cmd.lease_id == '' then return r.owner == cmd.incarnation end",
                "if cmd.lease_id == '' then return true end",
            ),
        ),
        twin=(twin("return record.owner == command.incarnation", "return True", "attempts.py"),),
        tests=(f"{_TESTS}test_prefill_may_not_fail_what_decode_has_taken_over",),
    ),
    ledger(
        "fail-lease-id",
        "a decode node fails an attempt with that attempt's lease only",
        lua=(lua("if r.lease ~= cmd.lease_id then return false end", ""),),
        twin=(twin("if record.lease != command.lease_id or lease is None or", "if lease is None or"),),
        tests=("tests/contract/ledger/test_leases_of_others.py::test_an_attempt_is_failed_with_its_own_lease_only",),
    ),
    ledger(
        "fail-lease-node",
        "rule 4: only the node that holds the lease may fail with it",
        lua=(lua("return l[1] == cmd.incarnation and (l[2]", "return (l[2]"),),
        twin=(twin("or lease.node != command.incarnation: return False", ":\n        return False", "attempts.py"),),
        tests=(_WHO_HOLDS,),
    ),
    ledger(
        "fail-again",
        "rule 2: a repeated failure counts once and answers as the first time",
        lua=(lua("if r.failed_by == by and", "if false and"),),
        twin=(twin("if record.failed_by == by and", "if False and"),),
        tests=(f"{_TESTS}test_the_same_failure_again_answers_the_same",),
    ),
    ledger(
        "failures-end",
        "a request fails in the end: max_attempts",
        lua=(lua("(kind == 'failure' and r.failures >= r.max_attempts)", "false"),),
        twin=(twin("kind is FailureKind.FAILURE and record.failures >= record.limits.max_attempts", "False"),),
        tests=(f"{_TESTS}test_one_attempt_means_the_first_failure_is_the_error",),
    ),
    ledger(
        "lease-ends-with-its-attempt",
        "rule 1: of an attempt's end, its lease's end is part",
        lua=(lua("close_lease(r, unused_lease or 'CANCELLED')", ""),),
        twin=(twin("close_lease(store, record, unused_lease)", "pass"),),
        tests=(
            f"{_TESTS}test_a_failure_ends_the_lease_too",
            "tests/contract/ledger/test_emit.py::test_the_last_token_and_the_end_are_one_step",
        ),
    ),
    ledger(
        "lines-end-with-their-attempt",
        "what ended waits in no line any more",
        lua=(lua("{ 'queue', 'waiters', 'deadlines', 'rings' }", "{ 'queue', 'deadlines', 'rings' }"),),
        twin=(
            twin(
                "(store.queue, store.waiters, store.deadlines, store.rings)",
                "(store.queue, store.deadlines, store.rings)",
                "ends.py",
            ),
        ),
        tests=("tests/contract/ledger/test_lines.py::test_what_ended_stands_in_no_line",),
    ),
    ledger(
        "requeue-keeps-output",
        "resume: tokens that were emitted stay, and are output",
        lua=(
            lua(
                "r.state, r.attempt, r.fence, r.owner, r.lease = 'QUEUED',",
                "redis.call('DEL', P .. 'tok:' .. r.uid)\n  r.state, r.attempt, r.fence, r.owner, r.lease = 'QUEUED',",
            ),
        ),
        twin=(twin("record.attempt += 1", "record.attempt += 1\n    record.tokens.clear()"),),
        tests=(f"{_TESTS}test_a_failed_decode_keeps_the_tokens_for_the_next_attempt",),
    ),
)
