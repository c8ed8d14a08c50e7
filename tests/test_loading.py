"""Checkpoints, their oddities, and what is refused in the constructor."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from models import make_engine, make_model
from oracles import generate, hf_greedy, prompts_of
from safetensors.torch import load_file, save_file

PROMPTS = prompts_of([5, 40])


def edit(path, change):
    """Change the tensors of a saved model."""
    file = Path(path) / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file({k: v.contiguous() for k, v in tensors.items()}, file, metadata={"format": "pt"})
    return str(path)


def edit_config(path, **changes):
    file = Path(path) / "config.json"
    config = json.loads(file.read_text())
    config.update(changes)
    file.write_text(json.dumps({k: v for k, v in config.items() if v is not ...}))
    return str(path)


def check(path, expected):
    llm = make_engine(path)
    assert generate(llm, PROMPTS, max_tokens=16) == [hf_greedy(expected, p, 16) for p in PROMPTS]


def test_tied_output_layer(tmp_path):
    """Tied with a redundant output tensor failed; untied lost its own to the embedding."""
    tied = make_model(tmp_path / "tied", tie_word_embeddings=True)
    assert "lm_head.weight" not in load_file(Path(tied) / "model.safetensors")
    check(tied, tied)
    redundant = shutil.copytree(tied, tmp_path / "redundant")
    edit(redundant, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    check(redundant, tied)
    untied = make_model(tmp_path / "untied")
    check(untied, untied)
    edit(untied, lambda t: t.pop("lm_head.weight"))
    with pytest.raises(ValueError, match="lm_head.weight"):
        make_engine(untied)


def test_other_spellings_of_a_checkpoint(tmp_path):
    """Names without the prefix, a tied model that holds only lm_head, biases that do not count."""
    path = make_model(tmp_path / "model")
    bare = shutil.copytree(path, tmp_path / "bare")
    edit(bare, lambda t: [t.update({name.removeprefix("model."): t.pop(name)}) for name in list(t)])
    check(str(bare), path)
    tied = make_model(tmp_path / "tied", tie_word_embeddings=True)
    head = shutil.copytree(tied, tmp_path / "head")
    edit(head, lambda t: t.update({"lm_head.weight": t.pop("model.embed_tokens.weight")}))
    check(str(head), tied)
    for family in ("qwen2", "mistral"):
        path = make_model(tmp_path / family, family)
        check(edit_config(shutil.copytree(path, tmp_path / f"{family} biased"),
                          attention_bias=True), path)


@pytest.mark.parametrize("changes, longest", [
    ({}, 512), (dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=64), 256),
    (dict(rope_type="yarn", factor=4.0), 2048), (dict(rope_type="linear", factor=2.0), 1024),
    (dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
          original_max_position_embeddings=32), 512)])
def test_the_longest_sequence_follows_from_rope_scaling(tmp_path, changes, longest):
    """It was read from the positions alone, and so refused what yarn is there to allow."""
    path = edit_config(make_model(tmp_path), rope_parameters=dict(
        dict(rope_type="default", rope_theta=1e4), **changes))
    assert make_engine(path, num_blocks=1024).max_model_len == longest
    assert make_engine(path, num_blocks=1024, max_model_len=longest).max_model_len == longest
    with pytest.raises(ValueError, match=f"max_model_len={longest + 1}.*{longest}.*model"):
        make_engine(path, max_model_len=longest + 1)


def test_end_tokens_are_numbers(tmp_path):
    """A string ended as the set of its characters."""
    path = Path(make_model(tmp_path))
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": "0"}))
    with pytest.raises(ValueError, match="eos_token_id='0'"):
        make_engine(str(path))


def test_missing_foreign_and_misshapen_tensors(tmp_path):
    path = make_model(tmp_path / "model", "qwen2")
    name = "model.layers.1.self_attn.k_proj.bias"
    for i, (change, message) in enumerate([
        (lambda t: t.pop(name), f"missing.*{name}"),
        (lambda t: t.update({"model.layers.9.mlp.up_proj.weight": torch.zeros(96, 64)}),
         "unexpected.*layers.9"),
        (lambda t: t.update({name: torch.zeros(31)}), f"{name}.*shape.*31.*32"),
    ]):
        copy = shutil.copytree(path, tmp_path / str(i))
        with pytest.raises(ValueError, match=message):
            make_engine(edit(copy, change))
    derived = shutil.copytree(path, tmp_path / "derived")
    edit(derived, lambda t: t.update(
        {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8)}))
    check(derived, path)


def test_files_of_a_checkpoint(tmp_path):
    """The index decides which files are read; others are ignored, and none is ever executed."""
    path = Path(make_model(tmp_path / "model"))
    save_file({"foreign": torch.zeros(1)}, path / "adapter.safetensors")
    (path / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'false'\ntR.")
    check(path, str(path))
    names = list(load_file(path / "model.safetensors"))
    index = path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {n: "model.safetensors" for n in names[1:]}}))
    with pytest.raises(ValueError, match="missing"):
        make_engine(str(path))
    for weight_map in ({n: "../model.safetensors" for n in names}, {names[0]: "gone.safetensors"},
                       {names[0]: 5}, {names[0]: "pytorch_model.bin"}, []):
        index.write_text(json.dumps({"weight_map": weight_map}))
        with pytest.raises(ValueError):
            make_engine(str(path))
    index.write_text("{")
    with pytest.raises(ValueError, match="index"):
        make_engine(str(path))
    index.unlink()
    whole = (path / "model.safetensors").read_bytes()
    for broken in (whole[:-100], b"", b"\x80\x04K\x01."):
        (path / "model.safetensors").write_bytes(broken)
        with pytest.raises(ValueError, match="model.safetensors"):
            make_engine(str(path))
    (path / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="no such weight file"):
        make_engine(str(path))


LLAMA3 = dict(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
              original_max_position_embeddings=32)
YARN = dict(factor=4.0, original_max_position_embeddings=64)


@pytest.mark.parametrize("kind, settings", [
    ("default", {}), ("llama3", LLAMA3), ("yarn", YARN), ("linear", dict(factor=2.0))])
@pytest.mark.parametrize("theta", [10000.0, 500000.0])
def test_rope_in_both_spellings(tmp_path, kind, settings, theta):
    """Scaling that is declared and not applied shows only as the prompt gets longer."""
    base = make_model(tmp_path / "base")
    plain = [hf_greedy(base, p, 16) for p in PROMPTS]
    spellings = [dict(rope_parameters=dict(rope_type=kind, rope_theta=theta, **settings))]
    for key in ("type", "rope_type"):
        scaling = None if kind == "default" else {key: kind, **settings}
        spellings.append(dict(rope_parameters=..., rope_theta=theta, rope_scaling=scaling))
    for i, changes in enumerate(spellings):
        path = edit_config(shutil.copytree(base, tmp_path / str(i)), **changes)
        check(path, path)
        if (kind, theta) != ("default", 10000.0):
            assert hf_greedy(path, PROMPTS[1], 16) != plain[1]


@pytest.mark.parametrize("changes, message", [
    (dict(rope_parameters=dict(rope_type="dynamic", rope_theta=1e4, factor=2.0)), "dynamic"),
    (dict(rope_parameters=dict(rope_type="default", rope_theta=1e4, partial_rotary_factor=0.5)),
     "partial_rotary_factor"),
    (dict(architectures=["GPT2LMHeadModel"]), "LlamaForCausalLM.*Qwen3ForCausalLM"),
    (dict(architectures=None), "architectures"),
    (dict(hidden_act="gelu"), "hidden_act"),
    (dict(quantization_config=dict(quant_method="gptq", bits=4)), "quant"),
    (dict(sliding_window=16), "sliding_window"),
])
def test_what_cannot_be_honoured_is_refused(tmp_path, changes, message):
    path = edit_config(make_model(tmp_path / "model"), **changes)
    with pytest.raises(ValueError, match=message):
        make_engine(path)


def test_unhonourable_layer_types(tmp_path):
    path = make_model(tmp_path / "model", "qwen2")
    for layer_types in (["sliding_attention"] * 3,  # without a window
                        ["chunked_attention"] * 3):
        edit_config(path, layer_types=layer_types)
        with pytest.raises(ValueError, match="layer_types"):
            make_engine(path)


def test_without_private_operators(r_model, monkeypatch):
    """Where oneDNN's packing is missing, F.linear serves."""
    class Missing:
        def __getattr__(self, name):
            raise AttributeError(name)

    monkeypatch.setattr(torch.ops, "mkldnn", Missing())
    llm = make_engine(r_model)
    assert isinstance(llm.model_runner.model.lm_head, torch.nn.Linear)
    monkeypatch.undo()
    assert generate(llm, PROMPTS, max_tokens=16) == [hf_greedy(r_model, p, 16) for p in PROMPTS]
