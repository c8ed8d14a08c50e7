"""Temperatures, filters, seeds, logprobs: each request is as when alone."""

import math
from pathlib import Path

import pytest
import torch
from models import make_engine, make_model, make_table_model
from oracles import check_idle, check_logprobs, generate, hf_greedy, prompts_of
from safetensors.torch import load_file, save_file
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from nanopage import BeamSearchParams, SamplingParams
from nanopage.sampler import filter_logits, pick

PROMPT = prompts_of([9])[0]


def run(llm, params_list, prompt=PROMPT):
    outputs = llm.generate([prompt] * len(params_list), params_list, use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]


def test_temperatures_in_one_batch(r_model):
    """Temperature 0 was divided by, and one near it overflowed to NaN: both are greedy."""
    llm = make_engine(r_model)
    params = [SamplingParams(temperature=t, seed=5, max_tokens=16) for t in (0, 1, 1e-4, 1e-8, 0)]
    tokens = run(llm, params)
    greedy = hf_greedy(r_model, PROMPT, 16)
    assert [tokens[i] for i in (0, 2, 3, 4)] == [greedy] * 4
    assert tokens[1] == run(llm, [params[1]])[0] != greedy
    check_idle(llm)


def test_filters_in_one_batch(r_model):
    """A filter that is off in one row was used as an index when another had it on."""
    llm = make_engine(r_model)
    changes = [dict(top_k=k) for k in (-1, 0, 1, 5, 10**7)]
    changes += [dict(top_p=p) for p in (1.0, 1e-6, 0.7)] + [dict(min_p=p) for p in (0.0, 0.1, 1.0)]
    params = [SamplingParams(seed=i, max_tokens=12, **c) for i, c in enumerate(changes)]
    together = run(llm, params)
    assert together == [run(llm, [p])[0] for p in params]
    greedy = hf_greedy(r_model, PROMPT, 12)
    for change, tokens in zip(changes, together):
        if change in (dict(top_k=1), dict(top_p=1e-6), dict(min_p=1.0)):
            assert tokens == greedy
    check_idle(llm)


@pytest.mark.parametrize("bad", [
    dict(top_p=0), dict(top_p=1.1), dict(top_p=float("nan")), dict(top_k=-2), dict(top_k=1.5),
    dict(min_p=2), dict(min_p=-0.1), dict(temperature=-1), dict(temperature=float("inf")),
    dict(temperature=float("nan")), dict(temperature="hot"), dict(n=0), dict(n=True),
    dict(max_tokens=0), dict(max_tokens=-1), dict(min_tokens=-1), dict(min_tokens=17),
    dict(seed=1.5), dict(seed=2**64), dict(stop=""), dict(stop=[""]), dict(stop=[1]), dict(stop=5),
    dict(stop_token_ids=[-1]), dict(stop_token_ids=5), dict(logprobs=-2), dict(ignore_eos=1),
])
def test_bad_parameters_are_named(bad):
    name, value = next(iter(bad.items()))
    with pytest.raises(ValueError, match=name) as error:
        SamplingParams(**bad)
    assert repr(value) in str(error.value) or "[" in repr(value)
    with pytest.raises(TypeError):
        SamplingParams(best_of=2)


def test_filters_equal_transformers():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(64, 50, generator=generator) * 3
    for top_k, top_p, min_p in [(0, 1.0, 0.0), (5, 1.0, 0.0), (0, 0.8, 0.0), (0, 1.0, 0.05),
                                (10, 0.5, 0.2), (50, 0.999, 0.001), (1, 0.3, 1.0)]:
        chain = LogitsProcessorList([TemperatureLogitsWarper(0.7)])
        if top_k:
            chain.append(TopKLogitsWarper(top_k))
        if top_p < 1:
            chain.append(TopPLogitsWarper(top_p))
        if min_p:
            chain.append(MinPLogitsWarper(min_p))
        expected = chain(None, logits.clone())
        got = filter_logits(logits / 0.7, torch.full((64, 1), top_k or 50),
                            torch.full((64, 1), top_p if top_p < 1 else float("inf")),
                            torch.full((64, 1), min_p))
        assert torch.equal(got.isinf(), expected.isinf()), (top_k, top_p, min_p)


def test_equally_likely_tokens_are_kept_by_place():
    """A threshold keeps all that are as likely as the last one: more than top_k, or top_p, says."""
    logits = torch.zeros(1, 4)
    off = dict(top_k=torch.tensor([[4]]), top_p=torch.tensor([[math.inf]]),
               min_p=torch.tensor([[0.0]]))
    for change, num_kept in ((dict(top_p=torch.tensor([[0.5]])), 2),
                             (dict(top_p=torch.tensor([[0.51]])), 3),
                             (dict(top_k=torch.tensor([[3]])), 3), ({}, 4)):
        assert filter_logits(logits, **{**off, **change}).isfinite().sum() == num_kept


@pytest.mark.parametrize("options", [dict(), dict(speculative_config=dict(
    method="ngram", num_speculative_tokens=3, prompt_lookup_min=1, prompt_lookup_max=2))])
def test_nan_logits_harm_nobody_else(tmp_path, options):
    """One request with NaN logits took the whole call down with an IndexError."""
    path = make_model(tmp_path)
    file = Path(path) / "model.safetensors"
    tensors = load_file(file)
    tensors["model.embed_tokens.weight"][5] = math.inf
    save_file(tensors, file, metadata={"format": "pt"})
    llm = make_engine(path, **options)
    for change in (dict(temperature=1.0), dict(temperature=0), dict(top_p=0.5, logprobs=3),
                   dict(top_k=3, n=3)):
        params = SamplingParams(seed=3, max_tokens=8, **change)
        alone = llm.generate([[1, 2, 3]], params, use_tqdm=False)[0].outputs
        broken, other = llm.generate([[5, 1, 5, 1], [1, 2, 3]], params, use_tqdm=False)
        assert [c.token_ids for c in other.outputs] == [c.token_ids for c in alone]
        for completion in broken.outputs:
            assert all(0 <= token_id < 128 for token_id in completion.token_ids)
    beams = llm.beam_search([[5, 1], [1, 2, 3]], BeamSearchParams(beam_width=2, max_tokens=4))
    assert [c.token_ids for c in beams[1].outputs] == [c.token_ids for c in llm.beam_search(
        [[1, 2, 3]], BeamSearchParams(beam_width=2, max_tokens=4))[0].outputs]
    check_idle(llm)


def test_pick_never_takes_an_impossible_token():
    logits = torch.tensor([[-float("inf"), 0.0, -float("inf"), 1.0, -float("inf")]])
    largest = 1 - 2.0**-24
    for uniform, expected in ((0.0, 1), (0.26, 1), (0.28, 3), (largest, 3)):
        assert pick(logits, torch.tensor([[uniform]])).item() == expected


def test_seeded_request_is_a_pure_function(r_model):
    """Alone, in a batch of 32, in chunks of 3, after preemption, with another engine seed."""
    params = SamplingParams(seed=11, max_tokens=16, top_p=0.95, temperature=1.2)
    alone = run(make_engine(r_model), [params])[0]
    others = [SamplingParams(seed=i, max_tokens=16) for i in range(31)]
    assert run(make_engine(r_model), others + [params])[-1] == alone
    assert run(make_engine(r_model, max_num_batched_tokens=3, seed=5), [params])[0] == alone
    llm = make_engine(r_model, num_blocks=9, enable_prefix_caching=False)
    assert run(llm, others[:3] + [params])[-1] == alone
    assert llm.metrics().num_preemptions > 0


def test_unseeded_requests_differ(r_model):
    llm = make_engine(r_model)
    tokens = run(llm, [SamplingParams(max_tokens=16)] * 4)
    assert len(set(map(tuple, tokens))) == 4
    assert run(make_engine(r_model), [SamplingParams(max_tokens=16)] * 4) == tokens
    assert run(make_engine(r_model, seed=1), [SamplingParams(max_tokens=16)] * 4) != tokens


def test_global_random_state_is_untouched(r_model):
    llm = make_engine(r_model)
    state = torch.get_rng_state()
    run(llm, [SamplingParams(max_tokens=4)] * 2)
    assert torch.equal(torch.get_rng_state(), state)


def test_logprobs_are_raw(r_model):
    """Logprobs changed with the temperature, or lacked the token that was sampled."""
    llm = make_engine(r_model)
    params = SamplingParams(temperature=0.5, top_k=1, logprobs=3, n=2, max_tokens=50)
    for completion in llm.generate(PROMPT, params, use_tqdm=False)[0].outputs:
        check_logprobs(r_model, PROMPT, completion)
        for token_id, entry in zip(completion.token_ids, completion.logprobs):
            assert len(entry) == 3 and entry[token_id].rank == 1
            assert sorted(e.rank for e in entry.values()) == [1, 2, 3]
    params = SamplingParams(temperature=3.0, seed=0, logprobs=3, max_tokens=30)
    completion = llm.generate(PROMPT, params, use_tqdm=False)[0].outputs[0]
    check_logprobs(r_model, PROMPT, completion)
    ranks = [entry[t].rank for t, entry in zip(completion.token_ids, completion.logprobs)]
    assert max(ranks) > 3  # outside the top, and still reported
    params = SamplingParams(temperature=0, logprobs=0, max_tokens=3)
    completion = llm.generate(PROMPT, params, use_tqdm=False)[0].outputs[0]
    assert [list(entry) for entry in completion.logprobs] == [[t] for t in completion.token_ids]
    params = SamplingParams(temperature=0, logprobs=10**6, max_tokens=1)
    completion = llm.generate(PROMPT, params, use_tqdm=False)[0].outputs[0]
    assert len(completion.logprobs[0]) == 128
    plain = llm.generate(PROMPT, SamplingParams(), use_tqdm=False)[0].outputs[0]
    assert plain.logprobs is None and plain.cumulative_logprob is None
    check_idle(llm)


def test_logprobs_in_a_mixed_batch(r_model):
    llm = make_engine(r_model)
    params = [SamplingParams(seed=1, max_tokens=8),
              SamplingParams(seed=2, max_tokens=8, logprobs=2),
              SamplingParams(temperature=0, max_tokens=8, logprobs=5)]
    outputs = llm.generate([PROMPT] * 3, params, use_tqdm=False)
    assert outputs[0].outputs[0].logprobs is None
    for output in outputs[1:]:
        check_logprobs(r_model, PROMPT, output.outputs[0])


@pytest.fixture(scope="session")
def known_distribution(tmp_path_factory):
    """Next token 0, 1, 2, 3 with probability 0.4, 0.3, 0.2, 0.1 after any token."""
    table = torch.full((8, 8), -60.0)
    table[:, :4] = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()
    return make_table_model(tmp_path_factory.mktemp("known"), table, vocab_size=8,
                            eos_token_id=None)


@pytest.mark.parametrize("filters, expected", [
    (dict(), [0.4, 0.3, 0.2, 0.1]),
    (dict(top_k=2), [4 / 7, 3 / 7, 0, 0]),
    (dict(top_p=0.75), [4 / 9, 3 / 9, 2 / 9, 0]),
    (dict(min_p=0.6), [4 / 7, 3 / 7, 0, 0]),
    (dict(temperature=0.5), [16 / 30, 9 / 30, 4 / 30, 1 / 30]),
])
def test_distribution(known_distribution, filters, expected):
    llm = make_engine(known_distribution, num_blocks=1024)
    outputs = llm.generate([[5]] * 20, SamplingParams(max_tokens=100, **filters), use_tqdm=False)
    counts = torch.zeros(8)
    for output in outputs:
        counts += torch.bincount(torch.tensor(output.outputs[0].token_ids), minlength=8)
    for token_id, p in enumerate(expected + [0] * 4):
        deviation = (2000 * p * (1 - p)) ** 0.5
        assert abs(counts[token_id] - 2000 * p) <= 4 * deviation


def test_caller_keeps_its_parameters(r_model):
    llm = make_engine(r_model)
    params = SamplingParams(temperature=0, max_tokens=3, stop_token_ids=[1])
    prompt = list(PROMPT)
    request_id = llm.add_request(prompt, params)
    params.max_tokens = 99
    params.stop_token_ids.append(200)
    prompt.clear()
    outputs = [llm.step() for _ in range(3)][-1]
    assert outputs[0].request_id == request_id and outputs[0].finished
    assert outputs[0].prompt_token_ids == PROMPT
    assert outputs[0].outputs[0].token_ids == hf_greedy(r_model, PROMPT, 3)
    with pytest.raises(ValueError, match="200"):  # changed behind the constructor's back
        generate(llm, [PROMPT], **{**vars(params), "stop_token_ids": [200]})
