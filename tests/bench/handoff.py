"""How long a handoff takes, and what part of the time to first token that is: ``python -m tests.bench.handoff``.

From COMMIT, when the decode node hears that the prompt's KV is ready to be pulled, until it is activated: the pull, the
digests, and one call to the ledger. Times are those of the request's record, in whole milliseconds; one request at a
time, one prefill and one decode worker.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
from pathlib import Path

from app.model.resolve import resolve_model
from app.settings import get_settings
from tests.bench.load import draw_prompt
from tests.integration.baton import Baton, share_caches

LENGTHS = (128, 512, 2048)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=7, help="of each length")
    options = parser.parse_args()
    settings = get_settings()
    folder = resolve_model(settings.model, settings.home, print)
    source = random.Random(1)
    with tempfile.TemporaryDirectory() as name:
        home = Path(name)
        share_caches(home, folder.path.parent)
        baton = Baton(home, home / "output", BATON_WEIGHT_DTYPE=settings.weight_dtype)
        try:
            baton.wait_until_ready()
            for length in LENGTHS:
                handoffs, ttfts = [], []
                for number in range(options.requests + 1):
                    body = {"model": folder.name, "prompt": draw_prompt(length, source), "max_tokens": 2}
                    request_id = f"{length}-{number}"
                    status, _, answer = baton.post(
                        "/v1/completions", {**body, "ignore_eos": True}, {"x-request-id": request_id}
                    )
                    if status != 200:
                        raise RuntimeError(f"{status}: {answer}")
                    at = baton.get(f"/v1/requests/{request_id}")[1]["timeline"]
                    handoffs.append(at["activated"] - at["committed"])
                    ttfts.append(at["first_token"] - at["queued"])
                handoff, ttft = statistics.median(handoffs[1:]), statistics.median(ttfts[1:])
                print(
                    f"{length:5} tokens: COMMIT to activation {handoff:5.1f} ms, time to first token {ttft:7.1f} ms:"
                    f" {100 * handoff / ttft:.2f} %"
                )
        finally:
            baton.stop()


if __name__ == "__main__":
    main()
