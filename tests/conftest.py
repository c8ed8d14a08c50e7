"""Models, oracles and a watchdog for all tests.

R-model: random weights, large enough that every token of the context matters: it sees wrong KV.
S-model: a table says which token follows which: it sees wrong text, stops and distributions.
"""

import os
import signal
from functools import lru_cache

import pytest

# oneDNN keeps each kernel that it compiled, a thousand of them: that would hide a leak in the soak.
os.environ["ONEDNN_PRIMITIVE_CACHE_CAPACITY"] = os.environ["LRU_CACHE_CAPACITY"] = "128"

import torch
from hypothesis import HealthCheck, settings
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
)

from nanopage import LLM, SamplingParams
from nanopage.scheduler import Scheduler

for profile, max_examples in (("ci", 300), ("long", 6000)):
    settings.register_profile(profile, deadline=None, max_examples=max_examples,
                              suppress_health_check=list(HealthCheck))
settings.load_profile("ci")
torch.set_num_threads(1)  # tiny models: two threads would mostly wait for each other

FAMILIES = {"llama": LlamaConfig, "mistral": MistralConfig, "qwen2": Qwen2Config,
            "qwen3": Qwen3Config}
GREEDY = dict(temperature=0.0, ignore_eos=True)


@pytest.fixture(autouse=True)
def watchdog(request):
    """Half of the worst faults of such engines show as hangs."""
    marker = request.node.get_closest_marker("timeout")
    seconds = marker.args[0] if marker else 60

    def bark(*_):
        raise TimeoutError(f"test ran for more than {seconds} s")

    signal.signal(signal.SIGALRM, bark)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)


def live_sequences(llm):
    return [seq for request in llm.requests.values() for seq in request.sequences
            if seq.finish_reason is None]


@pytest.fixture(autouse=True)
def invariants_after_every_step(monkeypatch):
    step = LLM._step

    def checked_step(self):
        touched = step(self)
        scheduler = self.scheduler
        scheduler.block_manager.check_invariants(scheduler.running + scheduler.waiting)
        assert len(scheduler.running) <= scheduler.max_num_seqs
        assert not set(scheduler.running) & set(scheduler.waiting)
        assert scheduler.running == sorted(scheduler.running, key=lambda seq: seq.order)
        assert scheduler.waiting == sorted(scheduler.waiting, key=lambda seq: seq.order)
        assert all(not seq.block_table for seq in scheduler.waiting)
        return touched

    schedule = Scheduler.schedule

    def checked_schedule(self):
        batch = schedule(self)
        scheduled = [seq.num_scheduled_tokens for seq in batch.sequences]
        assert batch.num_tokens == sum(scheduled) <= self.max_num_batched_tokens
        assert all(num > 0 for num in scheduled)
        return batch

    monkeypatch.setattr(LLM, "_step", checked_step)
    monkeypatch.setattr(Scheduler, "schedule", checked_schedule)


def check_idle(llm, model=None):
    """Nothing is left behind, and the engine still answers rightly."""
    assert not llm.has_unfinished_requests()
    assert not llm.scheduler.running and not llm.scheduler.waiting
    assert llm.num_free_blocks() == llm.model_runner.num_blocks
    assert all(block.ref_count == 0 for block in llm.scheduler.block_manager.blocks)
    if model is not None:
        prompt = [5, 4, 3]
        num = min(3, llm.max_model_len - 3,
                  llm.model_runner.num_blocks * llm.config.block_size - 2)
        assert generate(llm, [prompt], max_tokens=num) == [hf_greedy(model, prompt, num)]


def generate(llm, prompts, **params):
    outputs = llm.generate(prompts, SamplingParams(**{**GREEDY, **params}), use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]


# ---- models ----------------------------------------------------------------------------------


def make_config(family="llama", **changes):
    sizes = dict(vocab_size=128, hidden_size=64, intermediate_size=96, num_hidden_layers=3,
                 num_attention_heads=4, num_key_value_heads=2, initializer_range=0.3,
                 max_position_embeddings=512, bos_token_id=None, eos_token_id=None,
                 pad_token_id=0, tie_word_embeddings=False)
    if family == "qwen3":
        sizes["head_dim"] = 32
    if family == "mistral":
        sizes["sliding_window"] = None
    return FAMILIES[family](**{**sizes, **changes})


def make_model(path, family="llama", seed=0, **changes):
    """Save a random model in which every weight counts; returns the path as a string."""
    torch.manual_seed(seed)
    config = make_config(family, **changes)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):  # transformers starts these at 0 and the norms at 1
                parameter.normal_(0, 0.3)
            elif "norm" in name:
                parameter.uniform_(0.5, 1.5)
    model.save_pretrained(path)
    return str(path)


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory):
    """model_dir(family, **config changes): the directory of a random model, made once."""
    made = {}

    def make(family="llama", seed=0, **changes):
        key = (family, seed, repr(sorted(changes.items())))
        if key not in made:
            made[key] = make_model(tmp_path_factory.mktemp(family), family, seed, **changes)
        return made[key]

    return make


@pytest.fixture(scope="session")
def r_model(model_dir):
    """The R-model, with guards: a model without gaps or memory cannot see faults."""
    path = model_dir("llama")
    model = hf_model(path)
    prompt = torch.arange(20)[None] * 7 % 128
    out = model.generate(prompt, do_sample=False, max_new_tokens=24, min_new_tokens=24,
                         output_logits=True, return_dict_in_generate=True)
    best = torch.cat(out.logits).topk(2).values
    assert (best[:, 0] - best[:, 1]).min() > 1e-3
    flipped = prompt.clone()
    flipped[0, 2] += 1
    other = model.generate(flipped, do_sample=False, max_new_tokens=24, min_new_tokens=24)
    assert (other[0, 20:] != out.sequences[0, 20:]).sum() > 12
    return path


def make_engine(model, **options):
    options = {**dict(dtype="float32", device="cpu", block_size=4, num_blocks=256), **options}
    return LLM(model, **options)


# ---- oracles ---------------------------------------------------------------------------------


@lru_cache(maxsize=32)
def hf_model(path, dtype=torch.float32):
    return AutoModelForCausalLM.from_pretrained(path, dtype=dtype).eval()


_greedy: dict = {}


def hf_greedy(path, prompt, num_tokens):
    """Greedy tokens of transformers' own generate, no end token heeded."""
    key = (path, tuple(prompt))
    if len(_greedy.get(key, ())) < num_tokens:
        model = hf_model(path)
        ids = torch.tensor([list(prompt)])
        # Without a mask, generate would hide the tokens that look like padding.
        out = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False,
                             max_new_tokens=max(num_tokens, 24), eos_token_id=None)
        _greedy[key] = out[0, len(prompt):].tolist()
    return _greedy[key][:num_tokens]


@torch.no_grad()
def hf_logprobs(path, prompt, output, dtype=torch.float32):
    """Teacher forcing: log-softmax over the vocabulary at each output token."""
    ids = torch.tensor([list(prompt) + list(output)])
    logits = hf_model(path, dtype)(ids).logits[0, len(prompt) - 1:-1].float()
    return logits.log_softmax(-1)


def check_logprobs(path, prompt, completion, tolerance=1e-4):
    """Y3: the engine's logprobs of a sampled completion are transformers'."""
    expected = hf_logprobs(path, prompt, completion.token_ids)
    total = 0.0
    for i, token_id in enumerate(completion.token_ids):
        for other, logprob in completion.logprobs[i].items():
            assert abs(logprob.logprob - expected[i, other].item()) < tolerance
        total += completion.logprobs[i][token_id].logprob
    assert completion.cumulative_logprob == pytest.approx(total)


def prompts_of(lengths, seed=0, vocab=128):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(vocab, (length,), generator=generator).tolist() for length in lengths]


# ---- scripted text ---------------------------------------------------------------------------


def byte_tokenizer():
    """One token per byte (ids 0 to 255), then <s>, </s>, <|end|>."""
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    vocab = {chr(byte): byte for byte in printable}
    vocab.update({chr(256 + i): byte for i, byte in enumerate(others)})
    assert set(vocab) == set(alphabet)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>", "<|end|>"])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>",
                                   clean_up_tokenization_spaces=False)


def make_table_model(path, table, vocab_size=259, tokenizer=None, eos_token_id=257):
    """Save a model whose next-token logits are a row of `table`: [current, next]."""
    config = LlamaConfig(vocab_size=vocab_size, hidden_size=264, intermediate_size=8,
                         num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=4,
                         tie_word_embeddings=False, rms_norm_eps=1e-12, bos_token_id=None,
                         eos_token_id=eos_token_id, pad_token_id=None,
                         max_position_embeddings=512)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.fill_(1.0 if "norm" in name else 0.0)
        model.model.embed_tokens.weight.copy_(torch.eye(vocab_size, 264))
        model.lm_head.weight[:, :vocab_size] = table.T / 264 ** 0.5
    model.save_pretrained(path)
    if tokenizer is not None:
        tokenizer.save_pretrained(path)
    return str(path)


@pytest.fixture(scope="session")
def text_model(tmp_path_factory):
    """A model with the byte tokenizer, whose text the tests script."""
    return make_table_model(tmp_path_factory.mktemp("text"), torch.eye(259),
                            tokenizer=byte_tokenizer())


@pytest.fixture
def script(monkeypatch):
    """script(token_ids or str): every sequence gets these tokens, whatever the model says."""

    def install(tokens):
        tokens = list(tokens.encode()) if isinstance(tokens, str) else list(tokens)

        def sample(logits, rows):
            return torch.tensor([tokens[(row.position - row.seq.num_prompt_tokens) % len(tokens)]
                                 for row in rows])

        monkeypatch.setattr("nanopage.model_runner.sample", sample)

    return install
