"""How do several devices compute one model?

A leaf: without torchrun there is one process, and each function returns what it was given. With it
every process, a *rank*, runs the user's whole script: the same scheduler, the same requests, the
same steps. Only the matrices are cut, as in Megatron-LM (Shoeybi et al. 2019, section 3):

    q, k, v, gate, up         each rank has some of the heads and neurons: the outputs are cut
    o_proj, down_proj         each rank has their weights for what it holds, and the sum over all
                              ranks is the output: the only two all-reduces of a layer
    embedding, output layer   each rank has a part of the vocabulary: a sum again, and a gather

Invariants: nobody keeps a whole matrix; what rank 0 sampled is everyone's sample, logprobs included
(beams are ranked by them), so that rounding cannot let ranks drift; where ranks are about to
compute different things all the same, they raise.

Next: config.py, what is chosen at start-up.
"""

import logging
import os
from copy import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from nanopage.arguments import require

RANK, WORLD_SIZE = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


def connect(wanted: int | None) -> int:
    """Meet the other ranks; returns which one this is. On a GPU they talk over NCCL, else gloo.

    Raises ValueError, saying how to start them, if there are not as many as are wanted.
    """
    require(wanted in (None, WORLD_SIZE), "tensor_parallel_size", wanted,
            f"{WORLD_SIZE}, the number of processes that run this script: start it with "
            f"`torchrun --nproc-per-node {wanted} script.py`")
    logging.getLogger("nanopage").disabled = RANK > 0  # one speaks for all
    if WORLD_SIZE > 1 and not dist.is_initialized():
        if torch.cuda.is_available():
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
        dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
    return RANK


# ---- who has what ----------------------------------------------------------------------------


def cut_config(config: Any) -> Any:
    """What the model's config says of one rank: a share of its heads, neurons and vocabulary.

    Raises ValueError with the numbers if these cannot be shared out evenly; so there are never
    more ranks than KV heads.
    """
    config = copy(config)
    for name in ("num_attention_heads", "num_key_value_heads", "intermediate_size", "vocab_size"):
        num = getattr(config, name)
        require(num % WORLD_SIZE == 0, "tensor_parallel_size", WORLD_SIZE,
                f"a divisor of the model's {name}={num}")
        setattr(config, name, num // WORLD_SIZE)
    return config


def cut(name: str, tensor: Tensor) -> Tensor:
    """This rank's part of a checkpoint's tensor, in memory of its own."""
    if WORLD_SIZE == 1 or "norm" in name:
        return tensor
    dim = int("o_proj" in name or "down_proj" in name)  # a weight is [outputs, inputs]
    if tensor.dim() == dim:
        return tensor * (RANK == 0)  # a bias of what is summed must be added once
    return tensor.tensor_split(WORLD_SIZE, dim)[RANK].clone()


# ---- on the device ---------------------------------------------------------------------------


def all_reduce(x: Tensor) -> Tensor:
    """The sum of every rank's x, in x itself where it is contiguous. A CUDA graph may hold it."""
    if WORLD_SIZE > 1:
        x = x.contiguous()
        dist.all_reduce(x)
    return x


def embed(table: nn.Embedding, token_ids: Tensor) -> Tensor:
    """token_ids: [num_tokens]. Returns [num_tokens, hidden]: each rank adds the rows it has."""
    if WORLD_SIZE == 1:
        return table(token_ids)
    is_own = token_ids // table.num_embeddings == RANK  # [num_tokens]
    return all_reduce(table(token_ids % table.num_embeddings) * is_own.unsqueeze(1))


def gather(part: Tensor) -> Tensor:
    """part: [rows, vocab of this rank]. Returns [rows, vocab], the same to the bit everywhere."""
    if WORLD_SIZE == 1:
        return part
    parts = [torch.empty_like(part) for _ in range(WORLD_SIZE)]
    dist.all_gather(parts, part.contiguous())
    return torch.cat(parts, dim=-1)


# ---- on the host -----------------------------------------------------------------------------


def exchange(value: Any) -> list[Any]:
    """Every rank's value, by rank; it is pickled, so let it be small."""
    values = [value] * WORLD_SIZE
    if WORLD_SIZE > 1:
        dist.all_gather_object(values, value)
    return values


def check_alike(has_failed: bool, *numbers: list[int]) -> None:
    """Raise RuntimeError if others are about to compute something else, or wait in a failed step.

    Otherwise matrices of different requests would be added up without a word.
    """
    own = hash(tuple(map(tuple, numbers)))
    if WORLD_SIZE > 1 and (has_failed or len(set(exchange(own))) > 1):
        raise RuntimeError(f"rank {RANK}: a step failed here, or the ranks have different "
                           "requests; under torchrun all must make the same calls")
