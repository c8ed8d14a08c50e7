"""Complete a hundred prompts in one call, each with its own length, and tell the throughput."""

import sys
import time

from nanopage import LLM, SamplingParams

SUBJECTS = ["A cat", "The river", "Our neighbour", "Nobody", "The last train",
            "A painter", "Winter", "The committee", "My left shoe", "The moon"]
VERBS = ["remembers", "avoids", "counts", "sells", "repairs",
         "forgets", "follows", "draws", "doubts", "hides"]


def main() -> None:
    llm = LLM(model=sys.argv[1], tensor_parallel_size=1, trust_remote_code=True, dtype="float32",
              gpu_memory_utilization=0.8, max_model_len=256, max_num_seqs=32,
              enable_chunked_prefill=True, quantization=None, swap_space=4)
    prompts = [f"{subject} {verb}" for subject in SUBJECTS for verb in VERBS]
    params = [SamplingParams(temperature=0.0, max_tokens=4 + i % 9) for i in range(len(prompts))]

    start = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=True)
    seconds = time.perf_counter() - start

    for i, output in enumerate(outputs):
        print(f"{i}: {output.prompt!r} -> {output.outputs[0].text!r}")
    num_in = sum(len(output.prompt_token_ids) for output in outputs)
    num_out = sum(len(output.outputs[0].token_ids) for output in outputs)
    print(f"{len(outputs)} requests, {num_in} tokens in, {num_out} tokens out")
    print(f"Throughput: {len(outputs) / seconds:.2f} requests/s, {num_out / seconds:.2f} tokens/s")


if __name__ == "__main__":
    main()
