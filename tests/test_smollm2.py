"""A real model, real text: SmolLM2-135M-Instruct against transformers."""

import pytest
import torch
from models import make_engine
from oracles import check_idle, generate, hf_greedy, hf_logprobs

from nanopage import SamplingParams, demo

pytestmark = pytest.mark.timeout(300)

TEXT = (
    "Paging was invented so that programs need not care where in memory their data lies. A table "
    "maps each page of an address space to a frame, and the operating system hands out frames as "
    "they are touched. The cache of keys and values of a language model has the same shape: it "
    "grows one token at a time, nobody knows how long it will get, and many requests begin with "
    "the same words. If every request reserves memory for the longest answer, most of it stays "
    "empty; if blocks are handed out on demand, at most the last one of each request is not full. "
    "Blocks that begin alike can be shared, and copied when one of the owners writes. ")


@pytest.fixture(scope="module", autouse=True)
def two_threads():
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def path():
    return str(demo.model_path())


@pytest.fixture(scope="module")
def prompts(path):
    llm = make_engine(path, max_model_len=64, num_blocks=16)
    ids = llm.tokenizer(TEXT * 3)["input_ids"]
    return [ids[10 * i:10 * i + n] for i, n in enumerate((5, 17, 32, 64, 100, 150, 256, 400))]


@pytest.mark.parametrize("options", [
    dict(block_size=16, max_num_batched_tokens=512),
    dict(block_size=4, max_num_batched_tokens=100, num_blocks=180),  # preempts
    dict(block_size=256, max_num_batched_tokens=64, num_blocks=40, enable_prefix_caching=False),
    dict(block_size=1, num_blocks=4096),
])
def test_greedy_equals_transformers(path, prompts, options):
    llm = make_engine(path, **options)
    expected = [hf_greedy(path, p, 64) for p in prompts]
    assert generate(llm, prompts, max_tokens=64) == expected
    if options["block_size"] == 4:
        assert llm.metrics().num_preemptions > 0
    check_idle(llm)


def test_bfloat16_logits(path, prompts):
    """Teacher-forced: both round to bfloat16, each in its own order."""
    llm = make_engine(path, dtype="bfloat16", num_blocks=1024)
    for prompt in prompts[:6]:
        params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=16, logprobs=5)
        completion = llm.generate(prompt, params, use_tqdm=False)[0].outputs[0]
        expected = hf_logprobs(path, prompt, completion.token_ids, torch.bfloat16)
        exact = hf_logprobs(path, prompt, completion.token_ids)
        worst = theirs = 0.0
        for i, entry in enumerate(completion.logprobs):
            for token_id, logprob in entry.items():
                worst = max(worst, abs(logprob.logprob - expected[i, token_id].item()))
                theirs = max(theirs, abs(exact[i, token_id] - expected[i, token_id]).item())
        assert worst < 0.5, (worst, theirs)


def test_chat(path):
    llm = make_engine(path, num_blocks=256)
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    output = llm.chat(messages, SamplingParams(temperature=0, max_tokens=30), use_tqdm=False)[0]
    assert "Paris" in output.outputs[0].text and "<|im_" not in output.outputs[0].text
    ids = llm.tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    assert output.prompt_token_ids == ids
    assert output.outputs[0].text == llm.tokenizer.decode(output.outputs[0].token_ids,
                                                          skip_special_tokens=True)


def test_demo_without_network_or_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("NANOPAGE_CACHE", str(tmp_path))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(RuntimeError, match="python example.py PATH"):
        demo.model_path()
    assert list(tmp_path.iterdir()) == []  # nothing half-written is left
    (tmp_path / "SmolLM2-135M-Instruct").mkdir()
    assert demo.model_path() == tmp_path / "SmolLM2-135M-Instruct"
