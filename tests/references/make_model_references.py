"""Write model_references.json and .npz: logits and greedy tokens of a tiny model per architecture, by transformers.

Run it in an environment of its own: ``pip install torch==2.13.0 "transformers==5.24.*"`` (the CPU build), then
``python tests/references/make_model_references.py``. The JSON holds each model's config.json as transformers saves it
and the names and shapes of its tensors; the weights themselves follow from the names (tiny_weights.py).

Every row of logits is a forward pass over all tokens so far, without a cache. Prompts are drawn until no choice along
the answer is closer than MIN_MARGIN of the largest logit, so that any float32 engine must agree.
"""

import json
import random
from pathlib import Path

import numpy as np
import torch
import transformers
from tiny_weights import tiny_tensor
from transformers import Ernie4_5Config, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

HERE = Path(__file__).parent
PROMPT_TOKENS = (1, 40, 101)
ANSWER_TOKENS = 6
MIN_MARGIN = 1e-3

SHAPE = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": None,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
YARN_OPTIONS = {"beta_fast": 16.0, "beta_slow": 2.0, "truncate": False, "mscale": 1.0, "mscale_all_dim": 0.5}

CASES = {
    "llama": (LlamaConfig, "F32", {}),
    "llama-tied-biases-llama3": (
        LlamaConfig,
        "F16",
        {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True, "rope_parameters": LLAMA3},
    ),
    "llama-linear": (LlamaConfig, "F32", {"rope_parameters": {"rope_type": "linear", "factor": 4.0}}),
    "llama-dynamic": (LlamaConfig, "F32", {"rope_parameters": {"rope_type": "dynamic", "factor": 4.0}}),
    "llama-yarn": (LlamaConfig, "F32", {"rope_parameters": YARN | {"attention_factor": 1.25}}),
    "qwen2": (Qwen2Config, "BF16", {"tie_word_embeddings": True, "rope_theta": 1000000.0}),
    "qwen2-yarn": (Qwen2Config, "F32", {"rope_parameters": YARN}),
    "qwen3": (Qwen3Config, "BF16", {"head_dim": 16, "rope_theta": 1000000.0}),
    "qwen3-tied-biases-yarn": (
        Qwen3Config,
        "F32",
        {"head_dim": 16, "tie_word_embeddings": True, "attention_bias": True, "rope_parameters": YARN | YARN_OPTIONS},
    ),
    "mistral": (MistralConfig, "F32", {"head_dim": 12, "sliding_window": None}),
    "mistral-window": (MistralConfig, "BF16", {"sliding_window": 128}),
    "ernie45": (Ernie4_5Config, "BF16", {"head_dim": 16}),
    "ernie45-untied-biases": (Ernie4_5Config, "F32", {"head_dim": 8, "tie_word_embeddings": False, "use_bias": True}),
}


def build(case: str) -> tuple[torch.nn.Module, dict]:
    config_class, dtype, changes = CASES[case]
    config = config_class(**(SHAPE | changes))
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    if config.tie_word_embeddings:
        del shapes["lm_head.weight"]
    weights = {name: torch.from_numpy(tiny_tensor(case, name, shape, dtype)) for name, shape in shapes.items()}
    left = model.load_state_dict(weights, strict=False)
    if left.unexpected_keys or set(left.missing_keys) - {"lm_head.weight"}:
        raise SystemExit(f"{case}: {left}")
    model.tie_weights()
    saved = config.to_diff_dict() | {"architectures": [type(model).__name__]}
    return model.eval(), {"dtype": dtype, "config": saved, "tensors": shapes}


@torch.inference_mode()
def answer(model: torch.nn.Module, prompt: list[int]) -> tuple[list[int], np.ndarray, float]:
    """Return the greedy tokens, the logits that each was drawn from, and the closest choice."""
    out: list[int] = []
    rows = []
    margin = float("inf")
    for _ in range(ANSWER_TOKENS):
        logits = model(input_ids=torch.tensor([prompt + out]), use_cache=False).logits[0, -1]
        best = torch.topk(logits, 2)
        margin = min(margin, float(best.values[0] - best.values[1]) / float(logits.abs().max()))
        rows.append(logits.numpy())
        out.append(int(best.indices[0]))
    return out, np.stack(rows), margin


def clear_answer(model: torch.nn.Module, length: int) -> tuple[list[int], list[int], np.ndarray]:
    rng = random.Random(length)
    for _ in range(100):
        prompt = [rng.randrange(SHAPE["vocab_size"]) for _ in range(length)]
        tokens, logits, margin = answer(model, prompt)
        if margin >= MIN_MARGIN:
            return prompt, tokens, logits
    raise SystemExit(f"no prompt of {length} tokens keeps a margin of {MIN_MARGIN}")


def main() -> None:
    cases, arrays = {}, {}
    for case in CASES:
        model, described = build(case)
        described["answers"] = []
        for length in PROMPT_TOKENS:
            prompt, tokens, logits = clear_answer(model, length)
            described["answers"].append({"prompt_ids": prompt, "output_ids": tokens})
            arrays[f"{case}/{length}"] = logits
        cases[case] = described
        print(f"{case}: {[entry['output_ids'] for entry in described['answers']]}", flush=True)
    text = ",\n".join(f"{json.dumps(case)}: {json.dumps(described)}" for case, described in cases.items())
    (HERE / "model_references.json").write_text("{\n" + text + "\n}\n")
    np.savez_compressed(HERE / "model_references.npz", **arrays)


if __name__ == "__main__":
    main()
