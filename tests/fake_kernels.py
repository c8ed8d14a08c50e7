"""flash-attn and torch's varlen attention, row by row, asserting what the real ones demand.

Independent of the attention that the engine has itself, so that they can serve as its oracle.
"""

import types

import torch


def attend_row(q, k, v, scale, first, last):
    """One query of one head over keys [first, last]."""
    if last < first:
        return torch.zeros_like(q)
    weights = (k[first:last + 1].float() @ q.float() * scale).softmax(0)
    return (weights @ v[first:last + 1].float()).to(q.dtype)


def check_pools(q, k, v, tables, *lengths):
    assert q.dtype in (torch.float16, torch.bfloat16) and q.dtype == k.dtype == v.dtype
    head_dim = q.shape[-1]
    assert head_dim <= 256 and head_dim % 8 == 0 and q.shape[-2] % k.shape[2] == 0
    assert k.dim() == 4 and k.shape[1] % 256 == 0 and k.shape[3] == head_dim
    assert q.stride(-1) == k.stride(-1) == v.stride(-1) == 1
    assert tables.dtype == torch.int32 and tables.stride(-1) == 1
    for length in lengths:
        assert length.dtype == torch.int32 and length.is_contiguous()


def gather(pool, table, length, page):
    """[length, kv_heads, head_dim]: only the first ceil(length / page) entries are read."""
    entries = table[:-(-length // page)].tolist()
    assert all(0 <= entry < len(pool) for entry in entries)
    return pool[entries].flatten(0, 1)[:length] if entries else pool[:0].flatten(0, 1)


def rows(q, k_cache, v_cache, table, length, scale, window):
    """q: [queries, heads, head_dim], the last tokens of `length` keys; bottom-right causal."""
    k = gather(k_cache, table, length, k_cache.shape[1])
    v = gather(v_cache, table, length, v_cache.shape[1])
    out = torch.zeros_like(q)
    left, right = window
    for i in range(len(q)):
        at = length - len(q) + i
        last = min(length - 1, at + right) if right >= 0 else length - 1
        first = max(0, at - left) if left >= 0 else 0
        for head in range(q.shape[1]):
            kv_head = head // (q.shape[1] // k_cache.shape[2])
            out[i, head] = attend_row(q[i, head], k[:, kv_head], v[:, kv_head], scale, first, last)
    return out


def fake_flash_attn(calls):
    module = types.ModuleType("flash_attn")

    def flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
                               softmax_scale=None, causal=False, window_size=(-1, -1),
                               softcap=0.0, block_table=None):
        calls.append("varlen")
        check_pools(q, k, v, block_table, cu_seqlens_q, cu_seqlens_k)
        assert causal and q.dim() == 3 and len(block_table) == len(cu_seqlens_q) - 1
        q_lens, k_lens = cu_seqlens_q.diff().tolist(), cu_seqlens_k.diff().tolist()
        assert max(q_lens) <= max_seqlen_q and max(k_lens) <= max_seqlen_k
        assert all(k_len > 0 for q_len, k_len in zip(q_lens, k_lens) if q_len)
        parts = [rows(part, k, v, table, length, softmax_scale, (window_size[0], 0))
                 for part, table, length in zip(q.split(q_lens), block_table, k_lens)]
        return torch.cat(parts)

    def flash_attn_with_kvcache(q, k_cache, v_cache, k=None, v=None, cache_seqlens=None,
                                block_table=None, softmax_scale=None, causal=False,
                                window_size=(-1, -1), num_splits=0):
        calls.append(f"kvcache {q.shape[1]}")
        check_pools(q, k_cache, v_cache, block_table, cache_seqlens)
        assert k is None and v is None and q.dim() == 4 and causal
        assert len(q) == len(cache_seqlens) == len(block_table)
        assert cache_seqlens.max() <= block_table.shape[1] * k_cache.shape[1]
        return torch.stack([
            rows(part, k_cache, v_cache, table, length, softmax_scale, (window_size[0], 0))
            for part, table, length in zip(q, block_table, cache_seqlens.tolist())])

    module.flash_attn_varlen_func = flash_attn_varlen_func
    module.flash_attn_with_kvcache = flash_attn_with_kvcache
    return module


def fake_varlen_attn(calls):
    def varlen_attn(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, return_aux=None,
                    scale=None, window_size=(-1, -1), enable_gqa=False, seqused_k=None,
                    block_table=None, num_splits=None):
        calls.append(f"varlen {window_size} {num_splits}")
        check_pools(query, key, value, block_table, cu_seq_q, cu_seq_k, seqused_k)
        assert return_aux is None and enable_gqa == (query.shape[1] != key.shape[2])
        q_lens, k_lens = cu_seq_q.diff().tolist(), seqused_k.tolist()
        assert max(q_lens) <= max_q and max(k_lens) <= max_k
        assert all(k_len > 0 for q_len, k_len in zip(q_lens, k_lens) if q_len)
        if num_splits is None:  # several splits are wrong for a batch, but for one-token GQA
            assert max(q_lens) == 1 and enable_gqa
        if window_size == (-1, -1):
            assert max(q_lens) == 1
        parts = [rows(part, key, value, table, length, scale, window_size)
                 for part, table, length in zip(query.split(q_lens), block_table, k_lens)]
        return torch.cat(parts)

    return varlen_attn
