"""What makes it fast on a CPU?

A leaf: nothing here changes what is computed, and a first reader may skip it. Three things cost
time on a CPU that a GPU does not notice: copying keys and values together before they are attended
to, weights in an order that does not suit the processor, and fresh pages for every temporary.

Invariants: what this file replaces stays right without it; unwritten slots are never read into a
result.

Next: parallel.py, how several devices compute one model.
"""

import ctypes
import math
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanopage.attention import AttentionMetadata, Backend, causal_mask

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]  # (scaled q, K pool, V pool) -> as q


class CpuAttention(Backend):
    """Paged attention that reads the pool where it lies.

    Both halves of attention are weighted sums of rows. With K stored as [head_dim, block_size], the
    scores of a block's tokens are the sum of its rows weighted by the query; the result is the sum
    of the rows of V weighted by the probabilities. `embedding_bag` sums rows picked by an index: it
    does what vLLM's kernel does (csrc/attention), and copies neither K nor V.

    Long chunks of a prompt have many queries for the same keys: there it is cheaper to gather the
    keys once. They are cut into pieces: the scores of a piece need little memory, and fewer of them
    are computed only to be hidden.
    """

    name = "cpu"
    is_capturable = False
    max_bag_queries = 8
    max_dense_queries = 128

    def block_shape(self, block_size: int, num_kv_heads: int, head_dim: int) -> tuple[int, ...]:
        return num_kv_heads, block_size, head_dim

    def pools(self, cache: Tensor) -> tuple[Tensor, Tensor]:
        """K: [num_blocks + 1, kv_heads, head_dim, block_size]; V: the last two the other way."""
        num_blocks, num_kv_heads, block_size, head_dim = cache.shape[1:]
        return cache[0].view(num_blocks, num_kv_heads, head_dim, block_size), cache[1]

    def store(self, k: Tensor, v: Tensor, cache: Tensor, metadata: AttentionMetadata) -> None:
        k_pool, v_pool = self.pools(cache)
        if "slots" not in metadata.memo:
            slots, block_size = metadata.slot_mapping, cache.shape[3]
            metadata.memo["slots"] = slots // block_size, slots % block_size
        blocks, offsets = metadata.memo["slots"]
        k_pool[blocks, :, :, offsets] = k
        v_pool[blocks, :, offsets] = v

    def attend(self, q: Tensor, cache: Tensor, metadata: AttentionMetadata, scale: float,
               window: int | None) -> Tensor:
        assert q.dtype == cache.dtype and q.stride(-1) == 1 and q.shape[1] % cache.shape[2] == 0
        if window not in metadata.memo:  # layers with the same window share the index arithmetic
            metadata.memo[window] = list(self._plan(q, cache, metadata, window))
        k_pool, v_pool = self.pools(cache)
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        for tokens, attend in metadata.memo[window]:
            out[tokens] = attend(q[tokens] * scale, k_pool, v_pool)
        return out

    def _plan(self, q: Tensor, cache: Tensor, metadata: AttentionMetadata,
              window: int | None) -> Iterator[tuple[slice | Tensor, Attend]]:
        """Which of the step's tokens attend together, and how."""
        borders, tables = metadata.cu_seqlens_q.tolist(), metadata.block_tables
        short: list[int] = []
        for i, num_keys in enumerate(metadata.context_lens.tolist()):
            tokens = range(borders[i], borders[i + 1])
            if len(tokens) <= self.max_bag_queries:
                short += tokens
                continue
            for start in tokens[::self.max_dense_queries]:
                end = min(start + self.max_dense_queries, tokens.stop)
                num_seen = num_keys - (tokens.stop - end)  # by the last of these
                yield slice(start, end), plan_dense(
                    tables[i, :-(-num_seen // cache.shape[3])],
                    causal_mask(end - start, num_seen, window, q))
        if short:
            index = slice(None) if len(short) == len(q) else torch.tensor(short)
            tables = tables.repeat_interleave(metadata.cu_seqlens_q.diff(), dim=0)[index]
            yield index, plan_in_place(q, cache, tables, metadata.positions[index], window)


def plan_dense(table: Tensor, mask: Tensor) -> Attend:
    """table: the blocks of one sequence; mask: [queries, keys].

    Two products of matrices, with the query heads of a KV head one below the other: where there is
    no AMX, torch's fused attention takes up to three times as long in bfloat16.
    """
    num_queries, num_keys = mask.shape

    def attend(q: Tensor, k_pool: Tensor, v_pool: Tensor) -> Tensor:
        # [blocks, kv_heads, head_dim, block_size] -> [kv_heads, head_dim, num_keys]
        k = k_pool.index_select(0, table).permute(1, 2, 0, 3).flatten(2)[..., :num_keys]
        v = v_pool.index_select(0, table).transpose(0, 1).flatten(1, 2)[:, :num_keys]
        q = q.unflatten(1, (len(k), -1)).permute(1, 2, 0, 3)  # [kv_heads, group, queries, head_dim]
        scores = torch.bmm(q.flatten(1, 2), k).unflatten(1, (-1, num_queries)).add_(mask)
        out = torch.bmm(scores.softmax(-1).flatten(1, 2), v).view(q.shape)
        return out.permute(2, 0, 1, 3).flatten(1, 2)  # [queries, heads, head_dim]

    return attend


def plan_in_place(q: Tensor, cache: Tensor, tables: Tensor, positions: Tensor,
                  window: int | None) -> Attend:
    """tables: [tokens, width], positions: [tokens].

    A *row* is one query of one head, and a *bag* a row with one block that it sees something of.
    """
    num_heads, (num_kv_heads, block_size, head_dim) = q.shape[1], cache.shape[2:]
    width = tables.shape[1]
    # All indices are int32: they are read once for each row of K and V.
    in_block, in_head = (torch.arange(size, dtype=torch.int32) for size in (block_size, head_dim))
    last = positions[:, None] + 1  # [tokens, 1]: each token sees the keys [first, last)
    first = torch.zeros_like(last) if window is None else last - window
    begins = torch.arange(width) * block_size
    is_seen = (begins < last) & (begins + block_size > first)  # [tokens, width]: of a block
    rows, nth = is_seen.repeat_interleave(num_heads, 0).nonzero(as_tuple=True)  # [bags]
    tokens, kv_heads = rows // num_heads, rows % num_heads // (num_heads // num_kv_heads)
    blocks = (tables[tokens, nth] * num_kv_heads + kv_heads.int())[:, None]
    k_rows = blocks * head_dim + in_head  # a row of a pool is (block, KV head, dimension)
    begins = nth[:, None].int() * block_size
    keys = begins + in_block  # [bags, block_size]
    hidden = (keys < first[tokens]) | (keys >= last[tokens])
    # Hidden keys have probability 0, but 0 x NaN is NaN: a key that is seen stands in for them.
    stand_in = (first[tokens] - begins).clamp(min=0)
    v_rows = (blocks * block_size + torch.where(hidden, stand_in, in_block)).flatten()
    num_bags = is_seen.sum(1).repeat_interleave(num_heads)  # [rows]
    v_starts = ((num_bags.cumsum(0) - num_bags) * block_size).int()
    partial = hidden.any(1).nonzero()[:, 0]
    hidden = hidden[partial]
    places = rows * width + nth  # of the bags, among width places for each row
    padded = q.new_full((len(num_bags) * width, block_size), float("-inf"))

    def attend(q: Tensor, k_pool: Tensor, v_pool: Tensor) -> Tensor:
        queries = q.view(-1, head_dim).index_select(0, rows)  # [bags, head_dim]
        scores = F.embedding_bag(k_rows, k_pool.view(-1, block_size), mode="sum",
                                 per_sample_weights=queries)  # [bags, block_size]
        seen = scores.index_select(0, partial).masked_fill_(hidden, float("-inf"))
        scores.index_copy_(0, partial, seen)
        padded.index_copy_(0, places, scores)
        probs = padded.view(len(num_bags), -1).softmax(-1).view_as(padded)
        out = F.embedding_bag(v_rows, v_pool.view(-1, head_dim), v_starts, mode="sum",
                              per_sample_weights=probs.index_select(0, places).flatten())
        return out.view(-1, num_heads, head_dim)

    return attend


class PackedLinear(nn.Module):
    """y = x W^T + b, then perhaps SiLU, with the weight packed once for oneDNN.

    Outputs are padded to an even number of blocks of 64. With an odd number oneDNN is up to a third
    slower for 44 to 110 rows: it seems to share out rows among the threads instead of columns, so
    that each thread reads the whole weight.
    """

    def __init__(self, linear: nn.Linear, activation: str) -> None:
        super().__init__()
        self.out_features, self.activation = len(linear.weight), activation
        padding = -self.out_features % 128
        self.bias = None if linear.bias is None else F.pad(linear.bias, (0, padding))
        weight = F.pad(linear.weight, (0, 0, 0, padding))
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight, 64)
        self(weight[:1])  # private operators: they may be missing, or fail here

    def forward(self, x: Tensor) -> Tensor:
        out = torch.ops.mkldnn._linear_pointwise(
            x, self.weight, self.bias, self.activation, [], "")
        return out[:, :self.out_features]


def pack_linears(module: nn.Module) -> None:
    """Pack all linear layers inside; where the operators are missing, they stay as they are."""
    for name, child in list(module.named_children()):
        pack_linears(child)
        if isinstance(child, nn.Linear):
            is_gate = name == "gate_proj"
            try:
                packed = PackedLinear(child, "swish" if is_gate else "none")
            except (AttributeError, RuntimeError):
                return
            setattr(module, name, packed)
            if is_gate:  # its product now ends with the SiLU that stood behind it
                module.act = nn.Identity()


def keep_freed_memory() -> None:
    """Let glibc's malloc, where it is there, hand freed memory out again instead of unmapping it.

    A prefill of 512 tokens with the shape of Qwen3-0.6B has 110,000 page faults otherwise, which
    take up to a quarter of its time. The process then keeps the most that it ever used at once.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD: bytes that may be free at the end of the heap
        mallopt(-3, 2**25)  # M_MMAP_THRESHOLD: what is larger still gets pages of its own


def available_memory(root: Path = Path("/")) -> int:
    """Bytes of main memory that a process may take: what is free, and the container allows."""
    def read(file: str, name: str = "", default: float = math.inf) -> float:
        """The number behind a name in a file of the kernel's."""
        try:
            found = re.search(rf"^{name}\D*(\d+)", (root / file).read_text(), re.M)
        except (OSError, ValueError):  # there is none, or it may not be read
            found = None
        return int(found[1]) if found else default

    half = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2  # where Linux is not
    free = read("proc/meminfo", "MemAvailable:", half / 1024) * 1024
    for group, limit, usage in (  # cgroup v2 and v1
            ("sys/fs/cgroup/", "memory.max", "memory.current"),
            ("sys/fs/cgroup/memory/", "memory.limit_in_bytes", "memory.usage_in_bytes")):
        # Pages of files that were read, such as weights, are given up when memory is wanted.
        given_up = read(group + "memory.stat", "inactive_file ", 0)
        free = min(free, read(group + limit) - read(group + usage, default=0) + given_up)
    return max(0, int(free))
