"""``n`` and lists of prompts on real workers: each choice is the answer of a request for it alone, at the price of one
prompt."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.integration.baton import START_S, Baton
from tests.integration.small import Small
from tests.integration.test_prefix_cache import by_hand, counts, new_salt
from tests.integration.test_resume import GREEDY, body

pytestmark = [pytest.mark.model, pytest.mark.timeout(300)]

CASE, OTHER = GREEDY[6], GREEDY[8]
TOKENS = 12


@pytest.fixture
def baton(small: Small) -> Iterator[Baton]:
    """At rest before and after."""
    small.baton.wait_for(small.baton.is_ready, START_S)
    small.wait_for_baseline()
    yield small.baton
    small.wait_for_baseline()


def answers(baton: Baton, **fields: Any) -> tuple[list[list[int]], dict[str, Any]]:
    """Output ids of each choice, and usage."""
    status, _, answer = baton.post("/v1/completions", body(CASE, max_tokens=TOKENS, **fields))
    assert status == 200, answer
    assert [choice["index"] for choice in answer["choices"]] == list(range(len(answer["choices"])))
    return [choice["token_ids"] for choice in answer["choices"]], answer["usage"]


def test_sampled_choices_differ_the_first_is_that_of_one_and_all_come_again(baton: Baton) -> None:
    sampled: dict[str, Any] = {"temperature": 1.0, "seed": 4711, "cache_salt": new_salt()}
    before = counts(baton)
    three, usage = answers(baton, n=3, **sampled)
    assert len(set(map(tuple, three))) == 3
    prompt, known = len(CASE["prompt_ids"]), by_hand(CASE)
    assert usage == {
        "prompt_tokens": prompt,
        "completion_tokens": sum(map(len, three)),
        "total_tokens": prompt + sum(map(len, three)),
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    baton.wait_for(lambda: counts(baton)["prompts"] == before["prompts"] + 3, 10)
    after = counts(baton)
    assert after["computed_tokens"] - before["computed_tokens"] == prompt + 2 * (prompt - known)
    assert after["cached_tokens"] - before["cached_tokens"] == 2 * known
    assert answers(baton, n=1, **sampled)[0] == three[:1]
    assert answers(baton, n=3, **sampled)[0] == three


def test_greedy_choices_are_all_the_reference_and_so_are_those_of_two_prompts(baton: Baton) -> None:
    greedy = CASE["output_ids"][:TOKENS]
    assert answers(baton, n=3)[0] == [greedy] * 3
    both, usage = answers(baton, prompt=[CASE["prompt_ids"], OTHER["prompt_ids"]])
    assert both == [greedy, OTHER["output_ids"][:TOKENS]]
    assert usage["prompt_tokens"] == len(CASE["prompt_ids"]) + len(OTHER["prompt_ids"])
