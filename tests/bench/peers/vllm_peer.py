"""vLLM on a CPU, float32, for ``Talking``: ``python vllm_peer.py FOLDER THREADS``.

It cannot be told to start from a context: what its prefill and first token take is measured apart and taken off.
Runs in another Python than the rest: it imports nothing of this project.
"""

import json
import os
import sys
import time

VOCABULARY = 40_000
MAX_BATCH = 64


def main(folder, threads):
    cores = sorted(os.sched_getaffinity(0))[: int(threads)]
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", ",".join(map(str, cores)))
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    from vllm import LLM, SamplingParams

    llm = LLM(
        folder,
        dtype="float32",
        enforce_eager=True,
        skip_tokenizer_init=True,
        enable_prefix_caching=False,
        max_model_len=4096,
        max_num_batched_tokens=4096,
        max_num_seqs=MAX_BATCH,
        disable_log_stats=True,
    )

    def generate_s(batch, prompt, answer):
        prompts = [
            {"prompt_token_ids": [(31 * row + 7 * at) % VOCABULARY + 100 for at in range(prompt)]}
            for row in range(batch)
        ]
        sampling = SamplingParams(temperature=0, max_tokens=answer, ignore_eos=True, detokenize=False)
        started = time.perf_counter()
        llm.generate(prompts, sampling, use_tqdm=False)
        return time.perf_counter() - started

    generate_s(2, 64, 4)
    print("\nready", flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        if "prefill" in asked:
            seconds = generate_s(1, asked["prefill"], 1)
        else:
            batch, context, steps = asked["decode"], asked["context"], asked["steps"]
            seconds = generate_s(batch, context, steps + 1) - generate_s(batch, context, 1)
        print("\nanswer", seconds, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
