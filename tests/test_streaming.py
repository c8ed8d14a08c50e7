"""Token by token: pieces that join to the whole, beside whatever else runs."""

import pytest
from models import make_engine
from oracles import check_idle, generate, hf_greedy, prompts_of

from nanopage import SamplingParams


def test_stream_pieces_join_to_the_whole(text_model, script):
    """A streamed piece ended in half a character, or showed part of a stop string."""
    llm = make_engine(text_model)
    for text in ("hello world", " é😀漢!x", "aéaéaéb"):
        script(text)
        for stop in (None, ["lo w"], ["aéb", "漢!"], ["zz", "o"]):
            for include in (False, True):
                for max_tokens in range(1, 17):
                    params = SamplingParams(temperature=0, max_tokens=max_tokens, stop=stop,
                                            include_stop_str_in_output=include)
                    whole = llm.generate("p", params, use_tqdm=False)[0].outputs[0]
                    pieces = list(llm.stream("p", params))
                    assert "".join(piece.text for piece in pieces) == whole.text
                    assert sum((p.token_ids for p in pieces), []) == whole.token_ids
                    assert [p.finish_reason for p in pieces[:-1]] == [None] * (len(pieces) - 1)
                    assert (pieces[-1].finish_reason, pieces[-1].stop_reason) == (
                        whole.finish_reason, whole.stop_reason)
                    assert not any("\ufffd" in piece.text for piece in pieces[:-1])
    check_idle(llm)


def test_stream_comes_token_by_token(r_model):
    llm = make_engine(r_model)
    prompt = prompts_of([9])[0]
    stream = llm.stream(prompt, SamplingParams(temperature=0, max_tokens=6, logprobs=1))
    pieces = [next(stream) for _ in range(3)]
    assert [len(p.token_ids) for p in pieces] == [1, 1, 1] and llm.num_free_blocks() < 256
    assert [len(p.logprobs) for p in pieces] == [1, 1, 1]
    stream.close()  # leaving the loop aborts the request
    check_idle(llm, r_model)
    branches_of = {}
    for piece in llm.stream(prompt, SamplingParams(n=3, seed=5, max_tokens=6)):
        branches_of.setdefault(piece.index, []).extend(piece.token_ids)
    whole = llm.generate(prompt, SamplingParams(n=3, seed=5, max_tokens=6), use_tqdm=False)[0]
    assert branches_of == {c.index: c.token_ids for c in whole.outputs}
    with pytest.raises(ValueError):
        llm.stream([])  # at the call, not at the first piece
    check_idle(llm)


def test_streams_side_by_side(r_model):
    """Two streams, a generate and added requests share the loop; each finds its own."""
    llm = make_engine(r_model, num_blocks=24)
    prompts = prompts_of([5, 9, 6, 7])
    params = SamplingParams(temperature=0, max_tokens=12)
    request_id = llm.add_request(prompts[2], params)
    streams = [llm.stream(prompt, params) for prompt in prompts[:2]]
    got = [[], []]
    for _ in range(3):
        for tokens, stream in zip(got, streams):
            tokens += next(stream).token_ids
    assert generate(llm, [prompts[3]], max_tokens=12) == [hf_greedy(r_model, prompts[3], 12)]
    for tokens, stream in zip(got, streams):
        tokens += sum((piece.token_ids for piece in stream), [])
    assert got == [hf_greedy(r_model, p, 12) for p in prompts[:2]]
    outputs = []
    while llm.has_unfinished_requests():
        outputs += llm.step()
    assert outputs[-1].request_id == request_id
    assert outputs[-1].outputs[0].token_ids == hf_greedy(r_model, prompts[2], 12)
    check_idle(llm)
