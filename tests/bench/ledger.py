"""Ledger calls on an embedded Valkey: p50 with an empty store and with 20,000 live requests.

    python tests/bench/ledger.py [--live 20000] [--calls 500]

A script whose cost grew with the number of records would show in the ratio.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from app.errors import LedgerError
from app.ledger.redis import RedisLedger
from app.protocol.commands import (
    Abort,
    Activate,
    Admit,
    Claim,
    Command,
    Emit,
    Limits,
    Register,
    ReserveNext,
    Scan,
    Snapshot,
    Watcher,
)
from app.schemas import NodeInfo, SamplingParams
from app.valkey import EmbeddedValkey

PROMPT = tuple(range(1000, 1256))
LIMITS = Limits(3, 1_000_000, 600_000, 600_000, 60_000)
SAMPLING = SamplingParams(seed=1, max_tokens=256)
ENDLESS = SamplingParams(seed=1, max_tokens=100_000)


class Bench:
    """Measures one round of a request's life, and takes away what it made."""

    def __init__(self, ledger: RedisLedger) -> None:
        self.ledger = ledger
        self.count = 0

    def admission(self, sampling: SamplingParams = SAMPLING) -> Admit:
        self.count += 1
        uid = f"u{self.count}"
        return Admit(uid, f"client-{uid}", PROMPT, sampling, Watcher("w", uid), LIMITS)

    def run_all(self, commands: list[Command]) -> None:
        for answer in self.ledger.execute_many(commands):
            if isinstance(answer, LedgerError):
                raise answer

    def fill(self, live: int) -> None:
        """Half of them QUEUED, a quarter waiting for a grant, a quarter DECODING with some tokens."""
        for start in range(0, live, 500):
            self.run_all([self.admission() for _ in range(min(500, live - start))])
        for i in range(live // 2):
            work = self.ledger.execute(Claim("", "p", f"fill-{i}", 1_000, 16)).work
            if i % 2 and work:
                self.run_all(
                    [
                        ReserveNext(work.uid, "d", f"fill-{i}", 1_000_000, 16),
                        Emit(work.uid, 1, work.fence, "p", 0, (5,)),
                        Activate(work.uid, 1, work.fence, f"fill-{i}", "d", 0, 5),
                    ]
                )

    def p50_ms(self, calls: int) -> dict[str, float]:
        times: dict[str, list[float]] = {}

        def timed(name: str, command: Any) -> Any:
            began = time.perf_counter()
            answer = self.ledger.execute(command)
            times.setdefault(name, []).append((time.perf_counter() - began) * 1000)
            return answer

        for _ in range(calls):
            admission = self.admission()
            uid, fence = admission.uid, f"f{self.count}"
            timed("admit", admission)
            work = timed("claim", Claim(uid, "p", fence, 1_000, 16)).work
            timed("reserve_next", ReserveNext(work.uid, "d", fence, 1_000_000, 16))
            timed("emit", Emit(work.uid, 1, fence, "p", 0, (7,)))
            timed("activate", Activate(work.uid, 1, fence, fence, "d", 0, 7))
            for index in range(1, 4):
                timed("emit", Emit(work.uid, 1, fence, "d", index, (7,)))
            timed("snapshot", Snapshot(work.uid))
            timed("emit, last", Emit(work.uid, 1, fence, "d", 4, (7,), "stop"))
        while timed("scan, 128 due", Scan(0)).more:
            pass
        for _ in range(20):  # within the shortest pause between two bells
            timed("scan", Scan(0))
        return {name: statistics.median(values) for name, values in times.items()}

    def emit_at_ms(self, length: int, calls: int) -> float:
        """p50 of one token onto an answer of ``length`` tokens, with an otherwise small record."""
        admission = self.admission(ENDLESS)
        uid, fence = admission.uid, f"f{self.count}"
        self.ledger.execute(admission)
        work = self.ledger.execute(Claim(uid, "p", fence, 1_000_000, 16)).work
        uid = work.uid
        self.ledger.execute(Emit(uid, 1, fence, "p", 0, tuple(range(length))))
        times = []
        for i in range(calls):
            began = time.perf_counter()
            self.ledger.execute(Emit(uid, 1, fence, "p", length + i, (7,)))
            times.append((time.perf_counter() - began) * 1000)
        self.ledger.execute(Abort(uid, "bench"))
        return statistics.median(times)


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--live", type=int, default=20_000, help="requests in process in the second round")
    parser.add_argument("--calls", type=int, default=500, help="rounds measured")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        server = EmbeddedValkey(Path(folder) / "valkey")
        server.start()
        try:
            _measure(server.url, options.live, options.calls, print)
        finally:
            server.stop()


def _measure(url: str, live: int, calls: int, say: Callable[[str], None]) -> None:
    ledger = RedisLedger(url, "bench", timeout_s=30)
    for incarnation, role in (("w", "web"), ("p", "prefill"), ("d", "decode")):
        info = NodeInfo(
            incarnation=incarnation, role=role, name=incarnation, pid=1, host="h", num_blocks=1_000_000, layout="one"
        )
        ledger.execute(Register(info, 3_600_000))
    bench = Bench(ledger)
    bench.p50_ms(50)
    empty = bench.p50_ms(calls)
    long_answer = {length: bench.emit_at_ms(length, calls) for length in (1, 10_000)}
    bench.fill(live)
    full = bench.p50_ms(calls)
    say(f"{'command':14} {'empty':>9} {f'{live} live':>12} {'ratio':>6}   (p50, ms)")
    for name, value in empty.items():
        say(f"{name:14} {value:9.3f} {full[name]:12.3f} {full[name] / value:6.2f}")
    say(f"emit onto 1 token: {long_answer[1]:.3f} ms, onto 10,000 tokens: {long_answer[10_000]:.3f} ms")
    ledger.close()


if __name__ == "__main__":
    main(sys.argv[1:])
