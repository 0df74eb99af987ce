"""Guards of the end of a process: that it comes, by when, loud, and not where nothing is wrong."""

from tests.mutants.mutant import Edit, Mutant

_EMERGENCY = "tests/unit/test_emergency.py::"
_HOST = "tests/unit/test_host.py::"
_CRASH = "tests/unit/test_crash.py::"
_LOG = "tests/unit/test_log_lane.py::"
_SERVER = "tests/api/test_server.py::"


def _emergency(old: str, new: str) -> tuple[Edit, ...]:
    return (Edit("workers/emergency.py", old, new),)


def _crash(old: str, new: str) -> tuple[Edit, ...]:
    return (Edit("app/crash.py", old, new),)


def _log(old: str, new: str) -> tuple[Edit, ...]:
    return (Edit("app/log_lane.py", old, new),)


ENDING = (
    Mutant(
        "end-of-an-unwatched-node",
        "a node that nobody watches does not go on",
        (Edit("workers/watchdog.py", 'self._on_fault("watchdog", error)', "pass"),),
        ("tests/unit/test_watchdog.py::test_a_watch_that_cannot_go_on_is_a_fault_of_its_own",),
    ),
    Mutant(
        "end-if-nobody-looks",
        "one thread that keeps the interpreter to itself ends the process, though no watchdog can",
        _emergency("end_in(self._stall_s + self._last_words_s)", "pass"),
        (f"{_EMERGENCY}test_while_the_watchdog_looks_the_process_ends_soon_after_it_would_have_found_a_stall",),
    ),
    Mutant(
        "end-bounds-last-words",
        "promise 2: what is still to be said has a bound",
        _emergency("end_in(self._last_words_s)", "pass"),
        (f"{_HOST}test_a_lane_without_progress_ends_the_process_though_heartbeats_go_on",),
    ),
    Mutant(
        "end-takes-nothing-more",
        "an unhealthy node takes no bells from the first moment on",
        _emergency("self._shut() logger", "logger"),
        (f"{_EMERGENCY}test_a_broken_node_takes_nothing_more_then_speaks_then_ends",),
    ),
    Mutant(
        "end-once",
        "a second part that fails does not cut the last words of the first short",
        _emergency("or not self._begun.acquire(blocking=False)", ""),
        (f"{_HOST}test_a_node_that_ends_says_so_once_however_many_of_its_parts_fail",),
    ),
    Mutant(
        "end-whatever-is-raised",
        "a broken node ends, whatever its last words meet",
        _emergency("finally: end_crashed(", "else:\n            end_crashed("),
        (
            f"{_EMERGENCY}test_last_words_that_fail_in_a_way_that_nobody_foresaw_do_not_keep_the_process_alive",
            f"{_HOST}test_a_ledger_that_is_away_does_not_keep_a_broken_node_alive",
        ),
    ),
    Mutant(
        "end-not-of-the-closed",
        "what the parts of a node do that ends as it should is no crash",
        _emergency("if self._closed or not", "if not"),
        (f"{_EMERGENCY}test_what_the_parts_of_a_node_do_that_ends_as_it_should_is_no_emergency",),
    ),
    Mutant(
        "end-of-a-drain",
        "a worker that has drained ends with status 0: that its heartbeat is over is no fault",
        (Edit("workers/host.py", "self._watchdog.close()  # first: from here on what ends is meant to", "pass"),),
        (f"{_HOST}test_what_ends_with_a_drain_is_no_emergency_however_long_the_ledger_takes",),
    ),
    Mutant(
        "end-taken-back",
        "a process whose node has drained ends, whatever its parts do",
        _emergency("end_in(CLOSING_S)", "pass"),
        (f"{_EMERGENCY}test_what_the_parts_of_a_node_do_that_ends_as_it_should_is_no_emergency",),
    ),
    Mutant(
        "end-of-the-refused",
        "a refusal that may pass does not end the process",
        (Edit("app/heartbeat.py", "if now - self._refused_since >= self._refused_for_s:", "if True:"),),
        ("tests/unit/test_heartbeat.py::test_a_refusal_is_told_only_when_it_has_lasted",),
    ),
    Mutant(
        "end-refusal-forgotten",
        "a refusal that passed does not count with the next, hours later",
        (Edit("app/heartbeat.py", "if not self._refusal: self._refused_since = 0.0", "pass"),),
        ("tests/unit/test_heartbeat.py::test_a_refusal_that_passed_does_not_count_with_the_next",),
    ),
    Mutant(
        "end-whatever-runs",
        "a process ends at its time, though a thread of it never gives the interpreter's lock back",
        _crash("faulthandler.dump_traceback_later(seconds, exit=True,", "faulthandler.dump_traceback_later(seconds,"),
        (f"{_CRASH}test_a_process_ends_when_nobody_puts_its_end_off_and_tells_where_it_stood",),
    ),
    Mutant(
        "end-though-stderr-is-full",
        "a reader that takes nothing from stderr does not keep a broken process alive",
        _crash("os.O_WRONLY | os.O_NONBLOCK", "os.O_WRONLY"),
        (f"{_CRASH}test_a_process_ends_though_nobody_takes_its_last_words",),
        also=("TimeoutExpired",),
    ),
    Mutant(
        "end-though-logs-are-stuck",
        "nor does a log that nobody takes",
        _crash("flush.join(_LAST_LINES_S)", "flush.join()"),
        (f"{_CRASH}test_a_process_ends_though_nobody_takes_its_last_words",),
        also=("TimeoutExpired",),
    ),
    Mutant(
        "log-holds-nobody-up",
        "a frozen reader of the log stops no thread",
        _log("logger.addHandler(LogLane(handler))", "logger.addHandler(handler)"),
        (f"{_LOG}test_a_trace_is_kept_and_a_second_time_changes_nothing",),
    ),
    Mutant(
        "log-is-bounded",
        "lines that nobody takes do not fill the memory",
        _log("queue.Queue(MOST_LINES)", "queue.Queue()"),
        (f"{_LOG}test_a_full_pipe_holds_nobody_up_and_what_was_dropped_is_said",),
    ),
    Mutant(
        "log-says-what-it-dropped",
        "a log with a hole says so",
        _log("if dropped:", "if False:"),
        (f"{_LOG}test_a_full_pipe_holds_nobody_up_and_what_was_dropped_is_said",),
    ),
    Mutant(
        "exit-of-web-reported",
        "promise 2: a dead web worker's requests end within a second, not when its silence is noticed",
        (Edit("web/report_exit.py", "while ledger.execute(ReportExit(incarnation)).more:", "while False:"),),
        ("tests/unit/web/test_report_exit.py::test_a_web_worker_that_has_ended_is_in_the_ledger_no_more",),
    ),
    Mutant(
        "web-drain-tells",
        "never silence: an answer that does not end in the time of a drain ends with an explicit error",
        (Edit("web/gunicorn_worker.py", "_begin_drain(get_settings().drain_timeout_s)", "pass"),),
        (f"{_SERVER}test_sigterm_ends_what_does_not_finish_with_an_explicit_error",),
        also=("RemoteProtocolError",),
    ),
    Mutant(
        "web-drain-ends",
        "promise 2: an open answer does not outlive the drain of its web process",
        (Edit("web/relay.py", "if services.process.drain_over:", "if False:"),),
        (f"{_SERVER}test_sigterm_ends_what_does_not_finish_with_an_explicit_error",),
        also=("RemoteProtocolError",),
    ),
    Mutant(
        "web-drain-refuses",
        "what a web process lets in after its drain would only be cut off",
        (Edit("web/admission.py", "if services.process.drain_over:", "if False:"),),
        ("tests/api/test_reconnect.py::test_when_the_drains_time_is_over_nothing_is_attached",),
    ),
    Mutant(
        "web-drain-gets-shorter",
        "a second request to stop does not lengthen the drain",
        (
            Edit(
                "web/process.py",
                "min(self.drain_deadline, time.monotonic() + drain_timeout_s)",
                "time.monotonic() + drain_timeout_s",
            ),
        ),
        ("tests/unit/web/test_process.py::test_a_second_request_to_stop_can_only_shorten_the_drain",),
    ),
)
