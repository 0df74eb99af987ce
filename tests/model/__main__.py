"""``python -m tests.model MACHINE``: explore one machine; prints what happened as JSON, or ends with what broke.

A process of its own for each machine: what hypothesis draws depends also on the constants of every module that is
loaded, so that the steps would be others in a run of all tests than in one of these alone.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter

from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.model.machine import MACHINES

RUN = settings(
    max_examples=350,
    stateful_step_count=40,
    phases=(Phase.generate, Phase.shrink),
    deadline=None,
    database=None,
    print_blob=False,
    report_multiple_bugs=False,
    suppress_health_check=list(HealthCheck),
)
"""Which steps are taken depends on the seed of each machine alone."""


class Broken(AssertionError):
    """A promise was broken; the message is what hypothesis says of it."""


def explore(machine: str) -> Counter[str]:
    """Run all examples of a machine in a process of its own; answers what happened in them.

    Raises:
        Broken: with the shortest sequence of steps that hypothesis found.
    """
    hashed_alike = os.environ | {"PYTHONHASHSEED": "0"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.model", machine], capture_output=True, text=True, env=hashed_alike
    )
    if done.returncode:
        raise Broken(done.stdout + done.stderr)
    return Counter(json.loads(done.stdout.splitlines()[-1]))


def main(name: str) -> None:
    machine = next(each for each in MACHINES if each.__name__ == name)
    run_state_machine_as_test(machine, settings=RUN)
    print(json.dumps(machine.tally))


if __name__ == "__main__":
    main(sys.argv[1])
