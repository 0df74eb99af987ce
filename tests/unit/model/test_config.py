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


def test_absent_fields_take_the_llama_defaults():
    config = ModelConfig.from_hf(BASE)
    assert (config.num_kv_heads, config.head_dim, config.rms_norm_eps) == (4, 16, 1e-6)
    assert (config.rope_theta, config.rope_scaling, config.max_position_embeddings) == (10000.0, None, 2048)
    assert (config.tie_word_embeddings, config.bos_token_id, config.eos_token_ids) == (False, None, ())


def test_generation_config_says_which_tokens_end_an_answer():
    assert ModelConfig.from_hf(BASE | {"eos_token_id": 7}).eos_token_ids == (7,)
    assert ModelConfig.from_hf(BASE | {"eos_token_id": 7}, {"eos_token_id": [8, 9]}).eos_token_ids == (8, 9)
    assert ModelConfig.from_hf(BASE | {"eos_token_id": 7}, {"temperature": 1.0}).eos_token_ids == (7,)


LLAMA3 = {
    "rope_type": "llama3",
    "factor": 32,
    "low_freq_factor": 1,
    "high_freq_factor": 4,
    "original_max_position_embeddings": 8192,
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
        ({"attention_bias": True}, "attention_bias"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "yarn"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 4.0}}, "low_freq_factor"),
        ({"rope_theta": float("inf")}, "rope_theta"),
        ({"eos_token_id": [5, 100]}, "eos_token_id"),
        ({"bos_token_id": "<s>"}, "bos_token_id"),
    ],
)
def test_what_cannot_be_computed_exactly_is_refused_by_name(fields, named):
    with pytest.raises(ModelError, match=named):
        ModelConfig.from_hf(BASE | fields)
