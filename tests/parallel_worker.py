"""What every rank runs in test_parallel.py; without torchrun it tells what one process says.

    torchrun --nproc-per-node 2 parallel_worker.py answers OUT '{"name": "path"}'
    torchrun --nproc-per-node 2 parallel_worker.py raise|kill|drift|wait MODEL
"""

import json
import os
import signal
import sys
from pathlib import Path

import torch
from models import make_engine
from oracles import GREEDY, Fault, generate, prompts_of
from transformers import AutoConfig

from nanopage import BeamSearchParams, SamplingParams
from nanopage.attention import ReferenceAttention
from nanopage.layers import CausalLM
from nanopage.parallel import RANK, WORLD_SIZE, cut_config

NGRAM = dict(method="ngram", num_speculative_tokens=4, prompt_lookup_min=2, prompt_lookup_max=4)
PROMPTS = prompts_of([1, 5, 17, 40])


def facts(outputs):
    """All that a caller sees of outputs, as JSON has it."""
    return [[[c.token_ids, c.cumulative_logprob, c.finish_reason,
              None if c.logprobs is None else [
                  [[token_id, entry.logprob, entry.rank] for token_id, entry in row.items()]
                  for row in c.logprobs]] for c in output.outputs] for output in outputs]


def families(paths):
    """Greedy tokens by chunks, with preemption, and again from the prefix cache."""
    for name, path in paths.items():
        llm = make_engine(path, block_size=4, max_num_batched_tokens=7, num_blocks=19)
        answers = [generate(llm, PROMPTS, max_tokens=20) for _ in range(2)]
        metrics = llm.metrics()
        assert metrics.num_preemptions > 0 and metrics.prefix_hit_tokens > 0, name
        yield name, answers


def features(path):
    """What forks, ranks and draws; what is streamed, stepped and replayed."""
    def ask(llm, **params):
        params = SamplingParams(**{**dict(ignore_eos=True, max_tokens=12), **params})
        return facts(llm.generate(PROMPTS, params, use_tqdm=False))

    llm = make_engine(path)
    yield "samples", ask(llm, n=4, seed=1, logprobs=3)
    yield "filtered", ask(llm, seed=2, top_k=20, top_p=0.9, min_p=0.02)
    yield "unseeded", ask(llm, n=2)
    yield "beams", facts(llm.beam_search(PROMPTS, BeamSearchParams(beam_width=3, max_tokens=12)))
    pieces = llm.stream(PROMPTS[1], SamplingParams(seed=3, max_tokens=9))
    yield "stream", [piece.token_ids for piece in pieces]
    aborted, kept = (llm.add_request(prompt, SamplingParams(**GREEDY)) for prompt in PROMPTS[:2])
    llm.step()
    llm.abort(aborted)
    while llm.has_unfinished_requests():
        news = llm.step()
    yield "steps", [news[0].request_id == kept, facts(news)]
    llm.model_runner.capture_decode(lambda function: function)
    yield "static decode", generate(llm, PROMPTS, max_tokens=12)


def speculation(path):
    llm = make_engine(path, speculative_config=NGRAM)
    answers = generate(llm, prompts_of([9, 17, 30, 5], vocab=16), max_tokens=20)
    assert llm.metrics().num_accepted_tokens > 0
    return answers


def bytes_of_weights(path):
    """What is loaded, before it is packed for a CPU, and each memory counted once."""
    config = AutoConfig.from_pretrained(path)
    config.head_dim = config.hidden_size // config.num_attention_heads
    model = CausalLM(cut_config(config), ReferenceAttention(), 64, torch.device("cpu"),
                     torch.float32)
    model.load_weights(Path(path))
    memories = {p.untyped_storage().data_ptr(): p.untyped_storage() for p in model.parameters()}
    return sum(memory.nbytes() for memory in memories.values())


def refusals(paths):
    """What the constructor says to a size that does not fit; null where it says nothing."""
    for name, options in (("llama", dict(tensor_parallel_size=WORLD_SIZE + 1)), ("mqa", {}),
                          ("odd", {}), ("misshapen", {})):
        try:
            make_engine(paths[name], **options)
        except ValueError as error:
            yield name, str(error)
        else:
            yield name, None


def pool_size(path):
    """Rank 0 could afford a larger pool than the next one."""
    llm = make_engine(path, num_blocks=None, kv_cache_memory_bytes=(9 - RANK) << 16)
    return llm.model_runner.num_blocks


def on_gpus(path):
    """The logprobs of two tokens that follow, with captured graphs and without."""
    params = SamplingParams(temperature=0, max_tokens=2, logprobs=5)
    for eager in (False, True):
        llm = make_engine(path, device="cuda", dtype="bfloat16", block_size=256, num_blocks=32,
                          enforce_eager=eager)
        yield [[logprob for _, logprob, _ in row] for [completion] in
               facts(llm.generate(PROMPTS, params, use_tqdm=False)) for row in completion[3]]


def tell(paths):
    special = ("16 tokens", "mqa", "odd", "misshapen", "big", "smollm2", "gpu")
    answers = dict(families({k: v for k, v in paths.items() if k not in special}))
    if "llama" in paths:
        answers.update(features(paths["llama"]))
        answers["speculation"] = speculation(paths["16 tokens"])
        answers["weights"] = bytes_of_weights(paths["big"])
        answers["pool"] = pool_size(paths["llama"])
        answers["refused"] = dict(refusals(paths))
    if "gpu" in paths:
        answers["gpu"] = list(on_gpus(paths["gpu"]))
    if "smollm2" in paths:
        llm = make_engine(paths["smollm2"], block_size=16, max_num_batched_tokens=64)
        texts = ["The capital of France is", "A block table maps", "Once upon a time"]
        prompts = llm.tokenizer(texts)["input_ids"]
        params = SamplingParams(temperature=0, max_tokens=24, logprobs=2)
        answers["smollm2"] = facts(llm.generate(prompts, params, use_tqdm=False))
    return answers


def fail(how, path):
    """One rank fails in mid-step; the others are then within an all-reduce."""
    llm = make_engine(path, num_blocks=2048, max_model_len=512)
    print(f"rank {llm.rank}: pid {os.getpid()}", flush=True)
    params = SamplingParams(**GREEDY, max_tokens=400)
    last = llm.rank == WORLD_SIZE - 1
    prompt = PROMPTS[2]
    if how == "drift" and last:
        prompt = prompt[::-1]
    if how == "raise" and last:
        Fault(llm, RuntimeError("a fault in mid-step"))
        try:
            llm.generate(prompt, params)
        except RuntimeError as error:
            print(f"caught: {error}", flush=True)
    if how == "kill" and last:
        mlp = llm.model_runner.model.model["layers"][1].mlp
        mlp.register_forward_hook(lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    while True:
        llm.generate(prompt, params)
        print(f"rank {llm.rank}: a whole call", flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    if sys.argv[1] == "answers":
        told = tell(json.loads(sys.argv[3]))
        with open(f"{sys.argv[2]}.{RANK}", "w") as file:
            json.dump(told, file)
    else:
        fail(*sys.argv[1:3])
