"""Every argument of every call gets all kinds of nonsense: an error that names it, or an answer."""

import math
from dataclasses import fields

import pytest
from models import make_engine
from oracles import check_idle, generate, hf_greedy

from nanopage import LLM, BeamSearchParams, SamplingParams
from nanopage.config import EngineConfig

HOSTILE = [None, True, -1, 0, 1, 1.5, 2**70, -2**70, 1e308, math.inf, -math.inf, math.nan, "", "x",
           b"x", [], [None], [-1], [""], {}, {"x": 1}, object()]
PROMPT = [3, 1, 4]


@pytest.fixture(scope="module")
def llm(r_model):
    return make_engine(r_model, max_model_len=64)


def names(error, name):
    return name in str(error)


@pytest.mark.parametrize("name", [field.name for field in fields(SamplingParams)])
def test_sampling_params(llm, r_model, name):
    for value in HOSTILE:
        try:
            params = SamplingParams(**{"max_tokens": 2, name: value})
            output, = llm.generate(PROMPT, params, use_tqdm=False)
        except ValueError as error:
            assert names(error, name), (value, error)
        else:
            assert output.finished and len(output.outputs) == params.n
    check_idle(llm, r_model)


@pytest.mark.parametrize("name", [field.name for field in fields(BeamSearchParams)])
def test_beam_search_params(llm, r_model, name):
    for value in HOSTILE:
        try:
            params = BeamSearchParams(**{"beam_width": 2, "max_tokens": 2, name: value})
            output, = llm.beam_search(PROMPT, params)
        except ValueError as error:
            assert names(error, name), (value, error)
        else:
            assert len(output.outputs) == params.beam_width
    check_idle(llm, r_model)


@pytest.mark.parametrize("name", [field.name for field in fields(EngineConfig)])
def test_engine_arguments(r_model, name):
    for value in HOSTILE:
        if name == "tokenizer" and value == "x":
            continue  # a name that a hub might have
        options = {"num_blocks": 64, "block_size": 4, "max_num_batched_tokens": 64, name: value}
        try:
            llm = LLM(r_model, device=options.pop("device", "cpu"), **options)
            token_ids = generate(llm, [PROMPT], max_tokens=3)
        except ValueError as error:
            assert names(error, name), (value, error)
        else:
            num_tokens = min(3, llm.max_model_len - len(PROMPT))  # a small pool leaves fewer
            assert token_ids == [hf_greedy(r_model, PROMPT, num_tokens)]
            check_idle(llm)


@pytest.mark.parametrize("value", HOSTILE, ids=repr)
def test_arguments_of_calls(llm, r_model, value):
    params = SamplingParams(temperature=0, max_tokens=3)
    expected = hf_greedy(r_model, PROMPT, 3)
    for name, arguments in (("use_tqdm", dict(use_tqdm=value)), ("priority", dict(priority=value)),
                            ("priority", dict(priority=[value])),
                            ("sampling_params", dict(sampling_params=value)),
                            ("sampling_params", dict(sampling_params=[value]))):
        arguments = {"use_tqdm": False, "sampling_params": params, **arguments}
        try:
            output, = llm.generate(PROMPT, **arguments)
        except ValueError as error:
            assert names(error, name), error
        else:
            if arguments["sampling_params"] is params:
                assert output.outputs[0].token_ids == expected
    try:
        llm.abort(llm.add_request(PROMPT, params, priority=value))
    except ValueError as error:
        assert names(error, "priority"), error
    with pytest.raises(ValueError, match="params"):
        llm.beam_search(PROMPT, value)
    llm.abort(value)
    check_idle(llm, r_model)


@pytest.mark.parametrize("value", HOSTILE, ids=repr)
def test_chat(text_model, value):
    llm = make_engine(text_model)
    template = "{% for message in messages %}{{ message['content'] + '\n' }}{% endfor %}"
    message = {"role": "user", "content": "hi"}
    params = SamplingParams(temperature=0, max_tokens=2)
    for name, arguments in (
            ("message", dict(messages=value)), ("message", dict(messages=[value])),
            ("message", dict(messages=[message, value])), ("message", dict(messages=[[value]])),
            ("role", dict(messages=[{**message, "role": value}])),
            ("content", dict(messages=[{**message, "content": value}])),
            ("chat_template", dict(chat_template=value)),
            ("add_generation_prompt", dict(add_generation_prompt=value)),
            ("use_tqdm", dict(use_tqdm=value))):
        arguments = {"messages": [message], "sampling_params": params, "use_tqdm": False,
                     "chat_template": template, **arguments}
        try:
            outputs = llm.chat(**arguments)
        except ValueError as error:  # an empty template writes an empty prompt
            assert names(error, name) or names(error, "prompt has 0 tokens"), error
        else:
            assert all(output.finished for output in outputs)
    check_idle(llm)
