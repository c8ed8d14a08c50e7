"""What a caller may send, what is refused, and what is left behind afterwards."""

import pytest
from models import make_engine
from oracles import Fault, check_idle, generate, hf_greedy, prompts_of

from nanopage import LLM, SamplingParams


@pytest.fixture(scope="module")
def llm(r_model):
    return make_engine(r_model)


@pytest.mark.parametrize("prompt", [
    [], [128], [-1], [2**40], [1.5], ["a"], [True], None, 5, {}, {"text": "a"}, {"prompt": 5},
    {"prompt_token_ids": "ab"}, {"prompt_token_ids": [1], "cache_salt": 3}, "no tokenizer", [[1]],
])
def test_bad_prompts_are_refused(llm, r_model, prompt):
    """One empty prompt or wrong id took the engine down for all: refused before anything runs."""
    params = SamplingParams(temperature=0, max_tokens=2)
    for bad_call in ([[1, 2], prompt], [prompt, [1, 2]]):
        with pytest.raises(ValueError):
            llm.generate(bad_call, params, use_tqdm=False)
    with pytest.raises(ValueError):
        llm.add_request(prompt, params)
    check_idle(llm, r_model)


def test_bad_calls_are_refused(llm, r_model):
    good = SamplingParams(temperature=0)
    for arguments in (dict(sampling_params=[good]), dict(sampling_params="greedy"),
                      dict(sampling_params=[good, None]), dict(priority=[0]),
                      dict(priority=[0, 1.5]),
                      dict(sampling_params=SamplingParams(stop_token_ids=[128])),
                      dict(sampling_params=SamplingParams(stop="no tokenizer"))):
        with pytest.raises(ValueError, match=next(iter(arguments))[:4] + "|stop"):
            llm.generate([[1], [2]], use_tqdm=False, **arguments)
    with pytest.raises(ValueError):
        llm.generate(None, good)
    with pytest.raises(ValueError, match="tokenizer"):
        llm.chat([{"role": "user", "content": "hi"}])
    check_idle(llm, r_model)


def test_empty_call_and_largest_id(llm, r_model):
    assert llm.generate([], SamplingParams()) == []
    assert generate(llm, [[127]], max_tokens=4) == [hf_greedy(r_model, [127], 4)]


def test_empty_string(text_model):
    llm = make_engine(text_model)
    with pytest.raises(ValueError, match="0 tokens"):
        llm.generate("", SamplingParams(), use_tqdm=False)
    assert llm.generate("a", SamplingParams(max_tokens=1), use_tqdm=False)[0].prompt == "a"


def test_prompt_at_the_length_limit(r_model):
    """A prompt as long as the limit has no room for a token; max_tokens is cut to what is left."""
    llm = make_engine(r_model, max_model_len=16)
    for length, num_tokens in ((14, 2), (15, 1)):
        prompt = prompts_of([length])[0]
        for max_tokens in (10, None):
            params = SamplingParams(temperature=0, max_tokens=max_tokens)
            completion = llm.generate(prompt, params, use_tqdm=False)[0].outputs[0]
            assert completion.token_ids == hf_greedy(r_model, prompt, num_tokens)
            assert completion.finish_reason == "length"
    for length in (16, 17):
        with pytest.raises(ValueError, match="max_model_len=16"):
            llm.generate(prompts_of([length])[0], SamplingParams(), use_tqdm=False)
    check_idle(llm)


def test_length_limits_of_the_engine(r_model):
    with pytest.raises(ValueError, match="max_model_len=513"):
        make_engine(r_model, max_model_len=513)
    llm = make_engine(r_model, max_model_len=512, num_blocks=128)
    prompt = prompts_of([508])[0]
    assert generate(llm, [prompt], max_tokens=9) == [hf_greedy(r_model, prompt, 4)]
    # 3,072 bytes a block, and one of them is the scratch block.
    by_memory = dict(num_blocks=None, kv_cache_memory_bytes=41 * 3072)
    llm = make_engine(r_model, **by_memory)
    assert (llm.model_runner.num_blocks, llm.max_model_len) == (40, 160)
    with pytest.raises(ValueError, match="kv_cache_memory_bytes"):
        make_engine(r_model, **by_memory, max_model_len=161)
    llm = make_engine(r_model, num_blocks=None, max_num_seqs=2)  # no more than can ever be used
    assert llm.model_runner.num_blocks == 2 * 128


@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("x"), MemoryError()])
def test_fault_in_mid_run(r_model, error):
    """After an interrupt the next call returned old requests, or hit half-written blocks."""
    prompts = prompts_of([9, 13, 20, 6])
    for call in (1, 2, 3, 6):
        llm = make_engine(r_model, max_num_batched_tokens=16)
        Fault(llm, error, call)
        with pytest.raises(type(error)):
            generate(llm, prompts, max_tokens=8)
        llm.model_runner.kv_cache.fill_(float("nan"))
        assert generate(llm, [prompts[1]], max_tokens=8) == [hf_greedy(r_model, prompts[1], 8)]
        check_idle(llm, r_model)
        llm.add_request(prompts[0])
        Fault(llm, error, 1)
        with pytest.raises(type(error)):
            llm.step()
        assert llm.step() == []
        check_idle(llm, r_model)


@pytest.mark.parametrize("call", [1, 2, 3, 5, 9])
def test_fault_inside_the_scheduler(r_model, call):
    """An interrupt while blocks were handed out left sequences that no queue knew any more."""
    llm = make_engine(r_model, num_blocks=24)
    manager, calls = llm.scheduler.block_manager, [0]
    allocate = manager.allocate

    def faulty(seq, end):
        calls[0] += 1
        if calls[0] == call:
            raise KeyboardInterrupt
        return allocate(seq, end)

    manager.allocate = faulty
    ids = [llm.add_request(prompt) for prompt in prompts_of([9, 13])]
    stream = llm.stream(prompts_of([5])[0], SamplingParams(temperature=0, max_tokens=30))
    with pytest.raises(KeyboardInterrupt):
        list(stream)
    assert not llm.has_unfinished_requests() and len(ids) == 2
    check_idle(llm, r_model)


def test_abort(r_model):
    """An abort left ghosts: before the first step, in mid-prefill, in decode, twice, of all."""
    llm = make_engine(r_model, max_num_batched_tokens=4)
    params = SamplingParams(temperature=0, max_tokens=8)
    for num_steps in (0, 1, 2, 4, 6):
        ids = [llm.add_request(p, params) for p in prompts_of([9, 13])]
        for _ in range(num_steps):
            llm.step()
        for request_id in (*ids, *ids, "unknown"):
            llm.abort(request_id)
        assert llm.step() == []
        check_idle(llm, r_model)
    prompts = prompts_of([9, 13])
    ids = [llm.add_request(p, params) for p in prompts]
    llm.step()
    llm.abort(ids[0])
    last = [llm.step() for _ in range(20)]
    ended = [output for outputs in last for output in outputs if output.finished]
    assert [o.outputs[0].token_ids for o in ended] == [hf_greedy(r_model, prompts[1], 8)]
    check_idle(llm)


def test_order_of_results(r_model):
    """Results came in the order in which they ended, and were lost in the second call."""
    llm = make_engine(r_model)
    prompts = prompts_of(range(3, 13))
    prompts += [prompts[2], prompts[0]]
    for _ in range(3):
        params = [SamplingParams(temperature=0, max_tokens=12 - i) for i in range(12)]
        outputs = llm.generate(prompts, params, use_tqdm=False)
        assert [o.prompt_token_ids for o in outputs] == prompts
        for i, output in enumerate(outputs):
            assert output.outputs[0].token_ids == hf_greedy(r_model, prompts[i], 12 - i)
            assert output.finished and output.outputs[0].finished()
        assert len({o.request_id for o in outputs}) == 12
        check_idle(llm)


def test_generate_beside_added_requests(r_model):
    """What another call finished on the way is not lost."""
    llm = make_engine(r_model)
    prompts = prompts_of([5, 6, 7])
    params = [SamplingParams(temperature=0, max_tokens=n) for n in (3, 30)]
    ids = [llm.add_request(p, q) for p, q in zip(prompts, params)]
    assert generate(llm, [prompts[2]], max_tokens=10) == [hf_greedy(r_model, prompts[2], 10)]
    assert llm.has_unfinished_requests()
    ended = {}
    while llm.has_unfinished_requests():
        for output in llm.step():
            if output.finished:
                ended[output.request_id] = output.outputs[0].token_ids
    assert ended == {ids[0]: hf_greedy(r_model, prompts[0], 3),
                     ids[1]: hf_greedy(r_model, prompts[1], 30)}
    check_idle(llm)


def test_single_prompts_and_dicts(llm, r_model):
    prompt = [3, 1, 4]
    params = SamplingParams(temperature=0, max_tokens=4)
    for call in (prompt, [prompt], {"prompt_token_ids": prompt}, [{"prompt_token_ids": prompt}]):
        output, = llm.generate(call, params, use_tqdm=False)
        assert output.outputs[0].token_ids == hf_greedy(r_model, prompt, 4)
        assert output.outputs[0].text == ""


@pytest.mark.parametrize("bad", [
    dict(block_size=0), dict(block_size=1.5), dict(num_blocks=0), dict(kv_cache_memory_bytes=0),
    dict(max_model_len=1), dict(max_num_seqs=0), dict(max_num_batched_tokens=0),
    dict(gpu_memory_utilization=0), dict(gpu_memory_utilization=1.1),
    dict(enable_prefix_caching="yes"), dict(enforce_eager=2), dict(seed="x"),
    dict(device="tpu"), dict(device="meta"), dict(dtype="int8"), dict(dtype=8), dict(dtype="half!"),
])
def test_bad_engine_arguments(r_model, bad):
    name = next(iter(bad))
    with pytest.raises(ValueError, match=name):
        LLM(r_model, **bad)


def test_unknown_arguments_and_models(r_model, tmp_path):
    with pytest.raises(TypeError, match="quantisation.*LLM takes model.*quantization"):
        LLM(r_model, quantisation="awq")
    for bad in ("/no/such/dir", "", 5, str(tmp_path)):
        with pytest.raises(ValueError, match="model="):
            LLM(bad)


def test_metrics(r_model):
    llm = make_engine(r_model, num_blocks=64)
    generate(llm, prompts_of([8, 9]), max_tokens=5)
    metrics = llm.metrics()
    assert (metrics.num_blocks, metrics.num_used_blocks) == (64, 0)
    assert (metrics.num_prompt_tokens, metrics.num_generated_tokens) == (17, 10)
    assert (metrics.num_steps, metrics.num_preemptions) == (5, 0)
    assert metrics.peak_used_blocks == 7 and metrics.num_cached_blocks == 6
    assert 0 < metrics.kv_waste < 0.5
