"""Guards of admission, idempotency keys and watching."""

from tests.mutants.mutant import ledger, lua, twin

_TESTS = "tests/contract/ledger/test_requests.py::"
_KEYS = "tests/contract/ledger/test_idempotency.py::"
_WATCHING = "tests/contract/ledger/test_watching.py::"

ADMISSION = (
    ledger(
        "admit-duplicate",
        "a client id that is in process is refused",
        lua=(lua("if holder then return answer(", "if false then return answer("),),
        twin=(twin("if command.client_id in store.guards:", "if False:"),),
        tests=(f"{_TESTS}test_a_client_id_in_process_is_refused_with_the_uid_that_holds_it",),
    ),
    ledger(
        "admit-again",
        "rule 2: an admission whose answer was lost is one admission",
        lua=(lua("if admitted then", "if false then"),),
        twin=(twin("if uid in store.records:", "if False:"),),
        tests=(f"{_TESTS}test_the_same_admission_again_is_admitted_once",),
    ),
    ledger(
        "admit-tombstone",
        "an admission that its abort overtook does not come to life",
        lua=(lua("if redis.call('ZSCORE', P .. 'tombstones', cmd.uid) then", "if false then"),),
        twin=(twin("if uid in store.tombstones:", "if False:"),),
        tests=(f"{_TESTS}test_an_admission_that_comes_after_its_abort_is_refused",),
    ),
    ledger(
        "tombstone-age",
        "a tombstone outlives every not_after",
        lua=(lua("local STONE_MS = 600000", "local STONE_MS = 1000"),),
        twin=(twin("STONE_MS = 600_000", "STONE_MS = 1000"),),
        tests=(f"{_TESTS}test_an_admission_that_comes_after_its_abort_is_refused",),
    ),
    ledger(
        "admit-web-fresh",
        "no request is watched only by a web process that nobody would miss",
        lua=(lua("if not fresh(cmd.web) then return answer({ status = 'REFUSED' }) end", "", "admit.lua"),),
        twin=(twin("if not store.fresh(command.watcher.web):", "if False:"),),
        tests=(f"{_TESTS}test_a_request_watched_by_no_living_web_process_is_refused",),
    ),
    ledger(
        "admit-full",
        "what waits is bounded: 429 instead of an endless queue",
        lua=(lua("if queued + #sequences > limits.max_queued then", "if false then"),),
        twin=(twin("if queued + len(sequences) > command.limits.max_queued:", "if False:"),),
        tests=(f"{_TESTS}test_a_full_queue_refuses_and_says_how_many_wait",),
    ),
    ledger(
        "guard-compare",
        "the end of an old request leaves the guard of a later one alone",
        lua=(lua("if redis.call('GET', guard) ~= uid then return end", ""),),
        twin=(twin("if store.guards.get(record.client_id) != record.uid: return", "if False:\n        return"),),
        tests=(f"{_KEYS}test_what_names_a_later_request_stays_when_an_earlier_one_ends",),
    ),
    ledger(
        "last-watcher-aborts",
        "what nobody waits for is not computed",
        lua=(lua("end_request(r, 'ABORTED', { error_code = code })", ""),),
        twin=(twin("end_request(store, record, RequestState.ABORTED, code=code)", "pass"),),
        tests=(f"{_TESTS}test_the_last_watcher_gone_aborts",),
    ),
    ledger(
        "other-watchers-keep",
        "promise 4: a client that leaves does not end the answer of another",
        lua=(lua("if redis.call('EXISTS', P .. 'watch:' .. r.uid) == 1 then return 'WATCHED' end", ""),),
        twin=(twin("if record.watchers: return AbortStatus.WATCHED", "if False:\n        return AbortStatus.WATCHED"),),
        tests=(f"{_TESTS}test_the_last_watcher_gone_aborts",),
    ),
    ledger(
        "key-body",
        "an idempotency key with another body is refused, not answered with the first one's answer",
        lua=(lua("status = k[2] == cmd.body and 'KNOWN' or 'OTHER_BODY'", "status = 'KNOWN'"),),
        twin=(twin("AdmitStatus.KNOWN if record.key == key else AdmitStatus.OTHER_BODY", "AdmitStatus.KNOWN"),),
        tests=(f"{_KEYS}test_another_body_under_the_same_key_is_refused",),
    ),
    ledger(
        "key-known",
        "the same idempotency key again finds the first request, and computes nothing twice",
        lua=(lua("if keyed then", "if false then"),),
        twin=(twin("if command.key and (known := _known(", "if False and (known := _known("),),
        tests=(f"{_KEYS}test_a_request_that_was_computed_keeps_its_key",),
    ),
    ledger(
        "key-of-the-given-up",
        "a key whose request was aborted or expired is free again",
        lua=(lua("and state ~= 'ABORTED' and state ~= 'EXPIRED' and", "and"),),
        twin=(twin("or _outcome(record) in (RequestState.ABORTED, RequestState.EXPIRED)", ""),),
        tests=(f"{_KEYS}test_the_key_of_one_that_was_given_up_is_free_for_any_body",),
    ),
    ledger(
        "key-of-the-overloaded",
        "a key whose request failed because there was no room is free again",
        lua=(lua("and k[3] ~= '1' then", "then"),),
        twin=(twin("or record.overloaded:", ":"),),
        tests=(f"{_KEYS}test_the_key_of_one_that_was_given_up_is_free_for_any_body",),
    ),
    ledger(
        "dedup-window",
        "a finished client id is a duplicate for its window",
        lua=(lua("if state == 'FINISHED' and window > 0 then", "if false then"),),
        twin=(twin("if state is RequestState.FINISHED and window > 0:", "if False:"),),
        tests=(f"{_KEYS}test_a_finished_client_id_is_a_duplicate_for_its_window",),
    ),
    ledger(
        "attach-web-fresh",
        "attach demands a living web process",
        lua=(lua("if not fresh(cmd.web) then return answer({ status = 'REFUSED' }) end", "", "attach.lua"),),
        twin=(twin("if not store.fresh(web):", "if False:"),),
        tests=(f"{_WATCHING}test_a_web_process_that_is_not_alive_may_not_attach",),
    ),
    ledger(
        "grace",
        "a keyed request whose client lost its connection goes on for its grace",
        lua=(lua("if grace > 0 then", "if false then"),),
        twin=(twin("if record.limits.grace_ms > 0:", "if False:"),),
        tests=(f"{_WATCHING}test_an_unwatched_request_goes_on_for_its_grace",),
    ),
    ledger(
        "grace-ends",
        "promise 3: what nobody came back for is aborted after its grace",
        lua=(lua("for _, uid in ipairs(due('unwatched', int(now))) do", "for _, uid in ipairs({}) do"),),
        twin=(
            twin("unwatched = ranked(store.unwatched, upto=store.time, limit=PER_KIND)", "unwatched: list[str] = []"),
        ),
        tests=(f"{_WATCHING}test_an_unwatched_request_goes_on_for_its_grace",),
    ),
    ledger(
        "grace-once",
        "a detach, repeated, does not lengthen the grace",
        lua=(lua("redis.call('ZADD', P .. 'unwatched', 'NX', ", "redis.call('ZADD', P .. 'unwatched', "),),
        twin=(
            twin(
                "store.unwatched.setdefault(record.uid, store.time + record.limits.grace_ms)",
                "store.unwatched[record.uid] = store.time + record.limits.grace_ms",
            ),
        ),
        tests=(f"{_WATCHING}test_the_same_detach_again_does_not_lengthen_the_grace",),
    ),
    ledger(
        "attach-ends-grace",
        "who attaches in the grace saves the request",
        lua=(lua("redis.call('ZREM', P .. 'unwatched', cmd.uid)", ""),),
        twin=(twin("store.unwatched.pop(command.uid, None)", "pass"),),
        tests=(f"{_WATCHING}test_who_attaches_in_the_grace_saves_it",),
    ),
)
