"""Guards of leases that grow, and of who gives way for them."""

from tests.mutants.mutant import BOTH_LEDGERS, Edit, Mutant

_GROWTH = "tests/unit/protocol/test_growth.py::"
_RESERVE = "tests/contract/ledger/test_reserve_and_activate.py::"
_ALL_FINISH = f"{_GROWTH}test_many_that_do_not_fit_together_all_finish_and_nobody_goes_in_circles"


def _growth(old: str, new: str) -> tuple[Edit, ...]:
    return (Edit("app/protocol/decode/*.py", old, new),)


def _both(lua: tuple[str, str], twin: tuple[str, str]) -> tuple[Edit, ...]:
    return (Edit("app/ledger/lua/*.lua", *lua), Edit("app/ledger/memory/*.py", *twin))


GROWING = (
    Mutant(
        "growth",
        "a running sequence gets another block when the next step would not fit",
        _growth("self._grow(sample.key, lease)", "pass"),
        (f"{_GROWTH}test_a_lease_begins_small_and_grows_with_its_answer",),
    ),
    Mutant(
        "growth-told",
        "the ledger knows how many blocks a lease holds",
        _growth("len(lease.blocks) if len(lease.blocks) != lease.told_blocks else 0,", "0,"),
        (f"{_GROWTH}test_the_ledger_is_told_how_far_a_lease_has_grown",),
    ),
    Mutant(
        "preempts-when-short",
        "the oldest goes on though no block is free",
        _growth("while len(short) > coming and len(staying) > 1:", "while False:"),
        (f"{_GROWTH}test_where_no_block_is_free_the_youngest_gives_way_and_its_answer_goes_on_token_exactly",),
    ),
    Mutant(
        "preempts-the-youngest",
        "who was admitted last gives way, whatever came to this node last",
        _growth("key=lambda key: self.table[key].seq", "key=lambda key: -self.table[key].seq"),
        (
            f"{_GROWTH}test_where_no_block_is_free_the_youngest_gives_way_and_its_answer_goes_on_token_exactly",
            f"{_GROWTH}test_who_is_young_is_a_matter_of_admission_not_of_arrival",
        ),
    ),
    Mutant(
        "preempts-no-more-than-it-must",
        "nobody gives way where enough blocks are on their way back",
        _growth("while len(short) > coming and", "while short and"),
        (f"{_GROWTH}test_where_no_block_is_free_nobody_gives_way_but_the_youngest",),
    ),
    Mutant(
        "preemption-is-nobodys-failure",
        "a preempted request keeps its attempts: it goes on, however often it gives way",
        _growth(
            "FailureKind.OVERLOAD, FailureReason.PREEMPTED, detail)",
            "FailureKind.FAILURE, FailureReason.PREEMPTED, detail)",
        ),
        (_ALL_FINISH,),
    ),
    Mutant(
        "room-for-the-growing",
        "a new lease leaves a block for each that still grows",
        _growth("return self.pool.free - growing", "return self.pool.free"),
        (f"{_GROWTH}test_a_new_lease_leaves_a_block_for_each_that_still_grows",),
    ),
    Mutant(
        "growing-before-waiters",
        "freed blocks go to who cannot step before they go to who waits",
        _growth("self._make_room() super()._freed()", "super()._freed()"),
        (_ALL_FINISH,),
    ),
    Mutant(
        "promised-but-gone",
        "a lease whose blocks were given to running sequences meanwhile is handed back",
        _growth("fits = answer.blocks <= self.pool.free", "fits = True"),
        (f"{_GROWTH}test_what_was_promised_to_a_waiter_goes_to_who_needs_it_meanwhile",),
        also=("IllegalStep", "Violation"),
    ),
    Mutant(
        "room-when-resumed",
        "a sequence that had paused enters the engine only with room for its next step",
        _growth("if self._is_short(lease): self._make_room() else:", "if True:"),
        (f"{_GROWTH}test_a_sequence_that_paused_without_room_for_its_next_step_waits_for_a_block",),
    ),
    Mutant(
        "lease-for-the-whole-answer",
        "no node begins an answer that it could not hold to its end",
        _both(
            ("local could = most <=", "local could = need <="),
            (
                "need = _most_blocks(record, command) if need > max",
                "need = _first_blocks(record, command)\n        if need > max",
            ),
        ),
        (f"{_RESERVE}test_a_node_that_could_not_hold_the_whole_answer_gets_no_lease",),
        kinds=BOTH_LEDGERS,
    ),
    Mutant(
        "preempted-before-younger",
        "the hint does not pass an older request that was handed back",
        _both(
            ("return not c.requeued and hint or first", "return hint or first"),
            ("(uid if record.attempt > 1 else hint or uid)", "hint or uid"),
        ),
        (f"{_RESERVE}test_the_hint_does_not_pass_an_older_request_that_was_handed_back",),
        kinds=BOTH_LEDGERS,
    ),
)
