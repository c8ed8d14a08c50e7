"""For all tests: the models as fixtures, a watchdog, and the books checked after every step."""

import os
import signal
import sys

import pytest

# oneDNN keeps each kernel that it compiled, a thousand of them: that would hide a leak in the soak.
os.environ["ONEDNN_PRIMITIVE_CACHE_CAPACITY"] = os.environ["LRU_CACHE_CAPACITY"] = "128"

import torch
from fake_kernels import fake_flash_attn, fake_varlen_attn
from hypothesis import HealthCheck, settings
from models import byte_tokenizer, make_model, make_table_model
from oracles import check_invariants, hf_model

from nanopage.scheduler import Scheduler

for profile, max_examples in (("ci", 300), ("long", 6000)):
    settings.register_profile(profile, deadline=None, max_examples=max_examples,
                              suppress_health_check=list(HealthCheck))
settings.load_profile("ci")
torch.set_num_threads(1)  # tiny models: two threads would mostly wait for each other


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


@pytest.fixture(autouse=True)
def invariants_after_every_step(monkeypatch):
    schedule, update = Scheduler.schedule, Scheduler.update

    def checked_schedule(self):
        batch = schedule(self)
        scheduled = [seq.num_scheduled_tokens for seq in batch.sequences]
        assert batch.num_tokens == sum(scheduled) <= self.max_num_batched_tokens
        assert all(num > 0 for num in scheduled)
        if not scheduled:  # then there is no update
            check_queues(self)
        return batch

    def checked_update(self, batch, samples):
        touched = update(self, batch, samples)
        check_queues(self)
        return touched

    monkeypatch.setattr(Scheduler, "schedule", checked_schedule)
    monkeypatch.setattr(Scheduler, "update", checked_update)


def check_queues(scheduler):
    check_invariants(scheduler.block_manager, scheduler.running + scheduler.waiting)
    assert len(scheduler.running) <= scheduler.max_num_seqs
    assert not set(scheduler.running) & set(scheduler.waiting)
    assert scheduler.running == sorted(scheduler.running, key=lambda seq: seq.order)
    assert scheduler.waiting == sorted(scheduler.waiting, key=lambda seq: seq.order)
    assert all(not seq.block_table for seq in scheduler.waiting)


# ---- models ----------------------------------------------------------------------------------


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


@pytest.fixture
def kernels(monkeypatch):
    """Fake kernels that work on a CPU; the list tells which were called."""
    calls = []
    monkeypatch.setitem(sys.modules, "flash_attn", fake_flash_attn(calls))
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", fake_varlen_attn(calls))
    monkeypatch.setattr("nanopage.config.has_kernels", lambda device: True)
    return calls
