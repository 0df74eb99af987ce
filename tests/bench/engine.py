"""Speed of one engine without anything around it: ``python -m tests.bench.engine [--threads N]``.

Prints time to first token for prompts of several lengths, and tokens per second of decoding at several batch
sizes with a context of about 128 tokens. ``--kv-cache-dtype`` says what keys and values are stored in;
``--compare-kv ROUNDS`` decodes with both instead, in turn, with short and long contexts, and prints the median of the
rounds' ratios.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import time
from typing import TYPE_CHECKING

from app.model.resolve import resolve_model
from app.schemas import SamplingParams
from app.settings import get_settings
from workers.engine import runtime
from workers.engine.kernels.build import find_kernels

if TYPE_CHECKING:
    from workers.engine.engine import Engine

PREFILL_TOKENS = (128, 512, 2048)
DECODE_BATCHES = (1, 8, 32, 64)
DECODE_CONTEXT_TOKENS = 96
COMPARED_BATCHES = (8, 32, 64)
COMPARED_CONTEXTS_TOKENS = (128, 1000)


def sampling(max_tokens: int, temperature: float = 0) -> SamplingParams:
    return SamplingParams(temperature=temperature, seed=1, max_tokens=max_tokens, ignore_eos=True)


def prefill_s(engine: Engine, num_tokens: int) -> float:
    """Seconds from add to the first token."""
    prompt = [(7 * position) % 40_000 + 100 for position in range(num_tokens)]
    blocks = range(engine.blocks_needed(num_tokens))
    started = time.perf_counter()
    engine.add("prefill", prompt, [], sampling(1), blocks, num_computed=0)
    while engine.has_work:
        engine.step()
    return time.perf_counter() - started


def decode_tokens_per_s(
    engine: Engine, batch: int, steps: int, temperature: float = 0, context: int = DECODE_CONTEXT_TOKENS
) -> float:
    """Tokens per second of ``batch`` sequences that decode together, over ``steps`` steps."""
    each = engine.blocks_needed(context + steps)
    for number in range(batch):
        prompt = [(number * 31 + position) % 40_000 + 100 for position in range(context)]
        blocks = range(number * each, (number + 1) * each)
        engine.add(f"decode-{number}", prompt, [], sampling(steps, temperature), blocks, num_computed=context - 1)
    started = time.perf_counter()
    while engine.has_work:
        engine.step()
    return batch * steps / (time.perf_counter() - started)


def make_engine(threads: int, room_tokens: int = 4096, kv_cache_dtype: str = "") -> Engine:
    """The engine that the settings ask for, warm, with a pool for 64 sequences of ``room_tokens`` in all at least.

    ``kv_cache_dtype``: another one than that of the settings.
    """
    runtime.configure(threads)
    from workers.engine.engine import Engine

    settings = get_settings()
    folder = resolve_model(settings.model, settings.home, print)
    engine = Engine(
        folder,
        incarnation="bench",
        max_model_len=min(4096, folder.config.max_context_tokens),
        num_threads=threads,
        kernels=find_kernels(settings.kernels, "cpu", settings.home, print, print),
        weight_dtype="float32" if settings.weight_dtype == "float32" else "float16",
        kv_cache_dtype="float16" if (kv_cache_dtype or settings.kv_cache_dtype) == "float16" else "float32",
        num_blocks=room_tokens // 16 + 64,
        max_num_seqs=max(DECODE_BATCHES),
    )
    engine.warm_up(print)
    return engine


def compare_kv(threads: int, steps: int, rounds: int) -> None:
    """Decode with float32 and float16 in turn; the ratio of each round is one of neighbours in time."""
    room_tokens = max(COMPARED_BATCHES) * (max(COMPARED_CONTEXTS_TOKENS) + steps)
    full, half = (make_engine(threads, room_tokens, dtype) for dtype in ("float32", "float16"))
    print(f"{full.folder.name}, {threads} thread(s), {full.operations.name}, {steps} steps, medians of {rounds} rounds")
    for context in COMPARED_CONTEXTS_TOKENS:
        for batch in COMPARED_BATCHES:
            pairs = []
            for number in range(rounds):
                order = (full, half) if number % 2 else (half, full)
                speeds = {id(engine): decode_tokens_per_s(engine, batch, steps, context=context) for engine in order}
                pairs.append((speeds[id(full)], speeds[id(half)]))
            ratios = sorted(new / old for old, new in pairs)
            old, new = (statistics.median(speeds) for speeds in zip(*pairs, strict=True))
            print(
                f"decode  batch {batch:2d}  context {context:4d}  float32 {old:7.1f} tok/s  float16 {new:7.1f} tok/s"
                f"  ratio {statistics.median(ratios):.3f} ({ratios[0]:.3f} to {ratios[-1]:.3f})",
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--steps", type=int, default=32, help="decode steps per measurement")
    parser.add_argument("--kv-cache-dtype", choices=("float16", "float32"), default=get_settings().kv_cache_dtype)
    parser.add_argument("--compare-kv", type=int, default=0, metavar="ROUNDS", help="decode with both dtypes in turn")
    options = parser.parse_args()
    if options.compare_kv:
        compare_kv(options.threads, options.steps, options.compare_kv)
        return
    room_tokens = max(DECODE_BATCHES) * (DECODE_CONTEXT_TOKENS + options.steps)
    engine = make_engine(options.threads, room_tokens, options.kv_cache_dtype)
    print(f"{engine.folder.name}, {options.threads} thread(s), {engine.operations.name}")
    for num_tokens in PREFILL_TOKENS:
        best = min(prefill_s(engine, num_tokens) for _ in range(2))
        print(f"prefill {num_tokens:5d} tokens  {best * 1000:8.0f} ms  {num_tokens / best:7.0f} tok/s")
    for batch in DECODE_BATCHES:
        greedy = decode_tokens_per_s(engine, batch, options.steps)
        drawn = decode_tokens_per_s(engine, batch, options.steps, temperature=1.0)
        print(f"decode  batch {batch:2d}  greedy {greedy:7.1f} tok/s  sampled {drawn:7.1f} tok/s")
    print(f"peak RSS {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.0f} MiB")


if __name__ == "__main__":
    main()
