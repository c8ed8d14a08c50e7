"""The callers of the GPU kernels, on a CPU with fake kernels: the answers are the reference's."""

import sys
import types
from dataclasses import replace

import pytest
import torch
from models import make_engine
from oracles import check_idle, prompts_of

from nanopage import SamplingParams
from nanopage.config import choose_backend

NGRAM = dict(method="ngram", num_speculative_tokens=3, prompt_lookup_min=2, prompt_lookup_max=3)


def poison(llm):
    """NaN in every slot, and junk behind every block table, as the kernels must not read them."""
    llm.model_runner.kv_cache.fill_(float("nan"))
    backend = llm.model_runner.backend
    attend = backend.attend

    def with_junk(q, cache, metadata, scale, window):
        junk = torch.full((len(metadata.block_tables), 1), -1, dtype=torch.int32)
        tables = torch.cat([metadata.block_tables, junk], dim=1)
        for table, length in zip(tables, metadata.context_lens.tolist()):
            table[-(-length // llm.config.block_size):] = -1
        return attend(q, cache, replace(metadata, block_tables=tables), scale, window)

    backend.attend = with_junk


@pytest.mark.timeout(120)
@pytest.mark.parametrize("backend", ["flash", "varlen"])
@pytest.mark.parametrize("family, changes", [
    ("llama", {}), ("mistral", dict(sliding_window=8)), ("llama", dict(num_key_value_heads=4))])
def test_kernel_branches(model_dir, kernels, backend, family, changes):
    """The whole engine through the GPU branches, with the answers of the reference branch."""
    path = model_dir(family, vocab_size=16, initializer_range=0.2, **changes)
    prompts = prompts_of([3, 250, 257, 9], vocab=16)
    options = dict(block_size=256, num_blocks=12, dtype="bfloat16", max_num_batched_tokens=300)
    for more in (dict(), dict(speculative_config=NGRAM, max_num_seqs=4)):  # so few always draft
        params = [SamplingParams(temperature=0, max_tokens=7, logprobs=3)] * 3 + [
            SamplingParams(n=3, seed=1, max_tokens=5, logprobs=3)]
        expected = make_engine(path, **options, **more).generate(prompts, params, use_tqdm=False)
        kernels.clear()
        llm = make_engine(path, **options, **more, attention_backend=backend)
        poison(llm)
        got = llm.generate(prompts, params, use_tqdm=False)
        for a, b in zip(expected, got):
            for one, other in zip(a.outputs, b.outputs):
                for i, (x, y) in enumerate(zip(one.logprobs, other.logprobs)):
                    for token_id in set(x) & set(y):
                        assert abs(x[token_id].logprob - y[token_id].logprob) < 0.1
                    if one.token_ids[i] != other.token_ids[i]:
                        break  # bfloat16 rounding may decide a close race; then texts part
        if backend == "flash":
            assert {"varlen", "kvcache 1"} <= set(kernels)
            verified = {"kvcache 2", "kvcache 3", "kvcache 4"} & set(kernels)
            assert bool(verified) == bool(more)
        else:
            assert kernels
        check_idle(llm)


def test_choice_of_backend(kernels, monkeypatch, caplog):
    cpu, half = torch.device("cpu"), torch.bfloat16
    caplog.set_level("INFO", logger="nanopage")
    assert choose_backend("auto", cpu, half, 64, 256).name == "flash"
    monkeypatch.setitem(sys.modules, "flash_attn", types.ModuleType("flash_attn"))  # no binary
    assert choose_backend("auto", cpu, half, 64, 256).name == "varlen"
    assert "attention: varlen; not flash: it needs to import, but" in caplog.text
    for dtype, head_dim, block_size, reason in ((torch.float32, 64, 256, "float32"),
                                                (half, 64, 16, "block_size"),
                                                (half, 260, 256, "head_dim"),
                                                (half, 12, 256, "head_dim")):
        assert choose_backend("auto", cpu, dtype, head_dim, block_size).name == "cpu"
        with pytest.raises(ValueError, match=f"attention_backend='varlen'.*{reason}"):
            choose_backend("varlen", cpu, dtype, head_dim, block_size)
    monkeypatch.undo()
    with pytest.raises(ValueError, match="attention_backend='flash'.*CUDA"):
        choose_backend("flash", cpu, half, 64, 256)
    with pytest.raises(ValueError, match="attention_backend='xformers'"):
        choose_backend("xformers", cpu, half, 64, 256)
