"""Guards of requests with several sequences."""

from tests.mutants.mutant import Edit, Mutant, ledger, lua, twin

_TESTS = "tests/contract/ledger/test_groups.py::"
_API = "tests/api/test_groups.py::"

GROUPS = (
    ledger(
        "group-all-or-none",
        "the queue takes all sequences of a request or none",
        lua=(lua("if queued + #sequences > limits.max_queued then", "if queued >= limits.max_queued then"),),
        twin=(
            twin("if queued + len(sequences) > command.limits.max_queued:", "if queued >= command.limits.max_queued:"),
        ),
        tests=(f"{_TESTS}test_at_the_limit_all_are_admitted_or_none",),
    ),
    ledger(
        "group-each-fits",
        "no sequence waits for a node that could hold it and does not exist",
        lua=(
            lua(
                "for _, each in ipairs(sequences) do -- A prefill node reads",
                "for _, each in ipairs({ cmd }) do\n  -- A prefill node reads",
            ),
        ),
        twin=(twin("for each in sequences: if room :=", "for each in sequences[:1]:\n        if room :="),),
        tests=(f"{_TESTS}test_none_is_admitted_if_one_fits_nowhere",),
    ),
    ledger(
        "group-ends-together",
        "what nobody can be told any more is not computed: one that ends badly takes the others with it",
        lua=(lua("if mate and in_process(mate) then", "if false then"),),
        twin=(twin("if mate.in_process:", "if False:"),),
        tests=(f"{_TESTS}test_one_that_fails_takes_the_others_with_it_as_it_ended",),
    ),
    ledger(
        "group-holds-its-id",
        "a client id is in process until the last sequence of its request has ended",
        lua=(
            lua(
                "if redis.call('HINCRBY', first, 'left', -1) > 0 then return end",
                "redis.call('HINCRBY', first, 'left', -1)",
            ),
        ),
        twin=(twin("if first.left > 0: return", ""),),
        tests=(f"{_TESTS}test_the_client_id_is_taken_until_the_last_one_has_ended",),
    ),
    ledger(
        "group-abort",
        "a request is cancelled as a whole, whichever of its sequences have ended",
        lua=(lua("for _, uid in ipairs(group_of(r)) do", "for _, uid in ipairs({ r.uid }) do", "abort.lua"),),
        twin=(
            twin(
                "for each in store.group_of(record): if each.in_process: end_request(",
                "for each in (record,):\n        if each.in_process:\n            end_request(",
            ),
        ),
        tests=(f"{_TESTS}test_an_abort_ends_all_whatever_they_do",),
    ),
    ledger(
        "group-detach",
        "a client that has gone watches no sequence any more",
        lua=(lua("for _, uid in ipairs(group_of(r)) do", "for _, uid in ipairs({ r.uid }) do", "detach.lua"),),
        twin=(
            twin(
                "for each in store.group_of(record): if each.in_process: status =",
                "for each in (record,):\n        if each.in_process:\n            status =",
            ),
        ),
        tests=(f"{_TESTS}test_the_last_watcher_gone_aborts_all",),
    ),
    ledger(
        "group-key-of-the-given-up",
        "a key whose request was aborted or expired is free again, though its first sequence had finished",
        lua=(lua("local state = k[4] or k[1]", "local state = k[1]"),),
        twin=(twin("return first.ended_as or first.state", "return first.state"),),
        tests=(f"{_TESTS}test_a_key_is_replayed_or_free_as_the_whole_group_has_ended",),
    ),
    ledger(
        "group-key-of-the-overloaded",
        "a key whose request failed because one of its sequences found no room is free again",
        lua=(
            lua(
                "redis.call('HSET', P .. 'rec:' .. group_of(r)[1], 'overloaded',",
                "redis.call('HSET', P .. 'rec:' .. r.uid, 'overloaded',",
            ),
        ),
        twin=(twin("store.group_of(record)[0].overloaded =", "record.overloaded ="),),
        tests=(f"{_TESTS}test_a_key_is_replayed_or_free_as_the_whole_group_has_ended",),
    ),
    ledger(
        "group-expires",
        "the records of a request go when its time is over, all of them",
        lua=(
            lua(
                "for _, each in ipairs(uids) do redis.call('PEXPIRE'",
                "for _, each in ipairs({ uid }) do\n    redis.call('PEXPIRE'",
            ),
        ),
        twin=(twin("for record in group:", "for record in group[:1]:"),),
        tests=(f"{_TESTS}test_records_go_together_once_the_last_one_has_ended",),
    ),
    Mutant(
        "group-uids",
        "the uids of a request follow from its first one: else nobody would find the others",
        (Edit("app/ledger/ids.py", "if any(each.uid !=", "if False and any(each.uid !="),),
        (f"{_TESTS}test_uids_that_are_not_the_groups_are_refused",),
    ),
    Mutant(
        "group-version",
        "nodes of the release before meet no record that they do not understand",
        (Edit("web/params.py", "return max(options, GROUPS) if len(self.choices) > 1 else options", "return options"),),
        (f"{_API}test_while_a_node_runs_that_knows_no_groups_they_are_refused",),
    ),
    Mutant(
        "group-silent-one",
        "never silence: a sequence whose event was lost is read though others keep talking",
        (Edit("web/feeds.py", "if not self._due and self._clock() - self._swept_at >= SWEEP_S:", "if False:"),),
        ("tests/unit/web/test_feeds.py::test_a_silent_one_is_read_while_another_never_stops_talking",),
    ),
    Mutant(
        "group-answers-all",
        "an answer is complete when all of its choices are",
        (Edit("web/relay.py", "if not left: reasons", "if delta.finish_reason:\n                    reasons"),),
        (f"{_API}test_a_whole_chat_has_its_choices_in_order",),
    ),
    Mutant(
        "group-attached-in-part",
        "a client that could attach to a part of a request leaves no watcher behind",
        (Edit("web/admission.py", "if records: # watched in part", "if False:"),),
        (f"{_API}test_a_client_that_could_attach_to_a_part_only_leaves_no_watcher_behind",),
    ),
)
