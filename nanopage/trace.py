"""What happens in a step?

A leaf, for readers: `python example.py --trace` prints a story of ten steps that can be followed
with pencil and paper. README.md tells it chapter by chapter, and a test compares the two.

Invariants: the engine is the real one, driven by the three lines of `LLM._step` and only looked at
between them; the same is printed on every machine, for the model knows nothing but the alphabet.

Next: block_manager.py, which does most of what is seen here.
"""

import tempfile

import torch
from transformers import LlamaConfig, LlamaForCausalLM, logging

from nanopage.engine import LLM
from nanopage.sequence import Batch, SamplingParams, Sequence

LETTERS = "abcdefghijklmnopqrstuvwxyz?"  # the vocabulary: a letter is a token
STORY = {  # before which step who arrives: prompt, max_tokens, n
    1: [("studio", 9, 1), ("study", 5, 1)], 3: [("what?", 6, 2)], 4: [("dictionary", 2, 1)],
    10: [("studiopq", 1, 1)]}


def save_model(folder: str) -> None:
    """A Llama that says the alphabet: b follows a, a follows z, and n or y a "?", equally likely.

    Its logits differ by hundreds or not at all, so no rounding can change what it says.
    """
    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=27, hidden_size=32, intermediate_size=8, num_hidden_layers=1,
        num_attention_heads=4, eos_token_id=None))
    for name, weight in model.state_dict().items():
        weight.fill_("norm" in name)
    torch.eye(27, 32, out=model.state_dict()["model.embed_tokens.weight"])
    # [next letters, last letters]; 13 is n, 24 is y
    model.state_dict()["lm_head.weight"][[*range(26), 13, 24], [25, *range(25), 26, 26]] = 99
    logging.disable_progress_bar()
    model.save_pretrained(folder)


def spell(token_ids: list[int] | memoryview) -> str:
    return "".join(LETTERS[token_id] for token_id in token_ids)


def name(seq: Sequence) -> str:
    """A to E, and where there are branches the number of one."""
    return "ABCDE"[int(seq.request.request_id)] + str(seq.index)[:seq.request.params.n - 1]


def show_plan(llm: LLM, batch: Batch) -> None:
    """Who computes how many tokens and why; computed[scheduled+drafts]rest; block:references."""
    for seq in batch.sequences:
        start, drafts = seq.num_computed_tokens, spell(seq.draft_token_ids)
        end, text = start + seq.num_scheduled_tokens - len(drafts), spell(seq.token_ids)
        kind = "hit" if start and seq in batch.admitted else "chunk" if end < len(text) else (
            "decode" if start >= seq.num_prompt_tokens else "prompt")
        line = f"{text[:start]}[{text[start:end]}{'+' * bool(drafts)}{drafts}]{text[end:]}"
        print(f"  {name(seq):2} {seq.num_scheduled_tokens} {kind:6}  {line:17} ",
              *(f"{i}:{llm.scheduler.block_manager.blocks[i].ref_count}" for i in seq.block_table))


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        save_model(folder)
        llm = LLM(folder, device="cpu", dtype="float32", block_size=4, num_blocks=10,
                  max_num_batched_tokens=8, speculative_config=dict(
                      method="ngram", num_speculative_tokens=2, prompt_lookup_max=2))
    scheduler, manager = llm.scheduler, llm.scheduler.block_manager
    for step in range(1, 11):
        for prompt, max_tokens, n in STORY.get(step, []):
            llm.add_request([LETTERS.index(letter) for letter in prompt],
                            SamplingParams(n=n, max_tokens=max_tokens, seed=8))
            print(f"{name(scheduler.waiting[-1])} arrives: {prompt}, {max_tokens=}, {n=}")
        before = list(scheduler.running)
        batch = scheduler.schedule()
        notes = [f"block {source} is copied to {own}" for source, own in batch.copies]
        notes += [f"{name(s)} {'preempted' if s in before else 'waits'}" for s in scheduler.waiting]
        print(f"step {step}: {batch.num_tokens} of 8 tokens", *notes, sep=", ")
        show_plan(llm, batch)
        lengths = {seq: seq.num_tokens for one in batch.sequences for seq in one.request.sequences}
        scheduler.update(batch, llm.model_runner.execute(batch))
        news = [f"{name(s)} {spell(s.token_ids[length:])}{' ends' if s.finish_reason else ''}"
                for s, length in lengths.items() if s.num_tokens > length]
        news += [f"{name(s)} forks" for s in scheduler.running if s not in before + batch.sequences]
        if batch.num_drafts:
            news.append(f"{llm.total.num_accepted_tokens} of {batch.num_drafts} drafts accepted")
        print("  sampled", ", ".join(news))
        print("  free", *(f"{i}={spell(memoryview(block.prefix.content).cast('q'))}"
                          if block.prefix else i for i, block in manager.free_queue.items()))
