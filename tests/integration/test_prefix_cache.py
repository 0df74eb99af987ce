"""The prefix cache on real workers: what is not computed is counted exactly, and answers are the references' all along.

One prefill worker with 64 blocks of 16 tokens, 8 tokens a step.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.integration.baton import START_S, Baton
from tests.integration.small import NUM_BLOCKS, Small
from tests.integration.test_resume import GREEDY, Stream, body

pytestmark = [pytest.mark.model, pytest.mark.timeout(300)]

AT_ONCE = 4
"""So few that the first ones asked are also the first ones whose blocks go."""

numbers = itertools.count()


@pytest.fixture
def baton(small: Small) -> Iterator[Baton]:
    """At rest before and after."""
    small.baton.wait_for(small.baton.is_ready, START_S)
    small.wait_for_baseline()
    yield small.baton
    small.wait_for_baseline()


def new_salt() -> str:
    """Nobody has computed anything under it."""
    return f"salt-{next(numbers)}"


def cached(baton: Baton, case: dict[str, Any], salt: str, num_tokens: int = 0) -> int:
    """Ask for (the first ``num_tokens`` of) a reference, which must come back; returns how much of its prompt was not
    computed."""
    request_id = f"cached-{next(numbers)}"
    options = {"max_tokens": num_tokens} if num_tokens else {}
    request = body(case, cache_salt=salt, **options)
    status, _, answer = baton.post("/v1/completions", request, {"X-Request-Id": request_id})
    assert status == 200, answer
    assert answer["choices"][0]["token_ids"] == case["output_ids"][: request["max_tokens"]]
    told = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert baton.get(f"/v1/requests/{request_id}")[1]["cached_tokens"] == told
    return int(told)


def counts(baton: Baton) -> dict[str, int]:
    return dict(baton.nodes()["prefill1"]["prefix_cache"])


def by_hand(case: dict[str, Any]) -> int:
    """All full blocks, but for the one with the last token."""
    return (len(case["prompt_ids"]) - 1) // 16 * 16


def common_by_hand(case: dict[str, Any], earlier: list[dict[str, Any]]) -> int:
    """Full blocks with which an earlier prompt begins too: all chats begin with the same system message."""
    prompt = case["prompt_ids"]
    alike = [
        sum(
            1
            for _ in itertools.takewhile(
                lambda pair: pair[0] == pair[1], zip(prompt, other["prompt_ids"], strict=False)
            )
        )
        for other in earlier
    ]
    return min(max(alike, default=0) // 16 * 16, by_hand(case))


def all_cached(baton: Baton, cases: list[dict[str, Any]], salt: str) -> list[int]:
    """``cached`` of them all, asked at once."""
    with ThreadPoolExecutor(len(cases)) as pool:
        return list(pool.map(lambda case: cached(baton, case, salt), cases))


def test_every_reference_twice_is_exact_and_the_second_one_is_not_computed_again(baton: Baton) -> None:
    """Those that begin unlike any before them go first: what the others find is then known, in whatever order they are
    served."""
    salt = new_salt()
    shared = [common_by_hand(case, GREEDY[:number]) for number, case in enumerate(GREEDY)]
    unlike = [case for case, told in zip(GREEDY, shared, strict=True) if not told]
    alike = [case for case, told in zip(GREEDY, shared, strict=True) if told]
    assert unlike and alike
    assert all_cached(baton, unlike, salt) == [0] * len(unlike)
    common = [common_by_hand(case, unlike) for case in alike]
    assert common == [told for told in shared if told], "they have no more in common with each other"
    assert all_cached(baton, alike, salt) == common
    expected = [by_hand(case) for case in GREEDY]
    assert all_cached(baton, GREEDY, salt) == expected
    assert max(expected) == 32 and min(expected) == 0


def test_a_stream_says_it_too(baton: Baton) -> None:
    case, salt = GREEDY[6], new_salt()
    cached(baton, case, salt)
    stream = Stream().read(baton, f"streamed-{salt}", body(case, cache_salt=salt))
    assert stream.token_ids == case["output_ids"]
    assert stream.usage is not None
    assert stream.usage["prompt_tokens_details"] == {"cached_tokens": by_hand(case)}


def test_under_another_salt_it_is_computed(baton: Baton) -> None:
    case, salt = GREEDY[8], new_salt()
    assert cached(baton, case, salt) == 0
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(lambda known: cached(baton, case, known), (salt, new_salt()))) == [by_hand(case), 0]


def test_many_at_once_that_begin_alike_are_exact(baton: Baton) -> None:
    salt = new_salt()
    cases = [GREEDY[number] for number in (6, 6, 8, 6, 8, 10, 6, 10)]
    with ThreadPoolExecutor(len(cases)) as pool:
        found = list(pool.map(lambda case: cached(baton, case, salt), cases))
    assert all(told in range(0, by_hand(case) + 1, 16) for told, case in zip(found, cases, strict=True))


def test_what_does_not_fit_is_evicted_and_everything_stays_exact(baton: Baton) -> None:
    """Each of these leaves two blocks: with forty of them the first ones have gone, and the last one is there."""
    before, case = counts(baton), GREEDY[6]
    salts = [new_salt() for _ in range(40)]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        assert list(pool.map(lambda salt: cached(baton, case, salt, 4), salts[:-1])) == [0] * 39
        assert cached(baton, case, salts[-1], 4) == 0
        assert cached(baton, case, salts[-1], 4) == by_hand(case) == 32
        assert list(pool.map(lambda salt: cached(baton, case, salt, 4), salts[:4])) == [0] * 4
    baton.wait_for(lambda: counts(baton)["prompts"] == before["prompts"] + 45, 10)
    assert counts(baton)["evicted_blocks"] - before["evicted_blocks"] >= 2 * 40 - NUM_BLOCKS


def test_the_counters_say_what_was_computed(baton: Baton) -> None:
    case, salt, before = GREEDY[6], new_salt(), counts(baton)
    cached(baton, case, salt)
    all_cached(baton, [case, case], salt)
    num_tokens = len(case["prompt_ids"])
    expected = {"prompts": 3, "hits": 2, "cached_tokens": 2 * by_hand(case)}
    expected["computed_tokens"] = 3 * num_tokens - expected["cached_tokens"]
    baton.wait_for(lambda: counts(baton)["prompts"] == before["prompts"] + 3, 10)
    after = counts(baton)
    assert {name: after[name] - before[name] for name in expected} == expected
