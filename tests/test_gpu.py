"""What only a GPU can show; skipped elsewhere. `python -m pytest -m gpu` runs it."""

import gc

import pytest
import torch
from oracles import generate, hf_greedy, prompts_of

from nanopage import LLM, SamplingParams

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300),
              pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("backend", ["flash", "varlen"])
def test_gpu_kernels_equal_the_reference(model_dir, backend):
    if backend == "flash":
        pytest.importorskip("flash_attn")
    path = model_dir("qwen3", hidden_size=256, num_attention_heads=8, head_dim=64,
                     max_position_embeddings=1024)
    prompts = prompts_of([3, 255, 256, 257, 700])
    params = SamplingParams(temperature=0, max_tokens=16, logprobs=3)
    options = dict(dtype="bfloat16", block_size=256, num_blocks=32, device="cuda")
    expected = LLM(path, attention_backend="reference", enforce_eager=True, **options).generate(
        prompts, params, use_tqdm=False)
    for eager in (True, False):
        llm = LLM(path, attention_backend=backend, enforce_eager=eager, **options)
        for a, b in zip(expected, llm.generate(prompts, params, use_tqdm=False)):
            x, y = a.outputs[0].logprobs[0], b.outputs[0].logprobs[0]
            assert all(abs(x[t].logprob - y[t].logprob) < 0.1 for t in set(x) & set(y))


def test_gpu_graph_equals_eager(model_dir):
    """Contexts short, long, short at one batch size, and prompts up to max_model_len."""
    path = model_dir("qwen3", max_position_embeddings=1024)
    options = dict(dtype="bfloat16", block_size=256, num_blocks=32, device="cuda", max_num_seqs=7)
    graph, eager = LLM(path, **options), LLM(path, enforce_eager=True, **options)
    params = SamplingParams(temperature=0, max_tokens=8, logprobs=5)
    for lengths in ([10], [900], [10], [1022], [1023], [5, 6, 7, 8, 9, 10, 11], [3, 4, 5]):
        prompts = prompts_of(lengths)
        for a, b in zip(graph.generate(prompts, params, use_tqdm=False),
                        eager.generate(prompts, params, use_tqdm=False)):
            x, y = a.outputs[0].logprobs[0], b.outputs[0].logprobs[0]
            assert all(abs(x[t].logprob - y[t].logprob) < 0.1 for t in set(x) & set(y))


def test_gpu_memory_is_given_back(model_dir):
    """An engine that is deleted keeps its memory: three in one process, one after the other."""
    path = model_dir("llama")
    held, answers = [], []
    for _ in range(3):
        llm = LLM(path, device="cuda", dtype="bfloat16", gpu_memory_utilization=0.3,
                  max_model_len=256)
        answers.append(generate(llm, prompts_of([9]), max_tokens=8))
        del llm
        gc.collect()
        torch.cuda.empty_cache()
        held.append(torch.cuda.memory_allocated())
    assert answers[0] == answers[1] == answers[2] and max(held) - min(held) < 8 << 20


def test_gpu_real_model_equals_transformers():
    from nanopage import demo
    path = str(demo.model_path())
    llm = LLM(path, device="cuda", dtype="float32", block_size=16, num_blocks=512)
    prompts = llm.tokenizer(["The capital of France is", "Once upon a time"])["input_ids"]
    assert generate(llm, prompts, max_tokens=32) == [hf_greedy(path, p, 32) for p in prompts]
