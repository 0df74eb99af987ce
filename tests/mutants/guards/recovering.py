"""Guards of ledger time, registration, and what is taken from the dead."""

from tests.mutants.mutant import ledger, lua, twin

_NODES = "tests/contract/ledger/test_nodes.py::"
_SCAN = "tests/contract/ledger/test_scan.py::"
_LEDGER_TIME = f"{_NODES}test_ledger_time_moves_by_at_most_a_second_and_never_back"
_LUA_CLAMP = "math.max(0, math.min(wall_ms() - tonumber(c[2]), 1000))"
_TWIN_NODE = "node = store.nodes.get(command.incarnation)"
_TWIN_CLAMP = "max(0, min(self.wall - self.last, 1000))"

RECOVERING = (
    ledger(
        "not-after",
        "rule 2: what arrives after its not_after changes nothing",
        lua=(lua("return not_after ~= nil and now > not_after end", "return false end"),),
        twin=(twin("and self.store.time > not_after_ms:", "and False:"),),
        tests=("tests/contract/ledger/test_late.py::test_a_late_write_changes_nothing",),
    ),
    ledger(
        "clock-frozen",
        "rule 9: a clock that stood still or jumped kills nobody",
        lua=(lua(_LUA_CLAMP, "math.max(0, wall_ms() - tonumber(c[2]))"),),
        twin=(twin(_TWIN_CLAMP, "max(0, self.wall - self.last)"),),
        tests=(_LEDGER_TIME,),
    ),
    ledger(
        "clock-set-back",
        "rule 9: ledger time never runs backwards",
        lua=(lua(_LUA_CLAMP, "math.min(wall_ms() - tonumber(c[2]), 1000)"),),
        twin=(twin(_TWIN_CLAMP, "min(self.wall - self.last, 1000)"),),
        tests=(_LEDGER_TIME,),
    ),
    ledger(
        "clock-goes-on",
        "rule 9: after a step ledger time goes on from where the clock is",
        lua=(lua("'time', t, 'last', wall_ms())", "'time', t, 'last', math.max(wall_ms(), tonumber(c[2])))"),),
        twin=(twin("1000)) self.last = self.wall", "1000))\n        self.last = max(self.last, self.wall)"),),
        tests=("tests/contract/ledger/test_clock_step.py::test_ledger_time_goes_on_after_the_clock_was_set_back",),
    ),
    ledger(
        "heartbeat-of-the-dead",
        "who was declared dead does not come back by a heartbeat",
        lua=(lua("if not n[1] or n[1] == 'dead' then", "if not n[1] then", "heartbeat.lua"),),
        twin=(
            twin(
                f'store.advance_clock() {_TWIN_NODE} if node is None or node.state == "dead":',
                f"store.advance_clock()\n    {_TWIN_NODE}\n    if node is None:",
            ),
        ),
        tests=(f"{_NODES}test_a_dead_node_that_still_owns_something_may_not_register",),
    ),
    ledger(
        "register-after-exit",
        "an exit is final: a register of that process may still be under way",
        lua=(lua("if redis.call('ZSCORE', P .. 'exited', inc) then", "if false then"),),
        twin=(twin("if inc in store.exited:", "if False:"),),
        tests=(f"{_NODES}test_an_exit_is_final_for_its_incarnation",),
    ),
    ledger(
        "register-while-owing",
        "a dead node comes back only when all it had is taken back",
        lua=(lua("if state == 'dead' and redis.call('EXISTS', P .. 'owned:' .. inc) == 1 then", "if false then"),),
        twin=(twin('if known and known.state == "dead" and store.owned.get(inc):', "if False:"),),
        tests=(f"{_NODES}test_a_node_declared_dead_by_a_scan_waits_until_all_it_had_is_taken_back",),
    ),
    ledger(
        "register-layout",
        "nodes of another model or KV layout do not serve together",
        lua=(lua("if why and fresh(other) then return refused(why) end", ""),),
        twin=(twin("if store.fresh(other): return _refused", "if False:\n            return _refused"),),
        tests=(f"{_NODES}test_a_kv_node_with_another_layout_is_refused_while_others_live",),
    ),
    ledger(
        "deregister-while-owning",
        "promise 3: a node's entry goes only when nothing is its own",
        lua=(lua("if owns > 0 then", "if false then"),),
        twin=(
            twin('if owned: return _refused(store, f"it still', 'if False:\n        return _refused(store, f"it still'),
        ),
        tests=(f"{_NODES}test_drain_and_deregister",),
    ),
    ledger(
        "dead-before-taken",
        "a reported exit marks the node dead before it takes things away",
        lua=(lua("declare_dead(cmd.incarnation)", "", "report_exit.lua"),),
        twin=(twin("declare_dead(store, inc) _, left = bury", "_, left = bury"),),
        tests=(f"{_NODES}test_a_dead_node_that_still_owns_something_may_not_register",),
    ),
    ledger(
        "scan-orphans",
        "promise 2: what a silent node has is taken back",
        lua=(
            lua(
                "for _, incarnation in ipairs(due('nodes', '(' .. int(now))) do", "for _, incarnation in ipairs({}) do"
            ),
        ),
        twin=(twin("for inc in silent:", "for inc in ():"),),
        tests=(f"{_SCAN}test_a_silent_prefill_node_loses_what_it_owns",),
    ),
    ledger(
        "scan-first-token",
        "preallocated blocks whose first token never comes are released",
        lua=(lua("for _, uid in ipairs(due('deadlines', int(now))) do", "for _, uid in ipairs({}) do"),),
        twin=(twin("due = ranked(store.deadlines, upto=store.time, limit=PER_KIND)", "due: list[str] = []"),),
        tests=(f"{_SCAN}test_a_first_token_that_never_comes_releases_the_lease_and_fails_the_attempt",),
    ),
    ledger(
        "scan-rings",
        "no start depends on one bell: the ledger rings again",
        lua=(lua("for _, uid in ipairs(due('rings', int(now))) do", "for _, uid in ipairs({}) do"),),
        twin=(twin("due = ranked(store.rings, upto=store.time, limit=PER_KIND)", "due: list[str] = []"),),
        tests=(f"{_SCAN}test_an_unclaimed_request_is_rung_for_after_1_2_4_8_and_8_seconds",),
    ),
)
