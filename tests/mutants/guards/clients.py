"""Guards of web against too many clients, and against those that have gone."""

from tests.mutants.mutant import Edit, Mutant, ledger, lua, twin

_CLIENT = "tests/unit/web/test_client.py::"
_SERVER = "tests/api/test_server.py::"
_RECONNECT = "tests/api/test_reconnect.py::"
_ANSWERS = "tests/api/test_answers.py::"
_OVERLOAD = "tests/api/test_overload.py::"
_ARRIVALS = "tests/unit/web/test_arrivals.py::"
_SCAN = "tests/contract/ledger/test_scan.py::"


def _client(old: str, new: str) -> tuple[Edit, ...]:
    return (Edit("web/client.py", old, new),)


def _admission(old: str, new: str) -> tuple[Edit, ...]:
    return (Edit("web/admission.py", old, new),)


CLIENTS = (
    Mutant(
        "client-looked-at",
        "what nobody waits for is not computed: a client that goes while nothing is written is noticed",
        (Edit("web/relay.py", "if client.gone():", "if False:"),),
        (f"{_SERVER}test_a_client_that_goes_before_the_first_token_is_noticed",),
    ),
    Mutant(
        "client-closed",
        "a connection that the client has closed is seen",
        _client('socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""', "socket.MSG_PEEK | socket.MSG_DONTWAIT) is None"),
        (f"{_CLIENT}test_a_client_is_gone_when_it_has_closed",),
    ),
    Mutant(
        "client-pipelines",
        "a client that has sent its next request already is there, and loses no byte of it",
        _client("socket.MSG_PEEK | socket.MSG_DONTWAIT", "socket.MSG_DONTWAIT"),
        (f"{_CLIENT}test_a_client_is_gone_when_it_has_closed",),
        also=("TimeoutError",),
    ),
    Mutant(
        "client-asked-without-waiting",
        "looking at one client does not hold its answer up, nor take it for gone",
        _client("if not _has_something(self._socket):", "if False:"),
        (f"{_CLIENT}test_a_client_that_is_there_is_asked_without_waiting_though_its_socket_has_a_timeout",),
    ),
    Mutant(
        "client-machine-asked",
        "promise 2: a client whose machine is gone is noticed while nothing is on its way to it",
        _client("connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)", "pass"),
        (f"{_CLIENT}test_the_kernel_asks_a_silent_machine_and_gives_it_up_within_ten_seconds",),
    ),
    Mutant(
        "client-machine-asked-often",
        "and within ten seconds, not the system's two hours",
        _client("for name, value in _KEEPALIVE.items():", "for name, value in ():"),
        (f"{_CLIENT}test_the_kernel_asks_a_silent_machine_and_gives_it_up_within_ten_seconds",),
    ),
    Mutant(
        "client-machine-silent",
        "promise 2: and while something is",
        _client("silent_ms > 1000 * _SILENT_S", "False"),
        (f"{_CLIENT}test_a_machine_is_gone_that_has_acknowledged_nothing_for_long_of_what_is_on_its_way",),
    ),
    Mutant(
        "client-machine-idle",
        "a client that waits for its first token in silence is not taken for gone",
        _client("return bool(sent_again and on_their_way) and", "return"),
        (f"{_CLIENT}test_a_machine_is_gone_that_has_acknowledged_nothing_for_long_of_what_is_on_its_way",),
    ),
    Mutant(
        "client-gone-said",
        "promise 3: the ledger hears that nobody waits any more",
        _admission("if not ended: services.node.say_farewell(", "if False:\n        services.node.say_farewell("),
        (f"{_RECONNECT}test_without_a_key_or_without_grace_the_last_one_gone_aborts_at_once",),
    ),
    Mutant(
        "client-place-given-back",
        "whoever goes gives the place back",
        _admission(
            "services.node.mailboxes.close(job.uids, job.watcher.connection) services.seats.release()",
            "services.node.mailboxes.close(job.uids, job.watcher.connection)",
        ),
        (f"{_ANSWERS}test_a_full_queue_and_full_seats_say_when_to_come_back",),
    ),
    Mutant(
        "overload-refused-gives-back",
        "and so does who is refused",
        _admission("except BaseException: services.seats.release() raise", "except BaseException:\n        raise"),
        (f"{_RECONNECT}test_an_attached_answer_takes_a_place_as_every_other",),
    ),
    Mutant(
        "overload-places",
        "health checks and refusals are always served: answers take no more than their places",
        _admission(
            "if not services.seats.acquire(blocking=False):", "if not services.seats.acquire(blocking=False) and False:"
        ),
        (f"{_OVERLOAD}test_no_more_answers_are_open_than_there_are_places",),
    ),
    Mutant(
        "overload-is-429",
        "a full queue says that it is full",
        (Edit("web/refusals.py", "if status is AdmitStatus.FULL:", "if False:"),),
        (f"{_OVERLOAD}test_a_full_queue_refuses_at_once_and_takes_again_what_fits",),
    ),
    Mutant(
        "overload-come-back-later",
        "who is refused hears when to come back",
        (Edit("web/errors.py", "if error.retry_after_s is not None:", "if False:"),),
        (f"{_OVERLOAD}test_a_full_queue_refuses_at_once_and_takes_again_what_fits",),
        also=("KeyError",),
    ),
    Mutant(
        "overload-retry-only-what-helps",
        "official clients do not repeat what cannot succeed",
        (Edit("web/errors.py", '"true" if error.retry_helps else "false"', '"true"'),),
        (f"{_ANSWERS}test_of_fifty_with_one_id_one_is_served",),
    ),
    Mutant(
        "arrival-of-a-head",
        "a client that never sends the end of its request keeps no thread",
        (Edit("web/arrivals.py", "else arrival.until) <= now:", "else now + 1) <= now:"),),
        (f"{_ARRIVALS}test_a_head_has_its_time_and_no_more",),
    ),
    Mutant(
        "arrival-in-a-drain",
        "a head that is not here does not hold up the end of a web worker",
        (Edit("web/arrivals.py", "(arrival.until_in_drain if draining else arrival.until)", "arrival.until"),),
        (f"{_ARRIVALS}test_a_drain_waits_for_a_head_that_is_on_its_way_but_not_long",),
    ),
    Mutant(
        "arrival-on-its-way",
        "zero failed requests: what was on its way when a drain began is not cut off",
        (Edit("web/arrivals.py", "now + HEAD_S, now + LEFT_S, cut", "now + HEAD_S, now, cut"),),
        (f"{_ARRIVALS}test_a_drain_waits_for_a_head_that_is_on_its_way_but_not_long",),
    ),
    Mutant(
        "arrival-in-time",
        "what has come in time is not cut off",
        (Edit("web/arrivals.py", "self._expected.pop(who, None) is not None", "who in self._expected"),),
        (f"{_ARRIVALS}test_what_is_here_is_cut_off_no_more",),
    ),
    ledger(
        "overload-no-decode-node",
        "promise 2: what no decode node takes does not wait once more for as long",
        lua=(
            lua("elseif r and r.state == 'PREFILLING' and r.lease == '' then", "elseif false then", where="scan.lua"),
        ),
        twin=(twin("if not record.lease:", "if False:"),),
        tests=(f"{_SCAN}test_what_no_decode_node_takes_waits_no_longer_than_for_one_first_token",),
    ),
    ledger(
        "overload-queue-timeout",
        "promise 2: what waited too long for a place ends as EXPIRED, and is no attempt that failed",
        lua=(lua("if r and r.state == 'QUEUED' then", "if false then", where="scan.lua"),),
        twin=(twin("if record.state is RequestState.QUEUED: end_request(", "if False:\n            end_request("),),
        tests=(f"{_SCAN}test_a_request_queued_for_too_long_expires",),
    ),
    ledger(
        "overload-queue-time-adds-up",
        "promise 2: a request that is requeued gets no new time to wait",
        lua=(lua("now + r.queue_timeout - r.waited", "now + r.queue_timeout"),),
        twin=(
            twin(
                "store.time + record.limits.queue_timeout_ms - record.waited",
                "store.time + record.limits.queue_timeout_ms",
            ),
        ),
        tests=(f"{_SCAN}test_only_the_time_in_the_queue_counts_and_it_adds_up",),
    ),
)
