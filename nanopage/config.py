"""What is chosen at start-up?

A leaf: settings, and what a model's directory says. Everything is checked once, before any work is
done, and then frozen; what the engine cannot honour is refused here, never ignored.

Invariants: a wrong setting raises ValueError naming the argument, its value and what is allowed;
derived values are properties.

Next: model_runner.py, which brings a step to the device.
"""

import logging
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from transformers import AutoConfig, AutoTokenizer, GenerationConfig

from nanopage.arguments import CarriedEngineArguments, between, check_number, require
from nanopage.attention import Backend, FlashAttention, ReferenceAttention, VarlenAttention
from nanopage.cpu import CpuAttention
from nanopage.proposals import PromptLookup

logger = logging.getLogger("nanopage")
ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
ROPE_TYPES = ("default", "linear", "llama3", "yarn")
SAMPLING_NAMES = {"temperature": "temperature", "top_k": "top_k", "top_p": "top_p",
                  "min_p": "min_p", "max_new_tokens": "max_tokens"}
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")


@dataclass(frozen=True)
class EngineConfig(CarriedEngineArguments):
    """The keyword arguments of `LLM`; None and "auto" are chosen at start-up.

    device: "cuda", "cpu" or "auto". dtype: torch's or its name, float32, bfloat16 or float16;
    "auto" is bfloat16, on a GPU float16 for such a checkpoint, on a CPU without bfloat16 float32.
    block_size: tokens per block of the KV cache; by default 32, on a GPU 256.
    num_blocks or num_gpu_blocks_override fixes the size of the pool (the scratch block is not
    counted), or else kv_cache_memory_bytes does; by default what memory allows, on a GPU
    gpu_memory_utilization of the device less what weights and activations take.
    max_model_len: longest prompt + completion in tokens; by default what model and pool allow.
    max_num_batched_tokens: the token budget of a step; by default 512, on a GPU 8192.
    max_num_seqs: how many sequences may run at once; no more than the budget, for each gets one.
    generation_config: "auto" takes default sampling parameters from the model's, "vllm" none.
    enforce_eager: no CUDA graphs. attention_backend: "auto" or a key of BACKENDS.
    speculative_config: vLLM's {"method": "ngram", "num_speculative_tokens": 4,
    "prompt_lookup_min": 2, "prompt_lookup_max": 4}.
    tensor_parallel_size: how many processes torchrun started; by default as many as there are.
    kv_cache_memory_bytes and gpu_memory_utilization are each one's.

    Raises ValueError naming the argument, its value and what is allowed.
    """

    tokenizer: Any = None
    device: Any = "auto"
    dtype: Any = "auto"
    block_size: int = between(1, 2**31 - 1, default=None)
    num_gpu_blocks_override: int | None = between(1, 2**31 - 1, default=None)
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
    generation_config: str = "auto"
    tensor_parallel_size: int | None = between(1, default=None)
    seed: int = between(-2**63, 2**63 - 1, default=0)

    def __post_init__(self) -> None:
        for name, default in (("max_num_seqs", 256), ("enable_prefix_caching", True), ("seed", 0),
                              ("num_blocks", self.num_gpu_blocks_override)):
            if getattr(self, name) is None:  # as in vLLM; the dataclass is frozen for others
                object.__setattr__(self, name, default)
        super().__post_init__()
        require(self.num_gpu_blocks_override in (None, self.num_blocks), "num_gpu_blocks_override",
                self.num_gpu_blocks_override, "the same as num_blocks where both are given")
        require(self.generation_config in ("auto", "vllm"), "generation_config",
                self.generation_config, "'auto' or 'vllm'")
        is_name = isinstance(self.tokenizer, str | Path | None) and self.tokenizer != ""
        require(is_name, "tokenizer", self.tokenizer, "a directory, a name or None")

    def resolve(self, hf_config: Any) -> "EngineConfig":
        """The same settings with device, dtype and sizes chosen for this machine and model."""
        if self.max_model_len is not None:
            most = longest_sequence(hf_config)
            require(self.max_model_len <= most, "max_model_len", self.max_model_len,
                    f"at most {most}, the longest sequence of the model")
        device = choose_device(self.device)
        on_gpu = device.type == "cuda"
        budget = self.max_num_batched_tokens or (8192 if on_gpu else 512)
        return replace(
            self, device=device, dtype=choose_dtype(self.dtype, hf_config, device),
            block_size=self.block_size or (256 if on_gpu else 32), max_num_batched_tokens=budget,
            max_num_seqs=min(self.max_num_seqs, budget))

    @property
    def drafter(self) -> PromptLookup | None:
        settings = self.speculative_config
        try:
            return None if settings is None else PromptLookup(**settings)
        except (TypeError, ValueError) as error:  # a name that is unknown, a value that is wrong
            raise ValueError(f"speculative_config={settings!r}: {error}") from error


def choose_device(device: Any) -> torch.device:
    names = ["cuda", "cpu"] if torch.cuda.is_available() else ["cpu"]
    try:
        chosen = torch.device(names[0] if device == "auto" else device)
    except (RuntimeError, TypeError, ValueError):
        chosen = torch.device("meta")
    require(chosen.type in names, "device", device, f"'auto' or, here, one of {names}")
    return chosen


def choose_dtype(dtype: Any, hf_config: Any, device: torch.device) -> torch.dtype:
    if dtype == "auto" and device.type == "cuda":
        return torch.float16 if hf_config.dtype is torch.float16 else torch.bfloat16
    if dtype == "auto":
        # Private names: where a torch lacks one, `bool` answers False in its place.
        has_bfloat16 = any(getattr(torch.cpu, name, bool)() for name in (
            "_is_avx512_bf16_supported", "_is_amx_tile_supported"))
        return torch.bfloat16 if has_bfloat16 else torch.float32
    chosen: Any = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    is_known = chosen in (torch.float32, torch.bfloat16, torch.float16)
    require(is_known, "dtype", dtype, "'auto', 'float32', 'bfloat16' or 'float16'")
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
    is_known = wanted in ("auto", *BACKENDS)
    require(is_known, "attention_backend", wanted, f"'auto' or one of {', '.join(BACKENDS)}")
    demands = {  # of the CUDA kernels
        f"a CUDA device of compute capability 8.0 or later, not {device}": has_kernels(device),
        f"float16 or bfloat16, not {dtype}": dtype in (torch.float16, torch.bfloat16),
        f"head_dim up to 256, a multiple of 8, not {head_dim}": head_dim in range(8, 257, 8),
        f"block_size a multiple of 256, not {block_size}": block_size % 256 == 0}
    unmet = [demand for demand, is_met in demands.items() if not is_met]
    reasons: list[str] = []
    for name in BACKENDS if wanted == "auto" else [wanted]:
        lacks = unmet if name in ("flash", "varlen") else []
        if name == "cpu" and device.type != "cpu":
            lacks = [f"a CPU, not {device}"]
        if not lacks:
            try:
                backend = BACKENDS[name]()
            except ImportError as error:  # a broken installation imports badly, so try it
                lacks = [f"to import, but {error}"]
            else:
                logger.info("attention: %s", "; ".join([name, *reasons]))
                return backend
        reasons.append(f"not {name}: it needs {lacks[0]}")
    raise ValueError(f"attention_backend={wanted!r}: {'; '.join(reasons)}")


def has_kernels(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)


# ---- the model's directory -------------------------------------------------------------------


class Checkpoint:
    """A model's directory, and what it says beside its weights.

    model: a directory, or a name on the hub, whose files then come to the local cache.
    Without tokenizer files `tokenizer` is None: such a model takes token ids only.
    """

    def __init__(self, model: Any, tokenizer: str | Path | None, generation_config: str) -> None:
        self.path = path = find_directory(model)
        self.hf_config: Any = AutoConfig.from_pretrained(path, trust_remote_code=False)
        check_supported(self.hf_config)
        if getattr(self.hf_config, "head_dim", None) is None:
            self.hf_config.head_dim = (
                self.hf_config.hidden_size // self.hf_config.num_attention_heads)
        self.tokenizer: Any = None
        if tokenizer is not None or any((path / name).is_file() for name in TOKENIZER_FILES):
            source = str(tokenizer or path)
            try:
                self.tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=False)
            except Exception as error:  # of the hub's library or of a file that is no JSON
                raise ValueError(f"tokenizer={source!r}: {error}") from error
            require(self.tokenizer.is_fast, "tokenizer", source, "one with a tokenizer.json")
        has_file = (path / "generation_config.json").is_file()
        generation = GenerationConfig.from_pretrained(path) if has_file else GenerationConfig()
        # The stop set is the union of what the three files call the end.
        ends: list[Any] = []
        for file in (self.tokenizer, self.hf_config, generation):
            named = getattr(file, "eos_token_id", None)
            ends += named if isinstance(named, list) else [named]
        ends = [token_id for token_id in ends if token_id is not None]
        for token_id in ends:
            check_number("eos_token_id", token_id, 0)
        # One that the model cannot say ends nothing.
        self.end_token_ids = frozenset(i for i in ends if i < self.hf_config.vocab_size)
        given = generation.to_diff_dict() if generation_config == "auto" else {}
        for name in given:
            if name.endswith("penalty"):
                logger.warning("%s: %s=%r is not supported", path, name, given[name])
        self.sampling_defaults = {  # of SamplingParams
            ours: given[name] for name, ours in SAMPLING_NAMES.items() if name in given}


def longest_sequence(config: Any) -> int:
    """Positions times RoPE scaling, as vLLM derives it (llama3's names its positions in full)."""
    rope, positions = config.rope_parameters, config.max_position_embeddings
    if rope["rope_type"] not in ("linear", "yarn"):
        return positions
    return int(rope.get("original_max_position_embeddings", positions) * rope["factor"])


def find_directory(model: Any) -> Path:
    is_name = isinstance(model, (str, Path)) and str(model) != ""
    require(is_name, "model", model, "a directory or a name on the model hub")
    path, name = Path(model), str(model)
    if path.is_dir():
        require((path / "config.json").is_file(), "model", name, "a directory with a config.json")
        return path
    is_hub_name = not (path.exists() or name.startswith((".", "/", "~")) or name.count("/") > 1)
    require(is_hub_name, "model", name, "a directory that exists")
    try:
        return Path(snapshot_download(
            name, allow_patterns=["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"],
            ignore_patterns=["original/*", "consolidated*"]))
    except Exception as error:  # of the hub's library, whose tracebacks fill screens
        reason = " ".join([type(error).__name__, *str(error).splitlines()[:1]])
    raise ValueError(
        f"model={name!r}: not a directory, and not to be had from the model hub ({reason})")


def check_supported(config: Any) -> None:
    """Raise ValueError, naming the setting, if the decoder would compute something else."""
    rope = getattr(config, "rope_parameters", None) or {}
    window = getattr(config, "sliding_window", None)
    layer_types = {"full_attention", "sliding_attention"} if window else {"full_attention"}
    for name, is_supported, allowed in (
            ("architectures", set(config.architectures or ()) & set(ARCHITECTURES),
             f"one of {ARCHITECTURES}"),
            ("quantization_config", not getattr(config, "quantization_config", None), "absent"),
            ("hidden_act", getattr(config, "hidden_act", None) == "silu", "'silu'"),
            ("rope_type", rope.get("rope_type") in ROPE_TYPES, f"one of {ROPE_TYPES}"),
            ("partial_rotary_factor", rope.get("partial_rotary_factor", 1) == 1, "1"),
            ("sliding_window", not (window and config.model_type == "llama"), "absent in Llama"),
            ("layer_types", set(getattr(config, "layer_types", None) or ()) <= layer_types,
             f"among {layer_types}")):
        require(bool(is_supported), f"in the model's config: {name}",
                getattr(config, name, rope.get(name)), allowed)
