"""Each architecture against transformers: logits and greedy tokens of a tiny model, from its folder on disk."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from app.model.folder import ModelFolder, open_folder
from tests.references.tiny_weights import tiny_tensor

from .conftest import REFERENCES, Driver, TinyFolder, greedy

if TYPE_CHECKING:
    from workers.engine.engine import Engine

CASES: dict[str, dict[str, Any]] = json.loads((REFERENCES / "model_references.json").read_text())
TOLERANCE = 1e-4  # of the largest logit of a row; an error in the model is a hundred times that


def stored(values: np.ndarray, dtype: str) -> bytes:
    """The bytes of a checkpoint. The values fit ``dtype``, so nothing is rounded here."""
    as_stored = {"F32": values, "F16": values.astype("<f2"), "BF16": (values.view("<u4") >> 16).astype("<u2")}
    return as_stored[dtype].tobytes()


def write_tensors(case: str, names: list[str], file: Path) -> None:
    """A file in safetensors format: length of the header, header, bytes."""
    dtype, shapes = CASES[case]["dtype"], CASES[case]["tensors"]
    header, data = {}, b""
    for name in names:
        raw = stored(tiny_tensor(case, name, tuple(shapes[name]), dtype), dtype)
        header[name] = {"dtype": dtype, "shape": shapes[name], "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    encoded = json.dumps(header).encode()
    file.write_bytes(len(encoded).to_bytes(8, "little") + encoded + data)


def write_folder(case: str, path: Path, num_files: int) -> ModelFolder:
    """A folder as transformers saves it: in one file, or in several with an index."""
    (path / "config.json").write_text(json.dumps(CASES[case]["config"]))
    TinyFolder().tokenizer()._inner.save(str(path / "tokenizer.json"))
    names = sorted(CASES[case]["tensors"])
    if num_files == 1:
        write_tensors(case, names, path / "model.safetensors")
        return open_folder(path)
    index = {name: f"model-{1 + i % num_files:05}-of-{num_files:05}.safetensors" for i, name in enumerate(names)}
    for file in set(index.values()):
        write_tensors(case, [name for name in names if index[name] == file], path / file)
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    return open_folder(path)


@pytest.mark.parametrize("computing", ["compiled", "paddle"])
@pytest.mark.parametrize("max_num_batched_tokens", [256, 7], ids=["whole", "chunked"])
@pytest.mark.parametrize("case", CASES)
def test_logits_and_tokens_are_those_of_transformers(
    case: str,
    max_num_batched_tokens: int,
    computing: str,
    tmp_path: Path,
    kernels: Path,
    new_engine: Callable[..., Engine],
    drive: Callable[..., Driver],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = write_folder(case, tmp_path, num_files=3 if max_num_batched_tokens == 7 else 1)
    engine = new_engine(
        folder,
        num_blocks=32,
        max_num_seqs=4,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=folder.config.max_context_tokens,
        kernels=kernels if computing == "compiled" else None,
    )
    if folder.config.head_dim % 8 == 0:  # else there are no kernels for it
        assert computing in engine.operations.name.lower()
    logits = record_logits(engine, monkeypatch)
    driver = drive(engine, reserve_tokens=8)
    answers = {str(len(answer["prompt_ids"])): answer for answer in CASES[case]["answers"]}
    for key, answer in answers.items():
        driver.add(key, answer["prompt_ids"], greedy(len(answer["output_ids"])))
    tokens = driver.run()
    engine.close()
    assert tokens == {key: answer["output_ids"] for key, answer in answers.items()}
    with np.load(REFERENCES / "model_references.npz") as references:
        rows = {key: references[f"{case}/{key}"] for key in answers}
    for key, expected in rows.items():
        found = np.stack([logits[key, index] for index in range(len(expected))])
        error = np.abs(found - expected).max(axis=1) / np.abs(expected).max(axis=1)
        assert error.max() < TOLERANCE, f"prompt of {key} tokens: {error}"


def record_logits(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> dict[tuple[str, int], np.ndarray]:
    """(sequence, index of the token that is drawn from them) → logits, as the engine computes them."""
    seen: dict[tuple[str, int], np.ndarray] = {}
    forward = engine._model.forward

    def recording(batch: Any) -> np.ndarray:
        logits = forward(batch)
        for chunk, row in zip(batch.sampling_chunks, logits, strict=True):
            seen[chunk.sequence.key, len(chunk.sequence.output_ids)] = row
        return logits

    monkeypatch.setattr(engine._model, "forward", recording)
    return seen


def test_a_reference_is_there_for_every_architecture() -> None:
    from app.model.architectures import ARCHITECTURES

    found = {name for case in CASES.values() for name in case["config"]["architectures"]}
    assert found == ARCHITECTURES.keys() - {"Ernie4_5_ForCausalLM"}  # another name of the same
