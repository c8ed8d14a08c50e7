"""Complete a few prompts: text and token ids, bare and in their dicts, in one call."""

import sys

from nanopage import LLM, SamplingParams, TextPrompt, TokensPrompt


def main() -> None:
    llm = LLM(model=sys.argv[1], trust_remote_code=True, tensor_parallel_size=1,
              gpu_memory_utilization=0.8, max_model_len=512, dtype="float32", enforce_eager=True)
    tokenizer = llm.get_tokenizer()
    prompts = [
        "The old lighthouse keeper said",
        {"prompt": "In the year 1900"},
        TextPrompt(prompt="My favourite recipe begins with"),
        TokensPrompt(prompt_token_ids=tokenizer.encode("Between the two rivers")),
    ]
    params = SamplingParams(temperature=0.0, max_tokens=24, presence_penalty=0.0,
                            frequency_penalty=0.0, repetition_penalty=1.0)
    outputs = llm.generate(prompts, params)
    for output in outputs:
        prompt = output.prompt or tokenizer.decode(output.prompt_token_ids)
        completion = output.outputs[0]
        print(f"Prompt: {prompt!r}")
        print(f"Completion: {completion.text!r}")
        print(f"Ended by: {completion.finish_reason}, {len(completion.token_ids)} tokens")


if __name__ == "__main__":
    main()
