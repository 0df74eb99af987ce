"""What a step may and must contain."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from app.protocol.blocks import blocks_for
from app.schemas import SamplingParams
from workers.engine.scheduler import Chunk, Scheduler
from workers.engine.sequence import Sequence

SAMPLING = SamplingParams(seed=0, max_tokens=100)
BLOCK = 4


def sequence(key: str, num_tokens: int, *, num_computed: int = 0, spare_tokens: int = 100) -> Sequence:
    table = list(range(blocks_for(num_tokens + spare_tokens, BLOCK)))
    return Sequence(key, [1] * num_tokens, [], SAMPLING, table, num_computed, one_token=False)


def scheduler(max_num_seqs: int = 4, max_num_batched_tokens: int = 16) -> Scheduler:
    return Scheduler(max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens, block_size_tokens=BLOCK)


def shape(chunks: list[Chunk]) -> list[tuple[str, int, int]]:
    return [(chunk.sequence.key, chunk.start, chunk.num_tokens) for chunk in chunks]


def book(chunks: list[Chunk]) -> None:
    """What the engine does after a step, without a model."""
    for chunk in chunks:
        samples = chunk.samples
        chunk.sequence.num_computed = chunk.end
        if samples:
            chunk.sequence.append(1)


def test_short_prompts_share_a_step_and_a_long_one_takes_what_is_left() -> None:
    under_test = scheduler()
    for key, num_tokens in (("a", 5), ("b", 6), ("c", 40)):
        under_test.add(sequence(key, num_tokens))
    assert shape(under_test.schedule()) == [("a", 0, 5), ("b", 0, 6), ("c", 0, 5)]


def test_decoding_comes_first_even_before_older_prompts() -> None:
    under_test = scheduler()
    under_test.add(sequence("long", 40))
    under_test.add(sequence("decoding", 9, num_computed=8))
    assert shape(under_test.schedule()) == [("decoding", 8, 1), ("long", 0, 15)]


def test_a_later_prompt_does_not_overtake() -> None:
    under_test = scheduler()
    under_test.add(sequence("first", 40))
    under_test.add(sequence("second", 2))
    steps = []
    for _ in range(3):
        chunks = under_test.schedule()
        steps.append(shape(chunks))
        book(chunks)
    assert steps == [[("first", 0, 16)], [("first", 16, 16)], [("first", 32, 8), ("second", 0, 2)]]


def test_a_sequence_with_full_blocks_is_left_out_until_it_has_more() -> None:
    under_test = scheduler()
    full = sequence("full", BLOCK + 1, num_computed=BLOCK, spare_tokens=0)
    full.block_table.pop()
    under_test.add(full)
    assert not under_test.has_work
    assert under_test.schedule() == []
    full.block_table.append(9)
    assert under_test.has_work
    assert shape(under_test.schedule()) == [("full", BLOCK, 1)]


def test_who_waits_moves_up_in_order_when_one_is_removed() -> None:
    under_test = scheduler(max_num_seqs=2)
    sequences = {key: sequence(key, 3) for key in "abcd"}
    for each in sequences.values():
        under_test.add(each)
    assert [s.key for s in under_test.waiting] == ["c", "d"]
    under_test.remove(sequences["c"])
    under_test.remove(sequences["a"])
    assert [s.key for s in under_test.running] == ["b", "d"]
    assert not under_test.waiting


@settings(max_examples=100, deadline=None)
@given(
    arrivals=st.lists(st.tuples(st.integers(1, 50), st.integers(0, 5)), min_size=1, max_size=12),
    max_num_seqs=st.integers(1, 5),
    extra=st.integers(0, 20),
)
def test_every_schedule_ends_and_keeps_the_rules(
    arrivals: list[tuple[int, int]], max_num_seqs: int, extra: int
) -> None:
    budget = max_num_seqs + extra
    under_test = scheduler(max_num_seqs, budget)
    wanted = {}
    started: list[str] = []
    for number, (num_tokens, num_outputs) in enumerate(arrivals):
        each = sequence(str(number), num_tokens)
        wanted[each.key] = num_outputs + 1
        under_test.add(each)
    for _ in range(1000):
        chunks = under_test.schedule()
        if not chunks:
            break
        assert sum(chunk.num_tokens for chunk in chunks) <= budget
        assert len({chunk.sequence.key for chunk in chunks}) == len(chunks) <= max_num_seqs
        assert {s.key for s in under_test.running if s.num_remaining == 1} <= {c.sequence.key for c in chunks}
        assert all(chunk.start == chunk.sequence.num_computed for chunk in chunks)
        started += [c.sequence.key for c in chunks if c.start == 0 and c.sequence.key not in started]
        book(chunks)
        for chunk in chunks:
            if len(chunk.sequence.output_ids) == wanted[chunk.sequence.key]:
                under_test.remove(chunk.sequence)
                del wanted[chunk.sequence.key]
    assert not wanted
    assert not under_test.running
    # a one-token prompt counts as decoding; all others start in the order in which they came
    prompts = [key for key in started if arrivals[int(key)][0] > 1]
    assert prompts == sorted(prompts, key=int)
