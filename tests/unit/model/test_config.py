import math

import pytest

from app.errors import ModelError
from app.model.config import ModelConfig

BASE = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}


MISTRAL = {"architectures": ["MistralForCausalLM"], "num_key_value_heads": 2}


def test_absent_fields_take_the_llama_defaults():
    config = ModelConfig.from_hf(BASE)
    assert (config.num_kv_heads, config.head_dim, config.rms_norm_eps) == (4, 16, 1e-6)
    assert (config.rope_theta, config.rope_scaling, config.max_position_embeddings) == (10000.0, None, 2048)
    assert (config.tie_word_embeddings, config.bos_token_id, config.eos_token_ids) == (False, None, ())


def test_generation_config_says_which_tokens_end_an_answer():
    assert ModelConfig.from_hf(BASE | {"eos_token_id": 7}).eos_token_ids == (7,)
    assert ModelConfig.from_hf(BASE | {"eos_token_id": 7}, {"eos_token_id": [8, 9]}).eos_token_ids == (8, 9)
    assert ModelConfig.from_hf(BASE | {"eos_token_id": 7}, {"temperature": 1.0}).eos_token_ids == (7,)


@pytest.mark.parametrize(
    ("architecture", "expected"),
    [
        ("LlamaForCausalLM", (4, 16, 1e-6, 1e4, 2048, False)),
        ("MistralForCausalLM", (8, 8, 1e-6, 1e4, 131072, False)),
        ("Qwen2ForCausalLM", (32, 2, 1e-6, 1e4, 32768, False)),
        ("Qwen3ForCausalLM", (32, 128, 1e-6, 1e4, 32768, False)),
        ("Ernie4_5ForCausalLM", (2, 128, 1e-5, 5e5, 131072, True)),
    ],
)
def test_absent_fields_take_the_defaults_of_their_architecture(architecture, expected):
    heads = max(4, expected[0])
    config = ModelConfig.from_hf(BASE | {"architectures": [architecture], "num_attention_heads": heads})
    shape = (config.num_kv_heads, config.head_dim, config.rms_norm_eps, config.rope_theta)
    assert (*shape, config.max_position_embeddings, config.tie_word_embeddings) == expected


def test_null_heads_mean_what_they_mean_in_transformers():
    config = ModelConfig.from_hf(BASE | {"architectures": ["MistralForCausalLM"], "num_key_value_heads": None})
    assert (config.num_kv_heads, config.head_dim) == (4, 16)


@pytest.mark.parametrize(
    ("architecture", "fields", "biases"),
    [
        ("LlamaForCausalLM", {}, (False, False, False)),
        ("LlamaForCausalLM", {"attention_bias": True}, (True, True, False)),
        ("LlamaForCausalLM", {"mlp_bias": True}, (False, False, True)),
        ("Qwen2ForCausalLM", {}, (True, False, False)),
        ("Qwen2ForCausalLM", {"attention_bias": True}, (True, False, False)),
        ("Qwen3ForCausalLM", {"attention_bias": True}, (True, True, False)),
        ("Qwen3ForCausalLM", {"attention_bias": None}, (False, False, False)),
        ("Ernie4_5ForCausalLM", {"use_bias": True}, (True, True, True)),
        ("Ernie4_5_ForCausalLM", {"use_bias": False, "compression_ratio": 1.0}, (False, False, False)),
    ],
)
def test_biases_are_where_the_architecture_or_its_field_says(architecture, fields, biases):
    config = ModelConfig.from_hf(BASE | {"architectures": [architecture], "num_key_value_heads": 2} | fields)
    assert (config.qkv_bias, config.o_bias, config.mlp_bias) == biases
    names = {name for name in config.tensor_shapes() if name.endswith(".bias")}
    assert len(names) == 2 * (3 * biases[0] + biases[1] + 3 * biases[2])


QWEN_WINDOW = {"use_sliding_window": True, "sliding_window": 64, "max_position_embeddings": 512}


@pytest.mark.parametrize(
    ("architecture", "fields", "window"),
    [
        ("MistralForCausalLM", {"sliding_window": None}, None),
        ("MistralForCausalLM", {"sliding_window": 64}, 64),
        ("MistralForCausalLM", {}, 4096),
        ("Qwen2ForCausalLM", {"use_sliding_window": False, "sliding_window": 64, "max_window_layers": 0}, None),
        ("Qwen2ForCausalLM", QWEN_WINDOW | {"max_window_layers": 2}, None),  # of 2 layers
        ("Qwen2ForCausalLM", QWEN_WINDOW | {"max_window_layers": 1}, 64),
        ("Qwen3ForCausalLM", QWEN_WINDOW | {"max_window_layers": 0}, 64),
        ("Qwen3ForCausalLM", QWEN_WINDOW | {"layer_types": ["full_attention", "sliding_attention"]}, 64),
        ("Qwen3ForCausalLM", QWEN_WINDOW | {"layer_types": ["full_attention"] * 2, "max_window_layers": 0}, None),
        ("Qwen3ForCausalLM", QWEN_WINDOW | {"sliding_window": None, "max_window_layers": 0}, None),
    ],
)
def test_a_window_in_use_bounds_the_context(architecture, fields, window):
    stated = {"architectures": [architecture], "num_key_value_heads": 2, "max_position_embeddings": 8192}
    config = ModelConfig.from_hf(BASE | stated | fields)
    assert config.sliding_window == window
    assert config.max_context_tokens == (window or config.max_position_embeddings)


LLAMA3 = {
    "rope_type": "llama3",
    "factor": 32,
    "low_freq_factor": 1,
    "high_freq_factor": 4,
    "original_max_position_embeddings": 8192,
}
YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 2048.0,
    "attention_factor": 0.1 * math.log(4) + 1,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": True,
}


@pytest.mark.parametrize(
    ("fields", "theta", "scaling"),
    [
        ({"rope_theta": 5e5, "rope_scaling": None}, 5e5, None),
        (
            {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 4}},
            5e5,
            {"rope_type": "linear", "factor": 4.0},
        ),
        ({"rope_theta": 5e5, "rope_scaling": LLAMA3}, 5e5, LLAMA3),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 2e4}}, 2e4, None),
        ({"rope_parameters": LLAMA3 | {"rope_theta": 2e4}}, 2e4, LLAMA3),
        (
            {"rope_parameters": LLAMA3, "rope_scaling": {"type": "linear", "factor": 4}},
            1e4,
            {"rope_type": "linear", "factor": 4.0},
        ),
        (
            {"rope_scaling": LLAMA3, "original_max_position_embeddings": 512},
            1e4,
            LLAMA3 | {"original_max_position_embeddings": 512.0},
        ),
        ({"rope_scaling": {"type": "dynamic", "factor": 4.0}}, 1e4, None),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, 1e4, YARN),
        (
            {
                "rope_scaling": {
                    "type": "yarn",
                    "factor": 4.0,
                    "attention_factor": 1.5,
                    "truncate": False,
                    "original_max_position_embeddings": 512,
                    "beta_fast": 16,
                }
            },
            1e4,
            YARN
            | {
                "attention_factor": 1.5,
                "truncate": False,
                "original_max_position_embeddings": 512.0,
                "beta_fast": 16.0,
            },
        ),
    ],
)
def test_rope_is_read_from_both_spellings(fields, theta, scaling):
    config = ModelConfig.from_hf(BASE | fields)
    assert (config.rope_theta, config.rope_scaling) == (theta, scaling)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"architectures": ["MambaForCausalLM"]}, "MambaForCausalLM"),
        ({"architectures": []}, "architectures"),
        ({"vocab_size": None}, "vocab_size"),
        ({"hidden_size": -1}, "hidden_size"),
        ({"num_hidden_layers": "2"}, "num_hidden_layers"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"head_dim": 15}, "head_dim"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"attention_bias": "yes"}, "attention_bias"),
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings"),
        ({"use_bias": True}, "use_bias"),
        (MISTRAL | {"attention_bias": True}, "attention_bias"),
        ({"architectures": ["Qwen2ForCausalLM"], "mlp_bias": True}, "mlp_bias"),
        ({"architectures": ["Ernie4_5_ForCausalLM"], "compression_ratio": 2.0}, "compression_ratio"),
        ({"architectures": [["LlamaForCausalLM"]]}, "LlamaForCausalLM"),
        ({"sliding_window": 64}, "sliding_window"),
        (MISTRAL | {"sliding_window": "64"}, "sliding_window"),
        ({"layer_types": ["full_attention", "chunked_attention"]}, "layer_types.*chunked_attention"),
        (MISTRAL | {"sliding_window": None, "layer_types": ["sliding_attention"] * 2}, "layer_types"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 4.0}}, "longrope"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": None}}, "factor"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}, "rope_theta": 1.0}, "rope_theta"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "truncate": 1}}, "truncate"),
        ({"rope_scaling": {"rope_type": "dynamic"}}, "factor"),
        (
            {"rope_scaling": {"rope_type": "dynamic", "factor": 2, "original_max_position_embeddings": 512}},
            "original_max_position_embeddings",
        ),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "rope_parameters.full_attention"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 4.0}}, "low_freq_factor"),
        ({"rope_theta": float("inf")}, "rope_theta"),
        ({"eos_token_id": [5, 100]}, "eos_token_id"),
        ({"bos_token_id": "<s>"}, "bos_token_id"),
    ],
)
def test_what_cannot_be_computed_exactly_is_refused_by_name(fields, named):
    with pytest.raises(ModelError, match=named):
        ModelConfig.from_hf(BASE | fields)
