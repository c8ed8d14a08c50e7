"""Scripts as users of vLLM's offline API write them, with only the import changed, run as they are.

They carry along what such scripts carry along, whether or not it means anything to this engine.
"""

import re
import runpy
import sys
from ast import literal_eval
from pathlib import Path

import pytest
import torch
from models import byte_tokenizer, make_model, make_table_model
from oracles import hf_greedy
from transformers import AutoModelForCausalLM

SCRIPTS = Path(__file__).parent / "scripts"
TEMPLATE = ("{% for m in messages %}<s>{{ m['role'] }}: {{ m['content'] }}<|end|>{% endfor %}"
            "{% if add_generation_prompt %}<s>assistant: {% endif %}"
            "{% if enable_thinking is defined and not enable_thinking %}(quiet) {% endif %}")


@pytest.fixture(scope="module")
def talker(tmp_path_factory):
    """A random model with the byte tokenizer that, when greedy, writes nothing but ASCII."""
    path = make_model(tmp_path_factory.mktemp("talker"), vocab_size=259, initializer_range=0.2,
                      max_position_embeddings=2048)
    model = AutoModelForCausalLM.from_pretrained(path)
    with torch.no_grad():
        model.lm_head.weight[torch.tensor([not 32 <= i < 127 for i in range(259)])] = 0
    model.save_pretrained(path)
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def repeater(tmp_path_factory):
    """A model that writes abcdefghabcdefgh and so on."""
    table = torch.zeros(259, 259)
    table[:, ord("a")] = 1
    for i, letter in enumerate(b"abcdefgh"):
        table[letter] = torch.eye(259)[ord("a") + (i + 1) % 8]
    return make_table_model(tmp_path_factory.mktemp("repeater"), table,
                            tokenizer=byte_tokenizer())


@pytest.fixture
def run(talker, monkeypatch, capsys):
    """run(name, model): what the script prints."""

    def run_script(name, model=talker):
        script = SCRIPTS / f"{name}.py"
        monkeypatch.setattr(sys, "argv", [str(script), model])
        capsys.readouterr()
        runpy.run_path(str(script), run_name="__main__")
        return capsys.readouterr().out

    return run_script


def greedy(path, prompt, num_tokens):
    """The text with which transformers continues this one."""
    return bytes(hf_greedy(path, byte_tokenizer().encode(prompt), num_tokens)).decode()


def pairs(printed, pattern):
    """[(prompt, text)] of the lines that print both with their quotes."""
    return [tuple(map(literal_eval, found)) for found in re.findall(pattern, printed)]


def test_basic(run, talker):
    printed = run("basic")
    found = pairs(printed, r"Prompt: (.*)\nCompletion: (.*)\nEnded by: length, 24 tokens\n")
    assert [prompt for prompt, _ in found] == [
        "The old lighthouse keeper said", "In the year 1900", "My favourite recipe begins with",
        "Between the two rivers"]
    for prompt, text in found:
        assert text == greedy(talker, prompt, 24)


def test_chat(run, talker):
    printed = run("chat")
    found = {title: pairs(printed, rf"{title} prompt: (.*)\n{title} answer: (.*)\n")
             for title in ("One", "Many", "Quiet", "Hand", "Next")}
    assert [len(answers) for answers in found.values()] == [1, 2, 1, 1, 1]
    for prompt, text in sum(found.values(), []):
        assert text == greedy(talker, prompt, 16)
    asked = ("<s>system: You are a gardener. Answer in one sentence.<|end|>"
             "<s>user: When do I sow carrots?<|end|><s>assistant: ")
    (prompt, answer), = found["One"]
    assert prompt == asked and found["Many"][0] == (prompt, answer)
    assert "tomatoes" in found["Many"][1][0]
    assert found["Quiet"] == found["Hand"] and found["Quiet"][0][0] == asked + "(quiet) "
    assert found["Next"][0][0] == (
        f"{asked}{answer}<|end|><s>user: And radishes?<|end|><s>assistant: ")


def test_batch_of_a_hundred(run, talker):
    printed = run("batch")
    found = pairs(printed, r"\d+: (.*) -> (.*)\n")
    assert len({prompt for prompt, _ in found}) == len(found) == 100
    assert [len(text) for _, text in found] == [4 + i % 9 for i in range(100)]
    for prompt, text in found[::9]:
        assert text == greedy(talker, prompt, len(text))
    num_in, num_out = (sum(map(len, column)) for column in zip(*found))
    assert f"100 requests, {num_in} tokens in, {num_out} tokens out\n" in printed
    assert re.search(r"Throughput: [\d.]+ requests/s, [\d.]+ tokens/s\n", printed)


def test_prefix_caching(run, talker):
    printed = run("prefix_caching")
    found = re.findall(r"(.*): (\d+) of (\d+) prompt tokens cached, [\d.]+ s\n", printed)
    assert [title for title, *_ in found] == ["off", "first pass", "second pass", "after a reset"]
    off, first, second, reset = (int(num_cached) for _, num_cached, _ in found)
    num_in = int(found[0][2])
    # In the first pass the questions share the text; in the second all but the last block is there.
    assert off == 0 < first == reset < second < num_in and second > 0.95 * num_in
    assert "Same texts: True\n" in printed
    assert len(pairs(printed, r"('.*\?') -> (.*)\n")) == 4


def speculate(run, model):
    """Tokens drafted and accepted, steps with and without; the text is checked here."""
    printed = run("speculation", model)
    assert "Same tokens as without: True\n" in printed
    (prompt, text), = pairs(printed, r"('Once there was a') -> (.*)\n")
    assert text == greedy(model, prompt, 48)
    found = re.search(r"Drafted (\d+), accepted (\d+)\nSteps: (\d+) instead of (\d+)\n", printed)
    return map(int, found.groups())


def test_speculation(run, talker, repeater):
    drafted, accepted, steps, others = speculate(run, talker)  # it sees what a wrong draft leaves
    assert 0 < accepted < drafted and steps <= others == 48
    drafted, accepted, steps, others = speculate(run, repeater)
    assert 0.6 * drafted < accepted <= drafted and steps < others / 2


def test_seeds(run):
    printed = run("seeds")
    for title in ("Again", "Beside others", "In another engine", "Again all three",
                  "Again in an engine of the same seed"):
        assert f"{title}: True\n" in printed, printed
    assert "Again in one of another seed: False\n" in printed
    assert "Different seeds: 6 texts\n" in printed
    alone, several, unseeded = (
        literal_eval(re.search(rf"{title}: (.*)\n", printed).group(1))
        for title in ("Seed 42", "Three of seed 42", "Without a seed"))
    assert len(set(several)) == 3 and several[0] == alone
    assert len(set(unseeded)) == 2


def test_metrics_read_at_the_end(run):
    printed = run("read_metrics")
    counted = {name: int(value) for name, value in re.findall(r"(\w+) = (\d+)\n", printed)}
    assert "20 outputs\n" in printed
    length = len("Sort the following letters of the alphabet by how round they look: ") + 5
    assert counted["num_prompt_tokens"] == counted["prefix_queried_tokens"] == 20 * length
    assert counted["num_generated_tokens"] == 20 * 40
    # The second pass at least finds the four full blocks of its prefix.
    assert 10 * 64 <= counted["prefix_hit_tokens"] < 20 * length
    assert counted["num_steps"] >= 2 * 40
    assert 0 < counted["num_saved_blocks"]
    assert counted["num_used_blocks"] == 0 < counted["peak_used_blocks"] <= 24
    assert 0 < counted["num_cached_blocks"] <= counted["num_blocks"] == 24
    assert 0 < counted["num_empty_slots"] < counted["num_allocated_slots"]
    assert counted["num_preemptions"] > 0
    assert counted["num_draft_tokens"] == counted["num_accepted_tokens"] == 0
    hits = counted["prefix_hit_tokens"] / counted["prefix_queried_tokens"]
    waste = counted["num_empty_slots"] / counted["num_allocated_slots"]
    assert f"Prefix cache hit rate: {hits:.1%}, empty slots: {waste:.1%}\n" in printed
    assert "Free blocks: 24\n" in printed
