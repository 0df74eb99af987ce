"""PD against one loop that prefills and decodes in turn, on the same cores: ``python -m tests.bench.single_loop``.

Both are our own engine. Each round: 4 streams while long prompts come back to back, first through a cluster of one
prefill and one decode worker, then in one engine that has all the threads and does both.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from app.model.resolve import resolve_model
from app.settings import get_settings
from tests.bench.engine import make_engine, sampling
from tests.bench.load import Answer, ask_at_once, ask_beside_long_prompts, draw_words, quantile
from tests.bench.rounds import Row, table
from tests.bench.servers import LONG_WORDS, STREAM_TOKENS, STREAM_WORDS, STREAMS, baton_server

if TYPE_CHECKING:
    from workers.engine.engine import Engine

PD, LOOP = "PD", "single loop"


def in_one_loop(
    engine: Engine, tokenize: Callable[[str], list[int]], source: random.Random
) -> tuple[list[Answer], int]:
    """The streams' answers, and how many long prompts got their token meanwhile."""
    answers: dict[str, Answer] = {}
    blocks = itertools.count()

    def add(key: str, words: int, max_tokens: int) -> None:
        prompt = tokenize(draw_words(words, source))
        needed = engine.blocks_needed(len(prompt) + max_tokens)
        table_ = list(itertools.islice(blocks, needed))
        engine.add(key, prompt, [], sampling(max_tokens), table_, num_computed=0)

    for number in range(STREAMS):
        answers[f"stream-{number}"] = Answer(time.perf_counter())
        add(f"stream-{number}", STREAM_WORDS, STREAM_TOKENS)
    after_streams = next(blocks)
    long_prompts = 0
    add("long-0", LONG_WORDS, 1)
    while any(key in engine for key in answers):
        for output in engine.step():
            if output.key in answers:
                answers[output.key].token_at.append(time.perf_counter())
            else:
                long_prompts += 1
                blocks = itertools.count(after_streams)
                add(f"long-{long_prompts}", LONG_WORDS, 1)
    for key in engine.keys():  # noqa: SIM118 - a method of the engine's own
        engine.stop(key)
    return list(answers.values()), long_prompts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    settings = get_settings()
    folder = resolve_model(settings.model, settings.home, print)
    tokenizer = folder.tokenizer()
    rows = [Row("1 / inter-token p50", "1/s"), Row("1 / inter-token p99", "1/s"), Row("long prompts", "1/min")]
    engine = make_engine(len(os.sched_getaffinity(0)))
    with baton_server(folder.path, folder.name) as port:
        ask_at_once(port, folder.name, [["warm up"]], 8)
        for number in range(options.rounds):
            print(f"round {number + 1} of {options.rounds}", file=sys.stderr, flush=True)
            source = random.Random(number)
            streams = [draw_words(STREAM_WORDS, source) for _ in range(STREAMS)]
            long_prompts = (draw_words(LONG_WORDS, source) for _ in itertools.count())
            for subject in (PD, LOOP):
                started = time.perf_counter()
                if subject == PD:
                    answers, long_answers = ask_beside_long_prompts(
                        port, folder.name, streams, STREAM_TOKENS, long_prompts
                    )
                    count = len(long_answers)
                else:
                    answers, count = in_one_loop(engine, tokenizer.encode, source)
                took_s = time.perf_counter() - started
                gaps = [gap for answer in answers for gap in answer.gaps_s]
                for row, value in zip(
                    rows, (1 / quantile(gaps, 0.5), 1 / quantile(gaps, 0.99), 60 * count / took_s), strict=True
                ):
                    row.add(subject, value)
    print(f"{folder.name}, {STREAMS} streams beside prompts of {LONG_WORDS} words, medians of {options.rounds} rounds")
    print(table(rows, PD, [LOOP]))


if __name__ == "__main__":
    main()
