import json

import gguf
import numpy as np
import pytest
from gguf.constants import GGML_QUANT_SIZES
from gguf.constants import GGMLQuantizationType as Q
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from app.errors import ModelError
from app.model.folder import open_folder
from app.model.gguf_convert import convert_gguf
from app.model.gguf_file import read_gguf
from tests.unit.model.conftest import MERGES, TINY, TOKENS, tiny_weights


@pytest.fixture
def convert(tmp_path):
    def run(file):
        target = tmp_path / f"{file.stem}-converted"
        target.mkdir()
        convert_gguf(file, target, lambda _: None)
        return open_folder(target)

    return run


@pytest.mark.parametrize("tied", [True, False])
def test_float32_weights_come_back_in_hugging_face_names_and_order(gguf_file, convert, tied):
    config = TINY | {"tie_word_embeddings": tied}
    folder = convert(gguf_file(config=config))
    tensors, written = dict(folder.tensors()), tiny_weights(config)
    assert tensors.keys() == written.keys()
    for name, array in tensors.items():
        np.testing.assert_array_equal(array, written[name], err_msg=name)
    assert folder.config.tie_word_embeddings is tied


@pytest.mark.parametrize("qtype", [Q.F16, Q.BF16, Q.Q4_0, Q.Q4_1, Q.Q5_0, Q.Q5_1, Q.Q8_0])
def test_quantized_weights_are_near_what_was_quantized(gguf_file, convert, qtype):
    """Quantizing keeps values within half a step of their block: a wrong order or scale is far outside."""
    written = tiny_weights(TINY)
    steps = {Q.F16: 2e-3, Q.BF16: 2e-2, Q.Q4_0: 0.6, Q.Q4_1: 0.4, Q.Q5_0: 0.3, Q.Q5_1: 0.2, Q.Q8_0: 0.03}
    for name, array in convert(gguf_file(qtype=qtype)).tensors():
        assert np.abs(array - written[name]).max() < steps[qtype], name


def test_q8_0_and_q4_1_mean_what_the_format_says(gguf_file, convert):
    """Block by block by hand. Q8_0: float16 d, 32 int8. Q4_1: float16 d, m, 16 bytes with two 4-bit values each."""
    rng = np.random.default_rng(1)
    name, key = "model.layers.0.mlp.gate_proj.weight", "blk.0.ffn_gate.weight"
    rows, blocks = 96, 2
    scale = rng.random((rows, blocks)).astype(np.float16)
    offset = rng.random((rows, blocks)).astype(np.float16)
    bytes_ = rng.integers(0, 256, (rows, blocks, 32), dtype=np.uint8)

    q8 = np.concatenate([scale[..., None].view(np.uint8), bytes_], axis=-1).reshape(rows, -1)
    loaded = dict(convert(gguf_file("q8.gguf", raw={key: (q8, Q.Q8_0)})).tensors())[name]
    np.testing.assert_array_equal(
        loaded, (scale.astype(np.float32)[..., None] * bytes_.view(np.int8)).reshape(rows, 64)
    )

    nibbles = bytes_[..., :16]
    parts = [scale[..., None].view(np.uint8), offset[..., None].view(np.uint8), nibbles]
    q4 = np.concatenate(parts, axis=-1).reshape(rows, -1)
    loaded = dict(convert(gguf_file("q4.gguf", raw={key: (q4, Q.Q4_1)})).tensors())[name]
    values = np.concatenate([nibbles & 15, nibbles >> 4], axis=-1)
    expected = scale.astype(np.float32)[..., None] * values + offset.astype(np.float32)[..., None]
    np.testing.assert_array_equal(loaded, expected.reshape(rows, 64))


BLOCKS_OF_256 = [
    Q.Q2_K, Q.Q3_K, Q.Q4_K, Q.Q5_K, Q.Q6_K, Q.TQ1_0, Q.TQ2_0, Q.IQ1_S, Q.IQ1_M, Q.IQ2_XXS, Q.IQ2_XS, Q.IQ2_S,
    Q.IQ3_XXS, Q.IQ3_S, Q.IQ4_XS,
]  # fmt: skip


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # random bytes hold NaN and infinite scales
@pytest.mark.parametrize("qtype", [*BLOCKS_OF_256, Q.IQ4_NL, Q.MXFP4])
def test_every_other_quantization_is_undone_as_by_the_gguf_package(gguf_file, convert, qtype):
    config = TINY | {"hidden_size": 256, "num_hidden_layers": 1}
    size, block_bytes = GGML_QUANT_SIZES[qtype]
    data = np.random.default_rng(2).integers(0, 256, (64, 256 // size * block_bytes), dtype=np.uint8)
    name = "model.layers.0.self_attn.q_proj.weight"
    loaded = dict(convert(gguf_file(config=config, raw={"blk.0.attn_q.weight": (data, qtype)})).tensors())[name]
    whole = gguf.quants.dequantize(data, qtype)
    expected = whole.reshape(4, 8, 2, 256).swapaxes(1, 2).reshape(64, 256)
    np.testing.assert_array_equal(loaded, expected)


def test_interleaved_rotation_of_the_stored_rows_is_half_split_rotation_of_the_converted_ones(gguf_file, convert):
    """What a GGUF engine computes for q·k, and what a Hugging Face engine computes, must be the same scores."""
    path = gguf_file()
    stored = gguf.GGUFReader(path)
    raw = {tensor.name: np.array(tensor.data) for tensor in stored.tensors}
    converted = dict(convert(path).tensors())
    x, y = np.random.default_rng(3).standard_normal((2, 64))
    angles = 1e4 ** (-np.arange(8) / 8)

    def interleaved(v, position):
        a, b = v[0::2], v[1::2]
        c, s = np.cos(position * angles), np.sin(position * angles)
        return np.stack([a * c - b * s, a * s + b * c], axis=-1).ravel()

    def half_split(v, position):
        a, b = v[:8], v[8:]
        c, s = np.cos(position * angles), np.sin(position * angles)
        return np.concatenate([a * c - b * s, b * c + a * s])

    q, k = raw["blk.1.attn_q.weight"] @ x, raw["blk.1.attn_k.weight"] @ y
    hf_q = converted["model.layers.1.self_attn.q_proj.weight"] @ x
    hf_k = converted["model.layers.1.self_attn.k_proj.weight"] @ y
    for head in range(4):
        rows, kv_rows = slice(head * 16, head * 16 + 16), slice(head // 2 * 16, head // 2 * 16 + 16)
        score = interleaved(q[rows], 5) @ interleaved(k[kv_rows], 2)
        np.testing.assert_allclose(half_split(hf_q[rows], 5) @ half_split(hf_k[kv_rows], 2), score, rtol=1e-6)


def test_the_config_is_translated(gguf_file, convert):
    config = convert(gguf_file(metadata={"llama.rope.freq_base": 500000.0, "tokenizer.ggml.eot_token_id": 0})).config
    assert (config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim) == (2, 4, 2, 16)
    assert (config.vocab_size, config.hidden_size, config.intermediate_size) == (len(TOKENS), 64, 96)
    assert (config.rms_norm_eps, config.rope_theta, config.rope_scaling) == (1e-5, 5e5, None)
    assert (config.max_position_embeddings, config.bos_token_id, config.eos_token_ids) == (128, 1, (0, 2))


def llama3_factors(factor, head_dim=16, theta=500000.0):
    """Llama 3.1's rule as its reference code states it, one frequency at a time."""
    factors = []
    for i in range(0, head_dim, 2):
        wavelength = 2 * np.pi * theta ** (i / head_dim)
        if wavelength < 8192 / 4:
            factors.append(1.0)
        elif wavelength > 8192:
            factors.append(factor)
        else:
            smooth = (8192 / wavelength - 1) / (4 - 1)
            factors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(factors, np.float32)


def test_rope_factors_of_llama_3_are_recognised_and_others_refused(gguf_file, convert):
    theta = {"llama.rope.freq_base": 500000.0}
    for factor in (8.0, 32.0):
        path = gguf_file(f"f{factor}.gguf", metadata=theta, tensors={"rope_freqs.weight": llama3_factors(factor)})
        assert convert(path).config.rope_scaling == {
            "rope_type": "llama3",
            "factor": factor,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192.0,
        }
    ones = gguf_file("ones.gguf", tensors={"rope_freqs.weight": np.ones(8, np.float32)})
    assert convert(ones).config.rope_scaling is None
    odd = gguf_file("odd.gguf", tensors={"rope_freqs.weight": np.linspace(1, 4, 8, dtype=np.float32)})
    with pytest.raises(ModelError, match=r"rope_freqs.weight"):
        convert(odd)


def test_linear_rope_scaling_is_translated(gguf_file, convert):
    path = gguf_file(metadata={"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0})
    assert convert(path).config.rope_scaling == {"rope_type": "linear", "factor": 4.0}


@pytest.mark.parametrize(
    ("metadata", "named"),
    [
        ({"llama.expert_count": 8}, "expert"),
        ({"llama.rope.scaling.type": "yarn"}, "yarn"),
        ({"llama.logit_scale": 0.5}, "llama.logit_scale"),
        ({"llama.attention.value_length": 8}, "value_length"),
        ({"llama.rope.dimension_count": 8}, "rope.dimension_count"),
        ({"llama.attention.head_count_kv": [2, 2]}, "head_count_kv"),
        ({"llama.block_count": None}, "block_count"),
        ({"llama.block_count": 3}, "blk.2"),
        ({"llama.feed_forward_length": 64}, "ffn_gate"),
        ({"split.count": 3}, "3 parts"),
        ({"general.type": "adapter"}, "adapter"),
        ({"tokenizer.ggml.model": "llama"}, "'llama'.*Hugging Face folder"),
        ({"tokenizer.ggml.pre": "deepseek-llm"}, "deepseek-llm"),
        ({"tokenizer.ggml.pre": None}, "None"),
        ({"tokenizer.ggml.merges": None}, "merges"),
        ({"tokenizer.ggml.merges": [*MERGES, "Ġ"]}, "merges"),
        ({"tokenizer.ggml.merges": [*MERGES, "Ġ zz"]}, "merges"),
        ({"tokenizer.ggml.tokens": [*TOKENS[:-1], TOKENS[0]]}, "twice"),
        ({"tokenizer.ggml.tokens": [*TOKENS, "more"], "tokenizer.ggml.token_type": None}, "rows"),
        ({"tokenizer.ggml.token_type": [1]}, "token_type"),
        ({"tokenizer.ggml.eos_token_id": 99999}, "eos_token_id"),
    ],
)
def test_variants_that_would_compute_something_else_are_refused_by_name(gguf_file, convert, metadata, named):
    path = gguf_file(metadata=metadata)
    with pytest.raises(ModelError, match=named) as caught:
        convert(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_other_architectures_and_tensors_are_refused_by_name(gguf_file, convert):
    with pytest.raises(ModelError, match="'mamba' is not supported"):
        convert(gguf_file("a.gguf", architecture="mamba"))
    with pytest.raises(ModelError, match=r"blk.1.attn_k.weight is missing"):
        convert(gguf_file("b.gguf", tensors={"blk.1.attn_k.weight": None}))
    with pytest.raises(ModelError, match=r"blk\.0\.attn_q\.bias is no part"):
        convert(gguf_file("c.gguf", tensors={"blk.0.attn_q.bias": np.zeros(64, np.float32)}))
    with pytest.raises(ModelError, match=r"token_embd.weight is missing"):
        convert(gguf_file("d.gguf", tensors={"token_embd.weight": None}))
    norm = np.ones(64, np.float64)
    with pytest.raises(ModelError, match=r"output_norm.weight: F64 is not supported"):
        convert(gguf_file("e.gguf", raw={"output_norm.weight": (norm, Q.F64)}))


def test_the_header_is_read_as_by_the_gguf_package(gguf_file):
    path = gguf_file(qtype=Q.Q8_0, metadata={"x.list": [1.5, -2.0], "x.flag": True, "general.alignment": 64})
    ours, theirs = read_gguf(path), gguf.GGUFReader(path)
    for key, field in theirs.fields.items():
        if not key.startswith("GGUF."):
            assert ours.metadata[key] == field.contents(), key
    assert ours.tensors.keys() == {tensor.name for tensor in theirs.tensors}
    for tensor in theirs.tensors:
        raw = ours.rows(ours.tensors[tensor.name])
        assert raw.tobytes() == tensor.data.tobytes(), tensor.name


def refuse_cleanly(data, tmp_path, folder):
    """Convert ``data``; return whether that was refused in one line. Any other exception fails the test."""
    path = tmp_path / "damaged.gguf"
    path.write_bytes(data)
    target = tmp_path / folder
    target.mkdir(exist_ok=True)
    try:
        convert_gguf(path, target, lambda _: None)
    except ModelError as error:
        return "\n" not in str(error)
    return False


def test_a_file_cut_anywhere_is_refused(gguf_file, tmp_path):
    whole = gguf_file(qtype=Q.Q8_0).read_bytes()
    for length in [0, 3, 4, 8, 20, 24, *range(25, len(whole) - 256, len(whole) // 60)]:
        assert refuse_cleanly(whole[:length], tmp_path, "cut"), length


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(place=st.integers(0, 9000), value=st.integers(0, 255))
def test_a_damaged_header_never_hangs_or_crashes(gguf_file, tmp_path, place, value):
    path = tmp_path / "tiny.gguf"
    data = bytearray((path if path.exists() else gguf_file()).read_bytes())
    data[place] = value
    refuse_cleanly(data, tmp_path, "flipped")


def test_absurd_counts_are_refused_at_once(gguf_file, tmp_path):
    data = bytearray(gguf_file().read_bytes())
    for offset in (8, 16):  # tensor count, entry count
        broken = data.copy()
        broken[offset : offset + 8] = (2**60).to_bytes(8, "little")
        assert refuse_cleanly(broken, tmp_path, "absurd")


def test_converted_metadata_is_complete(gguf_file, convert):
    folder = convert(gguf_file(metadata={"tokenizer.chat_template": "{{ eos_token }}"}))
    written = json.loads((folder.path / "tokenizer_config.json").read_text())
    assert written["chat_template"] == folder.chat_template == "{{ eos_token }}"
    assert (folder.bos_token, folder.eos_token, folder.add_bos) == ("<|start|>", "<|stop|>", False)
    assert folder.chat().render([]) == "<|stop|>"
