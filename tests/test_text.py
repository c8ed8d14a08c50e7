"""Stop strings, characters of several tokens, end tokens, chat templates."""

import json
import random
from pathlib import Path

import pytest
import torch
from models import (
    byte_fallback_tokenizer,
    byte_tokenizer,
    make_engine,
    make_table_model,
)
from oracles import check_idle

from nanopage import SamplingParams
from nanopage.text import Detokenizer

END, EOS = 258, 257  # <|end|>, </s>


@pytest.fixture(scope="module")
def llm(text_model):
    return make_engine(text_model)


def complete(llm, prompt="say:", **params):
    params = SamplingParams(**{**dict(temperature=0, max_tokens=32), **params})
    completion = llm.generate(prompt, params, use_tqdm=False)[0].outputs[0]
    check_idle(llm)
    return completion


def test_stop_string_over_several_tokens(llm, script):
    """A stop string was only seen where a token ends, and stayed in the text."""
    script("hello world")
    completion = complete(llm, stop=["lo w"])
    assert (completion.text, completion.finish_reason, completion.stop_reason) == (
        "hel", "stop", "lo w")
    assert bytes(completion.token_ids).decode() == "hello w"
    assert complete(llm, stop="lo w", include_stop_str_in_output=True).text == "hello w"
    assert complete(llm, prompt="lo w", stop=["lo w"]).text == "hel"
    assert complete(llm, stop=["zz", "lo"]).text == "hel"
    assert complete(llm, stop=["o", "lo w"]).text == "hell"
    assert complete(llm, stop="hello world", max_tokens=11).text == ""
    length = complete(llm, stop=["zz"], max_tokens=11)
    assert (length.text, length.finish_reason) == ("hello world", "length")


def test_the_stop_token_has_no_part_in_the_text(llm, script):
    """As in vLLM: the text of the token by which a completion ends is left out."""
    script("hello world")
    completion = complete(llm, stop_token_ids=[ord("o")])
    assert (completion.text, completion.finish_reason, completion.stop_reason) == (
        "hell", "stop", ord("o"))
    assert bytes(completion.token_ids).decode() == "hello"
    assert complete(llm, stop_token_ids=[ord("o")], include_stop_str_in_output=True).text == "hello"
    pieces = llm.stream("p", SamplingParams(temperature=0, stop_token_ids=[ord("o")]))
    assert "".join(piece.text for piece in pieces) == "hell"


def test_stop_in_the_last_held_back_characters(llm, script):
    """A token that ends in half a character hides the stop string before it until the end."""
    script(b"ab" + "é".encode()[:1])
    assert complete(llm, stop="b", max_tokens=3).text == "a"
    assert complete(llm, stop="x", max_tokens=3).text == "ab\ufffd"


@pytest.mark.parametrize("max_tokens", range(1, 14))
def test_characters_of_several_tokens(llm, script, max_tokens):
    """Decoded token by token, accents and emoji became replacement characters."""
    script(" é😀漢!x")
    completion = complete(llm, max_tokens=max_tokens)
    assert completion.text == llm.tokenizer.decode(completion.token_ids)
    assert len(completion.token_ids) == max_tokens


def save(path, **ends):
    """A text model whose end tokens are named in this and that file."""
    tokenizer = byte_tokenizer()
    make_table_model(path, torch.eye(259), tokenizer=tokenizer)
    config = json.loads((Path(path) / "config.json").read_text())
    config["eos_token_id"] = ends.get("config")
    (Path(path) / "config.json").write_text(json.dumps(config))
    generation = Path(path) / "generation_config.json"
    if "generation" in ends:
        generation.write_text(json.dumps({"eos_token_id": ends["generation"]}))
    else:
        generation.unlink(missing_ok=True)
    return make_engine(str(path))


@pytest.mark.parametrize("ends, stops", [
    (dict(generation=[EOS, END]), True), (dict(generation=END), True), (dict(config=END), True),
    (dict(generation=EOS, config=END), True), (dict(config=[EOS, END]), True),
    (dict(generation=EOS, config=EOS), False), (dict(), False),
])
def test_end_tokens_are_a_union(tmp_path, script, ends, stops):
    """Chat models ran on, since only one of three files was asked for end tokens."""
    script([*b"abcd", END, *b"efghijklmnop"])
    llm = save(tmp_path, **ends)
    completion = complete(llm, max_tokens=12)
    assert len(completion.token_ids) == (5 if stops else 12)
    assert completion.text == ("abcd" if stops else "abcdefghijk")  # special tokens are left out
    assert completion.finish_reason == ("stop" if stops else "length")
    assert completion.stop_reason is None
    assert len(complete(llm, max_tokens=12, ignore_eos=True).token_ids) == 12
    options = dict(max_tokens=5, skip_special_tokens=False)
    is_left_out = complete(llm, **options).finish_reason == "stop"
    assert complete(llm, **options).text == ("abcd" if is_left_out else "abcd<|end|>")
    assert complete(llm, **options, include_stop_str_in_output=True).text == "abcd<|end|>"


def test_tokenizer_end_token(tmp_path, script):
    script([*b"ab", EOS, *b"cd"])
    assert complete(save(tmp_path)).text == "ab"


def test_min_tokens(tmp_path):
    """min_tokens was ignored by the further end tokens, or by stop strings."""
    table = torch.zeros(259, 259)
    table[:, END] = 9.0
    table[:, ord("a")] = 5.0
    path = make_table_model(tmp_path, table, tokenizer=byte_tokenizer(), eos_token_id=[EOS, END])
    llm = make_engine(path)
    completion = complete(llm, min_tokens=8, logprobs=1)
    assert completion.text == "a" * 8 and completion.token_ids[-1] == END
    assert completion.logprobs[0][END].logprob > completion.logprobs[0][ord("a")].logprob  # raw
    assert complete(llm, min_tokens=4, stop_token_ids=[ord("a")], seed=3,
                    temperature=1.0).token_ids.count(ord("a")) <= 1
    assert complete(llm, ignore_eos=True, min_tokens=3, max_tokens=4).token_ids == [END] * 4
    completion = complete(llm, min_tokens=8, stop="aa")
    assert len(completion.token_ids) == 8 and completion.finish_reason == "stop"


def test_special_tokens_of_prompts(tmp_path, script):
    """The start token was doubled by chat, or missing: strings get it, ids do not, chat once."""
    from tokenizers.processors import TemplateProcessing
    tokenizer = byte_tokenizer()
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 256)])
    tokenizer.chat_template = ("<s>{% for m in messages %}{{ m['role'][0] }}:{{ m['content'] }}"
                               "{% endfor %}{% if add_generation_prompt %}a:{% endif %}")
    path = make_table_model(tmp_path, torch.eye(259), tokenizer=tokenizer)
    llm = make_engine(path)
    script("ok")
    params = SamplingParams(temperature=0, max_tokens=2)
    outputs = llm.generate(["hi", {"prompt": "hi"}, [104, 105]], [params] * 3, use_tqdm=False)
    assert [o.prompt_token_ids for o in outputs] == [[256, 104, 105]] * 2 + [[104, 105]]
    assert [o.prompt for o in outputs] == ["hi", "hi", None]
    message = {"role": "user", "content": "hi"}
    output = llm.chat([message], params, use_tqdm=False)[0]
    assert output.prompt_token_ids == [256, *b"u:hia:"] and output.outputs[0].text == "ok"
    assert len(llm.chat([[message], [message, message]], params, use_tqdm=False)) == 2
    output = llm.chat([message], params, use_tqdm=False, add_generation_prompt=False)[0]
    assert output.prompt_token_ids == [256, *b"u:hi"]
    for bad in ([], [[]], "hi", [5]):
        with pytest.raises(ValueError, match="messages"):
            llm.chat(bad, params, use_tqdm=False)


def test_decoded_logprobs(llm, script):
    script("ab")
    completion = complete(llm, max_tokens=2, logprobs=1)
    assert [entry[t].decoded_token for t, entry in zip(completion.token_ids, completion.logprobs)
            ] == ["a", "b"]


def test_decoded_tokens_join_to_the_text(llm, script):
    """A token was decoded alone: pieces of a character then show as replacement characters."""
    script(" é😀漢!x")
    completion = complete(llm, max_tokens=12, logprobs=2)
    entries = zip(completion.token_ids, completion.logprobs)
    decoded = [entry[token_id].decoded_token for token_id, entry in entries]
    assert "".join(decoded) == completion.text == " é😀漢!x"
    assert [next(iter(entry)) for entry in completion.logprobs] == completion.token_ids


def test_a_token_is_decoded_in_its_place():
    """Decoded alone, a word loses its leading space, and two different tokens look alike."""
    tokenizer = byte_fallback_tokenizer()
    ids = tokenizer.convert_tokens_to_ids
    detokenizer = Detokenizer(tokenizer, True)
    detokenizer.read([ids("b")])
    assert detokenizer.peek(ids("▁true")) == " true" and detokenizer.peek(ids("true")) == "true"
    assert detokenizer.peek(ids("<0x0A>")) == "\n" and detokenizer.peek(ids("<0xE6>")) == ""
    assert detokenizer.peek(ids("</s>")) == "</s>"
    detokenizer.read([ids(name) for name in ("b", "<0xE6>", "<0xBC>")])
    assert detokenizer.text == "b" and detokenizer.peek(ids("<0xA2>")) == "漢"


def test_a_newline_that_is_a_byte_is_complete_at_once(tmp_path, script):
    """It waited for the next token, to prove a character complete: stops came late or never."""
    tokenizer = byte_fallback_tokenizer()
    path = make_table_model(tmp_path, torch.eye(271), vocab_size=271, tokenizer=tokenizer)
    llm = make_engine(path)
    word, newline = tokenizer.convert_tokens_to_ids(["▁a", "<0x0A>"])
    script([word] + [newline] * 30)
    for stop, num_tokens in (("\n\n", 3), ("\n", 2)):
        completion = complete(llm, prompt=[5, 6], stop=stop)
        assert (len(completion.token_ids), completion.text) == (num_tokens, "a")
    params = SamplingParams(temperature=0, max_tokens=5)
    assert [piece.text for piece in llm.stream([5, 6], params)] == ["a"] + ["\n"] * 4
    shown = SamplingParams(temperature=0, max_tokens=5, stop="\n\n\n\n\n\n",
                           include_stop_str_in_output=True)  # then nothing is held back
    assert [piece.text for piece in llm.stream([5, 6], shown)] == ["a"] + ["\n"] * 4


@pytest.mark.parametrize("make, byte", [(byte_tokenizer, 0x80), (byte_fallback_tokenizer, 0x83)])
def test_bytes_that_never_become_a_character(make, byte):
    """They were held back for ever, and decoded again with each new one: quadratic."""
    tokenizer = make()
    detokenizer, num_decoded = Detokenizer(tokenizer, True), 0
    decode = detokenizer.decode

    def counted(ids):
        nonlocal num_decoded
        num_decoded += len(ids)
        return decode(ids)

    detokenizer.decode = counted
    ids = []
    for i in range(2000):
        ids.append(byte)
        detokenizer.read(ids)
        assert i - 2 <= len(detokenizer.text) <= i + 1
    assert num_decoded < 100 * len(ids)
    detokenizer.finish(ids)
    assert detokenizer.text == "\ufffd" * 2000


def test_hostile_text(llm, script):
    """Lone surrogates, text that spells special tokens, messages without content."""
    script("ok")
    params = SamplingParams(temperature=0, max_tokens=2)
    for bad in ("\ud800", "a\udfffb"):
        with pytest.raises(ValueError, match="Unicode"):
            llm.generate(bad, params, use_tqdm=False)
    output = llm.generate("<|end|>\x00\u202e", params, use_tqdm=False)[0]
    assert output.prompt_token_ids[0] == END and output.outputs[0].text == "ok"
    with pytest.raises(ValueError):
        llm.chat([{"role": "user", "content": "hi"}], params, use_tqdm=False)  # no template
    check_idle(llm)


def is_valid(tokenizer, ids):
    """Whether every run of byte tokens is whole characters (tokens 259 and up are words)."""
    names = [tokenizer.convert_ids_to_tokens(token_id) for token_id in ids]
    runs = "".join(name[3:5] if name.startswith("<0x") else " " for name in names if name).split()
    try:
        return all(bytes.fromhex(run).decode() for run in runs)
    except UnicodeDecodeError:
        return False


@pytest.mark.parametrize("make", [byte_tokenizer, byte_fallback_tokenizer])
def test_any_ids_decode_piece_by_piece(make):
    """Whatever the ids, valid bytes or not: pieces only grow, lag little, and end as the whole.

    Only where a run of byte tokens is partly valid may the whole differ: such a tokenizer then
    reads the valid part as invalid as well, but it has been shown.
    """
    tokenizer, generator = make(), random.Random(0)
    for attempt in range(2000):
        ids = [generator.randrange(3, 280) for _ in range(generator.randint(1, 40))]
        if attempt % 2:
            ids = [generator.choice([*"😀é".encode(), 259, 260, 263, 268]) + 3 * (i < 255)
                   for i in ids]
        if attempt % 4 == 3:
            ids = [3 + byte for byte in generator.choice(["é😀漢", "\n\n", "a漢\n"]).encode()] * 9
        if make is byte_tokenizer:
            ids = [i % 259 for i in ids]
        whole = tokenizer.decode(ids, skip_special_tokens=True)
        stays_as_it_is = make is byte_tokenizer or is_valid(tokenizer, ids)
        detokenizer, shown = Detokenizer(tokenizer, True), ""
        for i in range(len(ids)):
            detokenizer.read(ids[:i + 1])
            so_far = tokenizer.decode(ids[:i + 1], skip_special_tokens=True)
            assert detokenizer.text.startswith(shown)
            if make is byte_tokenizer:
                assert len(so_far) - len(detokenizer.text) <= 3
            elif is_valid(tokenizer, ids[:i + 1]):
                assert detokenizer.text == so_far
            assert whole.startswith(detokenizer.text) or not stays_as_it_is
            shown = detokenizer.text
        detokenizer.finish(ids)
        assert detokenizer.text == whole or not stays_as_it_is
        assert detokenizer.text.startswith(shown)
