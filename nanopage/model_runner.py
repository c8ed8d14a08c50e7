"""How does a step reach the device?

`execute` turns the sequences of a batch into flat tensors, copies blocks, runs the decoder, and
has one token sampled for each row of logits that someone waits for. On a GPU a pure decode step
replays a captured CUDA graph instead of launching a thousand kernels.

Invariants: only rows that are sampled have their logits computed; the host waits for the device
once in a step, at the sampled tokens; a captured graph's tensors are never reallocated.

Next: engine.py, what a user calls.
"""

from collections.abc import Callable
from functools import partial
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from nanopage.attention import AttentionMetadata
from nanopage.config import EngineConfig, choose_backend, longest_sequence
from nanopage.cpu import available_memory, keep_freed_memory, pack_linears
from nanopage.layers import CausalLM
from nanopage.parallel import RANK, WORLD_SIZE, check_alike, cut_config, exchange, gather
from nanopage.sampler import SampleRow, sample, to_device, top_logprobs
from nanopage.sequence import Batch, Sample, Sequence

Function = Callable[[], Tensor]


class CudaCapture:
    """Record a function's kernels once; the result replays them."""

    def __init__(self) -> None:
        self.stream = torch.cuda.Stream()
        self.pool = torch.cuda.graph_pool_handle()  # shared: the graphs never run at once

    def __call__(self, function: Function) -> Function:
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            function()  # warm-up: libraries allocate their workspaces
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        # NCCL has a thread of its own, whose calls are none of the capture's business.
        with torch.cuda.graph(graph, self.pool, self.stream, "thread_local"):
            out = function()

        def replay() -> Tensor:
            graph.replay()
            return out

        return replay


class DecodeGraph:
    """The decode step on static buffers, captured for each of a few batch sizes.

    A batch is padded to the next size. A padding row is token 0 of a sequence of one token, in the
    scratch block, so no kernel needs a condition. What a graph freezes are addresses and integers:
    hence the buffers, and lengths and widths of max_model_len (one that is too small would silently
    drop keys). `capture` is a parameter: on a CPU the function itself will do.
    """

    def __init__(self, forward: Callable[..., Tensor], max_num_seqs: int, max_model_len: int,
                 block_size: int, device: torch.device,
                 capture: Callable[[Function], Function]) -> None:
        self.forward, self.max_model_len, self.block_size = forward, max_model_len, block_size
        with device:
            self.token_ids = torch.zeros(max_num_seqs, dtype=torch.int32)
            self.context_lens = torch.ones(max_num_seqs, dtype=torch.int32)
            width = -(-max_model_len // block_size)
            self.block_tables = torch.zeros(max_num_seqs, width, dtype=torch.int32)
            self.borders = torch.arange(max_num_seqs + 1, dtype=torch.int32)
        sizes = {1, 2, 4, *range(8, max_num_seqs, 8), max_num_seqs}
        self.sizes = sorted(size for size in sizes if size <= max_num_seqs)
        # Largest first, so that the smaller ones find their memory in its pool.
        self.runs = {size: capture(partial(self._run, size)) for size in reversed(self.sizes)}

    def _run(self, size: int) -> Tensor:
        """The captured body: nothing in it may wait for the device or depend on its values."""
        return self.forward(self.token_ids[:size], AttentionMetadata.build(
            self.borders[:size + 1], self.context_lens[:size], self.block_tables[:size], size,
            self.block_size, max_query_len=1, max_context_len=self.max_model_len, query_len=1))

    def replay(self, token_ids: Tensor, context_lens: Tensor, block_tables: Tensor) -> Tensor:
        """Returns hidden states [num_seqs, hidden_size], valid until the next replay."""
        num_seqs, width = block_tables.shape
        size = next(size for size in self.sizes if size >= num_seqs)
        for buffer, values, padding in (
                (self.token_ids, token_ids, 0), (self.context_lens, context_lens, 1),
                # Columns behind a sequence's own blocks may be dirty: nobody reads them.
                (self.block_tables[:, :width], block_tables, 0)):
            buffer[:num_seqs].copy_(values, non_blocking=True)
            buffer[num_seqs:size] = padding
        return self.runs[size]()[:num_seqs]


class ModelRunner:
    """Owns the device: the weights, the pool of blocks, and the tensors of a step."""

    def __init__(self, path: Path, hf_config: Any, config: EngineConfig) -> None:
        self.path, self.config, self.hf_config = path, config, cut_config(hf_config)
        self.device, self.block_size = config.device, config.block_size
        self.backend = choose_backend(config.attention_backend, config.device, config.dtype,
                                      hf_config.head_dim, config.block_size)
        max_length = config.max_model_len or longest_sequence(hf_config)
        self.model = CausalLM(self.hf_config, self.backend, max_length, config.device, config.dtype)
        self.model.load_weights(path)
        if config.device.type == "cpu":
            pack_linears(self.model)
            keep_freed_memory()
        self.decode_graph: DecodeGraph | None = None
        self.has_failed = False  # in a step: other ranks may still wait in it
        self.num_blocks, self.max_model_len = self._size_cache(max_length)
        self.kv_cache = self._make_cache(self.num_blocks)
        if (config.device.type == "cuda" and not config.enforce_eager
                and self.backend.is_capturable):
            self.capture_decode(CudaCapture())

    @torch.inference_mode()
    def capture_decode(self, capture: Callable[[Function], Function]) -> None:
        self.decode_graph = DecodeGraph(self._forward, self.config.max_num_seqs, self.max_model_len,
                                        self.block_size, self.device, capture)

    # ---- the size of the cache ---------------------------------------------------------------

    def _make_cache(self, num_blocks: int) -> Tensor:
        """One pool for all layers; one block more than num_blocks, since block 0 is scratch."""
        block = self.backend.block_shape(
            self.block_size, self.hf_config.num_key_value_heads, self.hf_config.head_dim)
        return torch.zeros(self.hf_config.num_hidden_layers, 2, num_blocks + 1, *block,
                           dtype=self.config.dtype, device=self.device)

    def _size_cache(self, max_model_len: int) -> tuple[int, int]:
        """Returns (num_blocks, max_model_len): what was asked for, or what memory allows."""
        config = self.config
        if config.num_blocks is not None:
            # The last token's K and V are never written, so one token more than slots will do.
            most = config.max_model_len or config.num_blocks * self.block_size + 1
            return config.num_blocks, min(max_model_len, most)
        # 2 (K and V) x layers x KV heads x head dim x bytes per element, for a block's tokens
        block_bytes = self._make_cache(0).nbytes
        budget = config.kv_cache_memory_bytes
        if budget is None and self.device.type == "cuda":
            budget = self._spare_gpu_memory()
        elif budget is None:
            budget = min(4 << 30, available_memory() // 4) // WORLD_SIZE
        blocks_per_seq = -(-max_model_len // self.block_size)
        # One block of the budget is the scratch block. The poorest rank decides for all.
        num_blocks = min(*exchange(budget // block_bytes - 1), config.max_num_seqs * blocks_per_seq)
        num_slots = num_blocks * self.block_size
        if num_slots < (config.max_model_len or self.block_size):
            raise ValueError(
                f"max_model_len={config.max_model_len}: the KV cache has room for {num_slots} "
                f"tokens ({num_blocks} blocks of {self.block_size}, {block_bytes:,} bytes each, in "
                f"{budget:,} bytes); raise kv_cache_memory_bytes or gpu_memory_utilization, or "
                "lower max_model_len")
        return num_blocks, min(max_model_len, num_slots)

    def _spare_gpu_memory(self) -> int:
        """Run the largest prefill once; what its peak leaves of our share is for the cache.

        Our share is gpu_memory_utilization of the whole device. What other processes hold is not
        counted as ours, but what they leave free is all that we can take.
        """
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        self._run_largest_prefill()
        peak = torch.cuda.max_memory_allocated()
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info()
        graphs = 0
        if not self.config.enforce_eager:
            num_graphs = 4 + self.config.max_num_seqs // 8
            per_token = (peak - before) // self.config.max_num_batched_tokens
            graphs = (64 << 20) + num_graphs * (2 << 20) + self.config.max_num_seqs * per_token
        share = int(total * self.config.gpu_memory_utilization)
        budget = min(share - peak, free - (peak - before)) - graphs
        if budget <= 0:
            raise ValueError(
                f"gpu_memory_utilization={self.config.gpu_memory_utilization}: of {total:,} bytes "
                f"on the device {free:,} are free; our share is {share:,}, weights and "
                f"activations take {peak:,} and graphs {graphs:,}: no room for a KV cache")
        return budget

    @torch.inference_mode()
    def _run_largest_prefill(self) -> None:
        num_tokens = self.config.max_num_batched_tokens
        self.kv_cache = self._make_cache(0)
        prompt: Any = SimpleNamespace(  # without blocks of its own: all goes to the scratch block
            token_ids=[0] * num_tokens, draft_token_ids=[], block_table=[], num_computed_tokens=0,
            num_scheduled_tokens=num_tokens)
        hidden, _ = self._run_decoder([prompt])
        gather(self.model.lm_head(hidden[:self.config.max_num_seqs])).float().softmax(-1)

    # ---- a step ------------------------------------------------------------------------------

    @torch.inference_mode()
    def execute(self, batch: Batch) -> list[list[Sample]]:
        """Copy blocks, run the decoder, sample: for each sequence what `Scheduler.update` takes."""
        if batch.copies:
            sources, destinations = to_device(batch.copies, torch.int64, self.device).T
            self.kv_cache.index_copy_(2, destinations, self.kv_cache.index_select(2, sources))
        hidden, borders = self._run_decoder(batch.sequences)
        return self._sample(hidden, batch.sequences, borders)

    def _forward(self, token_ids: Tensor, metadata: AttentionMetadata) -> Tensor:
        return self.model(token_ids, self.kv_cache, metadata)

    def _run_decoder(self, sequences: list[Sequence]) -> tuple[Tensor, list[int]]:
        """Returns hidden states [num_tokens, hidden_size] and each sequence's first row in them."""
        query_lens = [seq.num_scheduled_tokens for seq in sequences]
        longest = max(query_lens)
        is_decode = all(seq.num_scheduled_tokens == 1 + len(seq.draft_token_ids)
                        for seq in sequences)
        # Verifying drafts, a kernel may want as many queries of each sequence: padding follows.
        is_padded = is_decode and self.backend.pads_drafts
        token_ids: list[int] = []
        borders, context_lens = [0], []
        for seq, query_len in zip(sequences, query_lens):
            start = seq.num_computed_tokens
            token_ids += seq.token_ids[start:start + query_len]
            token_ids += seq.draft_token_ids
            if is_padded:
                token_ids += [0] * (longest - query_len)
            context_lens.append(start + len(token_ids) - borders[-1])
            borders.append(len(token_ids))
        width = max(-(-max(context_lens) // self.block_size),
                    max(len(seq.block_table) for seq in sequences))
        tables = [seq.block_table + [0] * (width - len(seq.block_table)) for seq in sequences]
        check_alike(self.has_failed, token_ids, context_lens)

        # One transfer for all of them.
        parts = [token_ids, borders, context_lens, list(chain.from_iterable(tables))]
        uploaded = to_device(list(chain.from_iterable(parts)), torch.int32, self.device)
        ids, cu_seqlens_q, lens, table = uploaded.split([len(part) for part in parts])
        table = table.view(len(sequences), width)
        if self.decode_graph is not None and longest == 1:
            return self.decode_graph.replay(ids, lens, table), borders
        is_uniform = is_padded or (is_decode and len(token_ids) == longest * len(sequences))
        return self._forward(ids, AttentionMetadata.build(
            cu_seqlens_q, lens, table, len(token_ids), self.block_size, max_query_len=longest,
            max_context_len=max(context_lens), query_len=longest if is_uniform else None)), borders

    def _sample(self, hidden: Tensor, sequences: list[Sequence],
                borders: list[int]) -> list[list[Sample]]:
        """hidden: [num_tokens, hidden_size]; borders: the first row of each sequence."""
        rows: list[SampleRow] = []
        hidden_rows: list[int] = []
        samples: list[list[Sample]] = [[] for _ in sequences]
        takers: list[list[Sample]] = []  # for each row, the list that its sample goes to
        for seq, border, taker in zip(sequences, borders, samples):
            # The token at `position` comes from the logits of the one before it; the range is
            # empty while a prompt is incomplete, and longer than 1 where drafts are verified.
            end = seq.num_computed_tokens + seq.num_scheduled_tokens
            for position in range(seq.num_tokens, end + 1):
                # The first tokens of n branches come from one row.
                is_first = seq.num_tokens == seq.num_prompt_tokens
                for branch in seq.request.sequences if is_first else [seq]:
                    rows.append(SampleRow(branch, position))
                    hidden_rows.append(border + position - 1 - seq.num_computed_tokens)
                    takers.append(taker)
        if rows:
            if hidden_rows != list(range(len(hidden))):
                hidden = hidden[to_device(hidden_rows, torch.int64, self.device)]
            logits = gather(self.model.lm_head(hidden))  # [rows, vocab]
            token_ids = sample(logits, rows).tolist()
            logprobs = top_logprobs(logits, token_ids, rows)
            chosen = list(zip(token_ids, logprobs)) if RANK == 0 else []
            for taker, sampled in zip(takers, exchange(chosen)[0]):
                taker.append(sampled)
        return samples
