"""What users' scripts bring: vLLM's spellings and defaults, and the mistakes of newcomers."""

import json
import logging
import types
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
import torch
from models import byte_tokenizer, make_engine, make_model, make_table_model
from oracles import check_idle, generate, hf_greedy, prompts_of
from tqdm import tqdm

import nanopage
from nanopage import LLM, BeamSearchParams, SamplingParams, TextPrompt, TokensPrompt
from nanopage.arguments import CarriedEngineArguments, CarriedSamplingParams
from nanopage.config import choose_dtype
from nanopage.cpu import available_memory

TEMPLATE = ("{% for m in messages %}{{ m['role'][0] }}:{{ m['content'] }};{% endfor %}"
            "{% if tools %}{{ tools | length }} tools{% endif %}"
            "{% if enable_thinking is defined and not enable_thinking %}<no>{% endif %}"
            "{% if add_generation_prompt %}a:{% endif %}")


@pytest.fixture
def chatty(tmp_path):
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = TEMPLATE
    return make_engine(make_table_model(tmp_path, torch.eye(259), tokenizer=tokenizer))


def prompt_of(llm, content, **options):
    params = SamplingParams(temperature=0, max_tokens=1)
    messages = [{"role": "user", "content": content}]
    return llm.chat(messages, params, use_tqdm=False, **options)[0].prompt


def test_chat_content_in_parts(chatty):
    """Python's repr of the list of parts stood in the prompt."""
    part = {"type": "text", "text": "hello"}
    assert prompt_of(chatty, "hello") == prompt_of(chatty, [part]) == "u:hello;a:"
    assert prompt_of(chatty, [part, "there", part]) == "u:hello\nthere\nhello;a:"
    for bad in ([{"type": "image_url", "image_url": "x"}], [part, 5], [{"type": "text"}]):
        with pytest.raises(ValueError, match="content"):
            prompt_of(chatty, bad)


def test_arguments_of_the_chat_template(chatty):
    assert prompt_of(chatty, "x", chat_template_kwargs={"enable_thinking": False}) == "u:x;<no>a:"
    assert prompt_of(chatty, "x", tools=[{"type": "function"}]) == "u:x;1 toolsa:"
    assert prompt_of(chatty, "x", continue_final_message=True,
                     add_generation_prompt=False) == "u:x"
    with pytest.raises(ValueError, match="lora_request"):
        prompt_of(chatty, "x", lora_request=object())
    check_idle(chatty)


CARRIED = [(table, entry) for table in (CarriedEngineArguments, CarriedSamplingParams)
           for entry in fields(table)]


def test_arguments_that_scripts_carry_along_change_nothing(r_model):
    """All at once, at each of their neutral values."""
    tokens = hf_greedy(r_model, [1, 2, 3], 4)
    for place in (0, -1):
        engine, sampling = ({entry.name: entry.metadata["neutral"][place]
                             for table, entry in CARRIED if table is wanted}
                            for wanted in (CarriedEngineArguments, CarriedSamplingParams))
        llm = make_engine(r_model, **engine)
        params = SamplingParams(temperature=0, max_tokens=4, **sampling)
        assert llm.generate([[1, 2, 3]], params)[0].outputs[0].token_ids == tokens
        assert "penalty" not in repr(params)


@pytest.mark.parametrize("table, entry", CARRIED, ids=[entry.name for _, entry in CARRIED])
def test_what_such_an_argument_would_change_is_refused(r_model, table, entry):
    for value in ("other", 3, {"a": 1}):
        with pytest.raises(ValueError) as error:
            if table is CarriedEngineArguments:
                make_engine(r_model, **{entry.name: value})
            else:
                SamplingParams(**{entry.name: value})
        assert str(error.value).startswith(f"{entry.name}={value!r}: nanopage ")


def test_refusals_say_what_happens_instead(r_model):
    with pytest.raises(ValueError) as error:
        LLM(r_model, quantization="awq")
    assert str(error.value) == (
        "quantization='awq': nanopage computes in float32, bfloat16 or float16")


def test_vllms_name_for_the_number_of_blocks(r_model):
    assert LLM(r_model, num_gpu_blocks_override=7).model_runner.num_blocks == 7
    with pytest.raises(ValueError, match="num_gpu_blocks_override=0"):
        LLM(r_model, num_gpu_blocks_override=0)


def test_an_unknown_argument_is_told_what_exists(r_model):
    with pytest.raises(TypeError, match="blocksize.*LLM takes model, .*block_size"):
        LLM(r_model, blocksize=16)


def test_prompt_types(r_model):
    """vLLM's are dicts, and so are these."""
    llm = make_engine(r_model)
    params = SamplingParams(temperature=0, max_tokens=4)
    output, = llm.generate(TokensPrompt(prompt_token_ids=[1, 2, 3]), params)
    assert output.outputs[0].token_ids == hf_greedy(r_model, [1, 2, 3], 4)
    assert TextPrompt(prompt="a", cache_salt="b") == {"prompt": "a", "cache_salt": "b"}


def test_prompts_in_any_sized_sequence(r_model):
    llm = make_engine(r_model)
    prompts = prompts_of([5, 5])
    expected = [hf_greedy(r_model, p, 4) for p in prompts]
    for form in (np.array(prompts), tuple(map(tuple, prompts)), [np.array(p) for p in prompts]):
        assert generate(llm, form, max_tokens=4) == expected
    assert generate(llm, np.array(prompts[0]), max_tokens=4) == expected[:1]
    check_idle(llm)


def test_other_spellings_of_parameters(r_model):
    params = SamplingParams(seed=-1, logprobs=True, stop="a", stop_token_ids=(3,))
    assert (params.seed, params.logprobs, params.stop, params.stop_token_ids) == (
        None, 1, ["a"], [3])
    llm = make_engine(r_model, max_num_seqs=None, enable_prefix_caching=None, dtype="float")
    assert (llm.config.max_num_seqs, llm.config.dtype) == (256, torch.float32)
    assert llm.config.enable_prefix_caching is True
    assert make_engine(r_model, dtype="half").config.dtype == torch.float16


def test_default_sampling_params_are_the_models(tmp_path, caplog):
    path = make_model(tmp_path)
    file = Path(path) / "generation_config.json"
    file.write_text(json.dumps(dict(temperature=0.25, top_k=7, top_p=0.5, max_new_tokens=3,
                                    do_sample=True, repetition_penalty=1.2)))
    caplog.set_level(logging.WARNING, logger="nanopage")
    llm = make_engine(path)
    params = llm.get_default_sampling_params()
    assert (params.temperature, params.top_k, params.top_p, params.max_tokens) == (0.25, 7, 0.5, 3)
    assert "repetition_penalty=1.2" in caplog.text
    assert len(llm.generate([1, 2, 3], use_tqdm=False)[0].outputs[0].token_ids) == 3
    plain = make_engine(path, generation_config="vllm")
    assert plain.get_default_sampling_params() == SamplingParams()
    with pytest.raises(ValueError, match="generation_config='x'"):
        make_engine(path, generation_config="x")


def test_max_tokens_none_is_what_the_pool_holds(r_model):
    """With num_blocks alone, "as many as fit" was more than the whole pool could hold."""
    llm = make_engine(r_model, num_blocks=4)
    prompt = prompts_of([6])[0]
    params = SamplingParams(temperature=0, max_tokens=None)
    tokens = llm.generate(prompt, params, use_tqdm=False)[0].outputs[0].token_ids
    assert tokens == hf_greedy(r_model, prompt, 11)  # the last one needs no slot
    check_idle(llm)


def test_memory_is_what_the_container_allows(tmp_path):
    def write(name, text):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)

    write("proc/meminfo", "MemTotal: 9000 kB\nMemAvailable: 8000 kB\n")
    assert available_memory(tmp_path) == 8000 * 1024
    write("sys/fs/cgroup/memory.max", "max\n")
    write("sys/fs/cgroup/memory.current", "1000\n")
    write("sys/fs/cgroup/memory.stat", "anon 700\ninactive_file 300\n")
    assert available_memory(tmp_path) == 8000 * 1024
    write("sys/fs/cgroup/memory.max", "5000\n")
    assert available_memory(tmp_path) == 4300
    write("sys/fs/cgroup/memory/memory.limit_in_bytes", "2000\n")
    write("sys/fs/cgroup/memory/memory.usage_in_bytes", "500\n")
    write("sys/fs/cgroup/memory/memory.stat", "cache 5\n")
    assert available_memory(tmp_path) == 1500


def test_readmission_is_no_new_work(r_model):
    """Prompts that share nothing had hits, once they came back from preemption."""
    llm = make_engine(r_model, num_blocks=8)
    generate(llm, prompts_of([8] * 8), max_tokens=12)
    metrics = llm.metrics()
    assert metrics.num_preemptions > 0
    assert (metrics.prefix_hit_tokens, metrics.prefix_queried_tokens) == (0, 64)


def test_reset_prefix_cache(r_model):
    llm = make_engine(r_model)
    prompt = prompts_of([9])[0]
    generate(llm, [prompt], max_tokens=2)
    assert llm.reset_prefix_cache() and llm.metrics().num_cached_blocks == 0
    output = llm.generate(prompt, SamplingParams(temperature=0, max_tokens=2), use_tqdm=False)[0]
    assert output.num_cached_tokens == 0
    check_idle(llm, r_model)


def test_repr_is_one_line(r_model):
    text = repr(make_engine(r_model))
    assert "\n" not in text
    for part in ("cpu", "float32", "attention cpu", "256 blocks of 4", "512"):
        assert part in text


def test_the_bar_moves_with_every_step(r_model):
    """For one prompt it stood still until the end."""
    shown = []

    class Bar(tqdm):
        def update(self, n=1):
            shown.append(self.postfix)
            return super().update(n)

    llm = make_engine(r_model)
    params = SamplingParams(temperature=0, max_tokens=6)
    llm.generate([[1, 2, 3]], params, use_tqdm=Bar)
    assert len(shown) == 6 and all("output" in text for text in shown)


def test_a_model_that_cannot_be_had_is_one_line(monkeypatch):
    """It was 91 lines of somebody else's traceback."""
    def refuse(*args, **kwargs):
        raise OSError("no network\nand more")

    monkeypatch.setattr("nanopage.config.snapshot_download", refuse)
    with pytest.raises(ValueError, match="model='no/such'.*hub.*no network") as error:
        make_engine("no/such")
    assert "\n" not in str(error.value) and error.value.__cause__ is None


def test_what_scripts_read(r_model):
    output = make_engine(r_model).generate([1, 2], SamplingParams(max_tokens=1), use_tqdm=False)[0]
    assert output.prompt_logprobs is None and output.metrics is None
    project = (Path(__file__).parent.parent / "pyproject.toml").read_text()
    assert f'version = "{nanopage.__version__}"' in project


@pytest.mark.parametrize("stored, computed", [
    (None, torch.bfloat16), (torch.float32, torch.bfloat16), (torch.float16, torch.float16)])
def test_dtype_on_a_gpu(stored, computed):
    """As in vLLM: a float32 checkpoint is computed in bfloat16."""
    config = types.SimpleNamespace(dtype=stored)
    assert choose_dtype("auto", config, torch.device("cuda")) is computed


def test_which_of_many_prompts_is_wrong(r_model):
    llm = make_engine(r_model, max_model_len=16)
    with pytest.raises(ValueError, match=r"prompts\[2\]: prompt has 20 tokens.*max_model_len=16"):
        generate(llm, [[1], [2], [3] * 20, [4]])
    with pytest.raises(ValueError, match="sampling_params={'temperature': 0}"):
        llm.generate([[1]], {"temperature": 0}, use_tqdm=False)
    check_idle(llm, r_model)


def test_what_tokenizers_return(chatty):
    """Arrays, tensors; but the mapping that a tokenizer returns was read as two prompts."""
    params = SamplingParams(temperature=0, max_tokens=2)
    expected = chatty.generate([[97, 98]], params)[0].outputs[0].token_ids
    encoded = chatty.get_tokenizer()("ab", add_special_tokens=False)
    ids = encoded["input_ids"]
    for prompt in (torch.tensor(ids), {"prompt_token_ids": torch.tensor(ids)},
                   torch.tensor([ids, ids]), np.array([ids, ids])):
        for output in chatty.generate(prompt, params):
            assert output.outputs[0].token_ids == expected
    with pytest.raises(ValueError, match="prompt_token_ids"):
        chatty.generate(encoded, params)
    check_idle(chatty)


def test_other_spellings(r_model):
    config = {"model": "[ngram]", "num_speculative_tokens": 2, "prompt_lookup_max": 3}
    llm = make_engine(r_model, speculative_config=config, seed=None)
    beams = BeamSearchParams(beam_width=2, max_tokens=3, temperature=0.0)
    assert len(llm.beam_search([[1, 2, 3]], beams, use_tqdm=False)[0].outputs) == 2
    with pytest.raises(ValueError, match="model='eagle'"):
        make_engine(r_model, speculative_config={**config, "model": "eagle"})
    with pytest.raises(ValueError, match="sampling_params=.*a SamplingParams, or a list"):
        llm.generate([[1, 2, 3]], {"temperature": 0})


def test_a_long_value_does_not_fill_the_screen(chatty):
    with pytest.raises(ValueError) as error:
        chatty.generate([{"prompt_token_ids": [1] * 9, "images": [0] * 9000}])
    assert len(str(error.value)) < 400


def test_numpys_numbers_are_python_numbers(r_model):
    """They overflowed in the middle of a step, which ended the requests of others."""
    llm = make_engine(r_model, seed=np.int64(1), max_num_seqs=np.int8(100))
    for seed in (5, np.int64(5)):
        params = SamplingParams(seed=seed, max_tokens=np.int8(4), top_k=np.int8(100))
        outputs = [llm.generate([[1, 2]], params)[0].outputs[0].token_ids for _ in range(2)]
        assert outputs[0] == outputs[1] and type(params.seed) is int
    assert len(llm.beam_search([[1, 2]], BeamSearchParams(np.int8(100), 2))[0].outputs) == 100


def test_limits_that_a_step_would_have_met(r_model):
    llm = make_engine(r_model)
    for name, value in (("temperature", 1e39), ("temperature", 10**400)):
        with pytest.raises(ValueError, match=name):
            SamplingParams(**{name: value})
    with pytest.raises(ValueError, match="length_penalty"):
        BeamSearchParams(beam_width=1, max_tokens=1900, length_penalty=100)
    for call in (llm.stream, llm.add_request, llm.generate):
        with pytest.raises(ValueError, match="sampling_params={}"):
            call([1, 2], {})
    with pytest.raises(ValueError, match="stop_token_ids"):
        SamplingParams(stop_token_ids=np.array([1, 2]))
    assert llm.generate({"prompt_token_ids": [1], "cache_salt": "\ud800"})[0].finished
    check_idle(llm)


def test_two_names_of_one_argument(r_model):
    assert LLM(r_model, num_blocks=7, num_gpu_blocks_override=7).model_runner.num_blocks == 7
    for options in (dict(num_blocks=64, num_gpu_blocks_override=3),
                    dict(num_gpu_blocks_override=2**40)):
        with pytest.raises(ValueError, match="num_gpu_blocks_override"):
            LLM(r_model, **options)


def test_an_end_token_that_the_model_cannot_say(tmp_path):
    """It was barred until min_tokens, by an index beyond the logits."""
    path = make_model(tmp_path / "model")
    config = json.loads((Path(path) / "config.json").read_text())
    (Path(path) / "config.json").write_text(json.dumps({**config, "eos_token_id": [200, 3]}))
    llm = make_engine(path)
    output, = llm.generate([[1]], SamplingParams(min_tokens=2, max_tokens=3))
    assert output.finished and llm.end_token_ids == {3}


@pytest.mark.parametrize("changes, named", [
    (dict(architectures=["GPT2LMHeadModel"], model_type="gpt2"), "architectures"),
    (dict(tokenizer="/no/such/tokenizer"), "tokenizer='/no/such"),
    (dict(device="cpu:00"), "device")])
def test_a_refusal_names_its_argument(tmp_path, changes, named):
    path = make_model(tmp_path / "model")
    options = {name: changes[name] for name in ("tokenizer", "device") if name in changes}
    if not options:
        config = json.loads((Path(path) / "config.json").read_text())
        (Path(path) / "config.json").write_text(json.dumps({**config, **changes}))
    with pytest.raises(ValueError, match=named):
        LLM(path, **options)


def test_a_limit_of_the_container_that_cannot_be_read(tmp_path):
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemAvailable: 8000 kB\n")
    (tmp_path / "sys/fs/cgroup").mkdir(parents=True)
    (tmp_path / "sys/fs/cgroup/memory.max").write_bytes(b"\xff\xfe")
    assert available_memory(tmp_path) == 8000 * 1024
