"""transformers on torch, float32, for ``Talking``: ``python transformers_peer.py FOLDER THREADS``.

Runs in another Python than the rest: it imports nothing of this project.
"""

import json
import sys
import time

import torch
from transformers import AutoModelForCausalLM, DynamicCache

VOCABULARY = 40_000


def prompts(batch, length):
    return torch.tensor([[(31 * row + 7 * at) % VOCABULARY + 100 for at in range(length)] for row in range(batch)])


@torch.inference_mode()
def prefill(model, tokens):
    ids = prompts(1, tokens)
    started = time.perf_counter()
    logits = model(ids, past_key_values=DynamicCache(), use_cache=True, logits_to_keep=1).logits
    logits[:, -1].argmax(-1).tolist()
    return time.perf_counter() - started


@torch.inference_mode()
def decode(model, batch, context, steps):
    cache = DynamicCache()
    logits = model(prompts(batch, context), past_key_values=cache, use_cache=True, logits_to_keep=1).logits
    ids = logits[:, -1:].argmax(-1)
    started = time.perf_counter()
    for _ in range(steps):
        ids = model(ids, past_key_values=cache, use_cache=True).logits[:, -1:].argmax(-1)
        ids.tolist()
    return time.perf_counter() - started


def main(folder, threads):
    torch.set_num_threads(int(threads))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa").eval()
    prefill(model, 128)
    decode(model, 2, 16, 4)
    print("ready", flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        if "prefill" in asked:
            seconds = prefill(model, asked["prefill"])
        else:
            seconds = decode(model, asked["decode"], asked["context"], asked["steps"])
        print("answer", seconds, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
