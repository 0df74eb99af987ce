"""Baton's own engine, for ``Talking``: ``python -m tests.bench.peers.baton_peer THREADS``."""

from __future__ import annotations

import json
import sys

from tests.bench.engine import decode_tokens_per_s, make_engine, prefill_s

ROOM_TOKENS = 64 * 160
"""64 sequences of the longest that is asked for."""


def main(threads: int) -> None:
    engine = make_engine(threads, ROOM_TOKENS)
    print("ready", flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        if "prefill" in asked:
            seconds = prefill_s(engine, asked["prefill"])
        else:
            batch, steps = asked["decode"], asked["steps"]
            seconds = batch * steps / decode_tokens_per_s(engine, batch, steps, context=asked["context"])
        print("answer", seconds, flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]))
