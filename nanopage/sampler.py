"""Which token comes next?

Sampling is a pure function: the token at position i of a sequence depends on its logits, its
parameters, its seed and i, and on nothing that runs beside it. The random number of a position
comes from hashing (seed, i), so no generator state is kept, and batching, chunking, preemption and
speculation leave a seeded text as it is.

Invariants: each row is treated by its own parameters; logprobs are the raw log-softmax of the
logits, whatever the filters did.

Next: model_runner.py, which makes the logits.
"""

import math
from dataclasses import dataclass

import torch
import xxhash
from torch import Tensor

from nanopage.sequence import Logprob, Sequence


def to_device(values: list, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Host to device through pinned memory, so that the host does not wait for the device."""
    host = torch.tensor(values, dtype=dtype, pin_memory=device.type == "cuda")
    return host.to(device, non_blocking=True)


@dataclass(frozen=True)
class SampleRow:
    """One token to be sampled: for `seq`, as its token at `position`."""

    seq: Sequence
    position: int

    @property
    def uniform(self) -> float:
        """The random number in [0, 1) that belongs to this position, whatever runs beside it."""
        digest = xxhash.xxh3_64_intdigest(
            self.position.to_bytes(8, "little"), seed=self.seq.seed % 2**64)
        return (digest >> 40) * 2.0**-24

    @property
    def barred_token_ids(self) -> frozenset[int]:
        """End tokens, as long as min_tokens is not reached."""
        request, num_generated = self.seq.request, self.position - self.seq.num_prompt_tokens
        is_barred = num_generated < request.params.min_tokens
        return request.stop_token_ids if is_barred else frozenset()


def filter_logits(logits: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """Set to -inf what the filters exclude, in transformers' order: top-k, top-p, min-p.

    logits: [rows, vocab], already divided by the temperature; the others: [rows, 1]. Places in the
    sorted order decide, so of equally likely tokens no more are kept than there is room for.
    """
    ranked, token_ids = logits.sort(dim=-1, descending=True, stable=True)
    ranks = torch.arange(logits.shape[-1], device=logits.device)
    ranked = ranked.masked_fill(ranks >= top_k, -math.inf)
    probs = ranked.softmax(-1)
    # A token stays while those before it have not reached top_p; the first always does.
    ranked = ranked.masked_fill(probs.cumsum(-1) - probs >= top_p, -math.inf)
    ranked = ranked.masked_fill(ranked < ranked[:, :1] + min_p.log(), -math.inf)
    return torch.empty_like(logits).scatter_(1, token_ids, ranked)


def pick(logits: Tensor, uniform: Tensor) -> Tensor:
    """Inverse transform sampling. logits: [rows, vocab], uniform: [rows, 1] in [0, 1)."""
    cdf = logits.softmax(-1).cumsum(-1)
    total = cdf[:, -1:].contiguous()
    # Strictly below the total: rounding must never pick a token of probability 0.
    target = torch.minimum(uniform * total, total.nextafter(torch.zeros_like(total)))
    # Where logits are NaN nothing is found: any token will do, but within the vocabulary.
    return torch.searchsorted(cdf, target, right=True).clamp_(max=logits.shape[-1] - 1)[:, 0]


def sample(logits: Tensor, rows: list[SampleRow]) -> Tensor:
    """One token id for each row: [rows]. logits: [rows, vocab], of which only a copy changes."""
    barred = [(i, token_id) for i, row in enumerate(rows) for token_id in row.barred_token_ids]
    if barred:
        where = to_device(barred, torch.int64, logits.device).T
        logits = logits.index_put(tuple(where), logits.new_full((), -math.inf))
    token_ids = logits.max(-1).indices  # on a CPU four times as fast as argmax
    random = [i for i, row in enumerate(rows) if row.seq.request.params.temperature >= 1e-5]
    if random:
        chosen = to_device(random, torch.int64, logits.device)
        picked = sample_random(logits[chosen].float(), [rows[i] for i in random])
        token_ids = token_ids.index_copy(0, chosen, picked)
    return token_ids


def sample_random(logits: Tensor, rows: list[SampleRow]) -> Tensor:
    def column(values: list, dtype: torch.dtype = torch.float32) -> Tensor:
        return to_device(values, dtype, logits.device)[:, None]

    params = [row.seq.request.params for row in rows]
    # The largest becomes 0, so that a tiny temperature gives -inf for the rest, and never NaN.
    logits = logits - logits.amax(dim=-1, keepdim=True)
    logits = logits / column([p.temperature for p in params])
    vocab_size = logits.shape[-1]
    if any(p.top_k > 0 or p.top_p < 1 or p.min_p > 0 for p in params):
        top_k = [min(p.top_k, vocab_size) if p.top_k > 0 else vocab_size for p in params]
        top_p = [p.top_p if p.top_p < 1 else math.inf for p in params]
        logits = filter_logits(logits, column(top_k, torch.int64), column(top_p),
                               column([p.min_p for p in params]))
    return pick(logits, column([row.uniform for row in rows]))


def top_logprobs(logits: Tensor, token_ids: list[int],
                 rows: list[SampleRow]) -> list[dict[int, Logprob]]:
    """For each row that asks: raw log-softmax of the sampled token and of the most likely ones."""
    result: list[dict[int, Logprob]] = [{} for _ in rows]
    most = logits.shape[-1]
    wanted = {i: min(num, most) if num >= 0 else most for i, row in enumerate(rows)
              if (num := row.seq.request.params.logprobs) is not None}
    if not wanted:
        return result
    chosen = to_device(list(wanted), torch.int64, logits.device)
    logprobs = logits[chosen].float().log_softmax(-1)  # [rows that ask, vocab]
    top = logprobs.topk(max(wanted.values()), dim=-1)
    picked = to_device([token_ids[i] for i in wanted], torch.int64, logits.device)
    sampled = logprobs.gather(1, picked[:, None])  # [rows that ask, 1]
    ranks = (logprobs > sampled).sum(-1) + 1
    for i, own, rank, values, others in zip(
            wanted, sampled[:, 0].tolist(), ranks.tolist(), top.values.tolist(),
            top.indices.tolist()):
        result[i] = {token_ids[i]: Logprob(own, rank)}  # the sampled one first
        for place, (other, value) in enumerate(zip(others[:wanted[i]], values)):
            result[i].setdefault(other, Logprob(value, place + 1))
    return result
