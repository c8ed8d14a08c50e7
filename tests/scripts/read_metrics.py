"""Run a workload in a small pool and read the engine's counters at the end."""

import sys

from nanopage import LLM, SamplingParams

PREFIX = "Sort the following letters of the alphabet by how round they look: "


def main() -> None:
    llm = LLM(model=sys.argv[1], trust_remote_code=True, tensor_parallel_size=1,
              gpu_memory_utilization=0.8, max_model_len=256, max_num_seqs=8,
              max_num_batched_tokens=64, enable_chunked_prefill=True, enable_prefix_caching=True,
              disable_log_stats=False, swap_space=4, block_size=16, num_blocks=24)
    prompts = [PREFIX + letter * 5 for letter in "abcdefghij"]
    params = SamplingParams(temperature=0.8, top_p=0.95, seed=1, max_tokens=40, ignore_eos=True)
    outputs = [llm.generate(prompts, params, use_tqdm=False) for _ in range(2)]

    print(f"{sum(map(len, outputs))} outputs")
    metrics = llm.metrics()
    for name, value in vars(metrics).items():
        print(f"{name} = {value}")
    hits = metrics.prefix_hit_tokens / metrics.prefix_queried_tokens
    print(f"Prefix cache hit rate: {hits:.1%}, empty slots: {metrics.kv_waste:.1%}")
    print(f"Free blocks: {llm.num_free_blocks()}")


if __name__ == "__main__":
    main()
