"""One oracle over all features: random engines, random workloads, faults in mid-run, a soak.

Every answer must be the one that the request gives alone, in a roomy engine without cache and
speculation; greedy answers must be transformers'. `--hypothesis-profile=long` runs for longer.
"""

import gc
import random
import time
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from models import make_engine
from oracles import Fault, check_idle, generate, hf_greedy

from nanopage import BeamSearchParams, SamplingParams

pytestmark = pytest.mark.timeout(36000)  # the examples of a run together; each has a limit below
VOCAB = 24
MODELS = [("llama", dict(eos_token_id=7)), ("qwen2", {}), ("qwen3", dict(eos_token_id=[3, 5])),
          ("mistral", dict(sliding_window=6))]
NGRAM = dict(method="ngram", num_speculative_tokens=3, prompt_lookup_min=1, prompt_lookup_max=3)


@pytest.fixture(scope="module")
def roomy(model_dir):
    """(directory, engine) of each family: what a request answers when it is alone."""
    engines = []
    for family, changes in MODELS:
        path = model_dir(family, vocab_size=VOCAB, initializer_range=0.2, **changes)
        engines.append((path, make_engine(path, num_blocks=1024, enable_prefix_caching=False)))
    return engines


tokens = st.integers(0, VOCAB - 1)
prefixes = st.sampled_from([[], [1, 2, 3, 4, 5, 6, 7, 8], [1, 2, 3, 4, 9, 9], [8] * 7])
prompts = st.tuples(prefixes, st.lists(tokens, max_size=14)).map(lambda p: p[0] + p[1] or [1])


@st.composite
def sampling(draw):
    greedy = draw(st.booleans())
    max_tokens = draw(st.integers(1, 14))
    return SamplingParams(
        n=draw(st.sampled_from([1, 1, 1, 2, 3, 5])), max_tokens=max_tokens,
        temperature=0.0 if greedy else draw(st.sampled_from([0.5, 1.0, 2.0])),
        seed=draw(st.integers(0, 50)), top_k=draw(st.sampled_from([0, 0, 1, 4])),
        top_p=draw(st.sampled_from([1.0, 1.0, 0.7])), min_p=draw(st.sampled_from([0.0, 0.0, 0.1])),
        ignore_eos=draw(st.booleans()), min_tokens=draw(st.integers(0, min(3, max_tokens))),
        stop_token_ids=draw(st.sampled_from([None, [1], [2, 4]])),
        logprobs=draw(st.sampled_from([None, None, 0, 2])))


requests = st.one_of(
    st.tuples(prompts, sampling()), st.tuples(prompts, sampling()), st.tuples(prompts, sampling()),
    st.tuples(prompts, st.builds(
        BeamSearchParams, beam_width=st.integers(1, 4), max_tokens=st.integers(1, 8),
        length_penalty=st.sampled_from([0.0, 1.0, 2.0]), ignore_eos=st.booleans())))
engines = st.fixed_dictionaries(dict(
    block_size=st.sampled_from([1, 2, 3, 4, 8, 16]), num_slots=st.integers(0, 160),
    max_num_batched_tokens=st.sampled_from([1, 2, 3, 5, 8, 17, 64, 512]),
    max_num_seqs=st.sampled_from([1, 2, 3, 4, 8, 64]), enable_prefix_caching=st.booleans(),
    speculate=st.booleans(), static=st.booleans()))


MOST_STEPS = 4000  # no such workload can need more: a hang shows as that many


def build(path, options, workload):
    """An engine as asked for, but as large as its largest request needs."""
    options = dict(options)
    width = max([p.beam_width for _, p in workload if isinstance(p, BeamSearchParams)], default=1)
    size = options["block_size"]
    needed = max(-(-(len(prompt) + params.max_tokens - 1) // size)
                 * getattr(params, "beam_width", 1) for prompt, params in workload)
    num_blocks = max(needed, options.pop("num_slots") // size)
    for name in ("max_num_batched_tokens", "max_num_seqs"):
        options[name] = max(options[name], width)
    speculate, static = options.pop("speculate"), options.pop("static")
    llm = make_engine(path, num_blocks=num_blocks,
                      speculative_config=NGRAM if speculate else None, **options)
    if static:
        llm.model_runner.capture_decode(lambda function: function)
    llm.model_runner.kv_cache.fill_(float("nan"))
    return llm


def add(llm, prompt, params, priority=0):
    """Queue a request of either kind for `step`."""
    if isinstance(params, SamplingParams):
        return llm.add_request(prompt, params, priority)
    sampling_params = params.to_sampling_params(len(llm.end_token_ids))
    request = llm._make_request(prompt, sampling_params, beams=params)
    llm.requests[request.request_id] = request
    llm.scheduler.add(request)
    return request.request_id


ALONE: dict = {}


def alone(model, prompt, params):
    """What the request answers by itself; greedy answers are checked against transformers."""
    path, llm = model
    key = (path, tuple(prompt), repr(params))
    if key not in ALONE:
        if isinstance(params, BeamSearchParams):
            output = llm.beam_search([prompt], params)[0]
        else:
            output = llm.generate([prompt], params, use_tqdm=False)[0]
            if params.temperature == 0 and params.min_tokens == 0:
                for completion in output.outputs:
                    ids = completion.token_ids
                    assert ids == hf_greedy(path, prompt, len(ids))
        ALONE[key] = answer(output)
    return ALONE[key]


def answer(output):
    return [(c.token_ids, c.finish_reason, c.stop_reason,
             None if c.cumulative_logprob is None else round(c.cumulative_logprob, 2))
            for c in output.outputs]


def same(got, expected):
    return len(got) == len(expected) and all(
        a[:3] == b[:3] and (a[3] is None) == (b[3] is None)
        and abs((a[3] or 0) - (b[3] or 0)) < 0.05 for a, b in zip(got, expected))


@given(data=st.data(), family=st.integers(0, 3), options=engines,
       workload=st.lists(requests, min_size=1, max_size=7))
def test_random_workloads(roomy, data, family, options, workload):
    """Arrivals and aborts in mid-run, priorities, and everything at once."""
    path, _ = roomy[family]
    llm = build(path, options, workload)
    pending = [(prompt, params, data.draw(st.integers(0, 6)), data.draw(st.sampled_from([0, 0, 1])),
                data.draw(st.sampled_from([None, None, None, 0, 2, 5])))
               for prompt, params in workload]
    live, ended, step = {}, {}, 0
    while pending or llm.has_unfinished_requests():
        for item in [item for item in pending if item[2] <= step]:
            pending.remove(item)
            request_id = add(llm, item[0], item[1], item[3])
            live[request_id] = item + (step,)
        for request_id, item in live.items():
            if item[4] is not None and step == item[5] + item[4] and request_id not in ended:
                llm.abort(request_id)
                ended[request_id] = None
        for output in llm.step():
            if output.finished:
                assert output.request_id not in ended
                ended[output.request_id] = answer(output)
        step += 1
        assert step < MOST_STEPS
    for request_id, item in live.items():
        got = ended[request_id]
        if got is not None:
            assert same(got, alone(roomy[family], item[0], item[1])), (got, item)
    check_idle(llm)


@settings(max_examples=settings().max_examples // 4)
@given(options=engines, workload=st.lists(requests, min_size=1, max_size=5),
       call=st.integers(1, 12), family=st.integers(0, 3),
       error=st.sampled_from([RuntimeError, KeyboardInterrupt, MemoryError]))
def test_faults_at_random_steps(roomy, options, workload, call, family, error):
    """After an error in mid-step requests and half-written blocks lived on as ghosts."""
    path, _ = roomy[family]
    llm = build(path, options, workload)
    fault = Fault(llm, error("on purpose"), call)
    for prompt, params in workload:
        add(llm, prompt, params)
    try:
        for _ in range(MOST_STEPS):
            llm.step()
            if not llm.has_unfinished_requests():
                break
        assert not llm.has_unfinished_requests()
    except error:
        assert not llm.has_unfinished_requests() and llm.step() == []
        llm.model_runner.kv_cache.fill_(float("nan"))  # nothing of it may be offered as a hit
    check_idle(llm)
    fault.call = 0
    for prompt, params in workload:
        request_id = add(llm, prompt, params)
        outputs = []
        while llm.has_unfinished_requests():
            outputs += llm.step()
        assert outputs[-1].request_id == request_id
        assert same(answer(outputs[-1]), alone(roomy[family], prompt, params))
    check_idle(llm)


def resident_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def soak(path, num_requests):
    """Requests through one engine whose pool always overflows; (memory, tokens/s) by tenths."""
    generator = random.Random(0)
    llm = make_engine(path, num_blocks=16, max_num_seqs=16, speculative_config=NGRAM)
    memory, rates = [], []
    for _ in range(10):
        start, num_tokens = time.perf_counter(), 0
        for _ in range(num_requests // 10 // 50):
            batch = [[generator.randrange(VOCAB) for _ in range(generator.randint(1, 24))]
                     for _ in range(50)]
            params = [SamplingParams(temperature=generator.choice([0, 1]), seed=i,
                                     max_tokens=generator.randint(1, 12)) for i in range(50)]
            for output in llm.generate(batch, params, use_tqdm=False):
                num_tokens += len(output.outputs[0].token_ids)
            assert llm.num_free_blocks() == 16
        rates.append(num_tokens / (time.perf_counter() - start))
        gc.collect()
        memory.append(resident_bytes())
    assert llm.metrics().num_preemptions > num_requests // 50
    check_idle(llm)
    return memory, rates


def test_soak(roomy, monkeypatch, request):
    """No block is lost, and memory is flat (conftest keeps oneDNN's own caches small)."""
    monkeypatch.undo()  # the checks after every step would be most of the work
    long = request.config.getoption("--hypothesis-profile") == "long"
    memory, rates = soak(roomy[0][0], 20_000 if long else 8_000)
    print("MiB", [m >> 20 for m in memory], "tok/s", [round(rate) for rate in rates])
    assert memory[-1] <= memory[0] * 1.02


def test_random_state_is_untouched_by_it_all(roomy):
    state = torch.get_rng_state()
    generate(roomy[0][1], [[1, 2, 3]], max_tokens=3)
    assert torch.equal(state, torch.get_rng_state())
