"""Let n-grams of the prompt propose the next tokens: the same texts in fewer steps."""

import sys

from nanopage import LLM, SamplingParams

LINES = "".join(f"row {i}: red green blue; " for i in range(8))
PROMPTS = [LINES + "row", "to be or not to be or not to be or", "Once there was a"]


def main() -> None:
    options = dict(model=sys.argv[1], trust_remote_code=True, tensor_parallel_size=1,
                   gpu_memory_utilization=0.8, max_model_len=512, max_num_seqs=8,
                   dtype="float32", enforce_eager=True, disable_log_stats=False)
    params = SamplingParams(temperature=0.0, max_tokens=48)
    plain = LLM(**options)
    expected = plain.generate(PROMPTS, params, use_tqdm=False)

    llm = LLM(**options, speculative_config={
        "method": "ngram", "num_speculative_tokens": 4,
        "prompt_lookup_min": 1, "prompt_lookup_max": 4})
    outputs = llm.generate(PROMPTS, params, use_tqdm=False)

    for output in outputs:
        print(f"{output.prompt[-20:]!r} -> {output.outputs[0].text!r}")
    same = [output.outputs[0].token_ids == other.outputs[0].token_ids
            for output, other in zip(outputs, expected)]
    print(f"Same tokens as without: {all(same)}")
    metrics = llm.metrics()
    print(f"Drafted {metrics.num_draft_tokens}, accepted {metrics.num_accepted_tokens}")
    print(f"Steps: {metrics.num_steps} instead of {plain.metrics().num_steps}")


if __name__ == "__main__":
    main()
