"""Tiny models made on the fly, and the default model where it is cached already."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf.constants import GGMLQuantizationType as Q
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

import app.model.resolve
from app.errors import ModelError
from app.model.folder import ModelFolder
from app.model.resolve import resolve_model
from app.settings import load_settings

SPECIALS = ("<|end|>", "<|start|>", "<|stop|>")
ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
TOKENS = [*SPECIALS, *ALPHABET, "Ġt", "he", "Ġthe"]
MERGES = ["Ġ t", "h e", "Ġt he"]
TINY = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": len(TOKENS),
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 128,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def tiny_weights(config: dict[str, Any], seed: int = 0) -> dict[str, np.ndarray]:
    """Random float32 weights in Hugging Face names, spelled out here independently of the code under test."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    q_rows = config["num_attention_heads"] * config["head_dim"]
    kv_rows = config["num_key_value_heads"] * config["head_dim"]
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config["vocab_size"], hidden)}
    for i in range(config["num_hidden_layers"]):
        shapes[f"model.layers.{i}.input_layernorm.weight"] = (hidden,)
        shapes[f"model.layers.{i}.post_attention_layernorm.weight"] = (hidden,)
        shapes[f"model.layers.{i}.self_attn.q_proj.weight"] = (q_rows, hidden)
        shapes[f"model.layers.{i}.self_attn.k_proj.weight"] = (kv_rows, hidden)
        shapes[f"model.layers.{i}.self_attn.v_proj.weight"] = (kv_rows, hidden)
        shapes[f"model.layers.{i}.self_attn.o_proj.weight"] = (hidden, q_rows)
        shapes[f"model.layers.{i}.mlp.gate_proj.weight"] = (inner, hidden)
        shapes[f"model.layers.{i}.mlp.up_proj.weight"] = (inner, hidden)
        shapes[f"model.layers.{i}.mlp.down_proj.weight"] = (hidden, inner)
    shapes["model.norm.weight"] = (hidden,)
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (config["vocab_size"], hidden)
    rng = np.random.default_rng(seed)
    return {name: rng.standard_normal(shape, dtype=np.float32) for name, shape in shapes.items()}


def tiny_tokenizer() -> Tokenizer:
    merges = [tuple(merge.split(" ")) for merge in MERGES]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(TOKENS)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIALS])
    return tokenizer


@pytest.fixture
def hf_folder(tmp_path: Path) -> Callable[..., Path]:
    """Write a tiny model in Hugging Face layout (float32) and return its folder; keywords change config.json."""

    def build(name: str = "tiny", *, weights: dict[str, np.ndarray] | None = None, **changes: Any) -> Path:
        folder = tmp_path / name
        folder.mkdir()
        config = TINY | changes
        (folder / "config.json").write_text(json.dumps(config))
        tiny_tokenizer().save(str(folder / "tokenizer.json"))
        save_file(tiny_weights(config) if weights is None else weights, folder / "model.safetensors")
        return folder

    return build


_TO_GGUF = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_tensors(config: dict[str, Any], weights: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Hugging Face tensors as converters store them: other names, and q and k with each head's halves interleaved."""
    stored = {}
    for name, array in weights.items():
        parts = name.split(".")
        if parts[1] != "layers":
            key = {"model.embed_tokens.weight": "token_embd", "model.norm.weight": "output_norm"}.get(name, "output")
        else:
            kind = ".".join(parts[3:-1])
            key = f"blk.{parts[2]}.{_TO_GGUF[kind]}"
            heads = {"self_attn.q_proj": "num_attention_heads", "self_attn.k_proj": "num_key_value_heads"}.get(kind)
            if heads:
                halves = array.reshape(config[heads], 2, array.shape[0] // config[heads] // 2, array.shape[1])
                array = halves.swapaxes(1, 2).reshape(array.shape)
        stored[key + ".weight"] = array
    return stored


@pytest.fixture
def gguf_file(tmp_path: Path) -> Callable[..., Path]:
    """Write a tiny GGUF file; ``metadata`` changes entries (None removes one), ``tensors`` adds or removes tensors."""

    def build(
        name: str = "tiny.gguf",
        *,
        qtype: Q = Q.F32,
        config: dict[str, Any] = TINY,
        seed: int = 0,
        architecture: str = "llama",
        metadata: dict[str, Any] | None = None,
        tensors: dict[str, np.ndarray | None] | None = None,
        raw: dict[str, tuple[np.ndarray, Q]] | None = None,
    ) -> Path:
        path = tmp_path / name
        writer = gguf.GGUFWriter(path, architecture)
        entries: dict[str, Any] = {
            "llama.block_count": config["num_hidden_layers"],
            "llama.context_length": config["max_position_embeddings"],
            "llama.embedding_length": config["hidden_size"],
            "llama.feed_forward_length": config["intermediate_size"],
            "llama.attention.head_count": config["num_attention_heads"],
            "llama.attention.head_count_kv": config["num_key_value_heads"],
            "llama.attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
            "llama.rope.freq_base": config["rope_theta"],
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": "smollm",
            "tokenizer.ggml.tokens": TOKENS,
            "tokenizer.ggml.merges": MERGES,
            "tokenizer.ggml.token_type": [3] * len(SPECIALS) + [1] * (len(TOKENS) - len(SPECIALS)),
            "tokenizer.ggml.bos_token_id": 1,
            "tokenizer.ggml.eos_token_id": 2,
        }
        if config["head_dim"] * config["num_attention_heads"] != config["hidden_size"]:
            entries["llama.attention.key_length"] = config["head_dim"]
            entries["llama.attention.value_length"] = config["head_dim"]
        entries |= metadata or {}
        for key, value in entries.items():
            if value is not None:
                _add_entry(writer, key, value)
        stored: dict[str, np.ndarray | None] = dict(gguf_tensors(config, tiny_weights(config, seed)))
        for key, array in (stored | (tensors or {})).items():
            if array is not None and key not in (raw or {}):
                kind = qtype if array.ndim == 2 and array.shape[-1] % gguf.GGML_QUANT_SIZES[qtype][0] == 0 else Q.F32
                writer.add_tensor(key, gguf.quants.quantize(array, kind), raw_dtype=kind)
        for key, (data, kind) in (raw or {}).items():
            writer.add_tensor(key, data, raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    return build


def _add_entry(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if key == "general.alignment":
        writer.add_custom_alignment(value)
    elif isinstance(value, list):
        writer.add_array(key, value)
    elif isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    else:
        writer.add_string(key, value)


class NotCached(ModelError):
    """The one reason to skip; any other error of the default model is a failure."""


@pytest.fixture(scope="session")
def default_model() -> ModelFolder:
    """The default model, if it lies in the cache; unit tests do not download it."""

    def refuse(*_: object) -> Path:
        raise NotCached("not cached")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(app.model.resolve, "fetch_default_gguf", refuse)
        try:
            return resolve_model("smollm2-135m-instruct", load_settings().home, lambda _: None)
        except NotCached as error:
            pytest.skip(f"default model: {error}")
