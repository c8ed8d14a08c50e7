"""Ask several questions about one long text: without a prefix cache, then twice with one."""

import sys
import time

from nanopage import LLM, SamplingParams

RULES = "".join(f"Rule {i}: tool {i} goes back to shelf {i * 7 % 12}. " for i in range(1, 25))
QUESTIONS = ["Where does the hammer go?", "Which shelf is the fullest?",
             "Who may borrow a saw?", "What does rule 8 say?"]
PROMPTS = [f"{RULES}\nQuestion: {question}\nAnswer:" for question in QUESTIONS]


def measure(llm: LLM, title: str) -> list[str]:
    params = SamplingParams(temperature=0.0, max_tokens=12)
    start = time.perf_counter()
    outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    seconds = time.perf_counter() - start
    num_cached = [output.num_cached_tokens for output in outputs]
    num_in = [len(output.prompt_token_ids) for output in outputs]
    print(f"{title}: {sum(num_cached)} of {sum(num_in)} prompt tokens cached, {seconds:.3f} s")
    return [output.outputs[0].text for output in outputs]


def main() -> None:
    options = dict(model=sys.argv[1], trust_remote_code=True, tensor_parallel_size=1,
                   gpu_memory_utilization=0.8, max_model_len=2048, max_num_seqs=16,
                   dtype="float32", enforce_eager=True)
    plain = measure(LLM(**options, enable_prefix_caching=False), "off")

    llm = LLM(**options, enable_prefix_caching=True)
    first = measure(llm, "first pass")
    second = measure(llm, "second pass")
    print(f"Same texts: {plain == first == second}")
    for question, text in zip(QUESTIONS, second):
        print(f"{question!r} -> {text!r}")

    llm.reset_prefix_cache()
    measure(llm, "after a reset")


if __name__ == "__main__":
    main()
