"""The simulator itself: a seed is one run, always; and a world is a value that can be copied at any moment."""

from __future__ import annotations

import hashlib
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from tests.sim.run import run_seed
from tests.sim.scenario import draw_scenario
from tests.sim.trace import lines
from tests.sim.world import Note, World

ROOT = Path(__file__).parents[2]


def digest(notes: list[Note]) -> str:
    return hashlib.sha256("\n".join(lines(notes)).encode()).hexdigest()


@pytest.mark.parametrize("seed", [3, 11, 42])
def test_the_same_seed_gives_the_same_trace(seed: int) -> None:
    first, second = run_seed(seed), run_seed(seed)
    assert len(first.notes) > 100
    assert digest(first.notes) == digest(second.notes)


def test_another_seed_gives_another_trace() -> None:
    assert digest(run_seed(3).notes) != digest(run_seed(4).notes)


def test_the_trace_does_not_depend_on_how_a_process_hashes_strings() -> None:
    code = (
        "from tests.sim.run import run_seed; from tests.sim.test_determinism import digest\n"
        "print([digest(run_seed(seed).notes) for seed in range(40, 52)])"
    )
    traces = {
        subprocess.run(
            [sys.executable, "-c", code],
            cwd=ROOT,
            env={**os.environ, "PYTHONHASHSEED": hashing},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for hashing in ("0", "1", "4242")
    }
    assert len(traces) == 1


@pytest.mark.parametrize("seed", [3, 11, 42, 77])
@pytest.mark.parametrize("moment", [0.5, 2.0, 5.0])
def test_a_copied_world_goes_on_as_the_original_does(seed: int, moment: float) -> None:
    original = World(draw_scenario(seed))
    original.run(moment)
    copy = pickle.loads(pickle.dumps(original))
    original.run(8.0)
    assert digest(copy.notes) != digest(original.notes)
    copy.run(8.0)
    assert digest(copy.notes) == digest(original.notes)
