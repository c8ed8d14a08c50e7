"""Parallel sampling and beam search, on shared blocks."""

import itertools

import pytest
import torch
from models import make_engine, make_table_model
from oracles import (
    check_idle,
    check_logprobs,
    generate,
    hf_greedy,
    hf_logprobs,
    hf_model,
    prompts_of,
)

from nanopage import BeamSearchParams, SamplingParams, demo
from nanopage.sequence import Batch


def branches(llm, prompt, **params):
    params = SamplingParams(**{**dict(n=4, temperature=1.5, seed=1, max_tokens=10, logprobs=1),
                               **params})
    completions = llm.generate(prompt, params, use_tqdm=False)[0].outputs
    assert [c.index for c in completions] == list(range(params.n))
    return completions


# ---- parallel sampling -----------------------------------------------------------------------


@pytest.mark.parametrize("length", [6, 8])
@pytest.mark.parametrize("family, changes", [("llama", {}), ("mistral", dict(sliding_window=8))])
def test_branches_do_not_overwrite_each_other(model_dir, family, changes, length):
    """Branches overwrote each other where a copy before the write was missing (length 6)."""
    path = model_dir(family, **changes)
    prompt = prompts_of([length])[0]
    llm = make_engine(path)
    completions = branches(llm, prompt)
    for completion in completions:
        check_logprobs(path, prompt, completion)
    assert len({tuple(c.token_ids) for c in completions}) > 1
    for output in llm.beam_search([prompt], BeamSearchParams(beam_width=3, max_tokens=10)):
        assert [c.token_ids for c in output.outputs] == [
            ids for ids, _ in hf_beams(path, prompt, 3, 10)]
    check_idle(llm, path)


def test_without_the_copy_branches_are_wrong(r_model):
    """The test above can fail: take the copy out, and the branches see each other's keys."""
    prompt = prompts_of([6])[0]
    llm = make_engine(r_model)
    execute = llm.model_runner.execute

    def without_copies(batch):
        batch.copies.clear()
        return execute(batch)

    llm.model_runner.execute = without_copies
    with pytest.raises(AssertionError):
        for completion in branches(llm, prompt):
            check_logprobs(r_model, prompt, completion)


@pytest.mark.parametrize("num_blocks", [16, 8, 6, 5, 4])
@pytest.mark.parametrize("caching", [True, False])
def test_samples_in_a_tight_pool(r_model, num_blocks, caching):
    """Forks without enough blocks crashed; children are preempted alone and come back."""
    prompt = prompts_of([6])[0]
    roomy = [c.token_ids for c in branches(make_engine(r_model), prompt, temperature=1, seed=2)]
    llm = make_engine(r_model, num_blocks=num_blocks, enable_prefix_caching=caching)
    completions = branches(llm, prompt, temperature=1, seed=2)
    assert [c.token_ids for c in completions] == roomy
    assert all(len(ids) == 10 for ids in roomy)
    for completion in completions:
        check_logprobs(r_model, prompt, completion)
    if num_blocks < 8:
        assert llm.metrics().num_preemptions > 0
    check_idle(llm, r_model)


def test_seeded_branches_differ_and_repeat(r_model):
    """With a seed all branches were the same; they differ, and repeat whatever runs beside."""
    prompt = prompts_of([11])[0]
    llm = make_engine(r_model)
    first = [c.token_ids for c in branches(llm, prompt, seed=7, max_tokens=16)]
    assert len(set(map(tuple, first))) == 4
    assert [c.token_ids for c in branches(llm, prompt, seed=7, max_tokens=16)] == first
    plain = make_engine(r_model, enable_prefix_caching=False, max_num_batched_tokens=6)
    assert [c.token_ids for c in branches(plain, prompt, seed=7, max_tokens=16)] == first
    params = [SamplingParams(seed=i, max_tokens=12) for i in range(20)]
    params.append(SamplingParams(n=4, seed=7, temperature=1.5, max_tokens=16))
    outputs = llm.generate(prompts_of([5] * 20) + [prompt], params, use_tqdm=False)
    assert [c.token_ids for c in outputs[-1].outputs] == first
    single = SamplingParams(seed=7, temperature=1.5, max_tokens=16)
    assert generate(llm, [prompt], **vars(single))[0] == first[0]
    check_idle(llm)


def test_branches_of_different_lengths(tmp_path_factory):
    """Late pieces of the other branches were lost once the first had ended."""
    table = torch.full((8, 8), -60.0)
    table[:, :4] = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()
    path = make_table_model(tmp_path_factory.mktemp("ends"), table, vocab_size=8, eos_token_id=2)
    llm = make_engine(path)
    completions = branches(llm, [5], n=12, seed=3, temperature=1, max_tokens=20)
    assert len({len(c.token_ids) for c in completions}) > 3
    for c in completions:
        assert (c.token_ids[-1] == 2) == (c.finish_reason == "stop")
        assert 2 not in c.token_ids[:-1]
    check_idle(llm)


@pytest.mark.parametrize("options", [dict(max_num_seqs=2), dict(max_num_batched_tokens=2)])
def test_more_samples_than_can_run(r_model, options):
    """More branches than can run waited for ever: they run in waves, or are refused at once."""
    prompt = prompts_of([6])[0]
    llm = make_engine(r_model, **options)
    expected = [c.token_ids for c in branches(make_engine(r_model), prompt, n=5)]
    assert [c.token_ids for c in branches(llm, prompt, n=5)] == expected
    with pytest.raises(ValueError, match="beam_width=5"):
        llm.beam_search([prompt], BeamSearchParams(beam_width=5, max_tokens=4))
    check_idle(llm, r_model)


def test_prompt_blocks_are_counted_once(r_model):
    prompt = prompts_of([400])[0]
    llm = make_engine(r_model, block_size=16, num_blocks=64)
    llm.add_request(prompt, SamplingParams(n=4, max_tokens=16, seed=0))
    llm.step()
    assert llm.metrics().num_used_blocks == 25
    for _ in range(14):
        llm.step()
        assert llm.metrics().num_used_blocks == 25 + 4
    assert llm.metrics().num_saved_blocks == 4 * 26 - 29
    while llm.has_unfinished_requests():
        llm.step()
    llm.add_request(prompts_of([401])[0], SamplingParams(n=4, max_tokens=2, seed=0))
    llm.step()
    assert llm.metrics().num_used_blocks == 26
    llm.step()  # the part-filled block: three copies, and the original for the last writer
    assert llm.metrics().peak_used_blocks == 29
    check_idle(llm)


# ---- beam search -----------------------------------------------------------------------------


def hf_beams(path, prompt, width, max_tokens, length_penalty=1.0, eos=None):
    """[(token ids, score)] of transformers' own beam search, best first."""
    if width == 1:  # transformers calls it greedy search, and gives no scores
        row = hf_greedy(path, prompt, max_tokens)
        row = row[:row.index(eos) + 1] if eos in row else row
        logprobs = hf_logprobs(path, prompt, row)
        total = sum(logprobs[i, token].item() for i, token in enumerate(row))
        return [(row, total / len(row) ** length_penalty)]
    ids = torch.tensor([prompt])
    out = hf_model(path).generate(
        ids, attention_mask=torch.ones_like(ids), num_beams=width, num_return_sequences=width,
        max_new_tokens=max_tokens, do_sample=False, length_penalty=length_penalty,
        eos_token_id=eos, pad_token_id=0, return_dict_in_generate=True, output_scores=True)
    beams = []
    for row, score in zip(out.sequences[:, len(prompt):].tolist(), out.sequences_scores.tolist()):
        if eos in row:
            row = row[:row.index(eos) + 1]
        if score > -1e8:  # transformers fills up with impossible beams
            beams.append((row, score))
    return beams


def our_beams(output, length_penalty=1.0):
    return [(c.token_ids, c.cumulative_logprob / len(c.token_ids) ** length_penalty)
            for c in output.outputs]


def assert_same_beams(got, expected):
    assert [ids for ids, _ in got] == [ids for ids, _ in expected]
    assert [s for _, s in got] == pytest.approx([s for _, s in expected], abs=1e-4)


@pytest.mark.parametrize("width", [1, 2, 4, 8])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("eos", [None, 7])
def test_beams_equal_transformers(model_dir, family, width, eos):
    # Small weights make flat distributions: beams cross and end tokens are likely.
    path = model_dir(family, vocab_size=24, initializer_range=0.15, eos_token_id=eos)
    prompts = prompts_of([3, 8, 21, 13], vocab=24)
    llm = make_engine(path)
    for length_penalty in (0.0, 1.0, 2.0):
        params = BeamSearchParams(beam_width=width, max_tokens=12, length_penalty=length_penalty)
        for prompt, output in zip(prompts, llm.beam_search(prompts, params)):
            assert_same_beams(our_beams(output, length_penalty),
                              hf_beams(path, prompt, width, 12, length_penalty, eos))
            assert output.finished
    check_idle(llm, path)


def brute_force(path, prompt, max_tokens, length_penalty, eos, vocab):
    """Every continuation with its score, best first."""
    scored = []
    for length in range(1, max_tokens + 1):
        for ids in itertools.product(range(vocab), repeat=length):
            if eos in ids[:-1] or (length < max_tokens and ids[-1] != eos):
                continue
            scored.append(list(ids))
    rows = torch.tensor([prompt + ids + [0] * (max_tokens - len(ids)) for ids in scored])
    with torch.no_grad():
        logprobs = hf_model(path)(rows).logits[:, len(prompt) - 1:-1].log_softmax(-1)
    result = []
    for i, ids in enumerate(scored):
        total = sum(logprobs[i, j, token].item() for j, token in enumerate(ids))
        result.append((ids, total / len(ids) ** length_penalty))
    return sorted(result, key=lambda pair: -pair[1])


@pytest.mark.parametrize("length_penalty", [0.0, 1.0, 2.0])
@pytest.mark.parametrize("length", [7, 40])
def test_beams_equal_brute_force(model_dir, length, length_penalty):
    """A score divided by the prompt's length as well made length_penalty nearly void."""
    for seed in range(3):
        path = model_dir("llama", seed=seed, vocab_size=6, eos_token_id=0, initializer_range=0.15)
        prompt = prompts_of([length], vocab=5)[0]
        prompt = [token + 1 for token in prompt]
        llm = make_engine(path, num_blocks=64 * 12)
        params = BeamSearchParams(beam_width=64, max_tokens=3, length_penalty=length_penalty)
        got = our_beams(llm.beam_search([prompt], params)[0], length_penalty)
        expected = brute_force(path, prompt, 3, length_penalty, 0, 6)
        assert_same_beams(got, expected[:64])
        assert len({tuple(ids) for ids, _ in got}) == 64
        check_idle(llm)


def test_more_beams_than_continuations(model_dir):
    path = model_dir("llama", vocab_size=6, eos_token_id=0)
    llm = make_engine(path, num_blocks=256)
    output = llm.beam_search([[1, 2]], BeamSearchParams(beam_width=50, max_tokens=2))[0]
    assert len(output.outputs) == 1 + 5 * 6
    output = llm.beam_search([[1, 2]], BeamSearchParams(beam_width=50, max_tokens=1))[0]
    assert len(output.outputs) == 6
    output = llm.beam_search(
        [[1, 2]], BeamSearchParams(beam_width=50, max_tokens=2, ignore_eos=True))[0]
    assert len(output.outputs) == 36
    check_idle(llm)


@pytest.mark.parametrize("options", [
    dict(num_blocks=20), dict(num_blocks=16, max_num_seqs=4), dict(max_num_seqs=5),
    dict(num_blocks=17, enable_prefix_caching=False, max_num_batched_tokens=7), dict(block_size=1),
])
def test_beams_under_pressure(model_dir, options):
    """Beams beside ordinary requests, in one loop: preempted, waiting for seats, never stuck."""
    path = model_dir("llama", vocab_size=24, initializer_range=0.15, eos_token_id=7)
    prompts = prompts_of([5, 6, 7], vocab=24)
    llm = make_engine(path, **options)
    params = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)
    ids = [llm.add_request(prompt, params) for prompt in prompts]
    outputs = llm.beam_search(prompts, BeamSearchParams(beam_width=4, max_tokens=9))
    for prompt, output in zip(prompts, outputs):
        assert_same_beams(our_beams(output), hf_beams(path, prompt, 4, 9, eos=7))
    ended = {}
    while llm.has_unfinished_requests():
        ended |= {o.request_id: o.outputs[0].token_ids for o in llm.step() if o.finished}
    assert ended == {i: hf_greedy(path, p, 9) for i, p in zip(ids, prompts)}
    if options.get("num_blocks"):
        assert llm.metrics().num_preemptions > 0
    check_idle(llm, path)


def test_preempted_beams_that_need_the_whole_pool(model_dir):
    """They come back without leaving headroom, or the first would wait for the last for ever."""
    path = model_dir("llama", vocab_size=24, initializer_range=0.15)
    llm = make_engine(path, num_blocks=24, enable_prefix_caching=False)
    update, num_steps = llm.scheduler.update, 0

    def watched(batch, samples):
        nonlocal num_steps
        num_steps += 1
        touched = update(batch, samples)
        if num_steps == 19:
            while llm.scheduler.running:
                llm.scheduler._preempt_last(llm.scheduler.running, batch)
        return touched

    llm.scheduler.update = watched
    output = llm.beam_search([[6, 7, 8]], BeamSearchParams(beam_width=4, max_tokens=21))[0]
    assert_same_beams(our_beams(output), hf_beams(path, [6, 7, 8], 4, 21))
    assert llm.metrics().peak_used_blocks == 24  # recomputed without the cache, they share nothing
    check_idle(llm, path)


def test_a_preempted_beam_makes_its_offers_anew(r_model):
    """Or its siblings would go on while it is recomputed, and fork from half of its blocks."""
    llm = make_engine(r_model)
    seq = None
    execute = llm.model_runner.execute

    def watched(batch):
        nonlocal seq
        seq = batch.sequences[0]
        return execute(batch)

    llm.model_runner.execute = watched
    llm.beam_search([[1, 2, 3]], BeamSearchParams(beam_width=2, max_tokens=3))
    assert seq.candidates is not None
    llm.scheduler._preempt_last([seq], Batch())
    assert seq.candidates is None
    llm.scheduler.waiting.clear()


def test_beams_that_do_not_fit_are_refused(r_model):
    llm = make_engine(r_model, num_blocks=11)
    params = BeamSearchParams(beam_width=4, max_tokens=8)
    with pytest.raises(ValueError, match="12 blocks.*num_blocks=11"):
        llm.beam_search([[1, 2, 3]], params)
    for bad in (dict(beam_width=0), dict(max_tokens=0), dict(length_penalty=float("nan")),
                dict(ignore_eos=1), dict(beam_width=2.5)):
        with pytest.raises(ValueError, match=next(iter(bad))):
            BeamSearchParams(**{**dict(beam_width=2, max_tokens=2), **bad})
    with pytest.raises(ValueError, match="params"):
        llm.beam_search([[1]], SamplingParams())
    check_idle(llm, r_model)


@pytest.mark.timeout(300)
def test_beams_on_a_real_model():
    path = str(demo.model_path())
    llm = make_engine(path, block_size=16, num_blocks=512)
    prompts = ["The capital of France is", "def fibonacci(n):", "Once upon a time, in a small",
               "The three laws of motion", "My favourite recipe begins with"]
    for width in (2, 4):
        outputs = llm.beam_search(prompts, BeamSearchParams(beam_width=width, max_tokens=32))
        for output in outputs:
            expected = hf_beams(path, output.prompt_token_ids, width, 32, eos=2)
            assert_same_beams(our_beams(output), expected)
            for completion in output.outputs:
                assert completion.text == llm.tokenizer.decode(completion.token_ids,
                                                               skip_special_tokens=True)
    check_idle(llm)


def test_an_interrupt_among_beams_loses_no_request(r_model, monkeypatch):
    """Between two lists the request was in neither, and who waited for its end waited for ever."""
    llm = make_engine(r_model)
    sampling_params = BeamSearchParams(2, 6).to_sampling_params(0)
    request = llm._make_request([1, 2, 3], sampling_params, beams=BeamSearchParams(2, 6))
    llm.scheduler.add(request)
    llm.step()

    def interrupted(*_):
        raise KeyboardInterrupt
    monkeypatch.setattr(type(request.sequences[0]), "__lt__", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.step()
    assert request.finished
    monkeypatch.undo()
    check_idle(llm)
