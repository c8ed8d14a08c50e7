"""Which settings are there?

Invariants: checked once, before any work is done, then frozen; derived values are properties.

Next: attention.py, how a step's tokens find the keys and values of their sequence.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from nanopage.scheduler import PromptLookup
from nanopage.sequence import check_bool, check_number

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class EngineConfig:
    """The keyword arguments of `LLM`; None and "auto" are chosen at start-up.

    device: "cuda", "cpu" or "auto". dtype: one of DTYPES; "auto" is the checkpoint's on a GPU,
    and on a CPU bfloat16 where the processor multiplies it natively.
    block_size: tokens per block of the KV cache; by default 32, on a GPU 256.
    num_blocks fixes the size of the pool (the scratch block is not counted), or else
    kv_cache_memory_bytes does; by default what memory allows, on a GPU gpu_memory_utilization
    of the device less what weights and activations take.
    max_model_len: longest prompt + completion in tokens; by default what model and pool allow.
    max_num_seqs: how many sequences may run at once.
    max_num_batched_tokens: the token budget of a step; by default 512, on a GPU 8192.
    enforce_eager: no CUDA graphs. attention_backend: "flash", "varlen", "reference" or "auto".
    speculative_config: vLLM's {"method": "ngram", "num_speculative_tokens": 4,
    "prompt_lookup_min": 2, "prompt_lookup_max": 4}.

    Raises ValueError naming the argument, its value and what is allowed.
    """

    tokenizer: Any = None
    device: Any = "auto"
    dtype: Any = "auto"
    block_size: int = None  # type: ignore[assignment]  # an int after `resolve`
    num_blocks: int | None = None
    kv_cache_memory_bytes: int | None = None
    max_model_len: int | None = None
    max_num_seqs: int = 256
    max_num_batched_tokens: int = None  # type: ignore[assignment]  # likewise
    gpu_memory_utilization: float = 0.9
    enable_prefix_caching: bool = True
    enforce_eager: bool = False
    attention_backend: str = "auto"
    speculative_config: dict[str, Any] | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.tokenizer, str | Path | None) or self.tokenizer == "":
            raise ValueError(f"tokenizer={self.tokenizer!r}: must be a directory, a name or None")
        for name in ("block_size", "num_blocks"):
            check_number(name, getattr(self, name), 1, 2**31 - 1, optional=True)
        for name in ("kv_cache_memory_bytes", "max_num_batched_tokens"):
            check_number(name, getattr(self, name), 1, optional=True)
        check_number("max_model_len", self.max_model_len, 2, optional=True)
        check_number("max_num_seqs", self.max_num_seqs, 1)
        check_number("gpu_memory_utilization", self.gpu_memory_utilization, 0.01, 1, integer=False)
        check_bool("enable_prefix_caching", self.enable_prefix_caching)
        check_bool("enforce_eager", self.enforce_eager)
        check_number("seed", self.seed, -2**63, 2**63 - 1)

    def resolve(self, hf_config: Any) -> EngineConfig:
        """The same settings with device, dtype and sizes chosen for this machine and model."""
        check_number("max_model_len", self.max_model_len, 2, hf_config.max_position_embeddings,
                     optional=True)
        device = choose_device(self.device)
        on_gpu = device.type == "cuda"
        return replace(
            self, device=device, dtype=choose_dtype(self.dtype, hf_config, on_gpu),
            block_size=self.block_size or (256 if on_gpu else 32),
            max_num_batched_tokens=self.max_num_batched_tokens or (8192 if on_gpu else 512))

    @property
    def max_decodes(self) -> int:
        """Most sequences that can run at once: each gets a token of the budget."""
        return min(self.max_num_seqs, self.max_num_batched_tokens)

    @property
    def drafter(self) -> PromptLookup | None:
        """vLLM's speculative_config; of its methods only "ngram"."""
        if self.speculative_config is None:
            return None
        try:
            settings = dict(self.speculative_config)
            known = settings.pop("method") == "ngram"
            num_drafts = settings.pop("num_speculative_tokens")
            longest = settings.pop("prompt_lookup_max", settings.get("prompt_lookup_min", 5))
            shortest = settings.pop("prompt_lookup_min", longest)
        except (KeyError, TypeError, ValueError):
            known = False
        if not known or settings:
            raise ValueError(
                f"speculative_config={self.speculative_config!r}: must be a dict with "
                "method='ngram' and num_speculative_tokens, prompt_lookup_min, prompt_lookup_max")
        check_number("num_speculative_tokens", num_drafts, 1)
        check_number("prompt_lookup_min", shortest, 1)
        check_number("prompt_lookup_max", longest, shortest)
        return PromptLookup(num_drafts, shortest, longest)


def choose_device(device: Any) -> torch.device:
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        chosen = torch.device(device)
        allowed = chosen.type == "cpu" or (chosen.type == "cuda" and torch.cuda.is_available())
    except (RuntimeError, TypeError, ValueError):
        allowed = False
    if not allowed:
        raise ValueError(f"device={device!r}: must be 'auto', 'cpu' or, where torch sees such a "
                         "device, 'cuda'")
    return chosen


def choose_dtype(dtype: Any, hf_config: Any, on_gpu: bool) -> torch.dtype:
    if dtype == "auto":
        if on_gpu:
            return hf_config.dtype or torch.bfloat16
        # Private names: where a torch lacks one, `bool` answers False in its place.
        probes = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
        has_bfloat16 = any(getattr(torch.cpu, name, bool)() for name in probes)
        return torch.bfloat16 if has_bfloat16 else torch.float32
    chosen = DTYPES.get(dtype) if isinstance(dtype, str) else dtype
    if not isinstance(chosen, torch.dtype) or chosen not in DTYPES.values():
        raise ValueError(f"dtype={dtype!r}: must be 'auto' or one of {', '.join(DTYPES)}")
    return chosen
