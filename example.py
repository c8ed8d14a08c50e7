"""Chat with a small model, then look at what paging did.

    python example.py                    SmolLM2-135M-Instruct, which comes from a PyPI wheel
    python example.py Qwen/Qwen3-0.6B    any supported model: a directory or a hub name
    torchrun --nproc-per-node 3 example.py    on three devices at once
    python example.py --trace            ten steps to follow by hand; README.md explains them
"""

import argparse
import sys

from nanopage import LLM, SamplingParams, demo, trace

SYSTEM = ("You are a patient teacher of computer science. You explain one idea at a time, in short "
          "sentences and with everyday comparisons, and you never use a formula.")
QUESTIONS = ["What is the capital of France?", "Why is the sky blue?",
             "What is a page table?", "Name three prime numbers."]


def chats(llm: LLM) -> None:
    conversations = [[{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]
                     for question in QUESTIONS]
    # Greedy and sampled requests run in one batch.
    params = [SamplingParams(temperature=0, max_tokens=48),
              SamplingParams(temperature=0.7, top_p=0.9, seed=1, max_tokens=48)] * 2
    for question, output in zip(QUESTIONS, llm.chat(conversations, params), strict=True):
        answer = " ".join(output.outputs[0].text.split())
        print(f"\n> {question}  ({output.num_cached_tokens} of {len(output.prompt_token_ids)} "
              f"prompt tokens from the cache)\n{answer}")


def show_tables(llm: LLM, title: str, tables: dict[str, list[int]]) -> None:
    """Physical block ids, logical order; a * marks those that more than one table names."""
    every = [block for table in tables.values() for block in table]
    print(f"\n{title} (block size {llm.config.block_size}, * = shared):")
    for name, table in tables.items():
        cells = [f"{block}{'*' if every.count(block) > 1 else ' '}" for block in table]
        print(f"  {name:12s} " + " ".join(f"{cell:>5s}" for cell in cells))


def tables_of(llm: LLM, num_steps: int, *requests: tuple[str, SamplingParams]) -> list[list[int]]:
    """Run some steps, look at the block tables, and let the requests go."""
    ids = [llm.add_request(prompt, params) for prompt, params in requests]
    for _ in range(num_steps):
        llm.step()
    tables = [list(seq.block_table) for seq in llm.scheduler.running]
    for request_id in ids:
        llm.abort(request_id)
    return tables


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", help="a directory or a name on the model hub")
    parser.add_argument("--trace", action="store_true", help="ten steps to follow by hand")
    args = parser.parse_args()
    if args.trace:
        return trace.main()
    llm = LLM(args.model or demo.model_path(), max_model_len=2048)
    if llm.rank > 0:
        sys.stdout = None  # under torchrun every rank runs this script, and one speaks
    print(llm)
    chats(llm)

    params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=32)
    prompts = [SYSTEM + " " + question for question in QUESTIONS[:2]]
    tables = tables_of(llm, 4, *((prompt, params) for prompt in prompts))
    show_tables(llm, "Two prompts that begin alike", dict(zip(["first", "second"], tables)))

    params = SamplingParams(n=4, seed=0, ignore_eos=True, max_tokens=32)
    tables = tables_of(llm, 3, (prompts[0], params))
    show_tables(llm, "One prompt, four samples: the part-filled block was copied before the write",
                {f"branch {i}": table for i, table in enumerate(tables)})

    metrics = llm.metrics()
    print(f"\nKV cache: {metrics.num_blocks} blocks, at most {metrics.peak_used_blocks} in use; "
          f"{metrics.kv_waste:.1%} of the allocated slots held no token.")
    print(f"Prefix cache: {metrics.prefix_hit_tokens} of {metrics.prefix_queried_tokens} prompt "
          f"tokens were not computed again. Preemptions: {metrics.num_preemptions}.")


if __name__ == "__main__":
    main()
