"""How much memory the pool takes, what is given back, and what is kept."""

import gc
import subprocess
import sys
import weakref

import pytest
import torch
from models import make_engine
from oracles import generate, prompts_of


def test_an_engine_gives_its_memory_back(r_model):
    """A reference that is left somewhere keeps a deleted engine, and its pool, alive."""
    llm = make_engine(r_model)
    llm.model_runner.capture_decode(lambda function: function)
    generate(llm, prompts_of([9]), max_tokens=4)
    cache = weakref.ref(llm.model_runner.kv_cache)
    del llm
    gc.collect()
    assert cache() is None


def test_gpu_cache_sizing_arithmetic(r_model, monkeypatch):
    """Memory of other processes was charged to this one; what is not free cannot be taken."""
    llm = make_engine(r_model, gpu_memory_utilization=0.3)
    runner, gib = llm.model_runner, 1 << 30
    for name in ("empty_cache", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 2 * gib)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 3 * gib)

    def spare(free):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (free * gib, 100 * gib))
        return runner._spare_gpu_memory() / gib

    assert 26 < spare(free=95) < 27  # 30 % of 100 GiB, less 3 at the peak, less graphs
    assert 26 < spare(free=58) < 27  # another process holds 40 %: there is room all the same
    assert 8 < spare(free=10) < 9  # it holds nearly all: what is free is the limit
    with pytest.raises(ValueError, match="gpu_memory_utilization=0.3.*no room"):
        spare(free=1)


def test_temporaries_have_no_fresh_pages():
    """malloc gave large temporaries back to the system: 110,000 page faults a step."""
    script = """if True:
        import ctypes, resource, torch
        from nanopage.cpu import keep_freed_memory
        mallopt = getattr(ctypes.CDLL(None), "mallopt", lambda *_: print("no mallopt"))
        for name in (-1, -3):
            mallopt(name, 128 << 10)  # what they are at first; they grow when memory is freed
        for make_ready in (lambda: None, keep_freed_memory):
            make_ready()
            for i in range(20):
                if i == 10:
                    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
                together = [torch.ones(15 << 18) for _ in range(3)]  # 15 MiB each
                del together
            print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)"""
    printed = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True,
                             check=True).stdout
    if "no mallopt" in printed:
        pytest.skip("not glibc")
    plain, kept = map(int, printed.split())
    assert kept < plain / 10
