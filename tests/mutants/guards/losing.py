"""Guards of what a node's loss means: stamps, suspects, and pairs that are kept apart."""

from tests.mutants.mutant import ledger, lua, twin

_LOSS = "tests/contract/ledger/test_node_loss.py::"
_PAIRS = "tests/contract/ledger/test_pairs.py::"
_ONLY_THE_OWNER = f"{_LOSS}test_only_the_owner_with_the_fence_may_stamp"
_LUA_STAMP = (
    "if r[1] ~= 'PREFILLING' or tonumber(r[2]) ~= cmd.attempt or r[3] ~= cmd.fence or r[4] ~= cmd.incarnation then"
)
_TWIN_STAMP = "named = (RequestState.PREFILLING, command.attempt, command.fence, command.incarnation)"

LOSING = (
    ledger(
        "stamp-fence",
        "rule 4: only the current fence may say what is in a step",
        lua=(lua(_LUA_STAMP, _LUA_STAMP.replace(" or r[3] ~= cmd.fence", "")),),
        twin=(twin(_TWIN_STAMP, _TWIN_STAMP.replace("command.fence", "getattr(record, 'fence', '')")),),
        tests=(_ONLY_THE_OWNER,),
    ),
    ledger(
        "stamp-owner",
        "rule 4: only the owner may say what is in a step",
        lua=(lua(_LUA_STAMP, _LUA_STAMP.replace(" or r[4] ~= cmd.incarnation", "")),),
        twin=(twin(_TWIN_STAMP, _TWIN_STAMP.replace("command.incarnation", "getattr(record, 'owner', '')")),),
        tests=(_ONLY_THE_OWNER,),
    ),
    ledger(
        "loss-of-bystanders",
        "a node's loss is no failure of what only stood there",
        lua=(lua("local counts = r.state == 'DECODING' or (as_owner and r.stamped == 1)", "local counts = true"),),
        twin=(
            twin("counts = record.state is RequestState.DECODING or (as_owner and record.stamped)", "counts = True"),
        ),
        tests=(f"{_LOSS}test_what_the_lost_prefill_node_was_computing_has_failed",),
    ),
    ledger(
        "loss-of-the-stamped",
        "what may have killed its node has failed, so that poison ends",
        lua=(lua("local counts = r.state == 'DECODING' or (as_owner and r.stamped == 1)", "local counts = false"),),
        twin=(
            twin("counts = record.state is RequestState.DECODING or (as_owner and record.stamped)", "counts = False"),
        ),
        tests=(f"{_LOSS}test_what_the_lost_prefill_node_was_computing_has_failed",),
    ),
    ledger(
        "loss-as-owner",
        "a stamp counts against the prefill node, not against one that only held a lease",
        lua=(lua("(as_owner and r.stamped == 1)", "r.stamped == 1"),),
        twin=(twin("(as_owner and record.stamped)", "record.stamped"),),
        tests=(f"{_LOSS}test_a_lost_decode_node_fails_nothing_that_only_had_a_lease_there",),
    ),
    ledger(
        "losses-end",
        "a request ends however often it loses its nodes: from the fifth loss on, each counts",
        lua=(lua(">= MOST_LOSSES end", ">= 1000000 end"),),
        twin=(twin("counts = record.losses >= MOST_LOSSES", "counts = False"),),
        tests=(f"{_LOSS}test_from_the_fifth_loss_in_its_life_on_a_bystander_fails_too",),
    ),
    ledger(
        "overloads-end",
        "a request ends however often it is handed round without getting a token",
        lua=(lua("local round = kind == 'overload' and handed_round(r)", "local round = false"),),
        twin=(twin("handed_round = kind is FailureKind.OVERLOAD and _handed_round(record)", "handed_round = False"),),
        tests=(f"{_LOSS}test_a_request_that_is_handed_round_without_a_token_comes_to_an_end",),
    ),
    ledger(
        "stamp-per-claim",
        "a stamp is of one attempt",
        lua=(lua("'stamped', cmd.stamp and 1 or 0)", "'claimed_stamp', cmd.stamp and 1 or 0)"),),
        twin=(twin("record.stamped = command.stamp", "pass"),),
        tests=(f"{_LOSS}test_every_claim_begins_without_a_stamp",),
    ),
    ledger(
        "stamp-ends-with-the-step",
        "prefill's emission says that the step is over",
        lua=(lua("if r.stamped == 1 and r.state == 'PREFILLING' then set(r, 'stamped', 0) end", ""),),
        twin=(twin("record.stamped = False", "pass"),),
        tests=(f"{_LOSS}test_prefills_emission_says_that_the_step_is_over",),
    ),
    ledger(
        "suspects-claimed-together",
        "poison does not take a second suspect along: on a prefill node",
        lua=(lua("and not (node.suspect and (tonumber(c[6]) or 0) > 0)", "", "claim.lua"),),
        twin=(twin("or (record.suspect and node.suspect):", ":", "attempts.py"),),
        tests=(f"{_LOSS}test_a_node_gets_no_second_suspect",),
    ),
    ledger(
        "suspects-leased-together",
        "poison does not take a second suspect along: on a decode node",
        lua=(lua("and not (node.suspect and (tonumber(c[6]) or 0) > 0)", "", "reserve_next.lua"),),
        twin=(twin("or (record.suspect and node.suspect):", ":", "handoff.py"),),
        tests=(f"{_LOSS}test_a_node_gets_no_second_suspect",),
    ),
    ledger(
        "suspect-trusted-again",
        "a suspect that got far enough is one no more",
        lua=(lua("if r.suspect > 0 and have >= r.suspect then", "if false then"),),
        twin=(twin("if record.suspect and len(record.tokens) >= record.suspect:", "if False:"),),
        tests=(f"{_LOSS}test_a_suspect_moves_with_its_activation_and_is_trusted_after_sixteen_tokens",),
    ),
    ledger(
        "pair-avoided",
        "a pair of nodes that failed each other does not use up a request's attempts",
        lua=(lua("if not apart(c, node.incarnation) then return false end", "if true then return false end"),),
        twin=(twin("if not _apart(store, record, decode): return False", "if True:\n        return False"),),
        tests=(f"{_PAIRS}test_they_are_kept_apart_for_two_seconds",),
    ),
    ledger(
        "pair-prefill-left",
        "a prefill node that is cut off does not use up a request's attempts",
        lua=(lua("if c.shunned_prefill ~= node.incarnation or now > c.shunned_until then", "if true then"),),
        twin=(twin("if record.shunned_prefill != prefill or store.time > record.shunned_until:", "if True:"),),
        tests=(f"{_PAIRS}test_the_record_keeps_away_from_that_prefill_node_too_while_another_could_compute_it",),
    ),
    ledger(
        "pair-better-than-none",
        "a bad pair is better than none: nobody waits for a node that could not take it",
        lua=(lua("c.need <= other.num_blocks and", ""),),
        twin=(twin("other is not None and need <= other.info.num_blocks", "other is not None"),),
        tests=(f"{_PAIRS}test_without_another_that_could_take_it_a_bad_pair_is_better_than_none",),
    ),
    ledger(
        "pair-made-good",
        "an activation makes a pair good again",
        lua=(lua("forget_pair(r.owner .. ':' .. cmd.incarnation)", ""),),
        twin=(twin('forget_pair(store, f"{record.owner}:{command.incarnation}")', "pass"),),
        tests=(f"{_PAIRS}test_an_activation_between_the_two_makes_it_good",),
    ),
)
