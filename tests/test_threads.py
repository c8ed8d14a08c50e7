"""Several threads in one engine: each call gets its own right results."""

from concurrent.futures import ThreadPoolExecutor

from models import make_engine
from oracles import check_idle, generate, hf_greedy, prompts_of

from nanopage import SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


def in_threads(function, items):
    with ThreadPoolExecutor(4) as pool:
        return list(pool.map(function, items))


def test_generate_from_four_threads(r_model):
    """Twelve of twelve answers were wrong, without any error."""
    llm = make_engine(r_model, num_blocks=24)
    prompts = prompts_of([5, 9, 6, 7] * 3)
    expected = [hf_greedy(r_model, p, 12) for p in prompts]
    assert in_threads(lambda p: generate(llm, [p], max_tokens=12)[0], prompts) == expected
    check_idle(llm, r_model)


def test_streams_and_steps_from_four_threads(r_model):
    llm = make_engine(r_model, num_blocks=24)
    prompts = prompts_of([5, 9, 6, 7] * 2)
    expected = [hf_greedy(r_model, p, 12) for p in prompts]

    def stream(prompt):
        return sum((piece.token_ids for piece in llm.stream(prompt, GREEDY)), [])

    assert in_threads(stream, prompts) == expected
    ended = {}

    def step(prompt):
        request_id = llm.add_request(prompt, GREEDY)
        aborted = llm.add_request(prompt, GREEDY)
        llm.abort(aborted)
        while llm.has_unfinished_requests():
            ended.update({o.request_id: o.outputs[0].token_ids for o in llm.step() if o.finished})
        return request_id

    ids = in_threads(step, prompts)
    assert [ended[request_id] for request_id in ids] == expected
    check_idle(llm, r_model)
