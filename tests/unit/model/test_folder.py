import json
import struct
from dataclasses import dataclass, replace

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from app.errors import ModelError
from app.model.config import ModelConfig
from app.model.folder import open_folder
from app.model.safetensors import read_header, read_tensor, write_safetensors
from tests.unit.model.conftest import TINY, tiny_weights


def test_float32_tensors_come_back_as_they_were_written(hf_folder):
    folder = open_folder(hf_folder(tie_word_embeddings=False))
    tensors = dict(folder.tensors())
    written = tiny_weights(TINY | {"tie_word_embeddings": False})
    assert tensors.keys() == written.keys()
    for name, array in tensors.items():
        assert array.dtype == np.float32
        np.testing.assert_array_equal(array, written[name])


def test_float16_is_widened(hf_folder):
    weights = {name: array.astype(np.float16) for name, array in tiny_weights(TINY).items()}
    for name, array in open_folder(hf_folder(weights=weights)).tensors():
        assert array.dtype == np.float32
        np.testing.assert_array_equal(array, weights[name].astype(np.float32))


def test_bfloat16_is_the_upper_half_of_a_float32(tmp_path):
    words = [0x3F80, 0xC049, 0x0001, 0x7F7F, 0x8000, 0xFF80]
    header = json.dumps({"w": {"dtype": "BF16", "shape": [2, 3], "data_offsets": [0, 12]}}).encode()
    file = tmp_path / "x.safetensors"
    file.write_bytes(struct.pack("<Q", len(header)) + header + struct.pack("<6H", *words))
    expected = [struct.unpack("<f", b"\0\0" + struct.pack("<H", word))[0] for word in words]
    array = read_tensor(read_header(file)["w"])
    assert array.shape == (2, 3)
    assert array.dtype == np.float32
    assert array.ravel().tolist() == expected
    assert expected[0] == 1.0


def shard(folder):
    """Split model.safetensors into two files with an index; return the name of one tensor and its file."""
    weights = load_file(folder / "model.safetensors")
    names = sorted(weights)
    files = {name: f"model-0000{1 + i % 2}-of-00002.safetensors" for i, name in enumerate(names)}
    for file in set(files.values()):
        save_file({name: weights[name] for name in names if files[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
    (folder / "model.safetensors").unlink()
    return names[0], folder / files[names[0]]


def test_a_sharded_model_is_the_same_model(hf_folder):
    single, sharded = hf_folder("single"), hf_folder("sharded")
    shard(sharded)
    one, other = open_folder(single), open_folder(sharded)
    for (name, array), (other_name, other_array) in zip(one.tensors(), other.tensors(), strict=True):
        assert name == other_name
        np.testing.assert_array_equal(array, other_array)
    assert one.fingerprint == other.fingerprint


def test_a_missing_shard_and_a_wrong_index_are_named(hf_folder):
    folder = hf_folder()
    name, file = shard(folder)
    index = folder / "model.safetensors.index.json"
    good = index.read_text()
    index.write_text(good.replace(file.name, "../elsewhere.safetensors"))
    with pytest.raises(ModelError, match="weight_map"):
        open_folder(folder)
    index.write_text(good)
    weights = load_file(file)
    del weights[name]
    save_file(weights, file)
    with pytest.raises(ModelError, match=name):
        open_folder(folder)
    file.unlink()
    with pytest.raises(ModelError, match=file.name):
        open_folder(folder)


def test_missing_misshapen_and_unknown_tensors_are_named(hf_folder):
    name = "model.layers.1.mlp.up_proj.weight"
    whole = tiny_weights(TINY)
    missing = {key: array for key, array in whole.items() if key != name}
    with pytest.raises(ModelError, match=f"{name} is missing"):
        open_folder(hf_folder("a", weights=missing))
    with pytest.raises(ModelError, match=f"{name} is .96, 63., config.json says .96, 64."):
        open_folder(hf_folder("b", weights=whole | {name: np.zeros((96, 63), np.float32)}))
    with pytest.raises(ModelError, match=r"q_proj.bias is no part"):
        open_folder(hf_folder("c", weights=whole | {"model.layers.0.self_attn.q_proj.bias": np.zeros(64, np.float32)}))
    with pytest.raises(ModelError, match=f"{name} is F64"):
        open_folder(hf_folder("d", weights=whole | {name: np.zeros((96, 64), np.float64)}))
    with pytest.raises(ModelError, match=r"lm_head.weight is missing"):
        open_folder(hf_folder("e", weights=whole, tie_word_embeddings=False))


def test_a_tied_model_may_carry_a_copy_of_its_head(hf_folder):
    weights = tiny_weights(TINY)
    folder = open_folder(hf_folder(weights=weights | {"lm_head.weight": weights["model.embed_tokens.weight"]}))
    assert "lm_head.weight" not in dict(folder.tensors())


def test_missing_and_broken_files_are_named(hf_folder):
    folder = hf_folder()
    for file in ("config.json", "tokenizer.json", "model.safetensors"):
        content = (folder / file).read_bytes()
        (folder / file).write_bytes(content[: len(content) // 2])
        with pytest.raises(ModelError, match=file):
            open_folder(folder).tokenizer()
        (folder / file).unlink()
        with pytest.raises(ModelError, match=file):
            open_folder(folder)
        (folder / file).write_bytes(content)
    open_folder(folder)


def test_all_that_a_folder_lacks_is_named_at_once(tmp_path):
    with pytest.raises(ModelError, match=r"no config.json, no tokenizer.json, no model.safetensors .or"):
        open_folder(tmp_path)


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [1], "data_offsets": [4, 0]},
        {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [9], "data_offsets": [0, 36]},
        {"dtype": "F32", "shape": "x", "data_offsets": [0, 4]},
        {"shape": [1], "data_offsets": [0, 4]},
        7,
    ],
)
def test_header_entries_that_do_not_fit_the_file_are_refused(tmp_path, entry):
    header = json.dumps({"broken": entry}).encode()
    file = tmp_path / "x.safetensors"
    file.write_bytes(struct.pack("<Q", len(header)) + header + b"\0" * 8)
    with pytest.raises(ModelError, match="broken"):
        read_header(file)


def test_written_files_are_read_by_the_safetensors_package(tmp_path):
    arrays = {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.array([1.5], np.float32)}
    chunks = [arrays["a"][:1], arrays["a"][1:], np.empty((0, 3), np.float32), arrays["b"]]
    write_safetensors(tmp_path / "x", {"a": (2, 3), "b": (1,)}, chunks)
    loaded = load_file(tmp_path / "x")
    assert loaded.keys() == arrays.keys()
    for name, array in arrays.items():
        np.testing.assert_array_equal(loaded[name], array)
    with pytest.raises(ValueError, match="28 announced"):
        write_safetensors(tmp_path / "y", {"a": (2, 3), "b": (1,)}, chunks[:2])


def test_the_fingerprint_follows_weights_config_and_tokenizer_but_not_the_place(hf_folder):
    weights = tiny_weights(TINY)
    base = open_folder(hf_folder("a")).fingerprint
    assert open_folder(hf_folder("b")).fingerprint == base
    changed = weights | {"model.norm.weight": weights["model.norm.weight"] + 1}
    others = [hf_folder("c", weights=changed), hf_folder("d", rms_norm_eps=1e-6), hf_folder("e", eos_token_id=3)]
    retokenized = hf_folder("f")
    tokenizer = retokenized / "tokenizer.json"
    tokenizer.write_text(tokenizer.read_text().replace("<|stop|>", "<|halt|>"))
    prints = {open_folder(folder).fingerprint for folder in [*others, retokenized]}
    assert len(prints | {base}) == 5


def test_chat_template_and_special_tokens_are_found_where_models_keep_them(hf_folder):
    folder = hf_folder()
    assert open_folder(folder).chat_template is None
    config = {
        "bos_token": {"content": "<|start|>", "special": True},
        "eos_token": "<|stop|>",
        "chat_template": [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}],
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    opened = open_folder(folder)
    assert (opened.bos_token, opened.eos_token, opened.chat_template) == ("<|start|>", "<|stop|>", "D")
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": "S"}))
    assert open_folder(folder).chat_template == "S"
    (folder / "chat_template.jinja").write_text("J {{ bos_token }}")
    assert open_folder(folder).chat().render([]) == "J <|start|>"


def test_a_template_may_name_every_special_token_that_the_model_has(hf_folder):
    folder = hf_folder()
    config = {"sep_token": "<|end|>", "cls_token": {"content": "<|start|>"}, "mask_token": None, "chat_template": "x"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "chat_template.jinja").write_text("{{ cls_token }}hi{{ sep_token }}{{ mask_token is defined }}")
    assert open_folder(folder).chat().render([]) == "<|start|>hi<|end|>False"


@pytest.mark.parametrize(
    ("config", "add_bos"),
    [
        ({}, None),
        ({"tokenizer_class": "Qwen2Tokenizer"}, None),
        ({"tokenizer_class": "Qwen2Tokenizer", "add_bos_token": False}, False),
        ({"tokenizer_class": "LlamaTokenizer"}, True),
        ({"tokenizer_class": "LlamaTokenizer", "add_bos_token": False}, False),
        ({"tokenizer_class": "LlamaTokenizer", "backend": "tokenizers"}, None),
    ],
)
def test_who_says_whether_a_prompt_starts_with_bos(hf_folder, config, add_bos):
    folder = hf_folder()
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    assert open_folder(folder).add_bos is add_bos


def test_what_an_architecture_adds_is_looked_for_and_named(hf_folder):
    tied = {"num_key_value_heads": 2, "tie_word_embeddings": True}
    for name, missing in {
        "Qwen2ForCausalLM": "model.layers.0.self_attn.q_proj.bias",
        "Qwen3ForCausalLM": "model.layers.0.self_attn.q_norm.weight",
    }.items():
        with pytest.raises(ModelError, match=f"tensor {missing} is missing"):
            open_folder(hf_folder(name, architectures=[name], **tied))
    unbiased = tiny_weights(TINY) | {"model.layers.1.self_attn.q_proj.bias": np.zeros(64, np.float32)}
    with pytest.raises(ModelError, match=r"tensor model\.layers\.1\.self_attn\.q_proj\.bias is no part of a Mistral"):
        open_folder(hf_folder("mistral", weights=unbiased, architectures=["MistralForCausalLM"], **tied))


def test_a_config_field_that_a_later_release_adds_changes_the_fingerprint_only_where_it_is_used(hf_folder):
    @dataclass(frozen=True)
    class Later(ModelConfig):
        added: int = 0

    folder = open_folder(hf_folder())
    unused, used = (replace(folder, config=Later(**vars(folder.config), added=value)) for value in (0, 1))
    assert unused.fingerprint == folder.fingerprint != used.fingerprint
