"""The engine against others on the same cores: ``python -m tests.bench.against_peers [--threads N] [--rounds N]``.

Prefill and decode rows of each that is installed (see ``tests.bench.peers``), in turn, round by round. A ratio is the
median of the ratios of the same rounds; above 1 Baton is faster.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from app.model.fetch import DEFAULT_MODEL, fetch_default_gguf
from app.model.resolve import resolve_model
from app.settings import get_settings
from tests.bench.peers import open_peers
from tests.bench.peers.talking import Talking
from tests.bench.rounds import Row, run_rounds, table

OURS = "Baton"
PREFILL = (128, 512, 2048)
DECODE = (1, 4, 8, 16, 32, 64)
CONTEXT = 96
STEPS = 32


def find_gguf(model: str, work: Path) -> Path:
    """The GGUF file that ``model`` (BATON_MODEL) was converted from; the default one is fetched into ``work``."""
    if model != DEFAULT_MODEL:
        return Path(model)
    fetched = work / "fetched"
    fetched.mkdir(exist_ok=True)
    return next(fetched.glob("*.gguf"), None) or fetch_default_gguf(fetched, print)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prefill", type=int, nargs="*", default=PREFILL, metavar="TOKENS")
    parser.add_argument("--decode", type=int, nargs="*", default=DECODE, metavar="BATCH")
    options = parser.parse_args()
    settings = get_settings()
    folder = resolve_model(settings.model, settings.home, print)
    work = settings.home / "bench"
    work.mkdir(parents=True, exist_ok=True)
    rows = [Row(f"prefill {tokens}", "tok/s") for tokens in options.prefill]
    rows += [Row(f"decode, batch {batch}", "tok/s") for batch in options.decode]
    sizes = dict(zip((row.name for row in rows), (*options.prefill, *options.decode), strict=True))
    ours = Talking(OURS, [sys.executable, "-m", "tests.bench.peers.baton_peer", str(options.threads)])
    gguf = find_gguf(settings.model, work)
    with ours, open_peers(folder.path, gguf, work, options.threads, print) as peers:
        by_name = {peer.name: peer for peer in (ours, *peers)}

        def measure(row: Row, subject: str) -> float:
            peer, size = by_name[subject], sizes[row.name]
            if row.name.startswith("prefill"):
                return size / peer.prefill_s(size)
            return peer.decode_tokens_per_s(size, CONTEXT, STEPS)

        run_rounds(rows, list(by_name), measure, options.rounds, lambda line: print(line, file=sys.stderr, flush=True))
    print(f"{folder.name}, {options.threads} thread(s), medians of {options.rounds} rounds")
    print(table(rows, OURS, [name for name in by_name if name != OURS]))


if __name__ == "__main__":
    main()
