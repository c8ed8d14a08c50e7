"""Every comparison that the README quotes, one command each.

    python bench.py                       throughput of the default workload
    python bench.py --compare hf vllm     the same requests through other engines, in turn
    python bench.py fragmentation         contiguous reservation against pages, at equal memory
    python bench.py prefix                many questions on one long prompt, cache on and off
    python bench.py sharing               blocks saved by parallel sampling and beam search
    python bench.py speculation           prompt lookup, where it wins and where it loses
    python bench.py host                  the cost of scheduling alone
    python bench.py growth                a decode step and its parts as sequences grow
    python bench.py pictures              the pool block by block, and what reserving wastes: docs/

Without --model it is SmolLM2-135M-Instruct; qwen3-0.6b-random is made on the spot: nano-vllm's
benchmark model, with random weights. All workloads are seeded.
"""

import argparse
import importlib.util
import inspect
import itertools
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import mean, median

PROSE = Path(__file__).with_name("README.md").read_text()

# ---- the workload of nano-vllm's benchmark, at a size that fits the device -------------------


def make_workload(args: argparse.Namespace) -> list[tuple[list[int], int]]:
    """[(prompt token ids, output tokens)], random lengths and random tokens."""
    generator = random.Random(args.seed)
    print(f"{args.num_seqs} requests of {args.input_len} tokens in and {args.output_len} out")
    return [([generator.randrange(10, 10_000) for _ in range(generator.randint(*args.input_len))],
             generator.randint(*args.output_len)) for _ in range(args.num_seqs)]


def params_of(workload: list, params_class: type, temperature: float = 0.0) -> list:
    """As many tokens as the workload says, whatever they are."""
    return [params_class(temperature=temperature, ignore_eos=True, max_tokens=length)
            for _, length in workload]


def engine_options(args: argparse.Namespace) -> dict:
    names = ("dtype", "block_size", "num_blocks", "max_num_seqs", "max_num_batched_tokens",
             "enforce_eager", "attention_backend")
    return {name: getattr(args, name) for name in names if getattr(args, name) is not None}


def make_llm(args: argparse.Namespace, **options):
    from nanopage import LLM, SamplingParams
    llm = LLM(args.model, **{**engine_options(args), **options})
    print(llm, flush=True)
    llm.generate([[1, 2, 3]], SamplingParams(max_tokens=2), use_tqdm=False)  # warm
    return llm


# ---- one run, step by step -------------------------------------------------------------------


class Run:
    """Requests driven through an engine by `step`: when tokens came, what the pool looked like."""

    def __init__(self, llm, prompts: list, params: list) -> None:
        self.times: dict[str, list[float]] = {}
        self.steps: list[dict] = []
        before = llm.metrics()  # allocated slots, and empty ones of them, summed over the steps
        self.slots = [(before.num_allocated_slots, before.num_empty_slots)]
        self.tables: list[list[tuple[str, list[int]]]] = []  # of each step, with whose it is
        self.num_in, self.num_out = sum(map(len, prompts)), 0
        start = time.perf_counter()
        for prompt, param in zip(prompts, params, strict=True):
            llm.add_request(prompt, param)
        while llm.has_unfinished_requests():
            for output in llm.step():
                now = time.perf_counter() - start
                self.times.setdefault(output.request_id, []).append(now)
                if output.finished:
                    self.num_out += sum(len(c.token_ids) for c in output.outputs)
            scheduler, metrics = llm.scheduler, llm.metrics()
            cached = scheduler.block_manager.cached.values()
            self.steps.append({
                "used": metrics.num_used_blocks, "preempted": metrics.num_preemptions,
                "cached": sum(block.ref_count == 0 for block in cached),
                "running": len(scheduler.running), "waiting": len(scheduler.waiting)})
            self.slots.append((metrics.num_allocated_slots, metrics.num_empty_slots))
            self.tables.append([(seq.request.request_id, list(seq.block_table))
                                for seq in scheduler.running])
        self.seconds, self.metrics = time.perf_counter() - start, llm.metrics()
        self.rate = self.num_out / self.seconds

    def row(self) -> dict:
        first = sorted(1000 * times[0] for times in self.times.values())
        between = sorted(1000 * (b - a) for times in self.times.values()
                         for a, b in zip(times, times[1:], strict=False)) or [0.0]
        metrics = self.metrics
        return {"output tok/s": self.rate, "prompt tok/s": self.num_in / self.seconds,
                "ttft ms": median(first), "ttft p99": first[int(0.99 * len(first))],
                "itl ms": median(between), "itl p99": between[int(0.99 * len(between))],
                "peak blocks": metrics.peak_used_blocks, "waste %": 100 * metrics.kv_waste,
                "preempted": metrics.num_preemptions, "seconds": self.seconds}


def measure_rates(dtype_name: str) -> tuple[float, float]:
    """The hardware's ceiling first: FLOP/s of a matrix product, bytes/s of a copy."""
    import torch
    device = "cuda" if torch.cuda.is_available() else "cpu"
    a = torch.randn(1024, 1024, device=device).to(getattr(torch, dtype_name))
    x, y = torch.ones(2, 256 << 20, dtype=torch.uint8, device=device)

    def seconds(function) -> float:
        start = time.perf_counter()
        function()
        if device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - start

    flops = 2 * 1024**3 / min(seconds(lambda: a @ a) for _ in range(5))
    bandwidth = 2 * x.nbytes / min(seconds(lambda: y.copy_(x)) for _ in range(5))
    print(f"Ceiling of the {device}: {dtype_name} {flops / 1e9:,.0f} GFLOP/s, copying memory "
          f"{bandwidth / 1e9:,.1f} GB/s")
    return flops, bandwidth


def ceiling_seconds(llm, num_in: int, num_out: int, num_steps: int, num_read: float,
                    flops: float, bandwidth: float) -> float:
    """What matrix products, weights and the KV cache alone would take at these rates.

    num_read: how often the K and V of a token are read.
    """
    config, pool = llm.model_runner.hf_config, llm.model_runner.kv_cache
    heads = config.num_attention_heads + config.num_key_value_heads
    per_layer = 2 * heads * config.head_dim + 3 * config.intermediate_size
    decoder = config.num_hidden_layers * config.hidden_size * per_layer
    head = config.hidden_size * config.vocab_size
    products = 2 * (decoder * (num_in + num_out) + head * num_out) / flops
    weights = num_steps * (decoder + head) * pool.itemsize / bandwidth
    bytes_per_token = pool.nbytes / pool.shape[2] / llm.config.block_size
    return max(products, weights) + num_read * bytes_per_token / bandwidth


def bench_throughput(args: argparse.Namespace) -> Iterator[dict]:
    """Random prompts and lengths, as nano-vllm's benchmark has them."""
    from nanopage import SamplingParams
    workload, llm = make_workload(args), make_llm(args)
    rates = measure_rates(str(llm.config.dtype).removeprefix("torch."))
    run = Run(llm, [prompt for prompt, _ in workload],
              params_of(workload, SamplingParams, args.temperature))
    num_read = sum(n * len(p) + n * n / 2 for p, n in workload)  # each token reads all before it
    ceiling = ceiling_seconds(llm, run.num_in, run.num_out, len(run.steps), num_read, *rates)
    yield {"engine": "nanopage", **run.row(), "of ceiling %": 100 * ceiling / run.seconds}
    if args.plot:
        plot(run, args.plot)


def plot(run: Run, file: str) -> None:
    """Blocks used, cached and free over the steps, with running and waiting sequences."""
    from matplotlib.figure import Figure
    used, preempted, cached, running, waiting = zip(
        *(step.values() for step in run.steps), strict=True)
    total = run.metrics.num_blocks
    held = [u + c for u, c in zip(used, cached, strict=True)]
    free = [min(total, 2 * max(held)) - blocks for blocks in held]
    figure = Figure(figsize=(9, 5), facecolor="white")
    blocks, queues = figure.subplots(2, 1, sharex=True)
    figure.suptitle("The pool and the queues, step by step")
    blocks.stackplot(range(len(used)), used, cached, free, labels=["used", "cached", "free"],
                     colors=["#2a6f97", "#a9d6e5", "#f1f1f1"])
    blocks.set_ylabel(f"blocks (of {total})")
    queues.plot(running, label="running", color="#2a6f97")
    queues.plot(waiting, label="waiting", color="#e07a5f", linestyle="--")
    marks = [i for i in range(1, len(preempted)) if preempted[i] > preempted[i - 1]]
    queues.plot(marks, [running[i] for i in marks], "kv", label="preemption")
    queues.set(ylabel="sequences", xlabel="step")
    for axes in (blocks, queues):
        axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
        axes.margins(x=0)
    save(figure, file)


def save(figure, file: str) -> None:
    figure.tight_layout()
    figure.savefig(file, dpi=120)
    print(f"wrote {file}")


# ---- other engines, each in a process of its own ---------------------------------------------


def worker_vllm_api(args: argparse.Namespace) -> tuple[int, float]:
    """nanopage, vLLM and nano-vllm are called alike; the last takes bare ids, and no greedy."""
    package, is_nano = importlib.import_module(args.engine), args.engine == "nanovllm"
    options = {"max_model_len": args.input_len[1] + args.output_len[1]}
    if args.engine == "vllm":
        options |= {"dtype": args.dtype, "max_num_seqs": args.num_seqs}
    if args.engine == "nanopage":
        options = engine_options(args)
    llm = package.LLM(args.model, **options)
    print(llm)
    workload = make_workload(args)
    params = params_of(workload, package.SamplingParams, args.temperature or 0.01 * is_nano)
    prompts = [[1, 2, 3], *(prompt for prompt, _ in workload)]
    if not is_nano:
        prompts = [{"prompt_token_ids": prompt} for prompt in prompts]
    llm.generate(prompts[:1], params[:1], use_tqdm=False)  # warm
    start = time.perf_counter()
    llm.generate(prompts[1:], params, use_tqdm=False)
    return sum(length for _, length in workload), time.perf_counter() - start


def load_hf(args: argparse.Namespace):
    import torch
    from transformers import AutoModelForCausalLM
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return AutoModelForCausalLM.from_pretrained(
        args.model, dtype=getattr(torch, args.dtype)).to(device).eval()


def worker_hf(args: argparse.Namespace) -> tuple[int, float]:
    """Static batches of 16, sorted by output length; a batch runs to its longest request."""
    import torch
    model = load_hf(args)
    workload = sorted(make_workload(args), key=lambda request: request[1])

    def run(batch):
        prompts = [torch.tensor(prompt, device=model.device) for prompt, _ in batch]
        ids, mask = (torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_side="left")
                     for rows in (prompts, [torch.ones_like(prompt) for prompt in prompts]))
        model.generate(ids, attention_mask=mask, do_sample=False, eos_token_id=None,
                       pad_token_id=0, max_new_tokens=max(length for _, length in batch))

    run([([1, 2, 3], 2)])
    start = time.perf_counter()
    for i in range(0, len(workload), 16):
        run(workload[i:i + 16])
    return sum(length for _, length in workload), time.perf_counter() - start


def worker_hf_continuous(args: argparse.Namespace) -> tuple[int, float]:
    """transformers' own continuous batching, which pages as well."""
    import torch
    from transformers import GenerationConfig
    model, workload = load_hf(args), make_workload(args)
    config = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0)

    def run(batch):
        with torch.no_grad(), model.continuous_batching_context_manager(config) as manager:
            for prompt, length in batch:
                manager.add_request(prompt, max_new_tokens=length)
            results = []
            while len(results) < len(batch) and manager.is_running():
                result = manager.get_result(timeout=1)
                results += [result] if result and result.is_finished() else []
        return sum(len(result.generated_tokens) for result in results)

    run([([1, 2, 3], 2)])
    start = time.perf_counter()
    num_tokens = run(workload)
    return num_tokens, time.perf_counter() - start


def worker_openvino(args: argparse.Namespace) -> tuple[int, float]:
    """OpenVINO GenAI's continuous batching; optimum-intel exports the model once."""
    import numpy as np
    import openvino
    import openvino_genai as genai
    folder = Path(args.model).with_name(Path(args.model).name + "-openvino")
    if not folder.is_dir():
        subprocess.run(["optimum-cli", "export", "openvino", "--model", args.model, "--task",
                        "text-generation-with-past", "--weight-format", "fp16", str(folder)],
                       check=True, env={**os.environ, "PATH": str(Path(sys.executable).parent)
                                        + os.pathsep + os.environ["PATH"]})
    scheduler = genai.SchedulerConfig()
    scheduler.cache_size, scheduler.max_num_seqs = 4, args.num_seqs
    precision = {"bfloat16": "bf16", "float32": "f32", "float16": "f16"}[args.dtype]
    pipeline = genai.ContinuousBatchingPipeline(
        str(folder), scheduler, "CPU", {"INFERENCE_PRECISION_HINT": precision})

    def run(batch):
        configs = [genai.GenerationConfig(max_new_tokens=length, ignore_eos=True)
                   for _, length in batch]
        prompts = [openvino.Tensor(np.array([prompt])) for prompt, _ in batch]
        results = pipeline.generate(prompts, configs)
        return sum(len(result.m_generation_ids[0]) for result in results)

    run([([1, 2, 3], 2)])
    workload, start = make_workload(args), time.perf_counter()
    num_tokens = run(workload)
    return num_tokens, time.perf_counter() - start


PACKAGES = {"nanopage": "nanopage", "hf": "transformers", "hf-continuous": "transformers",
            "openvino": "openvino_genai", "vllm": "vllm", "nanovllm": "nanovllm"}
WORKERS = {"hf": worker_hf, "hf-continuous": worker_hf_continuous, "openvino": worker_openvino}


def bench_compare(args: argparse.Namespace) -> Iterator[dict]:
    """Ours and the peers in turn, --repeat times; medians, and ratios run by run."""
    args.dtype = args.dtype.replace("auto", "bfloat16")
    measure_rates(args.dtype)
    runs: dict[str, list[dict]] = {"nanopage": []}
    for name in args.compare:
        probe = f"import importlib.util as u; assert u.find_spec({PACKAGES[name]!r})"
        if subprocess.run([python_of(name, args), "-c", probe], capture_output=True).returncode:
            print(f"{name}: not installed, skipped")
        else:
            runs[name] = []
    for repeat in range(args.repeat):
        for name, results in runs.items():
            results.append(run_worker(name, args))
            print(f"run {repeat + 1}, {name}: {results[-1]['tok/s']:,.1f} tok/s, "
                  f"{results[-1]['process s']:.1f} s from start to end", flush=True)
    for name, results in runs.items():
        rates = [result["tok/s"] for result in results]
        ratios = [ours["tok/s"] / theirs
                  for ours, theirs in zip(runs["nanopage"], rates, strict=True)]
        yield {"engine": name, "tok/s": median(rates), "min": min(rates), "max": max(rates),
               "process s": median(result["process s"] for result in results),
               "ours / it": median(ratios), "lowest": min(ratios), "highest": max(ratios)}


def python_of(name: str, args: argparse.Namespace) -> str:
    return getattr(args, f"{name}_python", None) or sys.executable


def run_worker(name: str, args: argparse.Namespace) -> dict:
    """A worker gets all options; only ours reads those of the engine."""
    options = json.dumps({**vars(args), "engine": name})
    environment = {"HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "4",
                   "VLLM_LOGGING_LEVEL": "ERROR", "TOKENIZERS_PARALLELISM": "false",
                   "VLLM_CPU_OMP_THREADS_BIND": f"0-{(os.cpu_count() or 1) - 1}"}
    start = time.perf_counter()
    done = subprocess.run(
        [python_of(name, args), __file__, "--worker", options],
        capture_output=True, text=True, env={**environment, **os.environ})
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if done.returncode or not lines:
        raise SystemExit(f"{name} failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    num_tokens, run_seconds = json.loads(lines[0][len("RESULT "):])
    return {"tok/s": num_tokens / run_seconds, "process s": time.perf_counter() - start}


# ---- fragmentation ---------------------------------------------------------------------------


def bench_fragmentation(args: argparse.Namespace) -> Iterator[dict]:
    """The paper's figure 2: with blocks of max_model_len a request reserves a contiguous slab.

    That *is* the old system; smaller blocks are pages. All get the same number of slots.
    """
    from nanopage import SamplingParams
    workload = make_workload(args)
    longest = args.input_len[1] + args.output_len[1]
    rates = []
    for block_size in (longest, 256, 16, 1):
        llm = make_llm(args, block_size=block_size, num_blocks=8 * longest // block_size,
                       max_model_len=longest, enable_prefix_caching=False)
        run = Run(llm, [prompt for prompt, _ in workload], params_of(workload, SamplingParams))
        running = [step["running"] for step in run.steps]
        in_demand = [step["running"] for step in run.steps if step["waiting"]]
        rates.append(run.rate)
        yield {"block size": block_size, "slots with tokens %": 100 * (1 - run.metrics.kv_waste),
               "running, mean": mean(running), "while others wait": mean(in_demand or running),
               "most": max(running), "preempted": run.metrics.num_preemptions,
               "output tok/s": run.rate, "speed": run.rate / rates[0]}


# ---- prefix caching --------------------------------------------------------------------------


def bench_prefix(args: argparse.Namespace) -> Iterator[dict]:
    """24 questions on one prompt of 800 tokens, 32 tokens each."""
    from nanopage import SamplingParams
    params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=32)
    for caching in (False, True):
        llm = make_llm(args, enable_prefix_caching=caching)
        shared = llm.tokenizer(PROSE)["input_ids"][:800]
        questions = [shared + llm.tokenizer(f" Question {i}: what is a page?")["input_ids"]
                     for i in range(24)]
        run = Run(llm, questions, [params] * len(questions))
        yield {"prefix cache": "on" if caching else "off", "prompt tokens": run.num_in,
               "computed": run.num_in - run.metrics.prefix_hit_tokens, **run.row()}


# ---- sharing ---------------------------------------------------------------------------------

SETTINGS = {  # mean tokens in and out, and the paper's figures (section 6.3)
    "Alpaca": (19, 58, {"sampling": "6.1 - 9.8 %", "beams": "37.6 - 55.2 %"}),
    "ShareGPT": (161, 338, {"sampling": "16.2 - 30.5 %", "beams": "44.3 - 66.3 %"}),
}


def bench_sharing(args: argparse.Namespace) -> Iterator[dict]:
    """Share of the blocks that branches would hold without sharing, over all steps of 8 requests.

    Block size 16, as in the paper.
    """
    llm = make_llm(args, block_size=16, enable_prefix_caching=False, num_blocks=8192,
                   max_model_len=2048)
    generator, ids = random.Random(0), llm.tokenizer(PROSE)["input_ids"]
    for setting, (mean_in, mean_out, paper) in SETTINGS.items():
        lengths = [generator.randint(mean_in // 2, mean_in + mean_in // 2) for _ in range(8)]
        prompts = [ids[i * 30:i * 30 + length] for i, length in enumerate(lengths)]
        for kind in ("sampling", "beams"):
            for width in (2, 4, 6):
                yield {"setting": setting, "kind": kind, "width": width,
                       "saved %": 100 * run_branches(llm, kind, width, prompts, mean_out),
                       "paper, 2 to 6": paper[kind]}


def run_branches(llm, kind: str, width: int, prompts: list[list[int]], length: int) -> float:
    """Run all requests at once; returns 1 - blocks in use / references, summed over steps."""
    from nanopage import BeamSearchParams, SamplingParams
    scheduler, schedule = llm.scheduler, llm.scheduler.schedule
    num_used = num_references = 0

    def watched():
        nonlocal num_used, num_references
        batch = schedule()
        num_used += scheduler.block_manager.num_used_blocks
        num_references += sum(len(seq.block_table) for seq in scheduler.running)
        return batch

    scheduler.schedule = watched
    if kind == "sampling":
        llm.generate(prompts, [SamplingParams(n=width, seed=i, ignore_eos=True, max_tokens=length)
                               for i in range(len(prompts))], use_tqdm=False)
    else:
        llm.beam_search(prompts, BeamSearchParams(width, length, ignore_eos=True))
    del scheduler.schedule
    return 1 - num_used / num_references


# ---- speculation -----------------------------------------------------------------------------


def bench_speculation(args: argparse.Namespace) -> Iterator[dict]:
    """Prompt lookup with 4 drafts, on text that is to be repeated, and on ordinary text.

    Alone and sixteen at a time; medians of --repeat runs, with and without in turn.
    """
    from nanopage import CompletionOutput, SamplingParams
    config = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 2,
              "prompt_lookup_max": 4}
    engines = {"off": make_llm(args), "on": make_llm(args, speculative_config=config)}
    things = ("lighthouse key brother train winter bell map door boat night coat garden number "
              "wind village clock").split()
    texts = {
        "repetitive": [f"Repeat the following code exactly, but rename the class to {name}:\n\n"
                       f"{inspect.getsource(CompletionOutput)}\n"
                       for name in ("Wallet", "Purse", "Vault", "Ledger")] * 4,
        "ordinary": [f"Write a short story about a {thing}." for thing in things]}
    params = SamplingParams(temperature=0, max_tokens=160)
    for (kind, questions), batch_size in itertools.product(texts.items(), (1, 16)):
        conversations = [[{"role": "user", "content": q}] for q in questions[:batch_size]]
        rates: dict[str, list[float]] = {name: [] for name in engines}
        for repeat in range(args.repeat + 1):  # the first warms up, and caches the prompts
            for name, llm in engines.items():
                before, start = llm.metrics(), time.perf_counter()
                outputs = llm.chat(conversations, params, use_tqdm=False)
                lengths = [len(output.outputs[0].token_ids) for output in outputs]
                if repeat:
                    rates[name].append(sum(lengths) / (time.perf_counter() - start))
        after = llm.metrics()  # of the engine with drafts, which came last
        drafted = after.num_draft_tokens - before.num_draft_tokens
        accepted = after.num_accepted_tokens - before.num_accepted_tokens
        yield {"text": kind, "batch": batch_size, "tok/s off": median(rates["off"]),
               "tok/s on": median(rates["on"]),
               "steps per token": (after.num_steps - before.num_steps) / max(lengths),
               "accepted %": 100 * accepted / max(1, drafted),
               "speed": median(rates["on"]) / median(rates["off"])}


# ---- the host's share ------------------------------------------------------------------------


def bench_host(args: argparse.Namespace) -> Iterator[dict]:
    """A real engine whose model is a constant: schedule + update; and prefix look-ups.

    The best of the runs. The look-ups are of 8,000 tokens, 500 blocks, all of them hits.
    """
    from transformers import AutoModelForCausalLM, LlamaConfig

    from nanopage import LLM, SamplingParams
    params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=1000)
    config = LlamaConfig(vocab_size=100, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
                         num_attention_heads=1, max_position_embeddings=10_000)
    with tempfile.TemporaryDirectory() as tiny:
        AutoModelForCausalLM.from_config(config).save_pretrained(tiny)
        for num_running, length in ((16, 1000), (256, 1000), (1024, 1000), (256, 4000)):
            costs, num_steps = [], 8000 // num_running + 16
            for _ in range(max(3, args.repeat)):
                llm = LLM(tiny, block_size=16, num_blocks=num_running * (length + 1000) // 16,
                          max_num_seqs=num_running, max_num_batched_tokens=num_running * length)
                scheduler, constant = llm.scheduler, [[(7, {})]] * num_running
                for i in range(num_running):
                    llm.add_request([i % 97] * length, params)
                scheduler.update(scheduler.schedule(), constant)
                start = time.perf_counter()
                for _ in range(num_steps):
                    scheduler.update(scheduler.schedule(), constant)
                costs.append((time.perf_counter() - start) / num_steps / num_running)
            yield {"running": num_running, "context": length, "us / seq / step": 1e6 * min(costs)}
        llm = LLM(tiny, block_size=16, num_blocks=1024, max_num_batched_tokens=8000)
    manager = llm.scheduler.block_manager
    looked_up: dict[str, list[float]] = {"first": [], "again": []}
    llm.generate([[5] * 8000], SamplingParams(max_tokens=1), use_tqdm=False)
    for _ in range(6):
        seq = llm.requests[llm.add_request([5] * 8000, params)].sequences[0]
        for times in looked_up.values():
            start = time.perf_counter()
            manager.share_prefix(seq)
            times.append(time.perf_counter() - start)
            manager.free(seq)
        llm.abort(seq.request.request_id)
    for name, times in looked_up.items():
        yield {"look-up": name, "us": 1e6 * min(times)}


# ---- growth ----------------------------------------------------------------------------------


def make_random_qwen() -> str:
    """A checkpoint of Qwen3-0.6B's shape, kept beside the demo model; it has no tokenizer."""
    import torch
    from transformers import AutoModelForCausalLM, Qwen3Config

    from nanopage import demo
    folder = demo.model_path().with_name("qwen3-0.6b-random")
    if not folder.is_dir():
        torch.manual_seed(0)
        config = Qwen3Config(
            vocab_size=151936, hidden_size=1024, intermediate_size=3072, num_hidden_layers=28,
            num_attention_heads=16, num_key_value_heads=8, head_dim=128, eos_token_id=None,
            max_position_embeddings=40960, tie_word_embeddings=True, rope_theta=1e6)
        AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    return str(folder)


def bench_growth(args: argparse.Namespace) -> Iterator[dict]:
    """A decode step and its parts, in ms, medians of 9; beside them what the ceiling allows.

    Inputs: from the batch to the device. Sampling: from hidden states to tokens.
    """
    from nanopage import SamplingParams
    shapes = [(n, 256) for n in (1, 4, 16, 64, 256)]
    shapes += [(16, length) for length in (1024, 2048, 4096, 8192)]
    llm = make_llm(args, max_num_seqs=256, num_blocks=16 * 8192 // 32 + 256, block_size=32,
                   max_num_batched_tokens=2048, enable_prefix_caching=False, enforce_eager=True)
    rates = measure_rates(str(llm.config.dtype).removeprefix("torch."))
    scheduler, runner, marks = llm.scheduler, llm.model_runner, []
    runner.kv_cache.fill_(1)  # untouched pages are all the same page of zeros, and read too fast
    runner.model.register_forward_pre_hook(lambda *_: marks.append(time.perf_counter()))
    runner.model.register_forward_hook(lambda *_: marks.append(time.perf_counter()))
    for num_seqs, length in shapes:
        num_steps = 9
        prompt, params = [7] * (length - num_steps - 1), SamplingParams(
            temperature=0, ignore_eos=True, max_tokens=num_steps + 2)
        ids = [llm.add_request(prompt, params) for _ in range(num_seqs)]
        for request_id in ids:  # all but the last token count as computed: ones take as long
            seq = llm.requests[request_id].sequences[0]
            scheduler.block_manager.extend(seq, len(prompt) - 1)
            seq.num_computed_tokens = len(prompt) - 1
        llm.step()
        parts = []
        for _ in range(num_steps):
            marks[:] = [time.perf_counter()]
            batch = scheduler.schedule()
            marks.append(time.perf_counter())
            samples = runner.execute(batch)
            marks.append(time.perf_counter())
            scheduler.update(batch, samples)
            times = [*marks, time.perf_counter()]
            parts.append([times[1] - times[0] + times[5] - times[4], times[2] - times[1],
                          times[3] - times[2], times[4] - times[3]])
        for request_id in ids:
            llm.abort(request_id)
        schedule, inputs, forward, sampling = (1000 * median(part) for part in zip(*parts))
        yield {"running": num_seqs, "tokens each": length,
               "step": 1000 * median(map(sum, parts)), "schedule + update": schedule,
               "inputs": inputs, "forward": forward, "sampling": sampling,
               "ceiling": 1000 * ceiling_seconds(llm, 0, num_seqs, 1, num_seqs * length, *rates)}


def plot_growth(rows: list[dict], file: str) -> None:
    from matplotlib.figure import Figure
    figure = Figure(figsize=(9, 4), facecolor="white")
    for axes, fixed, moving in zip(figure.subplots(1, 2, sharey=True),
                                   ("tokens each", "running"), ("running", "tokens each")):
        value = {"tokens each": 256, "running": 16}[fixed]
        chosen = sorted((row for row in rows if row[fixed] == value), key=lambda row: row[moving])
        for part, style in (("step", "k-o"), ("ceiling", "k--"), ("forward", "C0-"),
                            ("sampling", "C1-."), ("inputs", "C2:"), ("schedule + update", "C3:")):
            axes.loglog([row[moving] for row in chosen], [row[part] for row in chosen], style,
                        label=part)
        axes.set(xlabel=f"{moving} ({fixed}: {value})", ylabel="ms")
        axes.set_xticks([row[moving] for row in chosen], [row[moving] for row in chosen])
        axes.minorticks_off()
        axes.grid(alpha=0.3)
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
    save(figure, file)


# ---- pictures --------------------------------------------------------------------------------


def bench_pictures(args: argparse.Namespace) -> Iterator[dict]:
    """The pool block by block, and contiguous reservation beside pages, on the same requests."""
    from nanopage import SamplingParams
    args.input_len, args.output_len, args.num_seqs = (8, 64), (8, 128), 16
    workload, runs = make_workload(args), {}
    for name, block_size in (("contiguous reservation", 192), ("pages of 16", 16)):
        llm = make_llm(args, block_size=block_size, num_blocks=8 * 192 // block_size,
                       max_model_len=192, enable_prefix_caching=False)
        runs[name] = run = Run(llm, [prompt for prompt, _ in workload],
                               params_of(workload, SamplingParams))
        yield {"cache": name, **run.row()}
    plot_reservation(runs, 8 * 192, "docs/reservation.png")
    llm = make_llm(args, block_size=16, num_blocks=48)
    prompts = [[5] * 40 + prompt for prompt, _ in workload[:6]]
    params = [SamplingParams(n=1 + i % 3, seed=i, ignore_eos=True, max_tokens=40 + 10 * i)
              for i in range(6)]
    run = Run(llm, prompts, params)
    yield {"cache": "a common beginning, n up to 3", **run.row()}
    plot_pool(run, "docs/pool.png")


def plot_reservation(runs: dict[str, Run], num_slots: int, file: str) -> None:
    from matplotlib.figure import Figure
    figure = Figure(figsize=(9, 5), facecolor="white")
    for axes, (name, run) in zip(figure.subplots(2, 1, sharex=True, sharey=True), runs.items()):
        allocated, empty = ([b - a for a, b in itertools.pairwise(column)]
                            for column in zip(*run.slots))
        held = [a - e for a, e in zip(allocated, empty)]
        free = [num_slots - a for a in allocated]
        areas = axes.stackplot(range(len(held)), held, empty, free, edgecolor="k", linewidth=0.3,
                               labels=["hold a token", "reserved, empty", "free"],
                               colors=["#2a6f97", "#e9c46a", "#f1f1f1"])
        areas[1].set_hatch("///")
        axes.set(title=name, ylabel="slots")
        axes.margins(x=0)
        axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
    axes.set_xlabel("step")
    save(figure, file)


def plot_pool(run: Run, file: str) -> None:
    """Block by block over the steps: one colour a request, hatched where several tables name it."""
    import numpy as np
    from matplotlib import colormaps
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch
    requests = sorted({name for tables in run.tables for name, _ in tables}, key=int)
    owners = np.full((run.metrics.num_blocks + 1, len(run.tables)), np.nan)
    holders = np.zeros_like(owners)
    for step, tables in enumerate(run.tables):
        for name, table in tables:
            owners[table, step] = requests.index(name)
            holders[table, step] += 1
    figure = Figure(figsize=(9, 4.5), facecolor="white")
    axes = figure.subplots()
    colors = colormaps["viridis"].resampled(len(requests))
    axes.imshow(owners, aspect="auto", interpolation="nearest", cmap=colors, vmin=0,
                vmax=len(requests) - 1, origin="lower")
    axes.contourf(holders > 1, levels=[0.5, 1.5], hatches=["xxx"], colors="none")
    axes.set(title="The pool, block by block", xlabel="step", ylabel="block")
    patches = [Patch(facecolor=colors(i), label=f"request {name}")
               for i, name in enumerate(requests)]
    patches.append(Patch(facecolor="white", edgecolor="k", hatch="xxx", label="shared"))
    axes.legend(handles=patches, loc="center left", bbox_to_anchor=(1.0, 0.5))
    save(figure, file)


# ---- the command line ------------------------------------------------------------------------


def print_table(rows: list[dict]) -> None:
    names = list(dict.fromkeys(name for row in rows for name in row))
    cells = [[format_cell(row.get(name, "")) for name in names] for row in rows]
    widths = [max(len(line[i]) for line in [names, *cells]) for i in range(len(names))]
    for line in [names, *cells]:
        print("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)))


def format_cell(value) -> str:
    if isinstance(value, float):
        return f"{value:.3f}" if abs(value) < 10 else f"{value:,.1f}"
    return str(value)


def length_range(text: str) -> tuple[int, int]:
    low, _, high = text.partition(":")
    if not 0 < int(low) <= int(high or low):
        raise argparse.ArgumentTypeError(f"{text}: must be LOW:HIGH, from 1 on")
    return int(low), int(high or low)


MODES = {"throughput": bench_throughput, "fragmentation": bench_fragmentation,
         "prefix": bench_prefix, "sharing": bench_sharing, "speculation": bench_speculation,
         "host": bench_host, "growth": bench_growth, "pictures": bench_pictures}


def make_parser() -> argparse.ArgumentParser:
    on_gpu = Path("/proc/driver/nvidia").exists()
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("mode", nargs="?", choices=MODES, default="throughput")
    parser.add_argument("--model", help="a directory or hub name (default: SmolLM2-135M-Instruct)")
    parser.add_argument("--num-seqs", type=int, default=256 if on_gpu else 64,
                        help="requests of the workload (default: %(default)s)")
    for name, what in (("input", "prompt"), ("output", "completion")):
        parser.add_argument(f"--{name}-len", type=length_range, metavar="LOW:HIGH",
                            default=(100, 1024) if on_gpu else (16, 256),
                            help=f"tokens of a {what}, drawn evenly (default: %(default)s)")
    parser.add_argument("--temperature", type=float, default=0.0, help="0, the default, is greedy")
    parser.add_argument("--seed", type=int, default=0, help="of the workload")
    parser.add_argument("--repeat", type=int, default=3, help="runs of each (default: 3)")
    parser.add_argument("--compare", nargs="+", choices=list(PACKAGES)[1:],
                        help="peers to run in turn with this engine")
    for name in ("vllm", "openvino"):
        parser.add_argument(f"--{name}-python", metavar="PATH",
                            help=f"interpreter of {name}'s environment")
    parser.add_argument("--plot", metavar="FILE.png",
                        help='a picture of the run (needs the extra "plot")')
    parser.add_argument("--json", metavar="FILE", help="write all figures to FILE")
    engine = parser.add_argument_group("engine options")
    engine.add_argument("--dtype", default="auto", help="float32, bfloat16, float16 or auto")
    for name in ("block-size", "num-blocks", "max-num-seqs", "max-num-batched-tokens"):
        engine.add_argument(f"--{name}", type=int, help="as in nanopage.LLM")
    engine.add_argument("--attention-backend", help="flash, varlen, cpu, reference or auto")
    engine.add_argument("--enforce-eager", action="store_true", default=None,
                        help="no CUDA graphs")
    parser.add_argument("--worker", help=argparse.SUPPRESS)  # all options, as JSON
    return parser


def main() -> None:
    parser = make_parser()
    args = parser.parse_args()
    if args.worker:
        args = argparse.Namespace(**json.loads(args.worker))
        worker = WORKERS.get(args.engine, worker_vllm_api)
        print("RESULT " + json.dumps(worker(args)), flush=True)
        return
    if (args.plot or args.mode == "pictures") and not importlib.util.find_spec("matplotlib"):
        parser.error('pictures need matplotlib: pip install "nanopage[plot]"')
    if args.model is None:
        from nanopage import demo
        args.model = str(demo.model_path())
    if args.model == "qwen3-0.6b-random":
        args.model = make_random_qwen()
    start, rows = time.perf_counter(), []
    bench = bench_compare if args.compare else MODES[args.mode]
    for row in bench(args):
        rows.append(row)
        print(", ".join(f"{name} {format_cell(value)}" for name, value in row.items()), flush=True)
    print(f"\n{inspect.getdoc(bench)}\n")
    print_table(rows)
    print(f"\n{time.perf_counter() - start:.1f} s in all")
    if args.mode == "growth" and args.plot:
        plot_growth(rows, args.plot)
    if args.json:
        Path(args.json).write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
