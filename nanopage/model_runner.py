"""How does a step reach the device?

`execute` turns the sequences of a batch into flat tensors, copies blocks, runs the decoder, and
samples one token for each row of logits that someone waits for.

Invariants: sampling is a pure function, the token at position i of a sequence depends on its
logits, its parameters, its seed and i, and on nothing that runs beside it; only rows that are
sampled have their logits computed.

Next: engine.py, what a user calls.
"""

import logging
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import Tensor

from nanopage.attention import AttentionMetadata, ReferenceAttention
from nanopage.layers import CausalLM, head_dim_of
from nanopage.scheduler import Batch, Samples
from nanopage.sequence import Logprob, SamplingParams, Sequence

logger = logging.getLogger("nanopage")


@dataclass(frozen=True)
class SampleRow:
    """One token to be sampled: for `seq`, from row `logits_row`, as its token at `position`."""

    seq: Sequence
    logits_row: int
    position: int

    @property
    def params(self) -> SamplingParams:
        return self.seq.request.params

    @property
    def uniform(self) -> float:
        """The random number in [0, 1) that belongs to this position, whatever runs beside it."""
        digest = xxhash.xxh3_64_intdigest(
            self.position.to_bytes(8, "little"), seed=self.seq.seed % 2**64)
        return (digest >> 40) * 2.0**-24

    @property
    def barred_token_ids(self) -> list[int]:
        """End tokens, as long as min_tokens is not reached."""
        num_generated = self.position - self.seq.num_prompt_tokens
        if num_generated >= self.params.min_tokens:
            return []
        return list(self.seq.request.stop_token_ids)


def filter_logits(logits: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """Set to -inf what the filters exclude, in transformers' order: top-k, top-p, min-p.

    logits: [rows, vocab], already divided by the temperature; the others: [rows, 1].
    Each filter keeps the tokens above a threshold, so one sorted copy serves them all.
    """
    ranked = logits.sort(dim=-1, descending=True).values
    smallest = ranked.gather(1, top_k - 1)
    ranked = ranked.masked_fill(ranked < smallest, float("-inf"))
    probs = ranked.softmax(-1)
    # A token stays while those before it have not reached top_p; at least one always does.
    num_kept = (probs.cumsum(-1) - probs < top_p).sum(-1, keepdim=True)
    smallest = torch.maximum(smallest, ranked.gather(1, num_kept - 1))
    smallest = torch.maximum(smallest, ranked[:, :1] + min_p.log())
    return logits.masked_fill(logits < smallest, float("-inf"))


def pick(logits: Tensor, uniform: Tensor) -> Tensor:
    """Inverse transform sampling. logits: [rows, vocab], uniform: [rows, 1] in [0, 1)."""
    cdf = logits.softmax(-1).cumsum(-1)
    total = cdf[:, -1:].contiguous()
    # Strictly below the total: rounding must never pick a token of probability 0.
    target = torch.minimum(uniform * total, total.nextafter(torch.zeros_like(total)))
    return torch.searchsorted(cdf, target, right=True)[:, 0]


def sample(logits: Tensor, rows: list[SampleRow]) -> Tensor:
    """One token id for each row: [rows]. logits: [rows, vocab], of which only a copy changes."""
    barred = [(i, token_id) for i, row in enumerate(rows) if row.params.min_tokens
              for token_id in row.barred_token_ids]
    if barred:
        where = torch.tensor(barred, device=logits.device).T
        logits = logits.index_put(tuple(where), logits.new_tensor(float("-inf")))
    token_ids = logits.max(dim=-1).indices  # on a CPU much faster than argmax in bfloat16
    random = [i for i, row in enumerate(rows) if not row.params.is_greedy]
    if random:
        token_ids[random] = sample_random(logits[random].float(), [rows[i] for i in random])
    return token_ids


def sample_random(logits: Tensor, rows: list[SampleRow]) -> Tensor:
    def column(values: list[float], dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=logits.device)[:, None]

    params = [row.params for row in rows]
    # The largest becomes 0, so that a tiny temperature gives -inf for the rest, and never NaN.
    logits = logits - logits.max(dim=-1, keepdim=True).values
    logits = logits / column([p.temperature for p in params])
    vocab_size = logits.shape[-1]
    filtered = [i for i, p in enumerate(params) if p.top_k > 0 or p.top_p < 1 or p.min_p > 0]
    if filtered:
        chosen = [params[i] for i in filtered]
        logits[filtered] = filter_logits(
            logits[filtered],
            column([min(p.top_k, vocab_size) if p.top_k > 0 else vocab_size for p in chosen],
                   torch.int64)[:],
            column([p.top_p if p.top_p < 1 else math.inf for p in chosen]),
            column([p.min_p for p in chosen]))
    return pick(logits, column([row.uniform for row in rows]))


def top_logprobs(logits: Tensor, token_ids: list[int],
                 rows: list[SampleRow]) -> list[dict[int, Logprob]]:
    """For each row the raw log-softmax of the sampled token and of the most likely ones."""
    logprobs = logits.float().log_softmax(-1)  # [rows, vocab]
    vocab_size = logprobs.shape[-1]
    wanted = [row.params.logprobs for row in rows]
    wanted = [vocab_size if k == -1 else min(k, vocab_size) for k in wanted]
    top = logprobs.topk(max(wanted), dim=-1)
    sampled = logprobs.gather(1, torch.tensor(token_ids, device=logits.device)[:, None])
    ranks = ((logprobs > sampled).sum(-1) + 1).tolist()
    values, indices = top.values.tolist(), top.indices.tolist()
    result = []
    for i, token_id in enumerate(token_ids):
        entry = {token_id: Logprob(sampled[i].item(), ranks[i])}
        for rank in range(wanted[i]):
            other = indices[i][rank]
            if other != token_id:
                entry[other] = Logprob(values[i][rank], rank + 1)
        request = rows[i].seq.request
        if request.tokenizer is not None and request.beam_search is None:
            for other, logprob in entry.items():
                logprob.decoded_token = request.tokenizer.decode([other])
        result.append(entry)
    return result


@dataclass(frozen=True)
class EngineConfig:
    """All settings of an engine, checked by `LLM`; None means: chosen at start-up."""

    device: torch.device
    dtype: torch.dtype
    block_size: int
    num_blocks: int | None
    kv_cache_memory_bytes: int | None
    max_model_len: int | None
    max_num_seqs: int
    max_num_batched_tokens: int
    gpu_memory_utilization: float
    enable_prefix_caching: bool
    enforce_eager: bool


class ModelRunner:
    """Owns the device: the weights, the pool of blocks, and the tensors of a step."""

    def __init__(self, path: Path, hf_config: Any, config: EngineConfig) -> None:
        self.config, self.hf_config = config, hf_config
        self.device, self.block_size = config.device, config.block_size
        self.backend = ReferenceAttention()
        max_position = config.max_model_len or hf_config.max_position_embeddings
        self.model = CausalLM(hf_config, self.backend, max_position, config.device, config.dtype)
        self.model.load_weights(path)
        if config.device.type == "cpu":
            self.model.pack()
        self.num_blocks, self.max_model_len = self._size_cache()
        block = self.backend.block_shape(
            config.block_size, hf_config.num_key_value_heads, head_dim_of(hf_config))
        # One more than num_blocks: block 0 is the scratch block.
        self.kv_cache = torch.zeros(hf_config.num_hidden_layers, 2, self.num_blocks + 1, *block,
                                    dtype=config.dtype, device=config.device)

    @property
    def block_bytes(self) -> int:
        """2 (K and V) x layers x KV heads x head dim x bytes per element, for a block's tokens."""
        config = self.hf_config
        return (2 * config.num_hidden_layers * config.num_key_value_heads * head_dim_of(config)
                * self.config.dtype.itemsize * self.block_size)

    def _size_cache(self) -> tuple[int, int]:
        """Returns (num_blocks, max_model_len)."""
        config = self.config
        max_model_len = config.max_model_len or self.hf_config.max_position_embeddings
        if config.num_blocks is not None:
            return config.num_blocks, max_model_len
        blocks_per_seq = -(-max_model_len // self.block_size)
        budget = config.kv_cache_memory_bytes
        if budget is None:
            budget = min(4 << 30, available_memory() // 4)
        num_blocks = min(budget // self.block_bytes, config.max_num_seqs * blocks_per_seq)
        num_slots = num_blocks * self.block_size
        if num_slots < (config.max_model_len or 1):
            raise ValueError(
                f"max_model_len={config.max_model_len}: the KV cache has room for {num_slots} "
                f"tokens ({num_blocks} blocks of {self.block_size}, {self.block_bytes:,} bytes "
                f"each, in {budget:,} bytes); raise kv_cache_memory_bytes or lower max_model_len")
        return num_blocks, min(max_model_len, num_slots)

    @torch.inference_mode()
    def execute(self, batch: Batch) -> Samples:
        """Copy blocks, run the decoder over the batch, sample."""
        if batch.copies:
            sources, destinations = torch.tensor(batch.copies, device=self.device).T
            copies = self.kv_cache.index_select(2, sources)
            self.kv_cache.index_copy_(2, destinations, copies)
        # Neighbours of like length are computed together by the reference attention.
        sequences = sorted(batch.sequences,
                           key=lambda seq: (seq.num_scheduled_tokens, seq.num_computed_tokens))
        token_ids, positions, metadata = self._prepare_inputs(sequences)
        hidden = self.model(token_ids, positions, self.kv_cache, metadata)
        return self._sample(hidden, sequences)

    def _prepare_inputs(self, sequences: list[Sequence]) -> tuple[
            Tensor, Tensor, AttentionMetadata]:
        block_size = self.block_size
        token_ids, positions, slots = [], [], []
        cu_seqlens_q, cu_seqlens_k, context_lens = [0], [0], []
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
            cu_seqlens_q.append(cu_seqlens_q[-1] + end - start)
            cu_seqlens_k.append(cu_seqlens_k[-1] + end)
            context_lens.append(end)
        width = max(len(seq.block_table) for seq in sequences)
        tables = [seq.block_table + [0] * (width - len(seq.block_table)) for seq in sequences]
        query_lens = {seq.num_scheduled_tokens for seq in sequences}

        def tensor(values: Any, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.tensor(values, dtype=dtype, device=self.device)

        metadata = AttentionMetadata(
            slot_mapping=tensor(slots),
            cu_seqlens_q=tensor(cu_seqlens_q, torch.int32),
            cu_seqlens_k=tensor(cu_seqlens_k, torch.int32),
            context_lens=tensor(context_lens, torch.int32),
            block_tables=tensor(tables, torch.int32),
            max_query_len=max(query_lens),
            max_context_len=max(context_lens),
            query_len=query_lens.pop() if len(query_lens) == 1 else None,
        )
        return tensor(token_ids), tensor(positions), metadata

    def _sample(self, hidden: Tensor, sequences: list[Sequence]) -> Samples:
        """hidden: [num_tokens, hidden_size], the sequences one behind the other."""
        rows: list[SampleRow] = []
        hidden_rows: list[int] = []
        num_samples = []
        first = 0
        for seq in sequences:
            num_rows = len(rows)
            end = seq.num_computed_tokens + seq.num_scheduled_tokens
            num_tokens = seq.num_tokens
            for position in range(num_tokens, end + 1):  # empty while the prompt is incomplete
                hidden_rows.append(first + seq.num_scheduled_tokens - 1 - (end - position))
                branches = seq.request.sequences if not seq.num_generated_tokens else [seq]
                rows += [SampleRow(s, len(hidden_rows) - 1, position) for s in branches]
            num_samples.append(len(rows) - num_rows)
            first += seq.num_scheduled_tokens
        if not rows:
            return Samples(sequences, [[] for _ in sequences])
        if len(hidden_rows) < len(hidden):
            hidden = hidden[torch.tensor(hidden_rows, device=self.device)]
        logits = self.model.lm_head(hidden)  # [sampled rows, vocab]
        if len(rows) > len(logits):  # the first tokens of n branches come from one row
            logits = logits[torch.tensor([row.logits_row for row in rows], device=self.device)]
        token_ids = sample(logits, rows).tolist()
        logprobs = self._logprobs(logits, token_ids, rows)
        return Samples(sequences, split(token_ids, num_samples),
                       None if logprobs is None else split(logprobs, num_samples))

    @staticmethod
    def _logprobs(logits: Tensor, token_ids: list[int],
                  rows: list[SampleRow]) -> list[dict[int, Logprob]] | None:
        asked = [i for i, row in enumerate(rows) if row.params.logprobs is not None]
        if not asked:
            return None
        entries = top_logprobs(
            logits[asked], [token_ids[i] for i in asked], [rows[i] for i in asked])
        result: list[dict[int, Logprob]] = [{} for _ in rows]
        for i, entry in zip(asked, entries):
            result[i] = entry
        return result


def split(values: list[Any], sizes: list[int]) -> list[list[Any]]:
    iterator = iter(values)
    return [[next(iterator) for _ in range(size)] for size in sizes]


def available_memory() -> int:
    """Bytes of main memory that a process may take without swapping."""
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
