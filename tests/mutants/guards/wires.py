"""Guards of the wires: the link between nodes, the KV reader and mover, the ledger's connection, heartbeats."""

from tests.mutants.mutant import Edit, Mutant, ledger, lua, twin

_KERNELS = "tests/unit/engine/test_kernels.py::"
_LINK = "tests/integration/test_link.py::"
_SILENCE = "tests/integration/test_link_silence.py::"
_KV = "tests/contract/kv/test_transport.py::"
_SERVER = "tests/contract/ledger/test_server.py::"
_BROKER = "tests/unit/test_broker.py::"
_VERSIONS = "tests/contract/ledger/test_versions.py::"
_MOVER = "tests/unit/test_mover.py::"
_NOW = "tuple(int(pool.generations[block]) for block in job.blocks)"


def _link(old: str, new: str) -> tuple[Edit, ...]:
    return (Edit("app/link/*.py", old, new),)


def _reader(old: str, new: str) -> tuple[Edit, ...]:
    return (Edit("app/kv/reader.py", old, new),)


def _connection(old: str, new: str) -> tuple[Edit, ...]:
    return (Edit("app/ledger/connection.py", old, new),)


WIRES = (
    Mutant(
        "link-incarnation",
        "a restarted worker never acts on a message to its former life",
        _link("if envelope.to != self._incarnation:", "if False:"),
        (f"{_LINK}test_a_call_to_an_earlier_incarnation_is_refused_by_its_successor",),
    ),
    Mutant(
        "link-expired",
        "what a frozen peer reads after the deadline is not acted on",
        _link("if envelope.boot == boot_id() and envelope.deadline < time.monotonic():", "if False:"),
        (f"{_LINK}test_what_a_frozen_peer_reads_after_the_deadline_is_not_acted_on",),
    ),
    Mutant(
        "link-deadline",
        "a call ends at its deadline",
        _link(
            "overdue = [number for number, call in peer.open.items() if call.deadline <= now]",
            "overdue: list[int] = []",
        ),
        (f"{_LINK}test_a_call_without_an_answer_leaves_its_neighbours_on_the_same_link_alone",),
        also=("Empty",),
    ),
    Mutant(
        "link-retires-the-stuck",
        "a connection that missed a deadline sends nothing more, and its calls end",
        _link("if key is not None and (overdue or stuck):", "if False:"),
        (f"{_SILENCE}test_a_call_that_waits_for_its_connection_ends_at_its_deadline_as_not_sent",),
        also=("Empty",),
    ),
    Mutant(
        "link-immediate",
        "ZMQ never caches for a peer that is away",
        _link("socket.setsockopt(zmq.IMMEDIATE, 1)", "socket.setsockopt(zmq.IMMEDIATE, 0)"),
        (f"{_LINK}test_an_absent_peer_means_certainly_not_sent_and_soon",),
    ),
    Mutant(
        "kv-generation",
        "rule 6: a block in its next use is refused",
        _reader("if found != generation:", "if False:"),
        (
            "tests/contract/kv/test_reuse_during_a_copy.py::test_the_generation_counts_as_it_is_after_the_copy",
            f"{_KV}test_a_block_in_its_next_use_is_refused",
        ),
    ),
    Mutant(
        "kv-digest",
        "rule 6: what was copied is what was committed, bit by bit",
        _reader("if copied != expected:", "if False:"),
        (f"{_KV}test_one_flipped_bit_is_refused",),
    ),
    Mutant(
        "kv-incarnation",
        "a pool of another process at the same place is not read",
        _reader("if header.incarnation != location.incarnation:", "if False:"),
        (f"{_KV}test_a_location_of_another_life_is_refused",),
    ),
    Mutant(
        "kv-owner-lives",
        "the memory of a dead node is not read, though it is still mapped",
        _reader("or not cached.check_there():", ":"),
        (f"{_KV}test_a_killed_owner_is_gone_and_leaves_nothing",),
    ),
    Mutant(
        "kv-dtype",
        "nodes that store keys and values in other dtypes do not read each other's blocks",
        (Edit("app/kv/layout.py", "dtype={dtype} ", ""),),
        ("tests/unit/engine/test_kv_dtype.py::test_nodes_with_other_dtypes_refuse_each_other_and_say_why",),
    ),
    Mutant(
        "kv-beyond-half",
        "what a float16 cannot hold ends a request with an error",
        (Edit("workers/engine/kv_cache.py", "values.abs() < _LARGEST_HALF", "values == values"),),
        (f"{_KERNELS}test_what_a_half_cannot_hold_is_no_number_in_the_answer[portable-65520.0-key]",),
    ),
    Mutant(
        "kv-peers-pages",
        "the pages of other nodes' pools do not add up in a node that reads them",
        _reader("if self._read_bytes > _RESIDENT_BYTES:", "if False:"),
        ("tests/contract/kv/test_shared_memory.py::test_the_pages_of_others_are_let_go_once_many_were_read",),
    ),
    Mutant(
        "kv-bounds",
        "a COMMIT does not name blocks outside the pool",
        _reader("if not 0 <= src < location.num_blocks:", "if False:"),
        (f"{_KV}test_a_block_outside_the_pool_is_refused",),
        also=("IndexError",),
    ),
    Mutant(
        "seal-generation",
        "rule 6: prefill commits only to blocks that are still its own",
        (Edit("workers/mover.py", f"if {_NOW} != job.generations:", "if False:"),),
        (f"{_MOVER}test_a_block_that_was_given_to_its_next_use_is_not_sealed",),
    ),
    Mutant(
        "seal-order",
        "rule 6: generations are read again after the digest, not before it",
        (
            Edit(
                "workers/mover.py",
                "new = iter(pool.digest(unknown))",
                f"before = {_NOW}\n        new = iter(pool.digest(unknown))",
            ),
            Edit("workers/mover.py", f"if {_NOW} != job.generations:", "if before != job.generations:"),
        ),
        (f"{_MOVER}test_a_block_that_was_given_away_while_it_was_digested_is_not_sealed",),
    ),
    Mutant(
        "no-silent-retries",
        "rule 2: nothing is repeated behind the caller's back",
        _connection("retry=Retry(NoBackoff(), 0)", "retry=Retry(NoBackoff(), 3)"),
        ("tests/contract/ledger/test_no_retries.py::test_a_ledger_call_connects_once",),
    ),
    Mutant(
        "unknown-is-unknown",
        "rule 2: a write that was sent and not answered may have been applied",
        _connection(
            "replies.append(error if refused(error) else Lost(str(error)))",
            "replies.append(error if refused(error) else LedgerUnavailable(str(error)))",
        ),
        (f"{_SERVER}test_a_frozen_server_leaves_a_write_unknown_and_the_write_may_land_later",),
        also=("LedgerUnavailable",),
    ),
    Mutant(
        "ledger-time-read-anew",
        "rule 2: an idle process does not send writes that are late already",
        _connection("if time.monotonic() - at > _STALE_AFTER_S:", "if False:"),
        (f"{_SERVER}test_a_caller_that_was_idle_asks_for_the_time_before_it_writes",),
    ),
    Mutant(
        "ledger-schema",
        "data of another version are not touched",
        _connection("if not (version.isdigit() and int(version) in self._versions):", "if False:"),
        ("tests/contract/ledger/test_schema.py::test_data_of_another_version_are_refused_with_what_to_do",),
    ),
    ledger(
        "version-with-every-call",
        "data of a version that is not read here are not touched, not even on a connection that knew them older",
        lua=(lua("check_version(c[2])", ""),),
        twin=(twin("if self.store.version not in self._versions:", "if False:"),),
        tests=(f"{_VERSIONS}test_a_process_that_does_not_read_the_version_is_refused_with_every_call",),
    ),
    ledger(
        "version-of-the-oldest",
        "nothing is written that a living node does not read",
        lua=(
            lua("newest = math.min(newest, tonumber(redis.call('HGET', P .. 'node:' .. incarnation, 'newest')))", ""),
        ),
        twin=(twin("min(store.newest, *read)", "store.newest"),),
        tests=(f"{_VERSIONS}test_while_a_node_of_the_old_release_lives_all_write_as_it_reads",),
    ),
    Mutant(
        "another-life-of-the-ledger",
        "a restarted ledger is noticed: its run id has changed",
        (Edit("app/heartbeat.py", "if answer.run_id != self._run_id:", "if False:"),),
        ("tests/unit/test_heartbeat.py::test_a_restarted_ledger_is_noticed_once",),
    ),
    Mutant(
        "heartbeat-of-the-forgotten",
        "a node that the ledger does not know any more hears of it with its next heartbeat",
        (Edit("app/heartbeat.py", "if answer.status is NodeStatus.UNKNOWN:", "if False:"),),
        ("tests/unit/test_heartbeat.py::test_a_node_that_the_ledger_forgot_registers_again_by_itself",),
    ),
    Mutant(
        "scan-by-every-node",
        "beat and control workers may all be dead: every node scans if nobody has",
        (Edit("app/heartbeat.py", "if self._registered.is_set() and time.monotonic() >= self._scan_at:", "if False:"),),
        ("tests/unit/test_heartbeat.py::test_a_node_alone_scans_and_hands_the_bells_over",),
    ),
    Mutant(
        "bell-costs-one-timeout",
        "a frozen broker costs the bell lane one timeout per bell",
        (Edit("app/bells.py", ' | {"max_retries": 0}', ""),),
        (f"{_BROKER}test_a_bell_for_a_frozen_broker_costs_one_timeout_and_raises_nothing",),
    ),
    Mutant(
        "broker-takes-messages",
        "a broker that answers but takes no messages is no reason to be ready",
        (Edit("app/bells.py", '.client.set("asked", 1, ex=BELL_EXPIRES_S)', ".client.ping()"),),
        (f"{_BROKER}test_a_broker_that_answers_but_takes_no_messages_is_at_fault_until_it_takes_some",),
    ),
    Mutant(
        "broker-tried-often",
        "after a long outage of the broker no worker waits long to try it again",
        (Edit("app/broker.py", "**(pace | options)", "**options"),),
        (f"{_BROKER}test_a_worker_tries_to_connect_as_often_after_a_long_outage_as_at_its_start",),
    ),
    Mutant(
        "ready-asks-the-broker",
        "/ready says so while the broker takes no messages",
        (Edit("web/health.py", "broker_fault = these.broker_fault()", 'broker_fault = ""'),),
        ("tests/api/test_surface.py::test_a_broker_that_is_away_is_a_reason_not_to_be_ready_and_ends_no_request",),
    ),
)
