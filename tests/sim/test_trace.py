"""What a person reads of a failed seed."""

from __future__ import annotations

import pytest

from tests.sim import replay
from tests.sim.disasters import Disaster
from tests.sim.invariants import Checker
from tests.sim.run import run_seed
from tests.sim.trace import lines


def test_the_trace_of_one_request_tells_its_life_and_what_struck_meanwhile() -> None:
    result = run_seed(3, [Disaster.NODE_CRASHES])
    uid = next(uid for _, _, what, uid, _ in result.notes if what == "outcome")
    text = "\n".join(lines(result.notes, uid))
    others = {whose for _, _, _, whose, _ in result.notes if whose not in ("", uid)}
    assert "asks Admit" in text
    assert "node crashes" in text
    assert f"[{uid}]" not in text
    assert not any(f"[{other}]" in text for other in others)


def test_a_violation_is_printed_with_the_trace_of_its_request(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    finished = Checker._finished

    def wrong(self: Checker, shadow: object, reason: str) -> None:
        finished(self, shadow, reason + "!")  # type: ignore[arg-type]

    monkeypatch.setattr(Checker, "_finished", wrong)
    assert replay.main(["3"]) == 1
    printed = capsys.readouterr().out
    assert "asks Admit" in printed
    assert printed.splitlines()[0] == printed.splitlines()[-1]
    assert printed.startswith("seed 3:")
    assert "finish reason" in printed


def test_only_the_named_kinds_of_trouble_strike(capsys: pytest.CaptureFixture[str]) -> None:
    assert replay.main(["3", "--only", "bell lost", "--all"]) == 0
    printed = capsys.readouterr().out
    assert "fault bell lost" in printed
    assert "disaster" not in printed
