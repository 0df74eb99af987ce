"""Far more answers at once than the decode node's pool can hold: they take turns, and each is token-exact."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from openai import OpenAI

from tests.integration.baton import Baton
from tests.integration.test_pipeline import GREEDY, complete, stream, wait_for_baseline

pytestmark = [pytest.mark.model, pytest.mark.timeout(600)]

NUM_BLOCKS = 10
"""The largest of these requests takes seven at its end, and begins with four."""
AT_ONCE = 20


@pytest.fixture(scope="module")
def tight(new_home: Callable[[Path], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Baton]:
    folder = tmp_path_factory.mktemp("tight")
    cluster = Baton(new_home(folder), folder / "output", "--num-blocks", str(NUM_BLOCKS), "--max-num-seqs", "8")
    try:
        cluster.wait_until_ready()
        yield cluster
    finally:
        cluster.stop()


def test_answers_that_are_preempted_are_token_exact_and_every_block_comes_back(tight: Baton) -> None:
    client = OpenAI(base_url=f"http://127.0.0.1:{tight.port}/v1", api_key="none", max_retries=0, timeout=400)
    cases = [GREEDY[number % len(GREEDY)] for number in range(AT_ONCE)]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        asked = [pool.submit((complete, stream)[number % 2], client, case) for number, case in enumerate(cases)]
    assert [answer.result() for answer in asked] == [case["output_ids"] for case in cases]
    wait_for_baseline(tight)
    preempted = re.findall(r"attempt failed .* uid=(\S+) .*reason=preempted", tight.log("decode1").read_text())
    print(f"{len(preempted)} preemptions of {len(set(preempted))} answers")
    assert preempted, "the pool was large enough: this says nothing"
