"""Other engines on the same cores, each behind the same two questions: how long do a prefill and decode steps take?

None of them is installed by default. Where a variable below is not set its columns are left out, by name.

=============================  ==============================================================================
variable                       what it names
=============================  ==============================================================================
BENCH_LLAMA              folder of llama.cpp's programs (``llama-batched-bench``, ``llama-server``)
BENCH_TRANSFORMERS       a Python that has torch and transformers
BENCH_VLLM               a Python that has vLLM for CPUs
=============================  ==============================================================================
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from tests.bench.peers.gguf_f16 import make_f16
from tests.bench.peers.llama_cpp import LlamaCpp
from tests.bench.peers.talking import Talking

if TYPE_CHECKING:
    from tests.bench.peers.peer import Peer

HERE = Path(__file__).parent


@contextmanager
def open_peers(folder: Path, gguf: Path, work: Path, threads: int, say: Callable[[str], None]) -> Iterator[list[Peer]]:
    """Those that are installed, loaded and ready. ``folder``: the model in Hugging Face layout; ``gguf``: as fetched.

    ``work``: a folder for what has to be made for them.
    """
    with ExitStack() as stack:
        peers: list[Peer] = []
        if programs := _named("BENCH_LLAMA", "llama.cpp F16 and as fetched", say):
            peers.append(LlamaCpp("llama.cpp F16", programs, make_f16(gguf, work / "f16.gguf"), threads))
            peers.append(LlamaCpp(f"llama.cpp {gguf.stem.rpartition('.')[2]}", programs, gguf, threads))
        for variable, name, script in (
            ("BENCH_VLLM", "vLLM", "vllm_peer.py"),
            ("BENCH_TRANSFORMERS", "transformers", "transformers_peer.py"),
        ):
            if python := _named(variable, name, say):
                command = [str(python), str(HERE / script), str(folder), str(threads)]
                peers.append(stack.enter_context(Talking(name, command)))
        yield peers


def _named(variable: str, what: str, say: Callable[[str], None]) -> Path | None:
    value = os.environ.get(variable)
    if not value:
        say(f"without {what}: {variable} is not set")
        return None
    return Path(value)
