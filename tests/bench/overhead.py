"""What the pipeline adds to the time to first token: ``python -m tests.bench.overhead [--requests N]``.

Starts a cluster of one prefill and one decode worker, sends requests one at a time, and takes from each time to first
token (HTTP request sent → first token's event read) what a bare engine with as many threads needs for the same prompt,
measured in turn with the requests, so that a change of the machine's speed meets both.
"""

from __future__ import annotations

import argparse
import http.client
import json
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from app.model.resolve import resolve_model
from app.schemas import SamplingParams
from app.settings import get_settings
from tests.integration.baton import Baton
from workers.engine import runtime

if TYPE_CHECKING:
    from workers.engine.engine import Engine

PROMPT_TOKENS = 64
ANSWER_TOKENS = 4


def first_token_s(port: int, prompt: list[int]) -> float:
    """Seconds from sending a streamed request to reading its first token's event; reads the rest, too."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    body = {
        "model": "smollm2-135m-instruct",
        "prompt": prompt,
        "max_tokens": ANSWER_TOKENS,
        "temperature": 0,
        "stream": True,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    started = time.perf_counter()
    connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
    response = connection.getresponse()
    if response.status != http.client.OK:
        raise RuntimeError(f"{response.status}: {response.read()!r}")
    first = 0.0
    for line in response:
        if not first and line.startswith(b"data: {") and json.loads(line[6:])["choices"][0].get("token_ids"):
            first = time.perf_counter() - started
    connection.close()
    return first


def prefill_s(engine: Engine, prompt: list[int]) -> float:
    """Seconds that the engine alone needs for the first token."""
    started = time.perf_counter()
    sampling = SamplingParams(temperature=0, seed=1, max_tokens=1, ignore_eos=True)
    engine.add("bench", prompt, [], sampling, range(engine.blocks_needed(len(prompt))), num_computed=0)
    while engine.has_work:
        engine.step()
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=50)
    options = parser.parse_args()
    settings = get_settings()
    folder = resolve_model(settings.model, settings.home, print)
    runtime.configure(settings.num_threads)
    from workers.engine.engine import Engine

    engine = Engine(
        folder, incarnation="bench", max_model_len=256, num_threads=settings.num_threads, num_blocks=16, max_num_seqs=1
    )
    engine.warm_up(lambda line: None)
    random_ = random.Random(1)
    prompts = [[random_.randrange(100, 40_000) for _ in range(PROMPT_TOKENS)] for _ in range(options.requests + 3)]
    with tempfile.TemporaryDirectory() as folder_name:
        home = Path(folder_name)
        (home / "models").symlink_to(folder.path.parent)
        baton = Baton(home, home / "output", "--num-blocks", "64")
        try:
            baton.wait_until_ready()
            pairs = [(first_token_s(baton.port, prompt), prefill_s(engine, prompt)) for prompt in prompts][3:]
        finally:
            baton.stop()
    added = sorted(1000 * (seen - alone) for seen, alone in pairs)
    print(
        f"{len(pairs)} requests of {PROMPT_TOKENS} tokens, one at a time, {settings.num_threads} thread(s) per worker"
    )
    print(f"time to first token  p50 {1000 * statistics.median(seen for seen, _ in pairs):6.1f} ms")
    print(f"engine alone         p50 {1000 * statistics.median(alone for _, alone in pairs):6.1f} ms")
    print(
        f"added                p50 {statistics.median(added):6.1f} ms  p90 {added[int(0.9 * len(added))]:6.1f} ms"
        f"  max {added[-1]:6.1f} ms"
    )


if __name__ == "__main__":
    main()
