"""How does a step reach the device?

`execute` turns the sequences of a batch into flat tensors, copies blocks, runs the decoder, and
has one token sampled for each row of logits that someone waits for. On a GPU a pure decode step
replays a captured CUDA graph instead of launching a thousand kernels.

Invariants: only rows that are sampled have their logits computed; the host waits for the device
once in a step, at the sampled tokens; a captured graph's tensors are never reallocated.

Next: engine.py, what a user calls.
"""

import os
from collections.abc import Callable
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nanopage.attention import AttentionMetadata, choose_backend, length_class
from nanopage.config import EngineConfig
from nanopage.layers import CausalLM, head_dim_of
from nanopage.sampler import SampleRow, sample, to_device, top_logprobs
from nanopage.scheduler import Batch, Samples
from nanopage.sequence import Sequence

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
        with torch.cuda.graph(graph, pool=self.pool, stream=self.stream):
            out = function()

        def replay() -> Tensor:
            graph.replay()
            return out

        return replay


class DecodeGraph:
    """The decode step on static buffers, captured for each of a few batch sizes.

    A batch is padded to the next size. A padding row is token 0 at position 0 that sees one key, in
    the scratch block, so no kernel needs a condition. What a graph freezes are addresses and
    integers: hence the buffers, and lengths and widths of max_model_len (one that is too small
    would silently drop keys). `capture` is a parameter: on a CPU the function itself will do.
    """

    def __init__(self, forward: Callable[..., Tensor], max_num_seqs: int, max_model_len: int,
                 block_size: int, device: torch.device,
                 capture: Callable[[Function], Function]) -> None:
        self.forward, self.max_model_len = forward, max_model_len
        width = -(-max_model_len // block_size)

        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(*shape, dtype=dtype, device=device)

        self.token_ids, self.positions = zeros(max_num_seqs), zeros(max_num_seqs)
        self.slot_mapping = zeros(max_num_seqs)
        self.context_lens = zeros(max_num_seqs, dtype=torch.int32) + 1
        self.block_tables = zeros(max_num_seqs, width, dtype=torch.int32)
        self.cu_seqlens = torch.arange(max_num_seqs + 1, dtype=torch.int32, device=device)
        sizes = {1, 2, 4, *range(8, max_num_seqs, 8), max_num_seqs}
        self.runs: dict[int, Function] = {}
        # Largest first, so that the smaller ones find their memory in its pool.
        for size in sorted((size for size in sizes if size <= max_num_seqs), reverse=True):
            self.runs[size] = capture(partial(self._run, size))
        self.sizes = sorted(self.runs)

    def _run(self, size: int) -> Tensor:
        """The captured body: nothing in it may wait for the device or depend on its values."""
        metadata = AttentionMetadata(
            slot_mapping=self.slot_mapping[:size], cu_seqlens_q=self.cu_seqlens[:size + 1],
            cu_seqlens_k=self.cu_seqlens[:size + 1], context_lens=self.context_lens[:size],
            block_tables=self.block_tables[:size], max_query_len=1,
            max_context_len=self.max_model_len, query_len=1)
        return self.forward(self.token_ids[:size], self.positions[:size], metadata)

    def replay(self, token_ids: Tensor, positions: Tensor, metadata: AttentionMetadata) -> Tensor:
        """Returns hidden states [num_seqs, hidden_size], valid until the next replay."""
        num_seqs = len(token_ids)
        size = next(size for size in self.sizes if size >= num_seqs)
        width = metadata.block_tables.shape[1]
        for buffer, values, padding in (
                (self.token_ids, token_ids, 0), (self.positions, positions, 0),
                (self.slot_mapping, metadata.slot_mapping, 0),
                (self.context_lens, metadata.context_lens, 1),
                # Columns behind a sequence's own blocks may be dirty: nobody reads them.
                (self.block_tables[:, :width], metadata.block_tables, 0)):
            buffer[:num_seqs].copy_(values, non_blocking=True)
            buffer[num_seqs:size] = padding
        return self.runs[size]()[:num_seqs]


class ModelRunner:
    """Owns the device: the weights, the pool of blocks, and the tensors of a step."""

    def __init__(self, path: Path, hf_config: Any, config: EngineConfig) -> None:
        self.config, self.hf_config = config, hf_config
        self.device, self.block_size = config.device, config.block_size
        self.backend = choose_backend(config.attention_backend, config.device, config.dtype,
                                      head_dim_of(hf_config), config.block_size)
        max_position = config.max_model_len or hf_config.max_position_embeddings
        self.model = CausalLM(hf_config, self.backend, max_position, config.device, config.dtype)
        self.model.load_weights(path)
        if config.device.type == "cpu":
            self.model.pack()
        self.num_blocks, self.max_model_len = self._size_cache(max_position)
        self.kv_cache = self._make_cache(self.num_blocks)
        drafter = config.drafter
        self.max_decode_len = 1 + (drafter.num_speculative_tokens if drafter else 0)
        self.decode_graph: DecodeGraph | None = None
        if (config.device.type == "cuda" and not config.enforce_eager
                and self.backend.is_capturable):
            self.capture_decode(CudaCapture())

    def capture_decode(self, capture: Callable[[Function], Function]) -> None:
        with torch.inference_mode():
            self.decode_graph = DecodeGraph(self._forward, self.config.max_decodes,
                                            self.max_model_len, self.block_size, self.device,
                                            capture)

    # ---- the size of the cache ---------------------------------------------------------------

    def _make_cache(self, num_blocks: int) -> Tensor:
        """One pool for all layers; one block more than num_blocks, since block 0 is scratch."""
        block = self.backend.block_shape(
            self.block_size, self.hf_config.num_key_value_heads, head_dim_of(self.hf_config))
        return torch.zeros(self.hf_config.num_hidden_layers, 2, num_blocks + 1, *block,
                           dtype=self.config.dtype, device=self.device)

    @property
    def block_bytes(self) -> int:
        """2 (K and V) x layers x KV heads x head dim x bytes per element, for a block's tokens."""
        config = self.hf_config
        return (2 * config.num_hidden_layers * config.num_key_value_heads * head_dim_of(config)
                * self.config.dtype.itemsize * self.block_size)

    def _size_cache(self, max_model_len: int) -> tuple[int, int]:
        """Returns (num_blocks, max_model_len): what was asked for, or what memory allows."""
        config = self.config
        if config.num_blocks is not None:
            return config.num_blocks, max_model_len
        budget = config.kv_cache_memory_bytes
        if budget is None and self.device.type == "cuda":
            budget = self._spare_gpu_memory()
        elif budget is None:
            budget = min(4 << 30, available_memory() // 4)
        blocks_per_seq = -(-max_model_len // self.block_size)
        # One block of the budget is the scratch block.
        num_blocks = min(budget // self.block_bytes - 1, config.max_num_seqs * blocks_per_seq)
        num_slots = num_blocks * self.block_size
        if num_slots < (config.max_model_len or self.block_size):
            raise ValueError(
                f"max_model_len={config.max_model_len}: the KV cache has room for {num_slots} "
                f"tokens ({num_blocks} blocks of {self.block_size}, {self.block_bytes:,} bytes "
                f"each, in {budget:,} bytes); raise kv_cache_memory_bytes or "
                "gpu_memory_utilization, or lower max_model_len")
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
            num_graphs = 4 + self.config.max_decodes // 8
            per_token = (peak - before) // self.config.max_num_batched_tokens
            graphs = (64 << 20) + num_graphs * (2 << 20) + self.config.max_decodes * per_token
        share = int(total * self.config.gpu_memory_utilization)
        budget = min(share - peak, free - (peak - before)) - graphs
        if budget < 2 * self.block_bytes:
            raise ValueError(
                f"gpu_memory_utilization={self.config.gpu_memory_utilization}: of {total:,} bytes "
                f"on the device {free:,} are free; our share is {share:,}, weights and "
                f"activations take {peak:,} and graphs {graphs:,}: no room for a KV cache")
        return budget

    @torch.inference_mode()
    def _run_largest_prefill(self) -> None:
        num_tokens = self.config.max_num_batched_tokens
        self.kv_cache = self._make_cache(0)  # everything goes to the scratch block
        zeros = torch.zeros(num_tokens, dtype=torch.int64, device=self.device)
        lens = torch.tensor([0, num_tokens], dtype=torch.int32, device=self.device)
        tables = torch.zeros(1, -(-num_tokens // self.block_size), dtype=torch.int32,
                             device=self.device)
        hidden = self._forward(zeros, zeros, AttentionMetadata(
            zeros, lens, lens, lens[1:], tables, num_tokens, num_tokens, None))
        self.model.lm_head(hidden[:self.config.max_decodes]).float().softmax(-1)

    # ---- a step ------------------------------------------------------------------------------

    @torch.inference_mode()
    def execute(self, batch: Batch) -> Samples:
        """Copy blocks, run the decoder over the batch, sample."""
        if batch.copies:
            sources, destinations = to_device(batch.copies, torch.int64, self.device).T
            self.kv_cache.index_copy_(2, destinations, self.kv_cache.index_select(2, sources))
        # The reference attention computes neighbours together if their lengths are alike. Sorted no
        # further, so that each of its threads meets long ones and short ones.
        sequences = sorted(batch.sequences, key=lambda seq: (
            seq.num_scheduled_tokens,
            length_class(seq.num_computed_tokens + seq.num_scheduled_tokens)))
        starts, token_ids, positions, metadata = self._prepare_inputs(sequences)
        if self.decode_graph is not None and metadata.query_len == 1:
            hidden = self.decode_graph.replay(token_ids, positions, metadata)
        else:
            hidden = self._forward(token_ids, positions, metadata)
        return self._sample(hidden, sequences, starts)

    def _forward(self, token_ids: Tensor, positions: Tensor,
                 metadata: AttentionMetadata) -> Tensor:
        return self.model(token_ids, positions, self.kv_cache, metadata)

    def _prepare_inputs(self, sequences: list[Sequence]) -> tuple[
            list[int], Tensor, Tensor, AttentionMetadata]:
        """Returns each sequence's first row, and what the decoder takes."""
        block_size = self.block_size
        longest = max(seq.num_scheduled_tokens for seq in sequences)
        is_decode = longest <= self.max_decode_len
        # Verifying drafts wants as many queries of each sequence. The padding comes behind the
        # real tokens, which do not see it; its keys go to the scratch block.
        padded_len = longest if is_decode and self.backend.pads_drafts else 0
        token_ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        starts, cu_seqlens_k, context_lens = [0], [0], []
        for seq in sequences:
            start, table = seq.num_computed_tokens, seq.block_table
            end = start + seq.num_scheduled_tokens
            if end - start == 1:
                token_ids.append(seq.token_ids[start])
                positions.append(start)
                slots.append(table[start // block_size] * block_size + start % block_size)
            else:
                token_ids += (seq.token_ids[start:end] + seq.draft_token_ids)[:end - start]
                positions += range(start, end)
                slots += [table[position // block_size] * block_size + position % block_size
                          for position in range(start, end)]
            padding = max(0, padded_len - (end - start))
            if padding:
                for values in (token_ids, positions, slots):
                    values += [0] * padding
            starts.append(len(token_ids))
            context_lens.append(end + padding)
            cu_seqlens_k.append(cu_seqlens_k[-1] + end + padding)
        width = max(max(len(seq.block_table) for seq in sequences),
                    -(-max(context_lens) // block_size))
        tables = chain.from_iterable(
            seq.block_table + [0] * (width - len(seq.block_table)) for seq in sequences)

        # One transfer for all of them.
        parts = [token_ids, positions, slots, starts, cu_seqlens_k, context_lens, list(tables)]
        uploaded = to_device(list(chain.from_iterable(parts)), torch.int64, self.device)
        ids, at, slot_mapping, *others = uploaded.split([len(part) for part in parts])
        cu_q, cu_k, lens, table = (other.to(torch.int32) for other in others)
        is_uniform = is_decode and (padded_len or starts[-1] == longest * len(sequences))
        return starts, ids, at, AttentionMetadata(
            slot_mapping=slot_mapping, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, context_lens=lens,
            block_tables=table.view(len(sequences), width), max_query_len=longest,
            max_context_len=max(context_lens), query_len=longest if is_uniform else None)

    def _sample(self, hidden: Tensor, sequences: list[Sequence], starts: list[int]) -> Samples:
        """hidden: [num_tokens, hidden_size]; starts: the first row of each sequence."""
        rows: list[SampleRow] = []
        hidden_rows: list[int] = []
        num_samples = []
        for seq, start in zip(sequences, starts):
            num_rows, end = len(rows), seq.num_computed_tokens + seq.num_scheduled_tokens
            # The token at `position` comes from the logits of the one before it; the range is
            # empty while a prompt is incomplete, and longer than 1 where drafts are verified.
            for position in range(seq.num_tokens, end + 1):
                branches = seq.request.sequences if not seq.num_generated_tokens else [seq]
                rows += [SampleRow(branch, len(hidden_rows), position) for branch in branches]
                hidden_rows.append(start + position - 1 - seq.num_computed_tokens)
            num_samples.append(len(rows) - num_rows)
        if not rows:
            nothing: list[list] = [[] for _ in sequences]
            return Samples(sequences, nothing, nothing)
        if len(hidden_rows) < len(hidden):
            hidden = hidden[to_device(hidden_rows, torch.int64, self.device)]
        logits = self.model.lm_head(hidden)  # [sampled rows, vocab]
        if len(rows) > len(logits):  # the first tokens of n branches come from one row
            logits = logits[to_device([row.logits_row for row in rows], torch.int64, self.device)]
        token_ids = sample(logits, rows).tolist()
        logprobs = top_logprobs(logits, token_ids, rows)
        return Samples(sequences, split(token_ids, num_samples), split(logprobs, num_samples))


def split(values: list[Any], sizes: list[int]) -> list[list[Any]]:
    iterator = iter(values)
    return [list(islice(iterator, size)) for size in sizes]


def available_memory() -> int:
    """Bytes of main memory that a process may take without swapping."""
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
