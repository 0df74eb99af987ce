"""GGUF file → model folder in Hugging Face layout, every weight as float32."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf.constants import GGML_QUANT_SIZES
from gguf.quants import dequantize

from app.errors import ModelError
from app.model.config import ModelConfig
from app.model.gguf_file import GgufFile, RawTensor, read_gguf
from app.model.gguf_tokenizer import build_tokenizer
from app.model.safetensors import Array, write_safetensors

_CHUNK_VALUES = 1 << 18  # dequantized at a time: 1 MiB of float32 stays in the cache and is 2–3 times as fast

_LAYER_TENSORS = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_OTHER_TENSORS = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
_ROPE_FREQS = "rope_freqs.weight"

# Every llama.* key that is read below or changes nothing. Any other may change what the model computes.
_KNOWN_KEYS = frozenset(
    (
        "llama.block_count",
        "llama.context_length",
        "llama.embedding_length",
        "llama.feed_forward_length",
        "llama.vocab_size",
        "llama.tensor_data_layout",
        "llama.attention.head_count",
        "llama.attention.head_count_kv",
        "llama.attention.key_length",
        "llama.attention.value_length",
        "llama.attention.layer_norm_rms_epsilon",
        "llama.attention.causal",
        "llama.expert_count",
        "llama.expert_used_count",
        "llama.rope.dimension_count",
        "llama.rope.freq_base",
        "llama.rope.scale_linear",
        "llama.rope.scaling.type",
        "llama.rope.scaling.factor",
        "llama.rope.scaling.original_context_length",
        "llama.rope.scaling.finetuned",
    )
)


def convert_gguf(file: Path, target: Path, progress: Callable[[str], None]) -> None:
    """Write ``file`` as a model folder into the existing, empty folder ``target``.

    Peak memory is a few MiB whatever the model's size. ``progress`` gets one line per 5 %.

    Raises:
        ModelError: the file is damaged, or its model cannot be represented exactly; ``target`` is then incomplete.
    """
    gguf = read_gguf(file)
    try:
        tokenizer = build_tokenizer(gguf.metadata)
        config = hf_config(gguf, len(gguf.metadata["tokenizer.ggml.tokens"]))
        config |= {"bos_token_id": tokenizer.bos_id, "eos_token_id": tokenizer.eos_ids}
        shapes = ModelConfig.from_hf(config).tensor_shapes()
    except ModelError as error:
        raise ModelError(f"{file}: {error}") from error
    sources = _sources(gguf, shapes)
    write_safetensors(target / "model.safetensors", shapes, _chunks(gguf, config, sources, progress))
    _write_json(target / "config.json", config)
    _write_json(target / "tokenizer_config.json", tokenizer.config)
    tokenizer.tokenizer.save(str(target / "tokenizer.json"))


def hf_config(gguf: GgufFile, num_tokens: int) -> dict[str, Any]:
    """Translate the metadata to the fields of ``config.json``, without the special token ids."""
    metadata = gguf.metadata
    _refuse_variants(gguf)
    heads, hidden = _int(metadata, "attention.head_count"), _int(metadata, "embedding_length")
    head_dim = _int(metadata, "attention.key_length", hidden // heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if _int(metadata, key, head_dim) != head_dim:
            raise ModelError(f"llama.{key} differs from the head size {head_dim}; this is not supported")
    embedding = gguf.tensors.get("token_embd.weight")
    if embedding is None:
        raise ModelError("tensor token_embd.weight is missing")
    if num_tokens > embedding.shape[0]:
        raise ModelError(f"{num_tokens} tokens, but token_embd.weight has {embedding.shape[0]} rows")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "vocab_size": embedding.shape[0],
        "hidden_size": hidden,
        "intermediate_size": _int(metadata, "feed_forward_length"),
        "num_hidden_layers": _int(metadata, "block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": _int(metadata, "attention.head_count_kv", heads),
        "head_dim": head_dim,
        "rms_norm_eps": _float32(metadata, "attention.layer_norm_rms_epsilon", None),
        "rope_theta": _float32(metadata, "rope.freq_base", 10000.0),
        "rope_scaling": _rope_scaling(gguf, head_dim),
        "max_position_embeddings": _int(metadata, "context_length"),
        "tie_word_embeddings": "output.weight" not in gguf.tensors,
        "torch_dtype": "float32",
    }


def _refuse_variants(gguf: GgufFile) -> None:
    metadata = gguf.metadata
    architecture = metadata.get("general.architecture")
    if architecture != "llama":
        raise ModelError(f"architecture {architecture!r} is not supported; supported: 'llama'")
    if metadata.get("general.type", "model") != "model":
        raise ModelError(f"general.type is {metadata['general.type']!r}, not 'model'")
    if metadata.get("split.count", 1) not in (0, 1):
        raise ModelError(f"one of {metadata['split.count']} parts; merge them into one file first")
    if metadata.get("llama.expert_count", 0) != 0:
        raise ModelError("mixture of experts (llama.expert_count) is not supported")
    if metadata.get("llama.attention.causal", True) is not True:
        raise ModelError("llama.attention.causal = false is not supported")
    unknown = sorted(key for key in metadata if key.startswith("llama.") and key not in _KNOWN_KEYS)
    if unknown:
        raise ModelError(f"{unknown[0]} = {metadata[unknown[0]]!r} is not supported")


def _rope_scaling(gguf: GgufFile, head_dim: int) -> dict[str, Any] | None:
    metadata = gguf.metadata
    kind = metadata.get("llama.rope.scaling.type", "linear" if "llama.rope.scale_linear" in metadata else "none")
    default = _float32(metadata, "rope.scale_linear", 1.0)
    linear = _float32(metadata, "rope.scaling.factor", default) if kind == "linear" else 1.0
    if kind not in ("none", "linear"):
        raise ModelError(f"llama.rope.scaling.type {kind!r} is not supported; supported: none, linear")
    factors = _rope_factors(gguf, head_dim)
    if factors is None or bool(np.all(factors == 1)):
        return None if linear == 1 else {"rope_type": "linear", "factor": linear}
    if linear != 1:
        raise ModelError(f"{_ROPE_FREQS} together with linear rope scaling is not supported")
    scaling = {
        "rope_type": "llama3",
        "factor": float(factors.max()),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    theta = _float32(metadata, "rope.freq_base", 10000.0)
    if not np.allclose(factors, _llama3_factors(scaling, theta, head_dim), rtol=1e-4, atol=0):
        raise ModelError(f"{_ROPE_FREQS} holds factors other than Llama 3.1's; this is not supported")
    return scaling


def _rope_factors(gguf: GgufFile, head_dim: int) -> Array | None:
    """The divisors of the rotary frequencies, [head_dim / 2], where the file brings them."""
    tensor = gguf.tensors.get(_ROPE_FREQS)
    if tensor is None:
        return None
    if tensor.shape != (head_dim // 2,):
        raise ModelError(f"{_ROPE_FREQS} is {list(tensor.shape)}, not [{head_dim // 2}]")
    return _dequantize(gguf.rows(tensor), tensor).reshape(-1)


def _llama3_factors(scaling: dict[str, Any], theta: float, head_dim: int) -> npt.NDArray[np.float64]:
    """Llama 3.1's rule: long wavelengths are stretched by ``factor``, short ones kept, those between blended."""
    wavelength = 2 * np.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    low, high, factor = scaling["low_freq_factor"], scaling["high_freq_factor"], scaling["factor"]
    blend = (scaling["original_max_position_embeddings"] / wavelength - low) / (high - low)
    blend = np.clip(blend, 0, 1)
    result: npt.NDArray[np.float64] = 1 / ((1 - blend) / factor + blend)
    return result


def _sources(gguf: GgufFile, shapes: dict[str, tuple[int, ...]]) -> dict[str, RawTensor]:
    """Return the stored tensor of each Hugging Face name, checked."""
    sources = {}
    for name, shape in shapes.items():
        stored = _gguf_name(name)
        tensor = gguf.tensors.get(stored)
        if tensor is None:
            raise ModelError(f"{gguf.path}: tensor {stored} is missing")
        if tensor.shape != shape:
            raise ModelError(f"{gguf.path}: tensor {stored} is {list(tensor.shape)}, not {list(shape)}")
        _probe(gguf, tensor)
        sources[name] = tensor
    used = {tensor.name for tensor in sources.values()}
    for stored in gguf.tensors.keys() - used - {_ROPE_FREQS}:
        if not stored.endswith(".attn_rot_embd.weight"):  # unused leftovers of old converters
            raise ModelError(f"{gguf.path}: tensor {stored} is no part of a plain Llama; this variant is not supported")
    return sources


def _gguf_name(name: str) -> str:
    if name in _OTHER_TENSORS:
        return _OTHER_TENSORS[name]
    _, _, layer, part = name.removesuffix(".weight").split(".", 3)
    return f"blk.{layer}.{_LAYER_TENSORS[part]}.weight"


def _probe(gguf: GgufFile, tensor: RawTensor) -> None:
    """Fail before the long work when a quantization cannot be undone."""
    block_bytes = GGML_QUANT_SIZES[tensor.qtype][1]
    try:
        dequantize(np.zeros((1, block_bytes), np.uint8), tensor.qtype)
    except NotImplementedError as error:
        raise ModelError(f"{gguf.path}: tensor {tensor.name}: {tensor.qtype.name} is not supported") from error


def _chunks(
    gguf: GgufFile, config: dict[str, Any], sources: dict[str, RawTensor], progress: Callable[[str], None]
) -> Iterator[Array]:
    total = sum(prod(tensor.shape) for tensor in sources.values())
    done, reported = 0, 0
    progress("converting 0 %")
    for name, tensor in sources.items():
        rows = gguf.rows(tensor)
        order = _row_order(name, tensor.shape[0], config)
        step = max(1, _CHUNK_VALUES // tensor.shape[-1])
        for start in range(0, rows.shape[0], step):
            part = rows[start : start + step] if order is None else rows[order[start : start + step]]
            values = _dequantize(part, tensor)
            yield values
            done += values.size
            if (percent := 100 * done // total // 5 * 5) > reported:
                progress(f"converting {percent} %")
                reported = percent


def _row_order(name: str, rows: int, config: dict[str, Any]) -> npt.NDArray[np.intp] | None:
    """GGUF interleaves the two halves of each head's rotary pairs in q and k; this order parts them again."""
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}.get(name.split(".")[-2])
    if heads is None:
        return None
    return np.arange(rows).reshape(heads, rows // heads // 2, 2).swapaxes(1, 2).reshape(-1)


def _dequantize(rows: npt.NDArray[np.uint8], tensor: RawTensor) -> Array:
    values: Array = dequantize(np.ascontiguousarray(rows), tensor.qtype)
    return values


def _int(metadata: dict[str, Any], key: str, default: int | None = None) -> int:
    value = metadata.get(f"llama.{key}", default)
    if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
        raise ModelError(f"llama.{key} must be a positive integer, not {value!r}")
    return value


def _float32(metadata: dict[str, Any], key: str, default: float | None) -> float:
    """Return the shortest decimal that means the stored float32: 1e-05, not 9.999999747378752e-06."""
    value = metadata.get(f"llama.{key}", default)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < float("inf"):
        raise ModelError(f"llama.{key} must be a positive number, not {value!r}")
    return float(str(np.float32(value)))


def _write_json(file: Path, value: dict[str, Any]) -> None:
    file.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
