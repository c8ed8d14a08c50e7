"""How do a step's tokens find the keys and values of their sequence?

One pool holds the cache of all layers: [num_layers, 2, num_blocks + 1, *block]. Each layer first
*stores* the K and V of the step's tokens into their slots, then every query *attends*, through the
block table, to the keys of its own sequence up to its own position.

A backend is one implementation of the two. It owns the layout inside a block and nothing else.
`ReferenceAttention` is the definition, in plain torch. On a GPU `FlashAttention` calls flash-attn,
and `VarlenAttention` the kernel that torch itself brings. What is fast on a CPU is a leaf, cpu.py.
The metadata of a step is checked for what flash-attn demands, whatever the backend, so that a call
that works here works there.

Invariants: what a sequence has not written is never read into a result, be it NaN; a row without
keys (padding) gives exactly 0.

Next: layers.py, the decoder around it.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass
class AttentionMetadata:
    """Who attends to what in one step: what every layer needs, travelling as an argument.

    Sequences lie one behind the other in the token dimension; `cu_seqlens_q` are the borders. The
    queries of a sequence are its last tokens: context_lens counts them among the keys.
    """

    cu_seqlens_q: Tensor  # [num_seqs + 1] int32: first token of each sequence
    context_lens: Tensor  # [num_seqs] int32: keys of each sequence
    block_tables: Tensor  # [num_seqs, width] int32, padded with the scratch block
    max_query_len: int
    max_context_len: int
    query_len: int | None  # queries of each sequence in a decode step (1 + drafts), else None
    positions: Tensor  # [num_tokens] int32: where each token stands in its sequence
    slot_mapping: Tensor  # [num_tokens] int64: where its K and V go
    cu_seqlens_k: Tensor  # [num_seqs + 1] int32: as cu_seqlens_q, counted in keys
    # What a backend works out once, for all layers of the step.
    memo: dict[Any, Any] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:  # what flash-attn demands
        for lengths in (self.cu_seqlens_q, self.cu_seqlens_k, self.context_lens):
            assert lengths.dtype == torch.int32 and lengths.is_contiguous()
        assert self.block_tables.dtype == torch.int32 and self.block_tables.dim() == 2
        assert self.block_tables.stride(1) == 1 and self.slot_mapping.dtype == torch.int64

    @classmethod
    def build(cls, cu_seqlens_q: Tensor, context_lens: Tensor, block_tables: Tensor,
              num_tokens: int, block_size: int, **others: Any) -> AttentionMetadata:
        """Where each token stands, and its slot, follow from the lengths and the block tables.

        They are worked out on the device, inside a captured graph too. Padding needs no case of its
        own: behind a sequence's blocks its table names block 0, the scratch block.
        """
        ends = cu_seqlens_q.narrow(0, 1, len(context_lens))
        tokens = torch.arange(num_tokens, dtype=torch.int32, device=ends.device)
        seqs = torch.searchsorted(ends, tokens, right=True)  # [num_tokens]: whose token it is
        positions = tokens - ends.index_select(0, seqs) + context_lens.index_select(0, seqs)
        entries = (positions // block_size).clamp(min=0)  # it is less where there are no keys
        blocks = block_tables.index_select(0, seqs).gather(1, entries.long().unsqueeze(1))
        return cls(cu_seqlens_q, context_lens, block_tables, positions=positions,
                   slot_mapping=blocks.squeeze(1).long() * block_size + positions % block_size,
                   cu_seqlens_k=F.pad(context_lens.cumsum(0, dtype=torch.int32), (1, 0)), **others)


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


class ReferenceAttention(Backend):
    """The definition: gather a sequence's blocks, cut to what is written, attend."""

    name = "reference"
    is_capturable = False  # reads the lengths on the host

    def attend(self, q: Tensor, cache: Tensor, metadata: AttentionMetadata, scale: float,
               window: int | None) -> Tensor:
        assert q.dtype == cache.dtype and q.stride(-1) == 1 and q.shape[1] % cache.shape[3] == 0
        query_lens = metadata.cu_seqlens_q.diff().tolist()
        out = []
        for q_seq, table, num_keys in zip(q.split(query_lens), metadata.block_tables,
                                          metadata.context_lens.tolist()):
            # K and V: [num_keys, kv_heads, head_dim]
            table = table[:-(-num_keys // cache.shape[2])]
            k, v = cache[:, table].flatten(1, 2)[:, :num_keys]
            mask = causal_mask(len(q_seq), num_keys, window, q)
            q_seq, k, v = (x.transpose(0, 1) for x in (q_seq, k, v))  # heads first
            attended = F.scaled_dot_product_attention(
                q_seq, k, v, mask, scale=scale, enable_gqa=True)
            out.append(attended.transpose(0, 1))
        return torch.cat(out)


def causal_mask(num_queries: int, num_keys: int, window: int | None, like: Tensor) -> Tensor:
    """0, or -inf for what a query must not see, [queries, keys]; the queries are the last tokens.

    like: a tensor of the dtype and device that are wanted.
    """
    queries = torch.arange(num_keys - num_queries, num_keys, device=like.device)
    # How far each key lies before each query.
    distances = queries[:, None] - torch.arange(num_keys, device=like.device)
    hidden = (distances < 0) | (distances >= (window or num_keys))
    return like.new_zeros(hidden.shape).masked_fill_(hidden, float("-inf"))


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
