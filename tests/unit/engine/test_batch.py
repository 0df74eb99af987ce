"""The index arrays of a step against a dictionary of where each token's KV lies."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from app.protocol.blocks import blocks_for
from app.schemas import SamplingParams
from workers.engine.batch import build_batch
from workers.engine.ops.gathers import MAX_PADDING, gathers
from workers.engine.scheduler import Chunk
from workers.engine.sequence import Sequence

SAMPLING = SamplingParams(seed=0, max_tokens=100)
BLOCK, STRIDE = 4, 40


@settings(max_examples=60, deadline=None)
@given(
    shapes=st.lists(
        st.tuples(st.integers(0, 200), st.just(1) | st.integers(2, 150), st.integers(0, 3)), min_size=1, max_size=8
    ),
    order=st.randoms(use_true_random=False),
)
def test_every_query_reads_its_own_past_and_nothing_else(shapes: list[tuple[int, int, int]], order: object) -> None:
    free = list(range(1000))
    order.shuffle(free)  # type: ignore[attr-defined]
    chunks, rows_of = [], {}
    for number, (start, num_tokens, later) in enumerate(shapes):
        total = start + num_tokens + later
        table = [free.pop() for _ in range(blocks_for(total, BLOCK))]
        tokens = [number * 1000 + position for position in range(total)]
        each = Sequence(str(number), tokens, [], SAMPLING, table, start, one_token=False)
        chunks.append(Chunk(each, start, num_tokens))
        rows_of[number] = [table[position // BLOCK] * STRIDE + position % BLOCK for position in range(total)]

    batch = build_batch(chunks, block_size_tokens=BLOCK, row_stride=STRIDE)

    assert sorted(batch.token_ids) == sorted(
        n * 1000 + p for n, (s, c, _) in enumerate(shapes) for p in range(s, s + c)
    )
    for token, position, row in zip(batch.token_ids, batch.positions, batch.write_rows, strict=True):
        assert position == token % 1000
        assert row == rows_of[token // 1000][position]
    for chunk, (first, count, start, table) in zip(batch.chunks, batch.spans.tolist(), strict=True):
        assert (count, start) == (chunk.num_tokens, chunk.start)
        number = int(chunk.sequence.key)
        assert batch.token_ids[first : first + count].tolist() == [number * 1000 + p for p in range(start, chunk.end)]
        own = batch.tables[table : table + blocks_for(chunk.end, BLOCK)].tolist()
        assert own == chunk.sequence.block_table[: len(own)]
    read: list[int] = []
    groups, pieces = gathers(batch, block_size_tokens=BLOCK, row_stride=STRIDE)
    for group in groups:
        assert group.rows.size <= MAX_PADDING * group.lengths.sum()
        for offset, (length, rows) in enumerate(zip(group.lengths, group.rows, strict=True)):
            token = int(batch.token_ids[group.first + offset])
            assert rows[:length].tolist() == rows_of[token // 1000][: token % 1000 + 1]
            assert set(rows[length:]) <= {rows_of[token // 1000][0]}
            read.append(token)
    for piece in pieces:
        queries = batch.token_ids[piece.first : piece.first + piece.num_tokens].tolist()
        assert queries == list(range(queries[0], queries[0] + piece.num_tokens))
        assert piece.rows.tolist() == rows_of[queries[0] // 1000][: queries[-1] % 1000 + 1]
        read += queries
    assert read == batch.token_ids.tolist()
    last = {n * 1000 + s + c - 1 for n, (s, c, later) in enumerate(shapes) if later == 0}
    assert set(batch.token_ids[batch.sample_tokens].tolist()) == last
    assert [int(c.sequence.key) * 1000 + c.end - 1 for c in batch.sampling_chunks] == batch.token_ids[
        batch.sample_tokens
    ].tolist()
