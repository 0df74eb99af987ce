"""`baton up` against other servers, over HTTP on the same cores: ``python -m tests.bench.servers [--rounds N]``.

Each round starts every server that is installed (see ``tests.bench.peers``) once, alone, and asks it: 1, 8 and 32
clients at once, and 4 streams beside which another client sends long prompts back to back. A ratio is the median of the
ratios of the same rounds; above 1 Baton is better.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path

from app.launcher.checks import free_port
from app.model.resolve import resolve_model
from app.settings import get_settings
from tests.bench.against_peers import find_gguf
from tests.bench.load import ask, ask_at_once, ask_beside_long_prompts, draw_words, quantile
from tests.bench.peers.gguf_f16 import make_f16
from tests.bench.rounds import Row, table
from tests.integration.baton import Baton, share_caches

OURS = "Baton"
CLIENTS = (1, 8, 32)
REQUESTS = 3
"""Of each client, one after another."""
PROMPT_WORDS, ANSWER_TOKENS = 64, 64
STREAMS, STREAM_WORDS, STREAM_TOKENS, LONG_WORDS = 4, 32, 192, 950
START_S = 180.0
STOP_S = 20.0


@contextmanager
def baton_server(folder: Path, name: str) -> Iterator[int]:
    with tempfile.TemporaryDirectory() as home_name:
        home = Path(home_name)
        share_caches(home, folder.parent)
        baton = Baton(home, home / "output", BATON_WEIGHT_DTYPE=get_settings().weight_dtype)
        try:
            baton.wait_until_ready()
            yield baton.port
        finally:
            baton.stop()


@contextmanager
def program(command: list[str], port: int, environment: dict[str, str]) -> Iterator[int]:
    """A server that answers ``/health`` when it is ready."""
    with (
        tempfile.TemporaryFile() as output,
        subprocess.Popen(command, env=os.environ | environment, stdout=output, stderr=output) as child,
    ):
        try:
            until = time.monotonic() + START_S
            while not healthy(port):
                if child.poll() is not None or time.monotonic() > until:
                    output.seek(0)
                    raise RuntimeError(f"{command[0]} does not serve: {output.read()[-2000:].decode()}")
                time.sleep(0.2)
            yield port
        finally:
            child.terminate()
            try:
                child.wait(STOP_S)
            except subprocess.TimeoutExpired:
                child.kill()


def healthy(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=1):
            return True
    except (urllib.error.URLError, OSError):
        return False


def llama_server(programs: Path, model: Path, threads: int) -> AbstractContextManager[int]:
    port = free_port("127.0.0.1", 0, "")
    command = [str(programs / "llama-server"), "-m", str(model), "-t", str(threads), "-np", str(max(CLIENTS))]
    command += ["-c", str(2048 * max(CLIENTS)), "--port", str(port), "--no-webui"]
    return program(command, port, {"LD_LIBRARY_PATH": str(programs)})


def vllm_server(python: Path, folder: Path, threads: int) -> AbstractContextManager[int]:
    port = free_port("127.0.0.1", 0, "")
    command = [str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder), "--dtype", "float32"]
    command += ["--enforce-eager", "--port", str(port), "--max-model-len", "4096", "--served-model-name", folder.name]
    cores = ",".join(map(str, sorted(os.sched_getaffinity(0))[:threads]))
    return program(command, port, {"VLLM_CPU_OMP_THREADS_BIND": cores, "VLLM_CPU_KVCACHE_SPACE": "2"})


def measure(port: int, model: str, rows: dict[str, Row], subject: str, source: random.Random) -> None:
    ask(port, model, "warm up", 8)
    for clients in CLIENTS:
        prompts = [[draw_words(PROMPT_WORDS, source) for _ in range(REQUESTS)] for _ in range(clients)]
        started = time.perf_counter()
        answers = ask_at_once(port, model, prompts, ANSWER_TOKENS)
        took_s = time.perf_counter() - started
        rows[f"{clients} clients"].add(subject, sum(len(answer.token_at) for answer in answers) / took_s)
    streams = [draw_words(STREAM_WORDS, source) for _ in range(STREAMS)]
    long_prompts = (draw_words(LONG_WORDS, source) for _ in itertools.count())
    started = time.perf_counter()
    answers, long_answers = ask_beside_long_prompts(port, model, streams, STREAM_TOKENS, long_prompts)
    took_s = time.perf_counter() - started
    gaps = [gap for answer in answers for gap in answer.gaps_s]
    rows["mixed: 1 / p50"].add(subject, 1 / quantile(gaps, 0.5))
    rows["mixed: 1 / p99"].add(subject, 1 / quantile(gaps, 0.99))
    rows["mixed: long prompts"].add(subject, 60 * len(long_answers) / took_s)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="of the other servers")
    options = parser.parse_args()
    settings = get_settings()
    folder = resolve_model(settings.model, settings.home, print)
    work = settings.home / "bench"
    servers = {OURS: lambda: baton_server(folder.path, folder.name)}
    models = {OURS: folder.name}
    if llama := os.environ.get("BENCH_LLAMA"):
        f16 = make_f16(find_gguf(settings.model, work), work / "f16.gguf")
        servers["llama-server F16"] = lambda: llama_server(Path(llama), f16, options.threads)
    if vllm := os.environ.get("BENCH_VLLM"):
        servers["vLLM"] = lambda: vllm_server(Path(vllm), folder.path, options.threads)
        models["vLLM"] = folder.path.name
    units = {"mixed: 1 / p50": "1/s", "mixed: 1 / p99": "1/s", "mixed: long prompts": "1/min"}
    names = [f"{clients} clients" for clients in CLIENTS] + list(units)
    rows = {name: Row(name, units.get(name, "tok/s")) for name in names}
    for number in range(options.rounds):
        order = list(servers)[number % len(servers) :] + list(servers)[: number % len(servers)]
        for subject in order:
            print(f"round {number + 1} of {options.rounds}: {subject}", file=sys.stderr, flush=True)
            with ExitStack() as stack:
                port = stack.enter_context(servers[subject]())
                measure(port, models.get(subject, "any"), rows, subject, random.Random(number))
            seen = "  ".join(f"{row.name} {row.seen[subject][-1]:.1f} {row.unit}" for row in rows.values())
            print(f"    {seen}", file=sys.stderr, flush=True)
    print(f"{folder.name}, {options.threads} threads, medians of {options.rounds} rounds")
    print(table(list(rows.values()), OURS, [name for name in servers if name != OURS]))


if __name__ == "__main__":
    main()
