"""What the pipeline adds to the time to first token: ``python -m tests.bench.overhead [--requests N]``.

Starts a cluster of one prefill and one decode worker, sends requests one at a time, and takes from each time to first
token (HTTP request sent → first token's event read) the time that the prefill worker's engine spent in its steps for
that request, as its log says.
"""

from __future__ import annotations

import argparse
import http.client
import json
import random
import re
import statistics
import tempfile
import time
from pathlib import Path

from app.model.resolve import resolve_model
from app.settings import get_settings
from tests.integration.baton import Baton

PROMPT_TOKENS = 64
ANSWER_TOKENS = 4
WARM_UP = 3


def first_token_s(port: int, prompt: list[int], request_id: str) -> float:
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
    headers = {"content-type": "application/json", "x-request-id": request_id}
    connection.request("POST", "/v1/completions", json.dumps(body), headers)
    response = connection.getresponse()
    if response.status != http.client.OK:
        raise RuntimeError(f"{response.status}: {response.read()!r}")
    first = 0.0
    for line in response:
        if not first and line.startswith(b"data: {") and json.loads(line[6:])["choices"][0].get("token_ids"):
            first = time.perf_counter() - started
    connection.close()
    return first


def engine_ms(baton: Baton, request_id: str) -> float:
    """Milliseconds that the prefill engine spent on a request."""
    pattern = rf"prefilled .*request_id={request_id} .*engine_ms=(\d+)"
    match = re.search(pattern, baton.log("prefill1").read_text())
    if match is None:
        raise RuntimeError(f"the prefill worker's log does not say how long {request_id} took")
    return float(match[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=50)
    options = parser.parse_args()
    settings = get_settings()
    folder = resolve_model(settings.model, settings.home, print)
    random_ = random.Random(1)
    prompts = [
        [random_.randrange(100, 40_000) for _ in range(PROMPT_TOKENS)] for _ in range(options.requests + WARM_UP)
    ]
    with tempfile.TemporaryDirectory() as folder_name:
        home = Path(folder_name)
        (home / "models").symlink_to(folder.path.parent)
        baton = Baton(home, home / "output", "--num-blocks", "64")
        try:
            baton.wait_until_ready()
            seen = [1000 * first_token_s(baton.port, prompt, f"r{n}-") for n, prompt in enumerate(prompts)][WARM_UP:]
            alone = [engine_ms(baton, f"r{n}-") for n in range(len(prompts))][WARM_UP:]
        finally:
            baton.stop()
    added = sorted(ttft - engine for ttft, engine in zip(seen, alone, strict=True))
    print(f"{len(added)} requests of {PROMPT_TOKENS} tokens, one at a time, {settings.num_threads} thread(s) each")
    print(f"time to first token  p50 {statistics.median(seen):6.1f} ms")
    print(f"engine's prefill     p50 {statistics.median(alone):6.1f} ms")
    print(
        f"added                p50 {statistics.median(added):6.1f} ms  p90 {added[int(0.9 * len(added))]:6.1f} ms"
        f"  max {added[-1]:6.1f} ms"
    )


if __name__ == "__main__":
    main()
