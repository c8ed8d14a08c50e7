"""The reference and the CPU attention against a loop over rows; what is unwritten is not read."""

from dataclasses import replace

import pytest
import torch
from models import make_engine
from oracles import generate, hf_greedy, prompts_of

from nanopage.attention import AttentionMetadata, ReferenceAttention
from nanopage.cpu import CpuAttention


def by_rows(q, k, v, scale, window):
    """One query and one head at a time. q: [queries, heads, dim], k, v: [keys, heads, dim]."""
    out = torch.zeros_like(q)
    num_groups = q.shape[1] // k.shape[1]
    for i in range(len(q)):
        last = len(k) - len(q) + i
        first = 0 if window is None else max(0, last - window + 1)
        for head in range(q.shape[1]):
            keys = k[first:last + 1, head // num_groups].float()
            weights = (keys @ q[i, head].float() * scale).softmax(0)
            out[i, head] = (weights @ v[first:last + 1, head // num_groups].float()).to(q.dtype)
    return out


class CpuAttentionInPieces(CpuAttention):
    max_dense_queries = 16  # fewer than the longest chunk here


BACKENDS = [ReferenceAttention, CpuAttention, CpuAttentionInPieces]


def cumulate(lens):
    return torch.tensor([0, *lens]).cumsum(0).to(torch.int32)


def random_case(backend, query_lens, context_lens, heads, kv_heads, block_size=4, head_dim=8,
                dtype=torch.float32, seed=0):
    """Scattered blocks, junk behind the tables, NaN in every slot that is not a token's."""
    generator = torch.Generator().manual_seed(seed)

    def rand(*shape):
        return torch.randn(*shape, generator=generator).to(dtype)

    counts = [-(-length // block_size) for length in context_lens]
    order = (torch.randperm(sum(counts), generator=generator) + 1).tolist()
    tables = torch.randint(1, sum(counts) + 1, (len(counts), max(counts) + 2),
                           dtype=torch.int32, generator=generator)
    cache = torch.full((2, sum(counts) + 1, *backend.block_shape(block_size, kv_heads, head_dim)),
                       float("nan"), dtype=dtype)
    q, ks, vs, slots, old_slots = rand(sum(query_lens), heads, head_dim), [], [], [], []
    for i, (num_queries, length) in enumerate(zip(query_lens, context_lens)):
        table = [order.pop() for _ in range(counts[i])]
        tables[i, :counts[i]] = torch.tensor(table, dtype=torch.int32)
        ks.append(rand(length, kv_heads, head_dim))
        vs.append(rand(length, kv_heads, head_dim))
        for position in range(length):
            slot = table[position // block_size] * block_size + position % block_size
            (old_slots if position < length - num_queries else slots).append(slot)
    metadata = AttentionMetadata.build(
        cumulate(query_lens), torch.tensor(context_lens, dtype=torch.int32), tables,
        sum(query_lens), block_size, max_query_len=max(query_lens),
        max_context_len=max(context_lens), query_len=None)
    assert metadata.slot_mapping.tolist() == slots
    assert torch.equal(metadata.cu_seqlens_k, cumulate(context_lens))
    old_k = torch.cat([k[:len(k) - n] for k, n in zip(ks, query_lens)])
    old_v = torch.cat([v[:len(v) - n] for v, n in zip(vs, query_lens)])
    old_metadata = replace(metadata, slot_mapping=torch.tensor(old_slots, dtype=torch.int64))
    backend.store(old_k, old_v, cache, old_metadata)
    new_k = torch.cat([k[len(k) - n:] for k, n in zip(ks, query_lens)])
    new_v = torch.cat([v[len(v) - n:] for v, n in zip(vs, query_lens)])
    return q, ks, vs, new_k, new_v, cache, metadata


@pytest.mark.parametrize("make", BACKENDS)
@pytest.mark.parametrize("window", [None, 1, 5])
@pytest.mark.parametrize("heads, kv_heads", [(4, 4), (4, 2), (8, 1)])
def test_reference_is_attention(make, heads, kv_heads, window):
    query_lens = [1, 1, 1, 3, 3, 7, 40, 1]
    context_lens = [1, 9, 16, 3, 12, 30, 45, 21]
    backend = make()
    q, ks, vs, new_k, new_v, cache, metadata = random_case(
        backend, query_lens, context_lens, heads, kv_heads)
    backend.store(new_k, new_v, cache, metadata)
    out = backend.attend(q, cache, metadata, 0.3, window)
    first = 0
    for num_queries, k, v in zip(query_lens, ks, vs):
        expected = by_rows(q[first:first + num_queries], k, v, 0.3, window)
        torch.testing.assert_close(out[first:first + num_queries], expected)
        first += num_queries


@pytest.mark.parametrize("make", BACKENDS)
def test_rows_without_keys_give_zero(make):
    """A padding row of a captured batch: length 0, table 0, and the scratch block is dirty."""
    backend = make()
    cache = torch.full((2, 3, *backend.block_shape(4, 2, 8)), float("nan"))
    cache[:, 1] = 1.0
    metadata = AttentionMetadata.build(
        torch.arange(4, dtype=torch.int32), torch.tensor([1, 0, 0], dtype=torch.int32),
        torch.tensor([[1, 0], [0, 0], [0, 0]], dtype=torch.int32), 3, 4,
        max_query_len=1, max_context_len=1, query_len=1)
    out = backend.attend(torch.ones(3, 4, 8), cache, metadata, 1.0, None)
    assert torch.equal(out[0], torch.ones(4, 8)) and torch.equal(out[1:], torch.zeros(2, 4, 8))


@pytest.mark.parametrize("make", BACKENDS)
@pytest.mark.parametrize("num_keys", [0, 3])
def test_a_chunk_with_fewer_keys_than_queries(make, num_keys):
    """Its first queries have none: zero, and the last see what there is."""
    backend = make()
    cache = torch.full((2, 3, *backend.block_shape(4, 2, 8)), float("nan"))
    metadata = AttentionMetadata.build(
        cumulate([6]), torch.tensor([num_keys], dtype=torch.int32),
        torch.tensor([[1, 2]], dtype=torch.int32), 6, 4,
        max_query_len=6, max_context_len=num_keys, query_len=None)
    ones = torch.ones(num_keys, 2, 8)
    backend.store(ones, ones, cache, replace(
        metadata, slot_mapping=torch.arange(4, 4 + num_keys)))
    out = backend.attend(torch.ones(6, 4, 8), cache, metadata, 1.0, None)
    expected = torch.zeros(6, 4, 8)
    expected[6 - num_keys:] = 1
    torch.testing.assert_close(out, expected)


@pytest.mark.parametrize("field, value", [
    ("block_tables", lambda t: t.long()), ("block_tables", lambda t: t.T.contiguous().T),
    ("context_lens", lambda t: t.long()), ("cu_seqlens_q", lambda t: t.float()),
    ("cu_seqlens_k", lambda t: t.repeat_interleave(2)[::2]), ("slot_mapping", lambda t: t.int()),
])
def test_every_backend_demands_what_flash_attn_demands(field, value):
    metadata = random_case(ReferenceAttention(), [1, 2], [5, 6], 4, 2)[-1]
    with pytest.raises(AssertionError):
        replace(metadata, **{field: value(getattr(metadata, field))})


def test_a_request_with_nan_does_not_poison_the_next(r_model):
    """Blocks are reused uncleared: what an overflow left in them is never read."""
    llm = make_engine(r_model, num_blocks=8, enable_prefix_caching=False)
    prompts = prompts_of([9, 6, 3])
    for prompt in prompts:
        assert generate(llm, [prompt], max_tokens=6) == [hf_greedy(r_model, prompt, 6)]
        llm.model_runner.kv_cache.fill_(float("inf"))
