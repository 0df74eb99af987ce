import threading
import time
from collections.abc import Callable

from app.errors import LedgerUnavailable, LedgerUnknown
from app.launcher.reporter import ExitReporter
from app.protocol.commands import Bell, ReportExit, ScanAnswer


class FlakyLedger:
    """Fails as told, then answers; says when it has."""

    def __init__(self, failures: int = 0, answers: tuple[ScanAnswer, ...] = ()) -> None:
        self.failures = failures
        self.answers = list(answers)
        self.reported: list[str] = []
        self.closed = False
        self.changed = threading.Condition()

    def execute(self, command: ReportExit) -> ScanAnswer:
        with self.changed:
            if self.failures:
                self.failures -= 1
                raise LedgerUnknown("no answer", not_after_ms=0)
            self.reported.append(command.incarnation)
            self.changed.notify_all()
            return self.answers.pop(0) if self.answers else ScanAnswer(ran=True, time_ms=0)

    def close(self) -> None:
        self.closed = True

    def wait_for(self, condition: Callable[[], bool]) -> None:
        with self.changed:
            assert self.changed.wait_for(condition, timeout=10)


def test_an_exit_is_reported_and_what_it_requeued_is_rung() -> None:
    bells = (Bell("prefill", "uid-1", 2), Bell("prefill", "uid-2", 1))
    answers = (ScanAnswer(True, 0, bells[:1], more=True), ScanAnswer(True, 0, bells[1:]))
    ledger = FlakyLedger(answers=answers)
    rung: list[Bell] = []
    reporter = ExitReporter(lambda: ledger, rung.append)
    reporter.report("a")
    ledger.wait_for(lambda: len(ledger.reported) == 2)
    reporter.close(5.0)
    assert ledger.reported == ["a", "a"]  # the first answer said that work is left
    assert tuple(rung) == bells
    assert ledger.closed


def test_a_report_whose_outcome_is_unknown_is_repeated() -> None:
    ledger = FlakyLedger(failures=2)
    reporter = ExitReporter(lambda: ledger, lambda bell: None)
    reporter.report("a")
    ledger.wait_for(lambda: ledger.reported == ["a"])
    reporter.close(5.0)


def test_a_ledger_that_stays_away_costs_one_report_and_not_the_next() -> None:
    ledger, attempts = FlakyLedger(), []

    def connect() -> FlakyLedger:
        attempts.append(time.monotonic())
        if len(attempts) == 1:
            raise LedgerUnavailable("refused")
        return ledger

    reporter = ExitReporter(connect, lambda bell: None, try_for_s=0.0)
    reporter.report("lost")
    reporter.report("told")
    ledger.wait_for(lambda: ledger.reported == ["told"])
    reporter.close(5.0)


def test_closing_does_not_wait_for_a_ledger_that_does_not_answer() -> None:
    ledger = FlakyLedger(failures=10**9)
    reporter = ExitReporter(lambda: ledger, lambda bell: None, try_for_s=60.0)
    reporter.report("a")
    before = time.monotonic()
    reporter.close(5.0)
    assert time.monotonic() - before < 2.0
