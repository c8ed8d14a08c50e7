"""What is right: transformers' own answers, and books that balance."""

from functools import lru_cache

import pytest
import torch
from transformers import AutoModelForCausalLM

from nanopage import SamplingParams

GREEDY = dict(temperature=0.0, ignore_eos=True)


@lru_cache(maxsize=32)
def hf_model(path, dtype=torch.float32):
    return AutoModelForCausalLM.from_pretrained(path, dtype=dtype).eval()


GREEDY_ROWS: dict = {}


def hf_greedy(path, prompt, num_tokens):
    """Greedy tokens of transformers' own generate, no end token heeded."""
    key = (path, tuple(prompt))
    if len(GREEDY_ROWS.get(key, ())) < num_tokens:
        model = hf_model(path)
        ids = torch.tensor([list(prompt)])
        # Without a mask, generate would hide the tokens that look like padding.
        out = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False,
                             max_new_tokens=max(num_tokens, 24), eos_token_id=None)
        GREEDY_ROWS[key] = out[0, len(prompt):].tolist()
    return GREEDY_ROWS[key][:num_tokens]


@torch.no_grad()
def hf_logprobs(path, prompt, output, dtype=torch.float32):
    """Teacher forcing: log-softmax over the vocabulary at each output token."""
    ids = torch.tensor([list(prompt) + list(output)])
    logits = hf_model(path, dtype)(ids).logits[0, len(prompt) - 1:-1].float()
    return logits.log_softmax(-1)


def check_logprobs(path, prompt, completion, tolerance=1e-4):
    """Transformers, forced along a sampled completion, gives the logprobs that the engine gave."""
    expected = hf_logprobs(path, prompt, completion.token_ids)
    total = 0.0
    for i, token_id in enumerate(completion.token_ids):
        for other, logprob in completion.logprobs[i].items():
            assert abs(logprob.logprob - expected[i, other].item()) < tolerance
        total += completion.logprobs[i][token_id].logprob
    assert completion.cumulative_logprob == pytest.approx(total)


def prompts_of(lengths, seed=0, vocab=128):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(vocab, (length,), generator=generator).tolist() for length in lengths]


# ---- the engine's side ------------------------------------------------------------------------


def check_idle(llm, model=None):
    """Nothing is left behind, and the engine still answers rightly."""
    assert not llm.has_unfinished_requests()
    assert not llm.scheduler.running and not llm.scheduler.waiting
    assert llm.num_free_blocks() == llm.model_runner.num_blocks
    assert all(block.ref_count == 0 for block in llm.scheduler.block_manager.blocks)
    if model is not None:
        prompt = [5, 4, 3]
        num = min(3, llm.max_model_len - 3,
                  llm.model_runner.num_blocks * llm.config.block_size - 2)
        assert generate(llm, [prompt], max_tokens=num) == [hf_greedy(model, prompt, num)]


def generate(llm, prompts, **params):
    outputs = llm.generate(prompts, SamplingParams(**{**GREEDY, **params}), use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]


def check_invariants(manager, sequences):
    """The allocator's books balance; `sequences` are all the live ones."""
    references = [0] * len(manager.blocks)
    for seq in sequences:
        assert seq.num_computed_tokens <= seq.num_tokens
        assert len(seq.block_table) * manager.block_size >= seq.num_computed_tokens
        for block_id in seq.block_table:
            references[block_id] += 1
    assert references[0] == 0, "the scratch block was handed out"
    for block, expected in zip(manager.blocks, references):
        assert block.ref_count == expected, (block.block_id, block.ref_count, expected)
        if block.block_id:
            assert (block.ref_count == 0) == (block.block_id in manager.free_queue)
        if block.prefix is not None:
            assert manager.cached[block.prefix.hash] is block
            assert block.prefix.content
    assert sum(b.prefix is not None for b in manager.blocks) == len(manager.cached)


class Fault:
    """Makes the model raise on its n-th call."""

    def __init__(self, llm, error, call=3):
        self.llm, self.error, self.call = llm, error, call
        self.model = llm.model_runner.model
        llm.model_runner.model = self

    def __getattr__(self, name):
        return getattr(self.model, name)

    def __call__(self, *args):
        self.call -= 1
        if self.call == 0:
            self.llm.model_runner.model = self.model
            raise self.error
        return self.model(*args)
