"""Sample the same texts again: by the seed of a request, and by the seed of the engine."""

import sys

from nanopage import LLM, SamplingParams

PROMPT = "The weather tomorrow will be"


def make(seed: int) -> LLM:
    return LLM(model=sys.argv[1], seed=seed, trust_remote_code=True, tensor_parallel_size=1,
               gpu_memory_utilization=0.8, max_model_len=256, max_num_seqs=16, dtype="float32",
               quantization=None)


def texts(llm: LLM, *seeds: int | None, n: int = 1) -> list[str]:
    """What one call answers that asks the same for each of the seeds."""
    params = [SamplingParams(n=n, temperature=0.9, top_p=0.95, top_k=50, seed=seed, max_tokens=20,
                             presence_penalty=0.0, frequency_penalty=0.0) for seed in seeds]
    outputs = llm.generate([PROMPT] * len(params), params, use_tqdm=False)
    return [completion.text for output in outputs for completion in output.outputs]


def main() -> None:
    llm = make(seed=0)
    alone, = texts(llm, 42)
    print(f"Seed 42: {alone!r}")
    print(f"Again: {texts(llm, 42) == [alone]}")
    print(f"Beside others: {texts(llm, 1, None, 42, 7)[2] == alone}")
    print(f"In another engine: {texts(make(seed=5), 42) == [alone]}")

    several = texts(llm, 42, n=3)
    print(f"Three of seed 42: {several!r}")
    print(f"Again all three: {texts(llm, 42, n=3) == several}")
    print(f"Different seeds: {len(set(texts(llm, *range(6))))} texts")

    unseeded = texts(make(seed=5), None, None)
    print(f"Without a seed: {unseeded!r}")
    print(f"Again in an engine of the same seed: {texts(make(seed=5), None, None) == unseeded}")
    print(f"Again in one of another seed: {texts(make(seed=6), None, None) == unseeded}")


if __name__ == "__main__":
    main()
