"""More than one device: ranks under torchrun, and many engines on Ray Data.

A process that imports torch and transformers takes seconds to start, so one start answers many
questions: parallel_worker.py is what each rank runs.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from models import byte_tokenizer, make_config, make_engine, make_model
from parallel_worker import tell
from safetensors.torch import load_file, save_file
from test_decode_graph import run_captured_body

from nanopage import LLM, SamplingParams, demo
from nanopage.parallel import cut

pytestmark = pytest.mark.timeout(120)

ROOT = Path(__file__).parent.parent
WORKER = str(Path(__file__).parent / "parallel_worker.py")
VARIANTS = {
    "llama": ("llama", {}), "mha-tied": ("llama", dict(num_key_value_heads=4,
                                                       tie_word_embeddings=True)),
    "biases": ("llama", dict(attention_bias=True, mlp_bias=True)),
    "mistral-window": ("mistral", dict(sliding_window=8)), "qwen2": ("qwen2", {}),
    "qwen2-window": ("qwen2", dict(use_sliding_window=True, sliding_window=6, layer_types=[
        "sliding_attention", "full_attention", "sliding_attention"])),
    "qwen3": ("qwen3", {}),
    "qwen3-biases-tied": ("qwen3", dict(attention_bias=True, tie_word_embeddings=True)),
    # it repeats itself, so that drafts are accepted
    "16 tokens": ("llama", dict(vocab_size=16, initializer_range=0.2)),
    # refused by two ranks
    "mqa": ("llama", dict(num_key_value_heads=1)), "odd": ("llama", dict(vocab_size=129)),
    # measured
    "big": ("llama", dict(vocab_size=2000, hidden_size=256, intermediate_size=700))}


def start(num_ranks, *command):
    return subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(num_ranks),
         "--standalone", *command],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def finish(process, seconds):
    """All that it printed. Raises TimeoutExpired, after killing it, if it hangs."""
    try:
        return process.communicate(timeout=seconds)[0]
    finally:
        process.terminate()  # torchrun then ends its ranks, too


def torchrun(num_ranks, out, paths):
    """What each rank tells."""
    process = start(num_ranks, WORKER, "answers", str(out), json.dumps(paths))
    said = finish(process, 100)
    assert process.returncode == 0, said[-5000:]
    return [json.loads(Path(f"{out}.{rank}").read_text()) for rank in range(num_ranks)]


def check_equal(ours, expected, name):
    """Tokens are equal; logprobs but for the order in which ranks add up."""
    if isinstance(expected, list):
        assert len(ours) == len(expected), name
        for a, b in zip(ours, expected):
            check_equal(a, b, name)
    else:
        assert ours == (pytest.approx(expected, abs=1e-3) if isinstance(expected, float)
                        else expected), name


# ---- two and three ranks ---------------------------------------------------------------------


@pytest.fixture(scope="module")
def paths(model_dir, tmp_path_factory):
    paths = {name: model_dir(family, **changes) for name, (family, changes) in VARIANTS.items()}
    paths["misshapen"] = str(tmp_path_factory.mktemp("misshapen") / "model")
    shutil.copytree(paths["qwen2"], paths["misshapen"])
    file = Path(paths["misshapen"]) / "model.safetensors"
    tensors = load_file(file)
    tensors["model.layers.1.self_attn.k_proj.bias"] = torch.zeros(31)
    save_file(tensors, file, metadata={"format": "pt"})
    return paths


@pytest.fixture(scope="module")
def told(paths, tmp_path_factory):
    """What one process tells, and what each of two ranks does."""
    ranks = torchrun(2, tmp_path_factory.mktemp("told") / "out", paths)
    return json.loads(json.dumps(tell(paths))), ranks


def test_two_ranks_equal_one_process(told):
    """A bias added twice, a head of the wrong rank, a row of another's vocabulary: any of them
    changes nearly every token. And ranks agree to the bit, or beams would part."""
    alone, ranks = told
    names = [name for name in alone if name not in ("weights", "pool", "refused")]
    assert len(names) == 8 + 8
    for name in names:
        assert ranks[0][name] == ranks[1][name], name
        check_equal(ranks[0][name], alone[name], name)


def test_each_rank_holds_its_share(told):
    alone, ranks = told
    assert all(rank["weights"] <= 0.55 * alone["weights"] for rank in ranks)


def test_the_poorest_rank_decides_the_pool(told):
    block_bytes = 3 * 2 * 4 * 1 * 16 * 4  # layers, K and V, tokens, KV heads, head_dim, float32
    num_blocks = (8 << 16) // block_bytes - 1
    assert [rank["pool"] for rank in told[1]] == [num_blocks, num_blocks]


def test_what_two_ranks_refuse(told):
    for rank in told[1]:
        refused = rank["refused"]
        assert re.search("tensor_parallel_size=3: must be 2.*torchrun --nproc-per-node 3",
                         refused["llama"])
        assert "tensor_parallel_size=2" in refused["mqa"] and "key_value_heads=1" in refused["mqa"]
        assert "vocab_size=129" in refused["odd"]
    said = [rank["refused"]["misshapen"] for rank in told[1]]  # 31 is 16 and 15: one rank is right
    assert said[0] is None and "k_proj.bias" in said[1]


def test_one_process_is_not_two(r_model):
    with pytest.raises(ValueError, match="tensor_parallel_size=2.*torchrun --nproc-per-node 2"):
        make_engine(r_model, tensor_parallel_size=2)
    assert make_engine(r_model, tensor_parallel_size=1).rank == 0
    tensor = torch.ones(4, 4)
    assert cut("model.layers.0.mlp.up_proj.weight", tensor) is tensor  # not even a copy


def test_what_a_graph_captures_waits_for_nobody(monkeypatch):
    """The lookup in a cut embedding must not depend on values: the lint of the decode step."""
    monkeypatch.setattr("nanopage.parallel.WORLD_SIZE", 2)
    reduced = []
    monkeypatch.setattr("torch.distributed.all_reduce", reduced.append)
    config = make_config()
    config.head_dim = 16
    assert run_captured_body(config).shape == (4, 64)
    assert [x.shape for x in reduced] == [(4, 64)] * (1 + 2 * 3)  # the embedding, two a layer


def test_three_ranks_of_a_real_model(tmp_path):
    """9 heads, 3 KV heads: a share need not be a power of two."""
    paths = {"smollm2": str(demo.model_path())}
    ranks = torchrun(3, tmp_path / "out", paths)
    assert ranks[0] == ranks[1] == ranks[2]
    check_equal(ranks[0]["smollm2"], json.loads(json.dumps(tell(paths)))["smollm2"], "smollm2")


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_two_gpus_equal_one(model_dir, tmp_path):
    """NCCL's all-reduces inside a captured graph, and the gather of logits outside."""
    paths = {"gpu": model_dir("qwen3", max_position_embeddings=1024)}
    ranks, [expected, _] = torchrun(2, tmp_path / "out", paths), tell(paths)["gpu"]
    assert ranks[0] == ranks[1]
    for told in ranks[0]["gpu"]:  # sorted by likelihood; rounding may swap two and change little
        for ours, theirs in zip(told, expected):
            assert ours == pytest.approx(theirs, abs=0.2)


# ---- faults ----------------------------------------------------------------------------------


@pytest.mark.parametrize("how, said", [
    ("raise", "caught: a fault in mid-step.*a step failed here"),  # though the script goes on
    ("kill", "SIGKILL|Signal 9"),
    ("drift", "the ranks have different requests"),
    ("wait", "")])
def test_a_fault_on_one_rank_ends_all(r_model, how, said):
    """The others wait in an all-reduce for someone who will never come."""
    process = start(2, WORKER, how, r_model)
    lines = []
    while how == "wait" and "a whole call" not in "".join(lines):  # let it run, then press Ctrl-C
        lines.append(process.stdout.readline())
    begin = time.monotonic()
    if how == "wait":
        process.send_signal(signal.SIGINT)
    output = "".join(lines) + finish(process, 40)
    assert process.returncode != 0
    assert re.search(said, output, flags=re.DOTALL), output
    assert how != "wait" or time.monotonic() - begin < 15
    pids = re.findall(r"rank \d: pid (\d+)", output)
    assert len(pids) == 2 and not any(Path(f"/proc/{pid}").exists() for pid in pids)


# ---- the example, and many engines -----------------------------------------------------------


def test_the_example_speaks_once(tmp_path):
    model = make_model(tmp_path, vocab_size=260, max_position_embeddings=2048)
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    tokenizer.save_pretrained(model)
    process = start(2, str(ROOT / "example.py"), model)
    output = finish(process, 60)
    assert process.returncode == 0, output
    assert output.count("> What is the capital of France?") == output.count("LLM(") == 1
    assert output.count("Preemptions:") == 1


def test_many_engines_on_ray_data(tmp_path):
    """The script of README, on two engines, says what one engine says."""
    pytest.importorskip("ray", reason="ray has no wheel for this Python, or is not installed")
    readme = (ROOT / "README.md").read_text()
    script = re.search(r"```python\n(import sys\n\nimport ray.*?)```", readme, flags=re.DOTALL)[1]
    # Rounding in bfloat16 depends on the batch. And who answered?
    script = script.replace("LLM(MODEL)", 'LLM(MODEL, dtype="float32")')
    script = script.replace("return batch", 'return {**batch, "pid": [__import__("os").getpid()] * '
                            'len(outputs)}')
    (tmp_path / "engines.py").write_text(script)
    model = make_model(tmp_path / "model", vocab_size=260)
    byte_tokenizer().save_pretrained(model)
    prompts = [f"Question {i}: what is {i} times {7 * i % 13}?" for i in range(200)]
    (tmp_path / "prompts.txt").write_text("\n".join(prompts))
    done = subprocess.run(
        [sys.executable, "engines.py", model, "prompts.txt", str(tmp_path / "answers")],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, timeout=100,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert done.returncode == 0, done.stdout[-5000:]
    rows = [json.loads(line) for file in (tmp_path / "answers").glob("*.json")
            for line in file.read_text().splitlines()]
    llm = LLM(model, dtype="float32", device="cpu")
    params = SamplingParams(temperature=0, max_tokens=64)
    expected = {o.prompt: o.outputs[0].text for o in llm.generate(prompts, params, use_tqdm=False)}
    assert {row["text"]: row["answer"] for row in rows} == expected and len(rows) == 200
    assert len({row["pid"] for row in rows}) == 2
