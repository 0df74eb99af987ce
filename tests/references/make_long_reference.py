"""Write long_reference.json: greedy answers to prompts of 600 and 2,000 tokens, by an engine that is not ours.

Run it in an environment of its own: ``pip install torch==2.13.0 "transformers==5.24.*"`` (the CPU build), then
``python tests/references/make_long_reference.py MODEL_FOLDER``, where MODEL_FOLDER is the default model as Baton
converts it. It first reproduces greedy_reference.json, where that lies beside it, which proves the conversion.

Each prompt begins with a passage, goes on with other matter and ends with the passage's first words again, so that the
answer depends on the far end of the context. Seeds are tried until no choice along the answer is closer than
MIN_MARGIN, so that any float32 engine must agree.
"""

import argparse
import json
import random
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

HERE = Path(__file__).parent
LENGTHS_TOKENS = (600, 2000)
ANSWER_TOKENS = 48
MIN_MARGIN = 0.02
EOS_ID = 2

NAMES = ("Ada", "Boris", "Carmen", "Dmitri", "Elena", "Farid", "Greta", "Hugo", "Ines", "Jonas", "Kofi", "Lucia")
PLACES = ("harbour", "mill", "library", "station", "orchard", "bridge", "market", "chapel", "quarry", "lighthouse")
THINGS = (
    "copper kettle",
    "brass lamp",
    "blue map",
    "wooden flute",
    "old ledger",
    "silver key",
    "clay jar",
    "long rope",
)
VERBS = ("carried", "sold", "lent", "promised", "returned", "showed", "posted", "hid")
WEATHER = ("rain", "fog", "bright sun", "a cold wind", "light snow", "thunder")


def sentence(rng: random.Random) -> str:
    giver, taker = rng.sample(NAMES, 2)
    start = (
        f"On day {rng.randint(2, 364)}, in {rng.choice(WEATHER)}, {giver} {rng.choice(VERBS)} the {rng.choice(THINGS)}"
    )
    return f"{start} to {taker} at the {rng.choice(PLACES)}, for {rng.randint(3, 99)} coins."


def prompt_ids(tokenizer, seed: int, length: int) -> list[int]:
    """Exactly ``length`` ids: passage, other matter, and the passage's beginning as far as there is room."""
    rng = random.Random(seed)
    passage = " ".join(sentence(rng) for _ in range(6))
    middle = " ".join(sentence(rng) for _ in range(length // 10))
    head = tokenizer.encode(f"Chapter 1.\n\n{passage}\n\nChapter 2.\n\n{middle}", add_special_tokens=False)
    tail = tokenizer.encode(f"\n\nChapter 1 again.\n\n{passage}", add_special_tokens=False)[:80]
    return head[: length - len(tail)] + tail


@torch.inference_mode()
def greedy(model, prompt: list[int], limit: int) -> dict:
    out, margin, cache, step = [], float("inf"), None, torch.tensor([prompt])
    while len(out) < limit and (not out or out[-1] != EOS_ID):
        result = model(input_ids=step, past_key_values=cache, use_cache=True, logits_to_keep=1)
        cache = result.past_key_values
        best = torch.topk(result.logits[0, -1], 2)
        margin = min(margin, float(best.values[0] - best.values[1]))
        out.append(int(best.indices[0]))
        step = torch.tensor([out[-1:]])
    return {
        "output_ids": out,
        "finish": "stop" if out[-1] == EOS_ID else "length",
        "min_margin": round(margin, 4),
    }


def reproduce(model, cases: list[dict]) -> int:
    """Return how many of ``cases`` come out the same."""
    good = 0
    for case in cases:
        answer = greedy(model, case["prompt_ids"], 64)
        same = answer["output_ids"] == case["output_ids"] and answer["finish"] == case["finish"]
        print(f"{'same' if same else 'DIFFERENT'}  margin {answer['min_margin']}  {case['prompt']!r}", flush=True)
        good += same
    return good


def long_case(model, tokenizer, length: int) -> dict:
    for seed in range(100):
        ids = prompt_ids(tokenizer, seed, length)
        prompt = tokenizer.decode(ids)
        if len(ids) != length or tokenizer.encode(prompt, add_special_tokens=False) != ids:
            continue
        answer = greedy(model, ids, ANSWER_TOKENS)
        print(f"{length} tokens, seed {seed}: margin {answer['min_margin']}, {answer['finish']}", flush=True)
        if answer["min_margin"] >= MIN_MARGIN and answer["finish"] == "length":
            text = tokenizer.decode(answer["output_ids"], skip_special_tokens=True)
            return {"kind": "raw", "prompt": prompt, "prompt_ids": ids, **answer, "text": text}
    raise SystemExit(f"no prompt of {length} tokens keeps a margin of {MIN_MARGIN}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model_folder", type=Path)
    parser.add_argument("--greedy", type=Path, default=HERE / "greedy_reference.json", help="cases to reproduce first")
    arguments = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(arguments.model_folder)
    model = AutoModelForCausalLM.from_pretrained(arguments.model_folder, dtype=torch.float32).eval()
    if arguments.greedy.is_file():
        cases = json.loads(arguments.greedy.read_text())
        good = reproduce(model, cases)
        print(f"{good} of {len(cases)} references reproduced")
        if good < len(cases):
            raise SystemExit(1)
    long = [long_case(model, tokenizer, length) for length in LENGTHS_TOKENS]
    (HERE / "long_reference.json").write_text(json.dumps(long, indent=0) + "\n")


if __name__ == "__main__":
    main()
