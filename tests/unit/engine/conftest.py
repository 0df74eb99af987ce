"""Engines to test with. The default model is loaded twice per session: for wide steps and for narrow ones."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from app.kv import KVReader
from app.model.config import ModelConfig
from app.model.folder import ModelFolder
from app.model.resolve import resolve_model
from app.model.tokenizer import Tokenizer
from app.schemas import SamplingParams
from app.settings import get_settings
from workers.engine import runtime
from workers.engine.kernels.build import build_kernels

if TYPE_CHECKING:
    from workers.engine.engine import Engine
    from workers.engine.sequence import StepOutput

REFERENCES = Path(__file__).parents[2] / "references"


@pytest.fixture(scope="session")
def cases() -> list[dict[str, Any]]:
    """Prompts with the greedy answers of another implementation in float32."""
    loaded: list[dict[str, Any]] = json.loads((REFERENCES / "greedy_reference.json").read_text())
    return loaded


@pytest.fixture(scope="session")
def default_folder() -> ModelFolder:
    settings = get_settings()
    return resolve_model("smollm2-135m-instruct", settings.home, lambda _: None)


@pytest.fixture(scope="session")
def kernels() -> Path:
    """The compiled kernels, built once into the usual cache."""
    return build_kernels(get_settings().home, print)


@pytest.fixture(scope="session")
def new_engine(kernels: Path) -> Callable[..., Engine]:
    """Builds an engine with compiled kernels and float32 weights; keywords go to ``Engine``."""
    runtime.configure(1)
    from workers.engine.engine import Engine

    def build(folder: Any, **options: Any) -> Engine:
        usual = {"incarnation": "test", "num_threads": 1, "max_model_len": 256}
        return Engine(folder, **(usual | {"kernels": kernels, "weight_dtype": "float32"} | options))

    return build


@pytest.fixture(scope="session")
def _wide(default_folder: ModelFolder, new_engine: Callable[..., Engine]) -> Engine:
    return new_engine(default_folder, incarnation="wide", num_blocks=160, max_model_len=2500)


@pytest.fixture(scope="session")
def _narrow(default_folder: ModelFolder, new_engine: Callable[..., Engine]) -> Engine:
    return new_engine(default_folder, incarnation="narrow", num_blocks=96, max_num_seqs=4, max_num_batched_tokens=7)


@pytest.fixture
def engine(_wide: Engine) -> Iterator[Engine]:
    """The default model, 512 tokens per step."""
    yield _wide
    for key in _wide.keys():  # noqa: SIM118  (a method of the engine's own)
        _wide.stop(key)


@pytest.fixture
def narrow_engine(_narrow: Engine) -> Iterator[Engine]:
    """The default model, 7 tokens and 4 sequences per step."""
    yield _narrow
    for key in _narrow.keys():  # noqa: SIM118  (a method of the engine's own)
        _narrow.stop(key)


@pytest.fixture
def reader() -> Iterator[KVReader]:
    made = KVReader()
    yield made
    made.close()


TINY = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=97,
    hidden_size=48,
    intermediate_size=80,
    num_layers=3,
    num_heads=6,
    num_kv_heads=2,
    head_dim=8,
    rms_norm_eps=1e-5,
    rope_theta=10000.0,
    rope_scaling=None,
    max_position_embeddings=512,
    tie_word_embeddings=False,
    bos_token_id=1,
    eos_token_ids=(),
)


@dataclass
class TinyFolder:
    """Random weights in place of a folder on disk."""

    config: ModelConfig = TINY
    name: str = "tiny"
    fingerprint: str = "0"
    weights: dict[str, np.ndarray] = field(default_factory=dict)

    def __post_init__(self) -> None:
        rng = np.random.default_rng(3)
        for name, shape in self.config.tensor_shapes().items():
            values = rng.standard_normal(shape, np.float32)
            self.weights[name] = 1 + 0.1 * values if len(shape) == 1 else values / np.float32(shape[-1] ** 0.5)

    def tensors(self) -> Iterator[tuple[str, np.ndarray]]:
        yield from self.weights.items()

    def tokenizer(self) -> Tokenizer:
        """Token i is the bytes ``tiny_piece(i)``."""
        first, *rest = pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str("€")[0][0]
        letters = [tiny_piece(i).decode(errors="ignore") for i in range(self.config.vocab_size)]
        words = [each if i % 2 else "".join([*rest, each, first]) for i, each in enumerate(letters)]
        inner = tokenizers.Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=[]))
        inner.decoder = decoders.ByteLevel()
        return Tokenizer(inner)


def tiny_piece(token_id: int) -> bytes:
    """Two letters of its own. An even token begins and ends in the middle of a €: two of them in a row make one."""
    letters = bytes([97 + token_id // 26, 97 + token_id % 26])
    return letters if token_id % 2 else "€".encode()[1:] + letters + "€".encode()[:1]


@pytest.fixture
def tiny_folder() -> Callable[..., TinyFolder]:
    """Builds a tiny random model; keywords change its config."""
    return lambda **changes: TinyFolder(replace(TINY, **changes))


def greedy(max_tokens: int = 64, **changes: Any) -> SamplingParams:
    return SamplingParams(**({"temperature": 0, "seed": 0, "max_tokens": max_tokens} | changes))


@dataclass
class Driver:
    """Gives each sequence blocks of its own, scattered over the pool, and collects what the engine says."""

    engine: Engine
    reserve_tokens: int = 64
    outputs: dict[str, list[StepOutput]] = field(default_factory=dict)
    blocks: dict[str, list[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._free = list(np.random.default_rng(5).permutation(self.engine.pool.num_blocks))

    def allocate(self, key: str, num_tokens: int) -> list[int]:
        count = self.engine.blocks_needed(num_tokens)
        self.blocks[key] = [int(self._free.pop()) for _ in range(count)]
        return self.blocks[key]

    def add(
        self,
        key: str,
        prompt_ids: list[int],
        sampling: SamplingParams,
        *,
        output_ids: tuple[int, ...] = (),
        num_computed: int = 0,
        one_token: bool = False,
    ) -> None:
        if key not in self.blocks:
            self.allocate(key, len(prompt_ids) + len(output_ids) + self.reserve_tokens)
        self.engine.add(
            key, prompt_ids, output_ids, sampling, self.blocks[key], num_computed=num_computed, one_token=one_token
        )

    def run(self) -> dict[str, list[int]]:
        """Step until nothing is left to do; return the tokens of each sequence."""
        while self.engine.has_work:
            for output in self.engine.step():
                self.outputs.setdefault(output.key, []).append(output)
        return {
            key: [output.token_id for output in outputs if output.token_id is not None]
            for key, outputs in self.outputs.items()
        }


@pytest.fixture
def drive() -> Callable[..., Driver]:
    return Driver
