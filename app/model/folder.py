"""A model folder in Hugging Face layout, checked when it is opened."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Any

from app.errors import ModelError
from app.model.chat import ChatTemplate
from app.model.config import ModelConfig
from app.model.safetensors import Array, TensorInfo, read_header, read_raw, read_tensor
from app.model.tokenizer import Tokenizer

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_SAMPLE_BYTES = 4096

# Beside bos_token and eos_token, these are what a chat template may name.
_SPECIAL_TOKENS = ("unk_token", "sep_token", "pad_token", "cls_token", "mask_token")

# Tokenizer classes that put BOS in front unless tokenizer_config.json says otherwise.
_BOS_BY_DEFAULT = ("LlamaTokenizer", "LlamaTokenizerFast")


@dataclass(frozen=True)
class ModelFolder:
    """One model on disk. Opening it reads no weights; ``tensors`` does."""

    path: Path
    name: str
    config: ModelConfig
    chat_template: str | None
    bos_token: str
    eos_token: str
    special_tokens: dict[str, str] = field(default_factory=dict)
    """What else the chat template may name, such as ``sep_token``."""
    add_bos: bool | None = None
    """Whether a prompt starts with BOS; None leaves it to ``tokenizer.json``."""
    infos: dict[str, TensorInfo] = field(repr=False, default_factory=dict)

    def tensors(self) -> Iterator[tuple[str, Array]]:
        """Yield (Hugging Face name, float32 array), one tensor at a time; linear weights are [out, in].

        Arrays of float32 files are read-only views into the page cache: copy what must outlive or change.
        """
        for name in self.config.tensor_shapes():
            yield name, read_tensor(self.infos[name])

    def tokenizer(self) -> Tokenizer:
        """Load ``tokenizer.json`` (a few hundred ms; call once and keep it)."""
        return Tokenizer.from_file(self.path / "tokenizer.json", bos_token=self.bos_token, add_bos=self.add_bos)

    def chat(self) -> ChatTemplate:
        """The chat template, compiled. A model without one gives a template that refuses every render."""
        return ChatTemplate(self.chat_template, self.bos_token, self.eos_token, special_tokens=self.special_tokens)

    @cached_property
    def fingerprint(self) -> str:
        """16 hex digits that name weights, config and tokenizer: equal on every host that has the same files.

        It reads the tokenizer and three samples of each tensor, not every weight.
        """
        # A field at its default is left out, so that a release which adds one can serve beside those before it.
        stated = {
            each.name: value
            for each in fields(self.config)
            if (value := getattr(self.config, each.name)) != each.default
        }
        digest = hashlib.sha256(json.dumps(stated, sort_keys=True).encode())
        for name in sorted(self.config.tensor_shapes()):
            info, raw = self.infos[name], read_raw(self.infos[name])
            digest.update(f"\0{name}\0{info.dtype}\0{info.shape}\0".encode())
            for start in (0, raw.size // 2, max(0, raw.size - _SAMPLE_BYTES)):
                digest.update(raw[start : start + _SAMPLE_BYTES].tobytes())
        digest.update((self.path / "tokenizer.json").read_bytes())
        return digest.hexdigest()[:16]


def open_folder(path: Path, name: str | None = None) -> ModelFolder:
    """Open and check a folder: config.json, tokenizer.json, safetensors files. ``name`` defaults to the folder's.

    Raises:
        ModelError: a file is missing, unreadable or truncated, or holds a model that Baton cannot serve.
    """
    _check_files(path)
    config = ModelConfig.from_hf(_read_json(path / "config.json"), _read_json(path / "generation_config.json", {}))
    tokenizer_config = _read_json(path / "tokenizer_config.json", {})
    special = _read_json(path / "special_tokens_map.json", {}) | tokenizer_config
    infos = _tensor_infos(path)
    _check_tensors(path, config, infos)
    return ModelFolder(
        path=path,
        name=name or path.resolve().name,
        config=config,
        chat_template=_chat_template(path, tokenizer_config),
        bos_token=_token_text(special.get("bos_token")),
        eos_token=_token_text(special.get("eos_token")),
        special_tokens={name: text for name in _SPECIAL_TOKENS if (text := _token_text(special.get(name)))},
        add_bos=_add_bos(tokenizer_config),
        infos=infos,
    )


def _check_files(path: Path) -> None:
    """Name all that is missing at once."""
    missing = [name for name in ("config.json", "tokenizer.json") if not (path / name).is_file()]
    if not (path / _SINGLE).is_file() and not (path / _INDEX).is_file():
        missing.append(f"{_SINGLE} (or {_INDEX} and its files; save other weight formats as safetensors first)")
    if missing:
        raise ModelError(f"{path}: no {', no '.join(missing)}")


def _read_json(file: Path, default: dict[str, Any] | None = None) -> dict[str, Any]:
    if default is not None and not file.exists():
        return default
    try:
        value = json.loads(file.read_bytes())
    except FileNotFoundError as error:
        raise ModelError(f"{file.parent}: no {file.name}") from error
    except OSError as error:
        raise ModelError(f"{file}: cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ModelError(f"{file}: not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{file}: must hold a JSON object")
    return value


def _tensor_infos(path: Path) -> dict[str, TensorInfo]:
    if (path / _INDEX).is_file():
        weight_map = _read_json(path / _INDEX).get("weight_map")
        if not isinstance(weight_map, dict) or not all(_is_plain_name(file) for file in weight_map.values()):
            raise ModelError(f"{path / _INDEX}: weight_map must map tensor names to file names")
        shards = {file: read_header(path / file) for file in sorted(set(weight_map.values()))}
        absent = [name for name, file in weight_map.items() if name not in shards[file]]
        if absent:
            raise ModelError(
                f"{path}: tensor {absent[0]} is not in {weight_map[absent[0]]}, where the index says it is"
            )
        return {name: shards[file][name] for name, file in weight_map.items()}
    return read_header(path / _SINGLE)


def _is_plain_name(file: Any) -> bool:
    return isinstance(file, str) and file not in ("", ".", "..") and Path(file).name == file


def _check_tensors(path: Path, config: ModelConfig, infos: dict[str, TensorInfo]) -> None:
    shapes = config.tensor_shapes()
    for name, shape in shapes.items():
        if name not in infos:
            raise ModelError(f"{path}: tensor {name} is missing")
        if infos[name].shape != shape:
            raise ModelError(f"{path}: tensor {name} is {list(infos[name].shape)}, config.json says {list(shape)}")
        if infos[name].dtype not in ("F32", "F16", "BF16"):
            raise ModelError(f"{path}: tensor {name} is {infos[name].dtype}; supported: F32, F16, BF16")
    for name in infos.keys() - shapes.keys():
        tied_copy = name == "lm_head.weight" and config.tie_word_embeddings
        if not tied_copy and not name.endswith(".rotary_emb.inv_freq"):  # neither is used by the model
            raise ModelError(
                f"{path}: tensor {name} is no part of a {config.architecture}; this variant is not supported"
            )


def _chat_template(path: Path, tokenizer_config: dict[str, Any]) -> str | None:
    file = path / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = tokenizer_config.get("chat_template")
    if isinstance(template, list):  # several, by name
        template = {entry.get("name"): entry.get("template") for entry in template}.get("default")
    return template if isinstance(template, str) else None


def _token_text(token: Any) -> str:
    token = token.get("content") if isinstance(token, dict) else token
    return token if isinstance(token, str) else ""


def _add_bos(tokenizer_config: dict[str, Any]) -> bool | None:
    stated = tokenizer_config.get("add_bos_token")
    if isinstance(stated, bool):
        return stated
    if "backend" in tokenizer_config:  # written by transformers 5, which has the rule in tokenizer.json
        return None
    return True if tokenizer_config.get("tokenizer_class") in _BOS_BY_DEFAULT else None
