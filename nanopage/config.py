"""What is chosen at start-up?

A leaf: settings, and what a model's directory says. Everything is checked once, before any work is
done, and then frozen; what the engine cannot honour is refused here, never ignored.

Invariants: a wrong setting raises ValueError naming the argument, its value and what is allowed;
derived values are properties.

Next: model_runner.py, which brings a step to the device.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, GenerationConfig

from nanopage.attention import Backend, FlashAttention, ReferenceAttention, VarlenAttention
from nanopage.cpu import CpuAttention
from nanopage.proposals import PromptLookup
from nanopage.sequence import Checked, between, check_number

logger = logging.getLogger("nanopage")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
ROPE_TYPES = ("default", "linear", "llama3", "yarn")
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")


@dataclass(frozen=True)
class EngineConfig(Checked):
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
    enforce_eager: no CUDA graphs. attention_backend: "auto" or a key of BACKENDS.
    speculative_config: vLLM's {"method": "ngram", "num_speculative_tokens": 4,
    "prompt_lookup_min": 2, "prompt_lookup_max": 4}.

    Raises ValueError naming the argument, its value and what is allowed.
    """

    tokenizer: Any = None
    device: Any = "auto"
    dtype: Any = "auto"
    block_size: int = between(1, 2**31 - 1, default=None)
    num_blocks: int | None = between(1, 2**31 - 1, default=None)
    kv_cache_memory_bytes: int | None = between(1, default=None)
    max_model_len: int | None = between(2, default=None)
    max_num_seqs: int = between(1, default=256)
    max_num_batched_tokens: int = between(1, default=None)
    gpu_memory_utilization: float = between(0.01, 1, default=0.9)
    enable_prefix_caching: bool = True
    enforce_eager: bool = False
    attention_backend: str = "auto"
    speculative_config: dict[str, Any] | None = None
    seed: int = between(-2**63, 2**63 - 1, default=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.tokenizer, str | Path | None) or self.tokenizer == "":
            raise ValueError(f"tokenizer={self.tokenizer!r}: must be a directory, a name or None")

    def resolve(self, hf_config: Any) -> EngineConfig:
        """The same settings with device, dtype and sizes chosen for this machine and model."""
        if self.max_model_len is not None:
            check_number("max_model_len", self.max_model_len, 2, hf_config.max_position_embeddings)
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
        settings: Any = self.speculative_config
        if settings is None:
            return None
        try:
            if settings["method"] != "ngram":
                raise TypeError("another method")
            ngram = {name: value for name, value in settings.items() if name != "method"}
            longest = ngram.setdefault("prompt_lookup_max", ngram.get("prompt_lookup_min", 5))
            ngram.setdefault("prompt_lookup_min", longest)
            return PromptLookup(**ngram)
        except (TypeError, KeyError) as error:
            raise ValueError(
                f"speculative_config={settings!r}: must be a dict with method='ngram' and "
                "num_speculative_tokens, prompt_lookup_min, prompt_lookup_max") from error


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


# ---- the attention backend -------------------------------------------------------------------

BACKENDS: dict[str, type[Backend]] = {
    "flash": FlashAttention, "varlen": VarlenAttention, "cpu": CpuAttention,
    "reference": ReferenceAttention}


def choose_backend(wanted: Any, device: torch.device, dtype: torch.dtype, head_dim: int,
                   block_size: int) -> Backend:
    """The first of `BACKENDS` that can work here, or the one that is wanted.

    Raises ValueError that says why, if that one cannot.
    """
    if not isinstance(wanted, str) or wanted not in ("auto", *BACKENDS):
        raise ValueError(f"attention_backend={wanted!r}: must be 'auto', {', '.join(BACKENDS)}")
    reasons: list[str] = []
    for name in BACKENDS if wanted == "auto" else (wanted,):
        reason = why_not(name, device, dtype, head_dim, block_size)
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


def why_not(name: str, device: torch.device, dtype: torch.dtype, head_dim: int,
            block_size: int) -> str | None:
    """Why a backend cannot work here; the CUDA kernels all demand the same."""
    if name == "reference":
        return None
    if name == "cpu":
        return None if device.type == "cpu" else f"it needs a CPU, this is {device}"
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


# ---- the model's directory -------------------------------------------------------------------


def resolve_model(model: Any) -> Path:
    """A local directory, or the hub's files of that name in the local cache."""
    if not isinstance(model, (str, Path)) or not str(model):
        raise ValueError(f"model={model!r}: must be a directory or a name on the model hub")
    path = Path(model)
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ValueError(f"model={str(model)!r}: the directory has no config.json")
        return path
    if path.exists() or str(model).startswith((".", "/", "~")) or str(model).count("/") > 1:
        raise ValueError(f"model={str(model)!r}: no such directory")
    from huggingface_hub import snapshot_download
    patterns = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]
    return Path(snapshot_download(str(model), allow_patterns=patterns,
                                  ignore_patterns=["original/*", "consolidated*"]))


def check_supported(config: Any) -> None:
    """Raise ValueError, naming the setting, if the decoder would compute something else."""
    rope = config.rope_parameters or {}
    window = getattr(config, "sliding_window", None)
    layer_types = set(getattr(config, "layer_types", None) or ())
    for name, value, is_supported, allowed in (
            ("architectures", config.architectures,
             bool(set(config.architectures or ()) & set(ARCHITECTURES)), ", ".join(ARCHITECTURES)),
            ("quantization_config", "set", not getattr(config, "quantization_config", None), "none"),
            ("hidden_act", config.hidden_act, config.hidden_act == "silu", "'silu'"),
            ("rope_type", rope.get("rope_type"), rope.get("rope_type") in ROPE_TYPES,
             ", ".join(ROPE_TYPES)),
            ("partial_rotary_factor", rope.get("partial_rotary_factor"),
             rope.get("partial_rotary_factor", 1.0) == 1.0, "1.0"),
            ("sliding_window", window, not (window and config.model_type == "llama"),
             "None for Llama"),
            ("layer_types", layer_types, layer_types <= {"full_attention", "sliding_attention"}
             and (bool(window) or "sliding_attention" not in layer_types),
             "full_attention, and with a sliding_window also sliding_attention")):
        if not is_supported:
            raise ValueError(f"{name}={value!r}: supported is {allowed}")


def load_tokenizer(tokenizer: str | Path | None, path: Path) -> Any:
    """None if the model's directory has none: such a model takes token ids only."""
    if tokenizer is None and not any((path / name).is_file() for name in TOKENIZER_FILES):
        return None
    loaded = AutoTokenizer.from_pretrained(tokenizer or path, trust_remote_code=False)
    if not loaded.is_fast:
        raise ValueError(f"tokenizer={str(tokenizer or path)!r}: only tokenizers with a "
                         "tokenizer.json are supported")
    return loaded


def find_end_tokens(tokenizer: Any, hf_config: Any, path: Path) -> frozenset[int]:
    """The union of what tokenizer, config.json and generation_config.json call the end."""
    named = [getattr(tokenizer, "eos_token_id", None), hf_config.eos_token_id]
    if (path / "generation_config.json").is_file():
        named.append(GenerationConfig.from_pretrained(path).eos_token_id)
    ends: set[int] = set()
    for token_ids in named:
        ends.update([token_ids] if isinstance(token_ids, int) else token_ids or ())
    return frozenset(ends)
