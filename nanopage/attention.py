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
class Group:
    """Neighbouring sequences with the same number of queries: a batch of plain matrices."""

    queries: slice  # rows of the step's tokens
    num_seqs: int
    query_len: int
    num_keys: int  # padded to whole blocks
    gather: Tensor  # [2 * num_seqs * kv_heads * width] int64: rows (K or V, block, head) of a cache
    unwritten: Tensor  # rows (K or V, sequence, head, position) that come from slots without token
    query_positions: Tensor  # [num_seqs, query_len, 1]
    context_lens: Tensor  # [num_seqs, 1, 1]
    hidden: dict[int | None, Tensor] = field(default_factory=dict)  # a mask for each window

    def hidden_keys(self, window: int | None) -> Tensor:
        """True where a query must not look: [num_seqs, 1, query_len, num_keys]."""
        if window not in self.hidden:
            keys = torch.arange(self.num_keys, device=self.gather.device)
            mask = keys > self.query_positions
            if window is not None:
                mask |= keys <= self.query_positions - window
            # A row without keys looks at zeros (they are `unwritten`), so that it gives 0, not NaN.
            self.hidden[window] = (mask & (self.context_lens > 0))[:, None]
        return self.hidden[window]


@dataclass
class ReferencePlan:
    slots: Tensor  # [num_tokens * kv_heads] int64: rows (block, head, offset) of the pool
    groups: list[Group]


class ReferenceAttention(Backend):
    """Paged attention as its definition reads: gather the blocks of the table, mask, softmax, sum.

    A block is (kv_heads, block_size, head_dim): the gathered keys of one head are then one plain
    matrix. Sequences of like length are computed together, up to `group_size` of them, so that
    little is padded. The copies go to one buffer that is kept.
    """

    name = "reference"
    group_size = 16
    # From so many queries on, the scores of a long prompt are not worth keeping in memory.
    min_fused_queries = 32

    def __init__(self) -> None:
        self.buffer = torch.empty(0)

    def block_shape(self, block_size: int, num_kv_heads: int, head_dim: int) -> tuple[int, ...]:
        return num_kv_heads, block_size, head_dim

    def store(self, k: Tensor, v: Tensor, cache: Tensor, metadata: AttentionMetadata) -> None:
        plan = self._plan(metadata, cache)
        head_dim = k.shape[-1]
        cache[0].view(-1, head_dim).index_copy_(0, plan.slots, k.reshape(-1, head_dim))
        cache[1].view(-1, head_dim).index_copy_(0, plan.slots, v.reshape(-1, head_dim))

    def attend(self, q: Tensor, cache: Tensor, metadata: AttentionMetadata, scale: float,
               window: int | None) -> Tensor:
        assert q.dtype == cache.dtype and q.stride(-1) == 1 and q.shape[1] % cache.shape[2] == 0
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        for group in self._plan(metadata, cache).groups:
            k, v = self._gather(cache, group)  # [num_seqs, kv_heads, num_keys, head_dim]
            out[group.queries] = self._attend_group(q[group.queries], k, v, group, scale, window)
        return out

    def _attend_group(self, q: Tensor, k: Tensor, v: Tensor, group: Group, scale: float,
                      window: int | None) -> Tensor:
        num_seqs, num_kv_heads, num_keys, head_dim = k.shape
        num_heads = q.shape[1]
        hidden = group.hidden_keys(window)
        # [num_seqs, heads, query_len, head_dim]
        q = q.reshape(num_seqs, group.query_len, num_heads, head_dim).transpose(1, 2)
        if group.query_len >= self.min_fused_queries:
            out = F.scaled_dot_product_attention(
                q, k, v, attn_mask=~hidden, scale=scale, enable_gqa=True)
        else:
            # The query heads that share a KV head are further rows of one matrix.
            rows = num_heads // num_kv_heads * group.query_len
            q = q.reshape(num_seqs * num_kv_heads, rows, head_dim)
            k, v = k.flatten(0, 1), v.flatten(0, 1)  # [num_seqs * kv_heads, num_keys, head_dim]
            scores = torch.bmm(q * scale, k.transpose(1, 2))
            scores.view(num_seqs, num_heads, group.query_len, num_keys).masked_fill_(
                hidden, float("-inf"))
            out = torch.bmm(scores.softmax(-1), v)  # [num_seqs * kv_heads, rows, head_dim]
            out = out.view(num_seqs, num_heads, group.query_len, head_dim)
        return out.transpose(1, 2).reshape(-1, num_heads, head_dim)

    def _gather(self, cache: Tensor, group: Group) -> tuple[Tensor, Tensor]:
        """Copy the group's blocks together; slots that were never written become zeros."""
        _, _, num_kv_heads, block_size, head_dim = cache.shape
        rows, size = group.gather.numel(), block_size * head_dim
        if self.buffer.numel() < rows * size or self.buffer.dtype != cache.dtype:
            self.buffer = cache.new_empty(rows * size)
        out = self.buffer[:rows * size].view(rows, size)
        torch.index_select(cache.view(-1, size), 0, group.gather, out=out)
        out.view(-1, head_dim).index_fill_(0, group.unwritten, 0)
        k, v = out.view(2, group.num_seqs, num_kv_heads, group.num_keys, head_dim).unbind(0)
        return k, v

    def _plan(self, metadata: AttentionMetadata, cache: Tensor) -> ReferencePlan:
        if metadata.plan is None:
            metadata.plan = self._make_plan(metadata, cache)
        return metadata.plan

    def _make_plan(self, metadata: AttentionMetadata, cache: Tensor) -> ReferencePlan:
        """All index arithmetic of a step, shared by its layers."""
        tables = metadata.block_tables
        for name in ("cu_seqlens_q", "cu_seqlens_k", "context_lens"):
            lengths = getattr(metadata, name)
            assert lengths.dtype == torch.int32 and lengths.is_contiguous(), name
        assert tables.dtype == torch.int32 and tables.dim() == 2 and tables.stride(1) == 1
        assert metadata.slot_mapping.dtype == torch.int64

        num_kv_heads, block_size = cache.shape[2:4]
        heads = torch.arange(num_kv_heads, device=tables.device)
        block, offset = metadata.slot_mapping // block_size, metadata.slot_mapping % block_size
        slots = (block[:, None] * num_kv_heads + heads) * block_size + offset[:, None]
        groups = []
        starts = metadata.cu_seqlens_q.tolist()
        lens = metadata.context_lens.tolist()
        first = 0
        while first < len(lens):
            query_len = starts[first + 1] - starts[first]
            last = first + 1
            while (last < len(lens) and last - first < self.group_size
                   and starts[last + 1] - starts[last] == query_len):
                last += 1
            width = max(1, -(-max(lens[first:last]) // block_size))
            context_lens = metadata.context_lens[first:last, None].long()
            groups.append(self._make_group(
                slice(starts[first], starts[last]), query_len, context_lens,
                tables[first:last, :width].long(), heads, cache))
            first = last
        return ReferencePlan(slots.flatten(), groups)

    def _make_group(self, queries: slice, query_len: int, context_lens: Tensor, table: Tensor,
                    heads: Tensor, cache: Tensor) -> Group:
        _, pool_size, num_kv_heads, block_size, _ = cache.shape
        num_seqs, width = table.shape
        num_keys = width * block_size
        # What stands in a table behind the sequence's blocks may be anything: read the first
        # block instead, whose keys are masked there.
        num_blocks = -(-context_lens // block_size)
        column = torch.arange(width, device=table.device)
        table = torch.where(column < num_blocks, table, table[:, :1])
        k_rows = table[:, None] * num_kv_heads + heads[:, None]  # [num_seqs, kv_heads, width]
        gather = torch.cat([k_rows.flatten(), k_rows.flatten() + pool_size * num_kv_heads])
        # Masked scores hide such keys, but 0 * NaN is NaN: values must be zeros. The fused kernel
        # adds its mask, and a row without keys looks at them: there the keys as well.
        offset = torch.arange(num_keys, device=table.device)
        in_block = torch.where(offset < num_blocks * block_size, offset, offset % block_size)
        sequence, position = (in_block >= context_lens).nonzero(as_tuple=True)
        rows = ((sequence[:, None] * num_kv_heads + heads) * num_keys + position[:, None]).flatten()
        unwritten = rows + num_seqs * num_kv_heads * num_keys
        if query_len >= self.min_fused_queries or not context_lens.all():
            unwritten = torch.cat([rows, unwritten])
        query_positions = context_lens - query_len + offset.new_tensor(range(query_len))
        return Group(queries, num_seqs, query_len, num_keys, gather, unwritten,
                     query_positions[:, :, None], context_lens[:, :, None])


# ---- the choice, once at start-up ------------------------------------------------------------

BACKENDS: dict[str, type[Backend]] = {
    "flash": FlashAttention, "varlen": VarlenAttention, "reference": ReferenceAttention}


def choose_backend(wanted: str, device: torch.device, dtype: torch.dtype, head_dim: int,
                   block_size: int) -> Backend:
    """The first of `BACKENDS` that can work here, or the one that is wanted.

    Raises ValueError that says why, if that one cannot.
    """
    if wanted != "auto" and wanted not in BACKENDS:
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
