"""Answer conversations that begin with a system message, and pass arguments to the template."""

import sys

from nanopage import LLM, SamplingParams, TextPrompt

SYSTEM = {"role": "system", "content": "You are a gardener. Answer in one sentence."}
QUESTIONS = ["When do I sow carrots?", "Why are my tomatoes yellow?"]


def show(title: str, outputs: list) -> None:
    for output in outputs:
        print(f"{title} prompt: {output.prompt!r}")
        print(f"{title} answer: {output.outputs[0].text!r}")


def main() -> None:
    llm = LLM(sys.argv[1], trust_remote_code=True, tensor_parallel_size=1, dtype="float32",
              max_model_len=1024, gpu_memory_utilization=0.8, swap_space=4)
    params = SamplingParams(temperature=0.0, top_p=0.95, max_tokens=16, repetition_penalty=1.0)
    conversations = [[SYSTEM, {"role": "user", "content": question}] for question in QUESTIONS]

    show("One", llm.chat(conversations[0], params))
    show("Many", llm.chat(messages=conversations, sampling_params=params, use_tqdm=False))
    show("Quiet", llm.chat(conversations[0], sampling_params=params, use_tqdm=False,
                           add_generation_prompt=True,
                           chat_template_kwargs={"enable_thinking": False}))

    # The same by hand, as the cards of many models show it.
    tokenizer = llm.get_tokenizer()
    text = tokenizer.apply_chat_template(conversations[0], tokenize=False,
                                         add_generation_prompt=True, enable_thinking=False)
    show("Hand", llm.generate([TextPrompt(prompt=text)], params, use_tqdm=False))

    # A second turn: what was answered goes back into the conversation.
    answer = llm.chat(conversations[0], params, use_tqdm=False)[0].outputs[0].text
    following = [*conversations[0], {"role": "assistant", "content": answer},
                 {"role": "user", "content": [{"type": "text", "text": "And radishes?"}]}]
    show("Next", llm.chat(following, params, use_tqdm=False))


if __name__ == "__main__":
    main()
