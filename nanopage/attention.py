"""How do a step's tokens find the keys and values of their sequence?

One pool holds the cache of all layers: [num_layers, 2, num_blocks + 1, *block]. Each layer first
*stores* the K and V of the step's tokens into their slots, then every query *attends*, through the
block table, to the keys of its own sequence up to its own position.

A backend is one implementation of the two. It owns the layout inside a block and nothing else.
`ReferenceAttention` is the definition in plain torch, and also what runs on a CPU; it checks what
flash-attn checks, so that a call that works here works there. On a GPU `FlashAttention` calls
flash-attn, and `VarlenAttention` the kernel that torch itself brings.

Invariants: what a sequence has not written is never read into a result, be it NaN; a row without
keys (padding) gives exactly 0.

Next: layers.py, the decoder around it.
"""

from __future__ import annotations

import inspect
import logging
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

logger = logging.getLogger("nanopage")


@dataclass
class AttentionMetadata:
    """Who attends to what in one step: what every layer needs, travelling as an argument.

    Sequences lie one behind the other in the token dimension; `cu_seqlens_q` are the borders. The
    queries of a sequence are its last tokens: context_lens counts them among the keys.
    """

    slot_mapping: Tensor  # [num_tokens] int64: where the K and V of each token go
    cu_seqlens_q: Tensor  # [num_seqs + 1] int32: first token of each sequence
    cu_seqlens_k: Tensor  # [num_seqs + 1] int32: the same, counted in keys
    context_lens: Tensor  # [num_seqs] int32: keys of each sequence
    block_tables: Tensor  # [num_seqs, width] int32, padded with the scratch block
    max_query_len: int
    max_context_len: int
    query_len: int | None  # queries of each sequence in a decode step (1 + drafts), else None
    plan: ReferencePlan | None = None  # made once a step by the reference, used by its layers


class Backend:
    """One implementation of store and attend; blocks are (block_size, kv_heads, head_dim)."""

    name: str
    pads_drafts = False  # wants the same number of queries of each sequence in a decode step
    is_capturable = True  # waits for nothing on the host, so that a CUDA graph can hold it

    def block_shape(self, block_size: int, num_kv_heads: int, head_dim: int) -> tuple[int, ...]:
        return block_size, num_kv_heads, head_dim

    def store(self, k: Tensor, v: Tensor, cache: Tensor, metadata: AttentionMetadata) -> None:
        """Write k and v, [num_tokens, kv_heads, head_dim], to their slots in one layer's cache."""
        for pool, new in zip(cache.unbind(0), (k, v)):
            # index_copy_ has a fixed shape and does not synchronise, so a graph may contain it.
            pool.view(-1, *new.shape[1:]).index_copy_(0, metadata.slot_mapping, new)

    def attend(self, q: Tensor, cache: Tensor, metadata: AttentionMetadata, scale: float,
               window: int | None) -> Tensor:
        """q: [num_tokens, heads, head_dim]; cache: [2, num_blocks + 1, *block_shape].

        Each query sees the keys up to its own position, the last `window` of them if that is
        given. Returns [num_tokens, heads, head_dim].
        """
        raise NotImplementedError


class FlashAttention(Backend):
    """flash-attn 2.8.3: with_kvcache splits long keys among processors, varlen takes a mixture."""

    name = "flash"
    pads_drafts = True

    def __init__(self) -> None:
        from flash_attn import flash_attn_varlen_func, flash_attn_with_kvcache
        self.varlen, self.with_kvcache = flash_attn_varlen_func, flash_attn_with_kvcache

    def attend(self, q: Tensor, cache: Tensor, metadata: AttentionMetadata, scale: float,
               window: int | None) -> Tensor:
        common = dict(softmax_scale=scale, causal=True, block_table=metadata.block_tables,
                      window_size=(-1 if window is None else window - 1, 0))
        k_cache, v_cache = cache.unbind(0)
        if metadata.query_len is None:
            return self.varlen(
                q, k_cache, v_cache, metadata.cu_seqlens_q, metadata.cu_seqlens_k,
                metadata.max_query_len, metadata.max_context_len, **common)
        q = q.unflatten(0, (-1, metadata.query_len))  # [num_seqs, query_len, heads, head_dim]
        out = self.with_kvcache(q, k_cache, v_cache, cache_seqlens=metadata.context_lens, **common)
        return out.flatten(0, 1)


class VarlenAttention(Backend):
    """torch.nn.attention.varlen with a block table: for a GPU without the flash-attn wheel."""

    name = "varlen"

    def __init__(self) -> None:
        from torch.nn.attention.varlen import varlen_attn
        if "block_table" not in inspect.signature(varlen_attn).parameters:
            raise ImportError("torch.nn.attention.varlen takes no block table before torch 2.12")
        self.varlen: Any = varlen_attn
        # torch 2.12 takes no other value; from 2.13 on the key splits of a batch go wrong unless
        # there is one (pytorch issue 194167).
        self.num_splits = None if torch.__version__.startswith("2.12") else 1

    def attend(self, q: Tensor, cache: Tensor, metadata: AttentionMetadata, scale: float,
               window: int | None) -> Tensor:
        is_gqa = q.shape[1] != cache.shape[3]
        window_size = (-1 if window is None else window - 1, 0)
        num_splits = self.num_splits
        if metadata.query_len == 1 and window is None:
            window_size = (-1, -1)  # one query sees all keys anyway, and this is the fast path
            num_splits = None if is_gqa else num_splits
        k_cache, v_cache = cache.unbind(0)
        return self.varlen(
            q, k_cache, v_cache, metadata.cu_seqlens_q, metadata.cu_seqlens_k,
            metadata.max_query_len, metadata.max_context_len, scale=scale,
            window_size=window_size, enable_gqa=is_gqa, seqused_k=metadata.context_lens,
            block_table=metadata.block_tables, num_splits=num_splits)


@dataclass
class Bags:
    """Which rows of the pool are summed for whom: two calls of embedding_bag.

    A bag is a run of rows, and offsets say where each begins; the sum of an empty one is 0.
    """

    query_rows: Tensor  # [K bags] int32: the (token, head) of the group whose query weighs a bag
    k_rows: Tensor  # [K bags * head_dim] int32: rows (block, KV head, dimension)
    k_offsets: Tensor  # [num_seqs * query_len * heads * width] int32
    keep: Tensor  # [num_seqs, query_len, 1, keys]: all bits, or none where a score is hidden
    minus_inf: Tensor  # the same shape: no bit, or those of -inf
    picked: Tensor  # [visible pairs] int32: where their probabilities stand among all
    v_rows: Tensor  # [visible pairs] int32: rows (block, KV head, offset)
    v_offsets: Tensor  # [num_seqs * query_len * heads] int32


@dataclass
class Group:
    """A chunk of a prompt; or neighbours with as many queries and keys of one `length_class`."""

    tokens: slice  # rows of the step's tokens
    query_len: int
    num_keys: int  # of the longest
    table: Tensor  # [num_seqs, width] int32, block 0 behind the sequence's own
    context_lens: Tensor  # [num_seqs, 1] int32
    # Made by the first layer, for the others; layers with a window have their own.
    bags: dict[int | None, Bags] = field(default_factory=dict)
    masks: dict[int | None, Tensor] = field(default_factory=dict)

    def visible(self, window: int | None) -> tuple[Tensor, Tensor]:
        """The keys that each query sees, [first, last), both [num_seqs, query_len] int32."""
        queries = torch.arange(self.query_len, dtype=torch.int32, device=self.table.device)
        last = (self.context_lens - self.query_len + queries + 1).clamp(min=0)
        first = torch.zeros_like(last) if window is None else (last - window).clamp(min=0)
        return first, last

    def hidden(self, window: int | None, num_keys: int) -> Tensor:
        """What each query must not look at: [num_seqs, query_len, keys] bool."""
        keys = torch.arange(num_keys, dtype=torch.int32, device=self.table.device)
        first, last = self.visible(window)
        return (keys < first[..., None]) | (keys >= last[..., None])


@dataclass
class ReferencePlan:
    blocks: Tensor  # [num_tokens] int64, as is the next
    offsets: Tensor
    groups: list[Group]


class ReferenceAttention(Backend):
    """Paged attention in plain torch, which reads the pool where it lies.

    Both halves of attention are weighted sums of rows. With K stored as [head_dim, block_size], the
    scores of a block's tokens are the sum of its rows weighted by the query; the result is the sum
    of the rows of V weighted by the probabilities. `embedding_bag` sums rows picked by an index: it
    does what vLLM's kernel does (csrc/attention), and copies neither K nor V.

    Long chunks of a prompt have many queries for the same keys: there it is cheaper to gather the
    keys once.
    """

    name = "reference"
    is_capturable = False
    max_bag_queries = 4

    def block_shape(self, block_size: int, num_kv_heads: int, head_dim: int) -> tuple[int, ...]:
        return num_kv_heads, block_size, head_dim

    def pools(self, cache: Tensor) -> tuple[Tensor, Tensor]:
        """K: [num_blocks + 1, kv_heads, head_dim, block_size]; V: the last two the other way."""
        num_blocks, num_kv_heads, block_size, head_dim = cache.shape[1:]
        return cache[0].view(num_blocks, num_kv_heads, head_dim, block_size), cache[1]

    def store(self, k: Tensor, v: Tensor, cache: Tensor, metadata: AttentionMetadata) -> None:
        plan = self._plan(metadata, cache)
        k_pool, v_pool = self.pools(cache)
        k_pool[plan.blocks, :, :, plan.offsets] = k
        v_pool[plan.blocks, :, plan.offsets] = v

    def attend(self, q: Tensor, cache: Tensor, metadata: AttentionMetadata, scale: float,
               window: int | None) -> Tensor:
        assert q.dtype == cache.dtype and q.stride(-1) == 1 and q.shape[1] % cache.shape[2] == 0
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        k_pool, v_pool = self.pools(cache)
        for group in self._plan(metadata, cache).groups:
            in_place = group.query_len <= self.max_bag_queries
            attend = self._attend_in_place if in_place else self._attend_gathered
            out[group.tokens] = attend(q[group.tokens], k_pool, v_pool, group, scale, window)
        return out

    def _attend_in_place(self, q: Tensor, k_pool: Tensor, v_pool: Tensor, group: Group,
                         scale: float, window: int | None) -> Tensor:
        num_heads, head_dim = q.shape[1:]
        if window not in group.bags:
            group.bags[window] = make_bags(group, window, q, v_pool)
        bags = group.bags[window]
        q = (q * scale).reshape(-1, head_dim)
        weights = q.index_select(0, bags.query_rows)  # [K bags, head_dim]
        scores = sum_rows(k_pool.view(-1, k_pool.shape[-1]), bags.k_rows, bags.k_offsets, weights)
        scores = scores.view(-1, group.query_len, num_heads, bags.keep.shape[-1])
        # This is masked_fill_ in a quarter of its time. Adding -inf would let NaN through.
        scores.view(bags.keep.dtype).bitwise_and_(bags.keep).bitwise_or_(bags.minus_inf)
        probs = scores.softmax(-1).flatten().index_select(0, bags.picked)  # [visible pairs]
        out = sum_rows(v_pool.view(-1, head_dim), bags.v_rows, bags.v_offsets, probs)
        return out.view(-1, num_heads, head_dim)

    def _attend_gathered(self, q: Tensor, k_pool: Tensor, v_pool: Tensor, group: Group,
                         scale: float, window: int | None) -> Tensor:
        """One sequence: only what it has written is looked at, so nothing else needs hiding."""
        table, num_keys = group.table[0], group.num_keys
        k = k_pool.index_select(0, table).permute(1, 0, 3, 2).flatten(1, 2)[:, :num_keys]
        v = v_pool.index_select(0, table).transpose(0, 1).flatten(1, 2)[:, :num_keys]
        if window not in group.masks:
            hidden = group.hidden(window, num_keys)[0]  # [query_len, keys]
            group.masks[window] = torch.zeros_like(hidden, dtype=q.dtype).masked_fill_(
                hidden, float("-inf"))
        out = F.scaled_dot_product_attention(  # [heads, query_len, head_dim], of 1 sequence
            q.transpose(0, 1)[None], k[None], v[None], group.masks[window], scale=scale,
            enable_gqa=True)
        return out[0].transpose(0, 1)

    def _plan(self, metadata: AttentionMetadata, cache: Tensor) -> ReferencePlan:
        if metadata.plan is None:
            metadata.plan = self._make_plan(metadata, cache.shape[3])
        return metadata.plan

    def _make_plan(self, metadata: AttentionMetadata, block_size: int) -> ReferencePlan:
        """All index arithmetic of a step, shared by its layers."""
        tables = metadata.block_tables
        for name in ("cu_seqlens_q", "cu_seqlens_k", "context_lens"):
            lengths = getattr(metadata, name)
            assert lengths.dtype == torch.int32 and lengths.is_contiguous(), name
        assert tables.dtype == torch.int32 and tables.dim() == 2 and tables.stride(1) == 1
        assert metadata.slot_mapping.dtype == torch.int64

        groups = []
        starts = metadata.cu_seqlens_q.tolist()
        lens = metadata.context_lens.tolist()
        first = 0
        while first < len(lens):
            query_len = starts[first + 1] - starts[first]
            last = first + 1
            while (query_len <= self.max_bag_queries and last < len(lens)
                   and starts[last + 1] - starts[last] == query_len
                   and length_class(lens[last]) == length_class(lens[first])):
                last += 1
            num_keys = max(lens[first:last])
            width = max(1, -(-num_keys // block_size))
            context_lens = metadata.context_lens[first:last, None]
            firsts = torch.arange(0, width * block_size, block_size, device=tables.device)
            # What stands in a table behind the sequence's blocks may be anything.
            table = torch.where(firsts < context_lens, tables[first:last, :width], 0)
            groups.append(Group(slice(starts[first], starts[last]), query_len, num_keys, table,
                                context_lens))
            first = last
        return ReferencePlan(metadata.slot_mapping // block_size,
                             metadata.slot_mapping % block_size, groups)


def length_class(num_keys: int) -> int:
    """Sequences of one class are computed together, their scores padded to the longest.

    A class ends at 8 times its beginning: a score that is masked costs a sixteenth of one that is
    computed, so less than the operators of another group.
    """
    return -(-num_keys.bit_length() // 3)


def sum_rows(rows: Tensor, index: Tensor, offsets: Tensor, weights: Tensor) -> Tensor:
    """out[i] = the weighted sum of the rows that bag i picks: [bags, row length]."""
    return F.embedding_bag(index, rows, offsets, mode="sum", per_sample_weights=weights.flatten())


def make_bags(group: Group, window: int | None, q: Tensor, v_pool: Tensor) -> Bags:
    """q: [num_seqs * query_len, heads, head_dim]; v_pool as `pools` returns it."""
    num_heads, head_dim = q.shape[1:]
    num_kv_heads, block_size = v_pool.shape[1:3]
    width = group.table.shape[1]
    num_keys = width * block_size

    def arange(size: int) -> Tensor:
        return torch.arange(size, dtype=torch.int32, device=q.device)

    hidden = group.hidden(window, num_keys)
    bits = {2: torch.int16, 4: torch.int32}[q.dtype.itemsize]
    minus_inf = torch.full_like(hidden, float("-inf"), dtype=q.dtype).view(bits)

    # From here on a row is one query of one head: [num_seqs * query_len * heads].
    first, last = (bound.flatten().repeat_interleave(num_heads)
                   for bound in group.visible(window))
    rows = arange(len(first))
    kv_heads = arange(num_heads) // (num_heads // num_kv_heads)
    heads = group.table[:, None, None] * num_kv_heads + kv_heads[:, None]
    heads = heads.expand(-1, group.query_len, -1, -1)  # [num_seqs, query_len, heads, width]
    # K: for each row, a bag for each block that it sees something of.
    first_block, last_block = first // block_size, (last + block_size - 1) // block_size
    seen = concat_ranges(rows * width + first_block, last_block - first_block)
    k_rows = heads.flatten()[seen, None] * head_dim + arange(head_dim)  # [K bags, head_dim]
    sizes = torch.zeros(len(rows) * width, dtype=torch.int32, device=q.device)
    sizes[seen] = head_dim
    # V: for each row, one bag of what it sees.
    picked = concat_ranges(rows * num_keys + first, last - first)
    slots = heads[..., None] * block_size + arange(block_size)
    return Bags(
        query_rows=seen // width, k_rows=k_rows.flatten(), k_offsets=exclusive_sum(sizes),
        keep=torch.where(hidden, 0, -1).to(bits)[:, :, None],
        minus_inf=torch.where(hidden, minus_inf, 0)[:, :, None],
        picked=picked, v_rows=slots.flatten().index_select(0, picked),
        v_offsets=exclusive_sum(last - first))


def exclusive_sum(sizes: Tensor) -> Tensor:
    return (sizes.cumsum(0) - sizes).to(torch.int32)


def concat_ranges(starts: Tensor, sizes: Tensor) -> Tensor:
    """start, start + 1, ... start + size - 1 for each pair, one behind the other, as int32."""
    shifts = (starts - exclusive_sum(sizes)).repeat_interleave(sizes)
    return shifts + torch.arange(len(shifts), dtype=torch.int32, device=starts.device)


# ---- the choice, once at start-up ------------------------------------------------------------

BACKENDS: dict[str, type[Backend]] = {
    "flash": FlashAttention, "varlen": VarlenAttention, "reference": ReferenceAttention}


def choose_backend(wanted: str, device: torch.device, dtype: torch.dtype, head_dim: int,
                   block_size: int) -> Backend:
    """The first of `BACKENDS` that can work here, or the one that is wanted.

    Raises ValueError that says why, if that one cannot.
    """
    if wanted not in ("auto", *BACKENDS):
        raise ValueError(f"attention_backend={wanted!r}: must be 'auto', {', '.join(BACKENDS)}")
    reasons: list[str] = []
    for name in BACKENDS if wanted == "auto" else (wanted,):
        reason = None
        if name != "reference":
            reason = kernel_problem(device, dtype, head_dim, block_size)
        if reason is None:
            try:
                backend = BACKENDS[name]()
            except ImportError as error:  # a broken installation imports badly, so try it
                reason = f"it does not import ({error})"
            else:
                logger.info("attention: %s%s", name, "".join(f"; {text}" for text in reasons))
                return backend
        reasons.append(f"not {name}: {reason}")
    raise ValueError(f"attention_backend={wanted!r}: {reasons[0]}")


def kernel_problem(device: torch.device, dtype: torch.dtype, head_dim: int,
                   block_size: int) -> str | None:
    """Why the CUDA kernels cannot work here; they all demand the same."""
    if not has_kernels(device):
        return f"it needs a CUDA device of compute capability 8.0 or later, this is {device}"
    if dtype not in (torch.float16, torch.bfloat16):
        return f"it needs float16 or bfloat16, dtype is {dtype}"
    if head_dim > 256 or head_dim % 8:
        return f"it needs a head_dim up to 256 and a multiple of 8, this is {head_dim}"
    if block_size % 256:
        return f"it needs a block_size that is a multiple of 256, this is {block_size}"
    return None


def has_kernels(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)
