"""Every comparison that the README quotes, one command each.

    python bench.py sharing          blocks saved by parallel sampling and beam search

Without --model it is SmolLM2-135M-Instruct. All workloads are seeded.
"""

import argparse
import json
import random
import time
from pathlib import Path

from nanopage import LLM, BeamSearchParams, SamplingParams, demo

PROSE = """Paging was invented so that programs need not care where in memory their data lies. A
table maps each page of an address space to a frame, and the operating system hands out frames as
they are touched. The cache of keys and values of a language model has the same shape: it grows one
token at a time, nobody knows how long it will get, and many requests begin with the same words. If
every request reserves memory for the longest answer, most of it stays empty; if blocks are handed
out on demand, at most the last one of each request is not full. Blocks that begin alike can be
shared, and copied when one of the owners writes. On the first warm evening of the year the whole
street came out to sit on the steps. Somebody had brought a radio, somebody else a bowl of cherries,
and the children ran from lamp to lamp as if each of them were a station of a long journey. The old
baker, who never spoke of the war, told a story about a dog that could count to seven. """


def make_llm(args: argparse.Namespace, **options) -> LLM:
    return LLM(args.model or demo.model_path(), dtype=args.dtype, **options)


def prose_prompts(llm: LLM, lengths: list[int]) -> list[list[int]]:
    """Slices of ordinary text, each from another place."""
    ids = llm.tokenizer(PROSE * 12)["input_ids"]
    step = len(llm.tokenizer(PROSE)["input_ids"]) // max(1, len(lengths))
    return [ids[i * step:i * step + length] for i, length in enumerate(lengths)]


def print_table(title: str, rows: list[dict]) -> None:
    print(f"\n{title}")
    names = list(dict.fromkeys(name for row in rows for name in row))
    cells = [[format_cell(row.get(name, "")) for name in names] for row in rows]
    widths = [max(len(line[i]) for line in [names, *cells]) for i in range(len(names))]
    for line in [names, *cells]:
        print("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)))


def format_cell(value) -> str:
    if isinstance(value, float):
        return f"{value:.3f}" if abs(value) < 10 else f"{value:,.1f}"
    return str(value)


# ---- sharing ---------------------------------------------------------------------------------

SETTINGS = {  # mean tokens in and out, and the paper's figures (section 6.3): low, high in %
    "Alpaca": (19, 58, {"sampling": "6.1 - 9.8 %", "beams": "37.6 - 55.2 %"}),
    "ShareGPT": (161, 338, {"sampling": "16.2 - 30.5 %", "beams": "44.3 - 66.3 %"}),
}


def bench_sharing(args: argparse.Namespace) -> list[dict]:
    """Share of the blocks that branches would hold without sharing, over all steps of a run."""
    llm = make_llm(args, block_size=16, enable_prefix_caching=False, num_blocks=8192,
                   max_model_len=2048)
    generator = random.Random(0)
    rows = []
    for setting, (mean_in, mean_out, paper) in SETTINGS.items():
        def around(mean: int) -> int:
            return generator.randint(mean // 2, mean + mean // 2)

        prompts = prose_prompts(llm, [around(mean_in) for _ in range(args.num_seqs)])
        lengths = [around(mean_out) for _ in prompts]
        for kind in ("sampling", "beams"):
            for width in (2, 4, 6):
                saved = run_branches(llm, kind, width, prompts, lengths)
                rows.append({"setting": setting, "kind": kind, "width": width,
                             "saved %": 100 * saved, "paper, 2 to 6": paper[kind]})
    print_table(f"Blocks saved by sharing ({args.num_seqs} requests, block size 16)", rows)
    return rows


def run_branches(llm: LLM, kind: str, width: int, prompts: list[list[int]],
                 lengths: list[int]) -> float:
    """Run all requests at once; returns 1 - blocks in use / references, summed over steps."""
    num_references = num_used = 0
    schedule = llm.scheduler.schedule

    def watched():
        nonlocal num_references, num_used
        batch = schedule()
        num_references += sum(len(seq.block_table) for seq in llm.scheduler.running)
        num_used += llm.scheduler.block_manager.num_used_blocks
        return batch

    llm.scheduler.schedule = watched
    try:
        if kind == "sampling":
            params = [SamplingParams(n=width, seed=i, ignore_eos=True, max_tokens=length)
                      for i, length in enumerate(lengths)]
            llm.generate(prompts, params, use_tqdm=False)
        else:  # one length for all beams of a call, so a call for each request
            for prompt, length in zip(prompts, lengths, strict=True):
                llm.beam_search([prompt], BeamSearchParams(
                    beam_width=width, max_tokens=length, ignore_eos=True))
    finally:
        del llm.scheduler.schedule
    return 1 - num_used / num_references


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("mode", choices=["sharing"])
    parser.add_argument("--model", help="a directory or hub name")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--num-seqs", type=int, default=8)
    parser.add_argument("--json", metavar="FILE", help="write all figures to FILE")
    args = parser.parse_args()
    start = time.perf_counter()
    rows = {"sharing": bench_sharing}[args.mode](args)
    print(f"\n{time.perf_counter() - start:.1f} s in all")
    if args.json:
        Path(args.json).write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
