"""What makes it fast on a CPU?

A leaf: nothing here changes what is computed, and a first reader may skip it. Three things cost
time on a CPU that a GPU does not notice: copying keys and values together before they are attended
to, weights in an order that does not suit the processor, and memory that malloc gives back to the
system after each step and has mapped anew in the next.

Invariants: what this file replaces stays right without it; unwritten slots are never read into a
result.

Next: config.py, which chooses this on a CPU.
"""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanopage.attention import (
    AttentionMetadata,
    Backend,
    attend_densely,
    check_metadata,
    hidden_keys,
)


@dataclass
class Plan:
    """The index arithmetic of a step, shared by all layers that have the same window.

    A *row* is one query of one head, and a *bag* a row with one block that it sees something of.
    """

    tokens: Tensor  # [num_tokens of short queries]: which of the step's tokens these are
    rows: Tensor  # [bags] int32: whose bag it is
    places: Tensor  # [bags]: where it stands among all blocks of all rows, [rows * width]
    k_rows: Tensor  # [bags, head_dim] int32: rows of K, (block, KV head, dimension)
    v_rows: Tensor  # [bags * block_size] int32: rows of V, (block, KV head, offset)
    v_offsets: Tensor  # [rows] int32: where each row begins in v_rows
    partial: Tensor  # [partial bags]: those with slots that their row must not see
    hidden: Tensor  # [partial bags, block_size]: these slots
    scores: Tensor  # [rows * width, block_size]: -inf where no bag is
    chunks: list[tuple[slice, Tensor, Tensor]]  # of prompts: tokens, blocks, hidden keys


class CpuAttention(Backend):
    """Paged attention that reads the pool where it lies.

    Both halves of attention are weighted sums of rows. With K stored as [head_dim, block_size], the
    scores of a block's tokens are the sum of its rows weighted by the query; the result is the sum
    of the rows of V weighted by the probabilities. `embedding_bag` sums rows picked by an index: it
    does what vLLM's kernel does (csrc/attention), and copies neither K nor V.

    Long chunks of a prompt have many queries for the same keys: there it is cheaper to gather the
    keys once.
    """

    name = "cpu"
    is_capturable = False
    max_bag_queries = 4

    def block_shape(self, block_size: int, num_kv_heads: int, head_dim: int) -> tuple[int, ...]:
        return num_kv_heads, block_size, head_dim

    def pools(self, cache: Tensor) -> tuple[Tensor, Tensor]:
        """K: [num_blocks + 1, kv_heads, head_dim, block_size]; V: the last two the other way."""
        num_blocks, num_kv_heads, block_size, head_dim = cache.shape[1:]
        return cache[0].view(num_blocks, num_kv_heads, head_dim, block_size), cache[1]

    def store(self, k: Tensor, v: Tensor, cache: Tensor, metadata: AttentionMetadata) -> None:
        check_metadata(metadata)
        k_pool, v_pool = self.pools(cache)
        blocks = metadata.slot_mapping // cache.shape[3]
        offsets = metadata.slot_mapping % cache.shape[3]
        k_pool[blocks, :, :, offsets] = k
        v_pool[blocks, :, offsets] = v

    def attend(self, q: Tensor, cache: Tensor, metadata: AttentionMetadata, scale: float,
               window: int | None) -> Tensor:
        assert q.dtype == cache.dtype and q.stride(-1) == 1 and q.shape[1] % cache.shape[2] == 0
        if window not in metadata.memo:
            metadata.memo[window] = self._plan(q, cache, metadata, window)
        plan = metadata.memo[window]
        k_pool, v_pool = self.pools(cache)
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        if len(plan.tokens):
            out[plan.tokens] = self._attend_in_place(q[plan.tokens], k_pool, v_pool, plan, scale)
        for tokens, table, hidden in plan.chunks:
            # [blocks, kv_heads, head_dim, block_size] -> [num_keys, kv_heads, head_dim]
            k = k_pool.index_select(0, table).permute(0, 3, 1, 2).flatten(0, 1)
            v = v_pool.index_select(0, table).transpose(1, 2).flatten(0, 1)
            num_keys = hidden.shape[1]
            out[tokens] = attend_densely(q[tokens], k[:num_keys], v[:num_keys], hidden, scale)
        return out

    def _attend_in_place(self, q: Tensor, k_pool: Tensor, v_pool: Tensor, plan: Plan,
                         scale: float) -> Tensor:
        """q: [tokens, heads, head_dim]."""
        num_heads, head_dim = q.shape[1:]
        queries = (q * scale).view(-1, head_dim).index_select(0, plan.rows)  # [bags, head_dim]
        scores = F.embedding_bag(plan.k_rows, k_pool.view(-1, k_pool.shape[-1]), mode="sum",
                                 per_sample_weights=queries)  # [bags, block_size]
        scores[plan.partial] = scores[plan.partial].masked_fill_(plan.hidden, float("-inf"))
        plan.scores.index_copy_(0, plan.places, scores)
        probs = plan.scores.view(len(plan.v_offsets), -1).softmax(-1).view_as(plan.scores)
        # Hidden keys have probability 0, and point at the scratch block: 0 x NaN would be NaN.
        v_pool[0, 0, 0] = 0
        out = F.embedding_bag(plan.v_rows, v_pool.view(-1, head_dim), plan.v_offsets, mode="sum",
                              per_sample_weights=probs.index_select(0, plan.places).flatten())
        return out.view(-1, num_heads, head_dim)

    def _plan(self, q: Tensor, cache: Tensor, metadata: AttentionMetadata,
              window: int | None) -> Plan:
        num_heads, (num_kv_heads, block_size, head_dim) = q.shape[1], cache.shape[2:]

        def arange(size: int) -> Tensor:
            return torch.arange(size, dtype=torch.int32)

        query_lens, tables = metadata.cu_seqlens_q.diff(), metadata.block_tables
        seqs = arange(len(query_lens)).repeat_interleave(query_lens)  # [num_tokens]: whose it is
        tokens = (query_lens <= self.max_bag_queries)[seqs].nonzero()[:, 0]
        # Each token sees the keys [first, last), so the blocks [first_block, first_block + num).
        last = metadata.positions[tokens] + 1
        first = torch.zeros_like(last) if window is None else (last - window).clamp(min=0)
        first_block = first // block_size
        num_bags = (-(-last // block_size) - first_block).repeat_interleave(num_heads)  # [rows]
        starts = num_bags.cumsum(0, dtype=torch.int32) - num_bags
        rows = arange(len(num_bags)).repeat_interleave(num_bags)
        token, nth = rows // num_heads, arange(len(rows)) - starts[rows]
        logical = first_block[token] + nth
        kv_head = rows % num_heads // (num_heads // num_kv_heads)
        head_block = tables[seqs[tokens][token], logical] * num_kv_heads + kv_head  # [bags]
        keys = logical[:, None] * block_size + arange(block_size)  # [bags, block_size]
        hidden = (keys < first[token][:, None]) | (keys >= last[token][:, None])
        partial = hidden.any(1).nonzero()[:, 0]
        width = int(num_bags.max()) if len(num_bags) else 0
        chunks = []
        for i, num_keys in enumerate(metadata.context_lens.tolist()):
            if query_lens[i] > self.max_bag_queries:
                start, end = metadata.cu_seqlens_q[i:i + 2].tolist()
                chunks.append((slice(start, end), tables[i, :-(-num_keys // block_size)],
                               hidden_keys(end - start, num_keys, window)))
        return Plan(
            tokens=tokens, rows=rows, places=rows.long() * width + nth,
            k_rows=head_block[:, None] * head_dim + arange(head_dim),
            v_rows=(head_block[:, None] * block_size + arange(block_size)).masked_fill_(
                hidden, 0).flatten(),
            v_offsets=starts * block_size, partial=partial, hidden=hidden[partial],
            scores=q.new_full((len(num_bags) * width, block_size), float("-inf")), chunks=chunks)


class PackedLinear(nn.Module):
    """y = x W^T + b, then perhaps SiLU, with the weight packed once for oneDNN.

    Outputs are padded to an even number of blocks of 64. With an odd number oneDNN is up to a third
    slower for 44 to 110 rows: it seems to share out rows among the threads instead of columns, so
    that each thread reads the whole weight.
    """

    def __init__(self, linear: nn.Linear, activation: str = "none") -> None:
        super().__init__()
        self.out_features, self.activation = linear.out_features, activation
        padding = -self.out_features % 128
        weight, bias = F.pad(linear.weight, (0, 0, 0, padding)), linear.bias
        self.bias = None if bias is None else F.pad(bias, (0, padding))
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight, 64)
        self(weight[:1])  # private operators: they may be missing, or fail here

    def forward(self, x: Tensor) -> Tensor:
        out = torch.ops.mkldnn._linear_pointwise(
            x, self.weight, self.bias, self.activation, [], "")
        return out[:, :self.out_features]


def pack_linears(model: nn.Module) -> None:
    """Pack every linear layer; where the operators are missing, all stays as it is."""
    try:
        for module in list(model.modules()):
            for name, child in list(module.named_children()):
                if isinstance(child, nn.Linear):
                    is_gate = name == "gate_proj"  # takes the SiLU behind it into its product
                    setattr(module, name, PackedLinear(child, "swish" if is_gate else "none"))
                    if is_gate:
                        module.act = nn.Identity()
    except (AttributeError, RuntimeError):
        return


def keep_freed_memory() -> None:
    """Let malloc reuse what a step frees, or the next has to map and fault in every page anew."""
    try:
        mallopt: Any = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):  # not glibc
        return
    mallopt(-3, 32 << 20)  # M_MMAP_THRESHOLD, at its largest
    mallopt(-1, 1 << 30)  # M_TRIM_THRESHOLD


def available_memory() -> int:
    """Bytes of main memory that a process may take without swapping."""
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
