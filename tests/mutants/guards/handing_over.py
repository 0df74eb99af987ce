"""Guards of ``reserve_next`` and ``activate``: one lease per attempt, and one winner at its end."""

from tests.mutants.mutant import ledger, lua, twin

_TESTS = "tests/contract/ledger/test_reserve_and_activate.py::"
_REQUESTS = "tests/contract/ledger/test_requests.py::"
_ANYBODY_ELSE = f"{_TESTS}test_activation_by_anybody_else_is_fenced"
_LUA_NAMED = "r.attempt ~= cmd.attempt or r.fence ~= cmd.fence or r.lease ~= cmd.lease_id then"
_TWIN_NAMED = "named = (command.attempt, command.fence, command.lease_id)"
_LUA_LEASE = (
    "if r.state ~= 'PREFILLING' or l[1] ~= 'RESERVED' or l[2] ~= cmd.incarnation or not fresh(cmd.incarnation) then"
)
_TWIN_WAITING = "if record is None or record.state is not RequestState.PREFILLING or record.lease:"
_LUA_WAITING = "if c[1] ~= 'PREFILLING' or c[2] ~= '' then return nil end"

HANDING_OVER = (
    ledger(
        "reserve-one-lease",
        "promise 3: an attempt has one lease, whoever asks",
        lua=(
            lua(_LUA_WAITING, "if c[1] ~= 'PREFILLING' then return nil end"),
            lua("redis.call('ZREM', P .. 'waiters', uid)", "", "reserve_next.lua"),
        ),
        twin=(
            twin(_TWIN_WAITING, "if record is None or record.state is not RequestState.PREFILLING:"),
            twin("del store.waiters[uid] hold_suspect(", "hold_suspect("),
        ),
        tests=(f"{_TESTS}test_one_lease_per_attempt",),
    ),
    ledger(
        "reserve-stale-waiter",
        "no blocks are reserved for a request that moved on",
        lua=(lua(_LUA_WAITING, "if not c[1] or c[2] ~= '' then return nil end"),),
        twin=(twin(_TWIN_WAITING, "if record is None or record.lease:"),),
        tests=("tests/contract/ledger/test_lines.py::test_a_waiter_whose_record_moved_on_is_dropped",),
    ),
    ledger(
        "reserve-head",
        "nothing passes a head that has waited for long: a large request does not starve",
        lua=(lua("if not head and c.waited >= PASSED_OVER_MS then", "if false then"),),
        twin=(twin("if head and store.time - record.claimed_at >= PASSED_OVER_MS:", "if False:"),),
        tests=(f"{_TESTS}test_nothing_passes_a_head_that_has_waited_two_seconds",),
    ),
    ledger(
        "reserve-again",
        "rule 2: the same lease id again answers with the same lease",
        lua=(lua("if r and l[1] == 'RESERVED' and l[2] == cmd.incarnation then", "if false then", "reserve_next.lua"),),
        twin=(
            twin(
                "if owner and held.state is LeaseState.RESERVED and held.node == command.incarnation:",
                "if owner and False:",
            ),
        ),
        tests=(f"{_TESTS}test_the_same_lease_id_again_answers_with_the_same_lease",),
    ),
    ledger(
        "reserve-used-lease-id",
        "rule 2: a lease id reserves once, never twice",
        lua=(lua("if l[1] then", "if l[1] == 'RESERVED' then", "reserve_next.lua"),),
        twin=(twin("if held is not None:", "if held is not None and held.state is LeaseState.RESERVED:"),),
        tests=(f"{_TESTS}test_a_closed_lease_id_reserves_nothing_more",),
    ),
    ledger(
        "reserve-lease-of-another",
        "a lease answers to its own node only",
        lua=(lua("if r and l[1] == 'RESERVED' and l[2] == cmd.incarnation then", "if r and l[1] == 'RESERVED' then"),),
        twin=(twin("is LeaseState.RESERVED and held.node == command.incarnation:", "is LeaseState.RESERVED:"),),
        tests=(f"{_TESTS}test_a_lease_id_of_another_node_is_not_ours",),
    ),
    ledger(
        "activate-fence",
        "rule 4: KV of another fence is never activated",
        lua=(lua(_LUA_NAMED, "r.attempt ~= cmd.attempt or r.lease ~= cmd.lease_id then"),),
        twin=(twin(_TWIN_NAMED, "named = (command.attempt, getattr(record, 'fence', ''), command.lease_id)"),),
        tests=(_ANYBODY_ELSE,),
    ),
    ledger(
        "activate-attempt",
        "rule 4: KV of an earlier attempt is never activated",
        lua=(lua(_LUA_NAMED, "r.fence ~= cmd.fence or r.lease ~= cmd.lease_id then"),),
        twin=(twin(_TWIN_NAMED, "named = (getattr(record, 'attempt', 0), command.fence, command.lease_id)"),),
        tests=(_ANYBODY_ELSE,),
    ),
    ledger(
        "activate-lease-id",
        "an attempt is activated in its own lease only",
        lua=(lua(_LUA_NAMED, "r.attempt ~= cmd.attempt or r.fence ~= cmd.fence then"),),
        twin=(twin(_TWIN_NAMED, "named = (command.attempt, command.fence, getattr(record, 'lease', ''))"),),
        tests=("tests/contract/ledger/test_leases_of_others.py::test_an_attempt_is_activated_in_its_own_lease_only",),
    ),
    ledger(
        "activate-node",
        "rule 4: only the node that holds the lease may activate",
        lua=(
            lua("or l[2] ~= cmd.incarnation or not fresh(cmd.incarnation) then", "or not fresh(cmd.incarnation) then"),
        ),
        twin=(twin("or lease.node != command.incarnation: return False", ":\n        return False", "handoff.py"),),
        tests=(_ANYBODY_ELSE,),
    ),
    ledger(
        "activate-state",
        "of activate, expire, abort and fail exactly one wins",
        lua=(lua(_LUA_LEASE, "if l[2] ~= cmd.incarnation or not fresh(cmd.incarnation) then"),),
        twin=(
            twin("if record.state is not RequestState.PREFILLING or not _may_activate", "if not _may_activate"),
            twin(
                "lease is None or lease.state is not LeaseState.RESERVED or lease.node", "lease is None or lease.node"
            ),
        ),
        tests=(f"{_REQUESTS}test_abort_while_prefilling_cancels_the_lease_and_fences_both_nodes",),
        also=("LedgerForeign",),  # an ended record holds nothing that could be computed any more
    ),
    ledger(
        "activate-fresh",
        "a node that is about to be declared dead takes nothing over",
        lua=(lua("or l[2] ~= cmd.incarnation or not fresh(cmd.incarnation) then", "or l[2] ~= cmd.incarnation then"),),
        twin=(twin("return store.fresh(command.incarnation)", "return True", "handoff.py"),),
        tests=(f"{_TESTS}test_a_silent_decode_node_may_not_activate",),
    ),
    ledger(
        "activate-gap",
        "tokens that the ledger lost before prefill's own are noticed",
        lua=(lua("if cmd.index > have then return answer({ status = 'GAP' }) end", ""),),
        twin=(twin("if command.index > have: return ActivateAnswer", "if False:\n        return ActivateAnswer"),),
        tests=(f"{_TESTS}test_activation_past_lost_tokens_says_so",),
    ),
    ledger(
        "activate-different",
        "promise 1: an answer is never spliced from two different ones",
        lua=(
            lua(
                "if tonumber(redis.call('LINDEX', P .. 'tok:' .. cmd.uid, cmd.index)) ~= cmd.token then",
                "if false then",
            ),
        ),
        twin=(twin("if command.index < have and record.tokens[command.index] != command.token:", "if False:"),),
        tests=(f"{_TESTS}test_activation_on_another_token_changes_nothing",),
    ),
    ledger(
        "activate-lost-token",
        "no token is missing: activate writes prefill's token again if the ledger lost it",
        lua=(lua("append(r, { cmd.token }, logprobs and { logprobs })", ""),),
        twin=(twin("append(store, record, (command.token,), logprobs, command.cached_tokens)", "pass"),),
        tests=(f"{_TESTS}test_activation_writes_a_token_that_the_ledger_lost",),
    ),
    ledger(
        "activate-again",
        "rule 2: 'refused because DECODING by yourself' is an acknowledgement",
        lua=(lua("if r.state == 'DECODING' and r.owner == cmd.incarnation then", "if false then"),),
        twin=(twin("if record.state is RequestState.DECODING and record.owner == command.incarnation:", "if False:"),),
        tests=(f"{_TESTS}test_activation_again_answers_with_the_work",),
    ),
    ledger(
        "activate-deadline",
        "the first token's deadline ends with the activation",
        lua=(lua("redis.call('ZREM', P .. 'deadlines', cmd.uid)", "", "activate.lua"),),
        twin=(twin("store.deadlines.pop(record.uid, None)", "pass", "handoff.py"),),
        tests=("tests/contract/ledger/test_lines.py::test_what_decodes_waits_for_nothing_in_the_ledger",),
    ),
)
