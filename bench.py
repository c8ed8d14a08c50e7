"""Every comparison that the README quotes, one command each.

    python bench.py                       throughput of the default workload
    python bench.py --compare hf,vllm     the same requests through other engines, in turn
    python bench.py fragmentation         contiguous reservation against pages, at equal memory
    python bench.py prefix                many questions on one long prompt, cache on and off
    python bench.py sharing               blocks saved by parallel sampling and beam search
    python bench.py speculation           prompt lookup, where it wins and where it loses
    python bench.py host                  the cost of scheduling alone

Without --model it is SmolLM2-135M-Instruct. All workloads are seeded.
"""

import argparse
import importlib.util
import json
import os
import random
import statistics
import subprocess
import sys
import time
from bisect import bisect_left
from pathlib import Path

PROSE = """Paging was invented so that programs need not care where in memory their data lies. A
table maps each page of an address space to a frame, and the operating system hands out frames as
they are touched. The cache of keys and values of a language model has the same shape: it grows one
token at a time, nobody knows how long it will get, and many requests begin with the same words. If
every request reserves memory for the longest answer, most of it stays empty; if blocks are handed
out on demand, at most the last one of each request is not full. Blocks that begin alike can be
shared, and copied when one of the owners writes. On the first warm evening of the year the whole
street came out to sit on the steps. Somebody had brought a radio, somebody else a bowl of cherries,
and the children ran from lamp to lamp as if each of them were a station of a long journey. The old
baker, who never spoke of the war, told a story about a dog that could count to seven. """

CODE = '''class Account:
    def __init__(self, owner, balance=0):
        self.owner = owner
        self.balance = balance

    def deposit(self, amount):
        if amount <= 0:
            raise ValueError("amount must be positive")
        self.balance = self.balance + amount
        return self.balance

    def withdraw(self, amount):
        if amount > self.balance:
            raise ValueError("insufficient funds")
        self.balance = self.balance - amount
        return self.balance
'''


# ---- the workload of nano-vllm's benchmark, at a size that fits the device -------------------


def throughput_workload(args: argparse.Namespace) -> list[tuple[list[int], int]]:
    """[(prompt token ids, output tokens)], random lengths and random tokens."""
    generator = random.Random(args.seed)
    low_in, high_in = args.input_len
    low_out, high_out = args.output_len
    return [([generator.randrange(10, 10_000) for _ in range(generator.randint(low_in, high_in))],
             generator.randint(low_out, high_out)) for _ in range(args.num_seqs)]


def params_of(workload: list, params_class: type, temperature: float) -> list:
    """As many tokens as the workload says, whatever they are."""
    return [params_class(temperature=temperature, ignore_eos=True, max_tokens=length)
            for _, length in workload]


def engine_options(args: argparse.Namespace) -> dict:
    names = ("dtype", "block_size", "num_blocks", "max_num_seqs", "max_num_batched_tokens",
             "enforce_eager", "attention_backend")
    return {name: getattr(args, name) for name in names if getattr(args, name, None) is not None}


def make_llm(args: argparse.Namespace, **options):
    from nanopage import LLM
    return LLM(model_of(args), **{**engine_options(args), **options})


def model_of(args: argparse.Namespace) -> str:
    if args.model is None:
        from nanopage import demo
        args.model = str(demo.model_path())
    return args.model


class Recorder:
    """Watches an engine step by step: when tokens came, and what the pool looked like."""

    def __init__(self, llm) -> None:
        self.llm, self.steps, self.times = llm, [], {}
        self.batches: list[tuple[int, int]] = []  # tokens, sampled rows
        self.execute, self.step = llm.model_runner.execute, llm._step
        llm.model_runner.execute, llm._step = self.watched_execute, self.watched_step

    def watched_execute(self, batch):
        samples = self.execute(batch)
        self.batches.append((batch.num_tokens, sum(map(len, samples.token_ids))))
        return samples

    def watched_step(self):
        touched = self.step()
        now = time.perf_counter()
        for request in touched:
            self.times.setdefault(request, []).append(now)
        scheduler = self.llm.scheduler
        manager = scheduler.block_manager
        self.steps.append((manager.num_used_blocks, len(scheduler.running), len(scheduler.waiting),
                           sum(block.ref_count == 0 for block in manager.cached.values())))
        return touched

    def latencies(self, start: float) -> dict:
        first = [1000 * (times[0] - start) for times in self.times.values()]
        between = [1000 * (b - a) for times in self.times.values()
                   for a, b in zip(times, times[1:], strict=False)] or [0.0]
        return {"ttft ms": statistics.median(first), "ttft p99": percentile(first, 99),
                "itl ms": statistics.median(between), "itl p99": percentile(between, 99)}

    def stop(self) -> None:
        del self.llm.model_runner.execute, self.llm._step


def percentile(values: list[float], percent: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))]


def matmul_seconds(llm, batches: list[tuple[int, int]]) -> float:
    """What the matrix products of these steps alone would take, measured now on this machine."""
    import torch
    model = llm.model_runner.model
    layer = model.model.layers[0]
    linears = [layer.self_attn.qkv_proj, layer.self_attn.o_proj, layer.mlp.gate_proj,
               layer.mlp.up_proj, layer.mlp.down_proj]
    weight = layer.input_layernorm.weight
    mlp_size = model.config.intermediate_size
    q_size = layer.self_attn.num_heads * layer.self_attn.head_dim
    widths = [len(weight), q_size, len(weight), len(weight), mlp_size]

    def seconds_of(modules, sizes, rows):
        inputs = [torch.randn(rows, size).to(weight.dtype).to(weight.device) for size in sizes]
        best = float("inf")
        for _ in range(5):
            start = time.perf_counter()
            for module, x in zip(modules, inputs, strict=True):
                module(x)
            if weight.is_cuda:
                torch.cuda.synchronize()
            best = min(best, time.perf_counter() - start)
        return best

    points = [1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 256, 512, 1024, 2048, 4096, 8192]
    largest = bisect_left(points, max(max(pair) for pair in batches)) + 1
    points = points[:largest]
    with torch.inference_mode():
        per_layer = [seconds_of(linears, widths, rows) for rows in points]
        head = [seconds_of([model.lm_head], [len(weight)], rows) for rows in points
                if rows <= max(1, points[bisect_left(points, max(b for _, b in batches))])]

    def between(table, rows):
        i = min(bisect_left(points, rows), len(table) - 1)
        if i == 0 or rows >= points[i]:
            return table[i]
        share = (rows - points[i - 1]) / (points[i] - points[i - 1])
        return table[i - 1] + share * (table[i] - table[i - 1])

    num_layers = len(model.model.layers)
    return sum(num_layers * between(per_layer, tokens) + (between(head, rows) if rows else 0.0)
               for tokens, rows in batches)


def print_ceiling() -> None:
    """The hardware's ceiling first."""
    import torch
    device = "cuda" if torch.cuda.is_available() else "cpu"
    line = [f"{torch.get_num_threads()} threads" if device == "cpu"
            else torch.cuda.get_device_name()]
    for dtype in (torch.float32, torch.bfloat16):
        a = torch.randn(1024, 1024, device=device).to(dtype)
        seconds = min(timed(lambda a=a: a @ a, device) for _ in range(5))
        line.append(f"{str(dtype)[6:]} {2 * 1024**3 / seconds / 1e9:,.0f} GFLOP/s")
    x = torch.zeros(64 << 20, dtype=torch.uint8, device=device)
    seconds = min(timed(lambda: x.clone(), device) for _ in range(5))
    line.append(f"copy {2 * x.numel() / seconds / 1e9:,.0f} GB/s")
    print("Ceiling: " + ", ".join(line))


def timed(function, device: str) -> float:
    import torch
    start = time.perf_counter()
    function()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def run_throughput(args: argparse.Namespace) -> tuple[dict, "Recorder"]:
    """Our engine on the default workload."""
    from nanopage import SamplingParams
    workload = throughput_workload(args)
    llm = make_llm(args)
    llm.generate([[1, 2, 3]], SamplingParams(max_tokens=2), use_tqdm=False)
    recorder = Recorder(llm)
    params = params_of(workload, SamplingParams, args.temperature)
    start = time.perf_counter()
    outputs = llm.generate([prompt for prompt, _ in workload], params, use_tqdm=False)
    seconds = time.perf_counter() - start
    recorder.stop()
    num_in = sum(len(prompt) for prompt, _ in workload)
    num_out = sum(len(output.outputs[0].token_ids) for output in outputs)
    metrics = llm.metrics()
    row = {"engine": "nanopage", "output tok/s": num_out / seconds,
           "prompt tok/s": num_in / seconds, **recorder.latencies(start),
           "peak blocks": metrics.peak_used_blocks, "waste %": 100 * metrics.kv_waste,
           "preempted": metrics.num_preemptions, "seconds": seconds,
           "of ceiling %": 100 * matmul_seconds(llm, recorder.batches) / seconds}
    return row, recorder


def bench_throughput(args: argparse.Namespace) -> list[dict]:
    print_ceiling()
    row, recorder = run_throughput(args)
    if args.plot:
        plot(recorder, args.plot)
    print_table(f"{args.num_seqs} requests of {args.input_len} tokens in, {args.output_len} out, "
                f"dtype {args.dtype}", [row])
    return [row]


def plot(recorder: Recorder, file: str) -> None:
    """Blocks used, cached and free over the steps, with running and waiting sequences."""
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    used, running, waiting, cached = (list(column) for column in zip(*recorder.steps, strict=True))
    total = recorder.llm.model_runner.num_blocks
    top = min(total, 2 * max(u + c for u, c in zip(used, cached, strict=True)))
    free = [top - u - c for u, c in zip(used, cached, strict=True)]
    figure, (blocks, queues) = plt.subplots(2, 1, sharex=True, figsize=(8, 5))
    blocks.stackplot(range(len(used)), used, cached, free, labels=["used", "cached", "free"],
                     colors=["#2a6f97", "#a9d6e5", "#f1f1f1"])
    blocks.set_ylabel(f"blocks (of {total})")
    queues.plot(running, label="running", color="#2a6f97")
    queues.plot(waiting, label="waiting", color="#e07a5f")
    queues.set_ylabel("sequences")
    queues.set_xlabel("step")
    for axes in (blocks, queues):
        axes.legend(loc="upper right")
        axes.margins(x=0)
    figure.tight_layout()
    figure.savefig(file, dpi=120)
    print(f"wrote {file}")


# ---- other engines, each in a process of its own ---------------------------------------------


def worker_nanopage(args: argparse.Namespace) -> tuple[int, float]:
    from nanopage import SamplingParams
    workload = throughput_workload(args)
    llm = make_llm(args)
    llm.generate([[1, 2, 3]], SamplingParams(max_tokens=2), use_tqdm=False)
    return run_vllm_api(llm, SamplingParams, workload, args)


def worker_vllm(args: argparse.Namespace) -> tuple[int, float]:
    from vllm import LLM, SamplingParams
    workload = throughput_workload(args)
    longest = args.input_len[1] + args.output_len[1]
    llm = LLM(args.model, dtype=args.dtype, max_num_seqs=args.num_seqs, max_model_len=longest)
    llm.generate([{"prompt_token_ids": [1, 2, 3]}], SamplingParams(max_tokens=2), use_tqdm=False)
    return run_vllm_api(llm, SamplingParams, workload, args)


def worker_nanovllm(args: argparse.Namespace) -> tuple[int, float]:
    from nanovllm import LLM, SamplingParams
    workload = throughput_workload(args)
    llm = LLM(args.model, max_model_len=args.input_len[1] + args.output_len[1])
    llm.generate([[1, 2, 3]], SamplingParams(max_tokens=2), use_tqdm=False)
    params = params_of(workload, SamplingParams, max(args.temperature, 0.01))
    start = time.perf_counter()
    llm.generate([prompt for prompt, _ in workload], params, use_tqdm=False)
    return sum(length for _, length in workload), time.perf_counter() - start


def run_vllm_api(llm, params_class, workload, args: argparse.Namespace) -> tuple[int, float]:
    params = params_of(workload, params_class, args.temperature)
    prompts = [{"prompt_token_ids": prompt} for prompt, _ in workload]
    start = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - start
    return sum(len(output.outputs[0].token_ids) for output in outputs), seconds


def worker_hf(args: argparse.Namespace) -> tuple[int, float]:
    """Static batches of 16, sorted by output length; a batch runs to its longest request."""
    import torch
    from transformers import AutoModelForCausalLM
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = AutoModelForCausalLM.from_pretrained(
        args.model, dtype=getattr(torch, args.dtype)).to(device).eval()
    workload = sorted(throughput_workload(args), key=lambda request: request[1])

    def run(batch):
        width = max(len(prompt) for prompt, _ in batch)
        ids = torch.tensor([[0] * (width - len(p)) + p for p, _ in batch], device=device)
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p, _ in batch],
                            device=device)
        model.generate(ids, attention_mask=mask, do_sample=False, eos_token_id=None,
                       pad_token_id=0, max_new_tokens=max(length for _, length in batch))

    run([([1, 2, 3], 2)])
    start = time.perf_counter()
    for i in range(0, len(workload), 16):
        run(workload[i:i + 16])
    return sum(length for _, length in workload), time.perf_counter() - start


WORKERS = {"nanopage": worker_nanopage, "hf": worker_hf, "vllm": worker_vllm,
           "nanovllm": worker_nanovllm}
PACKAGES = {"nanopage": "nanopage", "hf": "transformers", "vllm": "vllm", "nanovllm": "nanovllm"}


def bench_compare(args: argparse.Namespace) -> list[dict]:
    """Ours and the peers in turn, --repeat times; ratios run by run."""
    print_ceiling()
    model_of(args)
    if args.dtype == "auto":
        args.dtype = "bfloat16"
    engines = ["nanopage", *args.compare.split(",")]
    pythons = {name: sys.executable for name in engines} | {
        "vllm": args.vllm_python or sys.executable}
    for name in engines[1:]:
        package = PACKAGES[name]
        probe = f"import sys, importlib.util as u; sys.exit(u.find_spec('{package}') is None)"
        if subprocess.run([pythons[name], "-c", probe]).returncode:
            print(f"{name}: not installed, skipped")
            engines.remove(name)
    runs: dict[str, list[dict]] = {name: [] for name in engines}
    for repeat in range(args.repeat):
        for name in engines:
            runs[name].append(run_worker(name, pythons[name], args))
            print(f"run {repeat + 1}, {name}: {runs[name][-1]['tok/s']:,.1f} tok/s, "
                  f"{runs[name][-1]['process s']:.1f} s from start to end", flush=True)
    rows = []
    for name, results in runs.items():
        rates = [result["tok/s"] for result in results]
        row = {"engine": name, "tok/s": statistics.median(rates), "min": min(rates),
               "max": max(rates),
               "process s": statistics.median(result["process s"] for result in results)}
        if name != "nanopage":
            ratios = [ours["tok/s"] / theirs["tok/s"]
                      for ours, theirs in zip(runs["nanopage"], results, strict=True)]
            row |= {"ours / it": statistics.median(ratios), "lowest": min(ratios),
                    "highest": max(ratios)}
        rows.append(row)
    print_table(f"{args.num_seqs} requests, {args.dtype}, median of {args.repeat} runs each", rows)
    return rows


def run_worker(name: str, python: str, args: argparse.Namespace) -> dict:
    command = [python, __file__, "--worker", name, "--model", args.model, "--dtype", args.dtype,
               "--num-seqs", str(args.num_seqs), "--seed", str(args.seed),
               "--temperature", str(args.temperature),
               "--input-len", "{}:{}".format(*args.input_len),
               "--output-len", "{}:{}".format(*args.output_len)]
    if name == "nanopage":
        for option, value in engine_options(args).items():
            if option != "dtype" and value is not False:
                command += [f"--{option.replace('_', '-')}"] + [str(value)] * (value is not True)
    environment = {"HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "4",
                   "VLLM_LOGGING_LEVEL": "ERROR", "TOKENIZERS_PARALLELISM": "false",
                   "VLLM_CPU_OMP_THREADS_BIND": f"0-{(os.cpu_count() or 1) - 1}"}
    start = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True,
                          env={**environment, **os.environ})
    seconds = time.perf_counter() - start
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if done.returncode or not lines:
        raise SystemExit(f"{name} failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    num_tokens, run_seconds = json.loads(lines[0][len("RESULT "):])
    return {"tok/s": num_tokens / run_seconds, "process s": seconds}


# ---- fragmentation ---------------------------------------------------------------------------


def bench_fragmentation(args: argparse.Namespace) -> list[dict]:
    """The paper's figure 2: with blocks of max_model_len a request reserves a contiguous slab.

    That *is* the old system; smaller blocks are pages. All get the same number of slots.
    """
    from nanopage import SamplingParams
    workload = throughput_workload(args)
    longest = args.input_len[1] + args.output_len[1]
    num_slots = 8 * longest
    rows = []
    for block_size in (longest, 256, 16, 1):
        llm = make_llm(args, block_size=block_size, num_blocks=num_slots // block_size,
                       max_model_len=longest, enable_prefix_caching=False)
        recorder = Recorder(llm)
        params = params_of(workload, SamplingParams, temperature=0.0)
        start = time.perf_counter()
        llm.generate([prompt for prompt, _ in workload], params, use_tqdm=False)
        seconds = time.perf_counter() - start
        recorder.stop()
        running = [step[1] for step in recorder.steps]
        in_demand = [step[1] for step in recorder.steps if step[2]]  # others wait for memory
        metrics = llm.metrics()
        rows.append({
            "block size": block_size, "slots with tokens %": 100 * (1 - metrics.kv_waste),
            "running, mean": statistics.mean(running),
            "while others wait": statistics.mean(in_demand or running), "most": max(running),
            "preempted": metrics.num_preemptions,
            "output tok/s": sum(length for _, length in workload) / seconds})
    for row in rows:
        row["speed"] = row["output tok/s"] / rows[0]["output tok/s"]
    print_table(f"{num_slots} slots for all, {args.num_seqs} requests "
                f"(block size {longest} = contiguous reservation)", rows)
    return rows


# ---- prefix caching --------------------------------------------------------------------------


def bench_prefix(args: argparse.Namespace) -> list[dict]:
    """Many questions on one long shared prompt."""
    from nanopage import SamplingParams
    rows = []
    for caching in (False, True):
        llm = make_llm(args, enable_prefix_caching=caching)
        shared = llm.tokenizer(PROSE * 4)["input_ids"][:800]
        questions = [shared + llm.tokenizer(f" Question {i}: what is a page?")["input_ids"]
                     for i in range(24)]
        recorder = Recorder(llm)
        params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=32)
        start = time.perf_counter()
        llm.generate(questions, params, use_tqdm=False)
        seconds = time.perf_counter() - start
        metrics = llm.metrics()
        latencies = recorder.latencies(start)
        rows.append({"prefix cache": "on" if caching else "off",
                     "prompt tokens": metrics.num_prompt_tokens,
                     "computed": metrics.num_prompt_tokens - metrics.prefix_hit_tokens,
                     "output tok/s": 24 * 32 / seconds, "ttft ms": latencies["ttft ms"],
                     "ttft p99": latencies["ttft p99"], "peak blocks": metrics.peak_used_blocks})
    print_table("24 questions on one prompt of 800 tokens, 32 tokens each", rows)
    return rows


# ---- sharing ---------------------------------------------------------------------------------

SETTINGS = {  # mean tokens in and out, and the paper's figures (section 6.3)
    "Alpaca": (19, 58, {"sampling": "6.1 - 9.8 %", "beams": "37.6 - 55.2 %"}),
    "ShareGPT": (161, 338, {"sampling": "16.2 - 30.5 %", "beams": "44.3 - 66.3 %"}),
}


def bench_sharing(args: argparse.Namespace) -> list[dict]:
    """Share of the blocks that branches would hold without sharing, over all steps of a run."""
    llm = make_llm(args, block_size=16, enable_prefix_caching=False, num_blocks=8192,
                   max_model_len=2048)
    generator = random.Random(0)
    rows = []
    for setting, (mean_in, mean_out, paper) in SETTINGS.items():
        lengths = [generator.randint(mean_in // 2, mean_in + mean_in // 2) for _ in range(8)]
        ids = llm.tokenizer(PROSE * 12)["input_ids"]
        prompts = [ids[i * 30:i * 30 + length] for i, length in enumerate(lengths)]
        for kind in ("sampling", "beams"):
            for width in (2, 4, 6):
                saved = run_branches(llm, kind, width, prompts, mean_out)
                rows.append({"setting": setting, "kind": kind, "width": width,
                             "saved %": 100 * saved, "paper, 2 to 6": paper[kind]})
    print_table("Blocks saved by sharing (8 requests, block size 16)", rows)
    return rows


def run_branches(llm, kind: str, width: int, prompts: list[list[int]], length: int) -> float:
    """Run all requests at once; returns 1 - blocks in use / references, summed over steps."""
    from nanopage import BeamSearchParams, SamplingParams
    num_references = num_used = 0
    schedule = llm.scheduler.schedule

    def watched():
        nonlocal num_references, num_used
        batch = schedule()
        num_references += sum(len(seq.block_table) for seq in llm.scheduler.running)
        num_used += llm.scheduler.block_manager.num_used_blocks
        return batch

    llm.scheduler.schedule = watched
    if kind == "sampling":
        llm.generate(prompts, [SamplingParams(n=width, seed=i, ignore_eos=True, max_tokens=length)
                               for i in range(len(prompts))], use_tqdm=False)
    else:
        llm.beam_search(prompts, BeamSearchParams(width, length, ignore_eos=True))
    del llm.scheduler.schedule
    return 1 - num_used / num_references


# ---- speculation -----------------------------------------------------------------------------


def bench_speculation(args: argparse.Namespace) -> list[dict]:
    """Text that is to be repeated, and ordinary text, alone and sixteen at a time."""
    from nanopage import SamplingParams
    config = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 2,
              "prompt_lookup_max": 4}
    engines = {"off": make_llm(args), "on": make_llm(args, speculative_config=config)}
    rename = [f"Repeat the following code exactly, but rename the class to {name}:\n\n{CODE}\n"
              for name in ("Wallet", "Purse", "Vault", "Ledger")] * 4
    ordinary = [f"Write a short story about {thing}." for thing in (
        "a lighthouse", "a lost key", "two brothers", "a slow train", "the last winter", "a bell",
        "an old map", "a red door", "a small boat", "the night shift", "a borrowed coat",
        "a garden", "a wrong number", "the north wind", "a silent village", "a clock")]
    rows = []
    for kind, questions in (("repetitive", rename), ("ordinary", ordinary)):
        for batch_size in (1, 16):
            row = {"text": kind, "batch": batch_size}
            for name, llm in engines.items():
                conversations = [[{"role": "user", "content": q}] for q in questions[:batch_size]]
                params = SamplingParams(temperature=0, max_tokens=160)
                llm.chat(conversations, params, use_tqdm=False)  # warm, prompts cached
                before = llm.metrics()
                best = 0.0
                for _ in range(args.repeat):
                    start = time.perf_counter()
                    outputs = llm.chat(conversations, params, use_tqdm=False)
                    num_tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
                    best = max(best, num_tokens / (time.perf_counter() - start))
                row[f"tok/s {name}"] = best
                after = llm.metrics()
                num_steps = after.num_steps - before.num_steps
                longest = max(len(output.outputs[0].token_ids) for output in outputs)
                if name == "on":
                    row["steps per token"] = num_steps / args.repeat / longest
                    drafted = after.num_draft_tokens - before.num_draft_tokens
                    accepted = after.num_accepted_tokens - before.num_accepted_tokens
                    row["accepted %"] = 100 * accepted / max(1, drafted)
            row["speed"] = row["tok/s on"] / row["tok/s off"]
            rows.append(row)
    print_table(f"Prompt lookup, 4 drafts (best of {args.repeat} runs)", rows)
    return rows


# ---- the host's share ------------------------------------------------------------------------


def bench_host(args: argparse.Namespace) -> list[dict]:
    """schedule + update with the model replaced by a constant, and one prefix look-up."""
    from nanopage.block_manager import BlockManager
    from nanopage.scheduler import Samples, Scheduler
    from nanopage.sequence import Request, SamplingParams
    has_peer = importlib.util.find_spec("nanovllm") is not None
    if not has_peer:
        print("nanovllm: not importable, skipped")
    rows = []

    def request(i: int, length: int) -> Request:
        params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=10_000)
        return Request(str(i), i, 0, None, [i % 997] * length, params, 10_000, 0, frozenset())

    def step(scheduler: Scheduler) -> None:
        sequences = scheduler.schedule().sequences
        scheduler.update(Samples(sequences, [
            [7] if seq.num_computed_tokens + seq.num_scheduled_tokens == seq.num_tokens else []
            for seq in sequences], [[{}]] * len(sequences)))

    for num_running, length in ((16, 1000), (256, 1000), (1024, 1000), (256, 4000)):
        best = peer = float("inf")
        for _ in range(max(3, args.repeat)):
            manager = BlockManager(num_running * (length // 16 + 20), 16)
            scheduler = Scheduler(manager, num_running, num_running * length)
            for i in range(num_running):
                scheduler.add(request(i, length))
            step(scheduler)
            num_steps = 8000 // num_running + 16
            start = time.perf_counter()
            for _ in range(num_steps):
                batch = scheduler.schedule()
                scheduler.update(Samples(batch.sequences, [[7]] * num_running,
                                         [[{}]] * num_running))
            best = min(best, (time.perf_counter() - start) / num_steps / num_running)
            if has_peer:
                peer = min(peer, nanovllm_host(num_running, length, num_steps))
        row = {"running": num_running, "context": length, "us / seq / step": 1e6 * best}
        if has_peer:
            row |= {"nanovllm us": 1e6 * peer, "ratio": best / peer}
        rows.append(row)
    print_table("schedule + update (best of the runs)", rows)
    manager = BlockManager(1024, 16)
    times = []
    for attempt in range(4):
        seq = request(0, 8000).sequences[0]
        start = time.perf_counter()
        manager.share_prefix(seq)
        times.append(1e6 * (time.perf_counter() - start))
        if attempt == 0:
            manager.allocate(seq, 8000)
            manager.register(seq, 8000)
            manager.step_done()
        manager.free(seq)
    start = time.perf_counter()
    manager.share_prefix(seq)
    rows.append({"prefix look-up of 8,000 tokens": "first", "us": min(times[1:])})
    rows.append({"prefix look-up of 8,000 tokens": "again, hashes kept",
                 "us": 1e6 * (time.perf_counter() - start)})
    print_table("prefix look-up of 8,000 tokens, 500 blocks, all hits", rows[-2:])
    return rows


def nanovllm_host(num_running: int, length: int, num_steps: int) -> float:
    """The same calls on nano-vllm's scheduler: seconds per sequence and step."""
    from types import SimpleNamespace

    from nanovllm.engine.scheduler import Scheduler
    from nanovllm.engine.sequence import Sequence
    from nanovllm.sampling_params import SamplingParams
    Sequence.block_size = 16
    config = SimpleNamespace(
        max_num_seqs=num_running, max_num_batched_tokens=num_running * length, eos=-1,
        num_kvcache_blocks=num_running * (length // 16 + 20), kvcache_block_size=16)
    scheduler = Scheduler(config)
    params = SamplingParams(temperature=1.0, ignore_eos=True, max_tokens=10_000)
    for i in range(num_running):
        scheduler.add(Sequence([i % 997] * length, params))

    def step() -> None:
        seqs, *phase = scheduler.schedule()
        arguments = phase if scheduler.postprocess.__code__.co_argcount > 3 else []
        scheduler.postprocess(seqs, [7] * len(seqs), *arguments)

    step()
    start = time.perf_counter()
    for _ in range(num_steps):
        step()
    return (time.perf_counter() - start) / num_steps / num_running


# ---- the command line ------------------------------------------------------------------------


def print_table(title: str, rows: list[dict]) -> None:
    print(f"\n{title}")
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
    return int(low), int(high or low)


MODES = {"throughput": bench_throughput, "fragmentation": bench_fragmentation,
         "prefix": bench_prefix, "sharing": bench_sharing, "speculation": bench_speculation,
         "host": bench_host}


def main() -> None:
    on_gpu = Path("/proc/driver/nvidia").exists()
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("mode", nargs="?", choices=MODES, default="throughput")
    parser.add_argument("--model", help="a directory or hub name")
    parser.add_argument("--num-seqs", type=int, default=256 if on_gpu else 64)
    parser.add_argument("--input-len", type=length_range, metavar="LOW:HIGH",
                        default=(100, 1024) if on_gpu else (16, 256))
    parser.add_argument("--output-len", type=length_range, metavar="LOW:HIGH",
                        default=(100, 1024) if on_gpu else (16, 256))
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--compare", metavar="hf,vllm,nanovllm", help="peers to run in turn")
    parser.add_argument("--vllm-python", metavar="PATH", help="interpreter of vLLM's environment")
    parser.add_argument("--plot", metavar="FILE.png", help="needs matplotlib")
    parser.add_argument("--json", metavar="FILE", help="write all figures to FILE")
    engine = parser.add_argument_group("engine options")
    engine.add_argument("--dtype", default="auto")
    for name in ("block-size", "num-blocks", "max-num-seqs", "max-num-batched-tokens"):
        engine.add_argument(f"--{name}", type=int)
    engine.add_argument("--attention-backend")
    engine.add_argument("--enforce-eager", action="store_true", default=None)
    parser.add_argument("--worker", choices=WORKERS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        print("RESULT " + json.dumps(WORKERS[args.worker](args)), flush=True)
        return
    start = time.perf_counter()
    rows = (bench_compare if args.compare else MODES[args.mode])(args)
    print(f"\n{time.perf_counter() - start:.1f} s in all")
    if args.json:
        Path(args.json).write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
