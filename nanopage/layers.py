"""What is computed?

One decoder serves Llama, Mistral, Qwen2 and Qwen3; what differs (biases, query and key norms, head
size, sliding windows, RoPE) is read from the transformers config, not from the class name. The
hidden state is flat, [num_tokens, hidden]: sequences of any length lie one behind the other, and
only attention knows where one ends.

Invariants: every tensor of the checkpoint has exactly one place in a parameter, and every parameter
is filled; what the config asks for and this decoder cannot do is refused, never ignored.

Next: sampler.py, which turns logits into tokens.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from nanopage.attention import AttentionMetadata, Backend

SUPPORTED_ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM",
                           "Qwen3ForCausalLM")
SUPPORTED_ROPE_TYPES = ("default", "linear", "llama3", "yarn")


class Linear(nn.Module):
    """y = x W^T + b, then perhaps SiLU. On a CPU the weight is packed once for oneDNN.

    The two operators are private, so F.linear stays the fallback where they are missing or fail.
    """

    def __init__(self, in_features: int, out_features: int, bias: bool = False,
                 silu: bool = False) -> None:
        super().__init__()
        self.silu, self.out_features = silu, out_features
        self.weight: Any = nn.Parameter(torch.empty(out_features, in_features))
        self.bias = nn.Parameter(torch.empty(out_features)) if bias else None
        self.packed: Tensor | None = None

    def pack(self) -> None:
        """Replace the weight by its packed form; to be called once, after loading.

        Outputs are padded to an even number of blocks of 64. With an odd number oneDNN is up to a
        third slower for 44 to 110 rows: it seems to share out rows among the threads instead of
        columns, so that each thread reads the whole weight.
        """
        weight, bias = self.weight.detach(), self.bias
        padding = -self.out_features % 128
        if padding:
            weight = F.pad(weight, (0, 0, 0, padding))
            if bias is not None:
                bias = nn.Parameter(F.pad(bias, (0, padding)), requires_grad=False)
        try:
            packed = torch.ops.mkldnn._reorder_linear_weight(weight, 64)
            torch.ops.mkldnn._linear_pointwise(weight[:1], packed, bias, "none", [], "")
        except (AttributeError, RuntimeError):
            return
        self.packed, self.bias, self.weight = packed, bias, None

    def forward(self, x: Tensor) -> Tensor:
        if self.packed is not None:
            out = torch.ops.mkldnn._linear_pointwise(
                x, self.packed, self.bias, "swish" if self.silu else "none", [], "")
            return out[:, :self.out_features]
        out = F.linear(x, self.weight, self.bias)
        return F.silu(out) if self.silu else out


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class RotaryEmbedding(nn.Module):
    """Rotate the halves of each query and key head by an angle that grows with the position."""

    def __init__(self, config: Any, max_position: int, device: torch.device,
                 dtype: torch.dtype) -> None:
        super().__init__()
        rope = config.rope_parameters
        if rope["rope_type"] == "default":
            exponent = torch.arange(0, head_dim_of(config), 2).float() / head_dim_of(config)
            inv_freq, attention_scaling = 1.0 / rope["rope_theta"] ** exponent, 1.0
        else:
            inv_freq, attention_scaling = ROPE_INIT_FUNCTIONS[rope["rope_type"]](config, "cpu")
        angles = torch.arange(max_position).float()[:, None] * inv_freq  # [positions, head_dim / 2]
        cos, sin = angles.cos() * attention_scaling, angles.sin() * attention_scaling
        # The sign of "rotate half" is in the table: x * cos + swapped halves * (-sin, sin).
        self.cos = torch.cat([cos, cos], dim=-1).to(device, dtype)  # [positions, head_dim]
        self.sin = torch.cat([-sin, sin], dim=-1).to(device, dtype)

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = self.cos.index_select(0, positions), self.sin.index_select(0, positions)
        return cos.unsqueeze(1), sin.unsqueeze(1)  # [num_tokens, 1, head_dim]


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x: [num_tokens, heads, head_dim]."""
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, dims=-1), sin)


class Attention(nn.Module):
    def __init__(self, config: Any, layer: int, backend: Backend) -> None:
        super().__init__()
        self.backend = backend
        self.num_heads, self.num_kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.head_dim = head_dim_of(config)
        self.scale = self.head_dim ** -0.5
        self.window = window_of(config, layer)
        is_qwen2 = config.model_type == "qwen2"  # the one whose biases its config does not name
        bias = getattr(config, "attention_bias", False)
        q_size, kv_size = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        self.qkv_proj = Linear(config.hidden_size, q_size + 2 * kv_size, bias or is_qwen2)
        self.o_proj = Linear(q_size, config.hidden_size, bias)
        if config.model_type == "qwen3":
            self.q_norm = RMSNorm(self.head_dim, config.rms_norm_eps)
            self.k_norm = RMSNorm(self.head_dim, config.rms_norm_eps)

    def forward(self, x: Tensor, cos_sin: tuple[Tensor, Tensor], cache: Tensor,
                metadata: AttentionMetadata) -> Tensor:
        heads, kv_heads = self.num_heads, self.num_kv_heads
        qkv = self.qkv_proj(x).view(-1, heads + 2 * kv_heads, self.head_dim)
        if hasattr(self, "q_norm"):
            q, k, v = qkv.split([heads, kv_heads, kv_heads], dim=1)
            qk = torch.cat([self.q_norm(q), self.k_norm(k)], dim=1)
        else:
            qk, v = qkv.split([heads + kv_heads, kv_heads], dim=1)
        q, k = rotate(qk, *cos_sin).split([heads, kv_heads], dim=1)
        # All K and V of the step are written before anyone attends: a block that this very step
        # fills may therefore be shared within it.
        self.backend.store(k, v, cache, metadata)
        out = self.backend.attend(q, cache, metadata, self.scale, self.window)
        return self.o_proj(out.view(-1, heads * self.head_dim))


class MLP(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        bias = getattr(config, "mlp_bias", False)
        hidden_size, size = config.hidden_size, config.intermediate_size
        self.gate_proj = Linear(hidden_size, size, bias, silu=True)
        self.up_proj = Linear(hidden_size, size, bias)
        self.down_proj = Linear(size, hidden_size, bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.gate_proj(x).mul_(self.up_proj(x)))


class DecoderLayer(nn.Module):
    def __init__(self, config: Any, layer: int, backend: Backend) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config, layer, backend)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, cos_sin: tuple[Tensor, Tensor], cache: Tensor,
                metadata: AttentionMetadata) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos_sin, cache, metadata)
        return x + self.mlp(self.post_attention_layernorm(x))


class Decoder(nn.Module):
    """The part that transformers calls `model`: from token ids to hidden states."""

    def __init__(self, config: Any, backend: Backend) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(
            DecoderLayer(config, layer, backend) for layer in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)


class CausalLM(nn.Module):
    """Parameter names are those of the checkpoint, with q, k, v fused."""

    def __init__(self, config: Any, backend: Backend, max_position: int,
                 device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        check_supported(config)
        self.config = config
        with torch.device("meta"):
            self.model = Decoder(config, backend)
            self.lm_head = Linear(config.hidden_size, config.vocab_size)
        self.to(dtype).to_empty(device=device)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight
        self.rotary = RotaryEmbedding(config, max_position, device, dtype)
        self.requires_grad_(False)

    def forward(self, token_ids: Tensor, positions: Tensor, kv_cache: Tensor,
                metadata: AttentionMetadata) -> Tensor:
        """token_ids, positions: [num_tokens]. Returns hidden states [num_tokens, hidden]."""
        x = self.model.embed_tokens(token_ids)
        cos_sin = self.rotary(positions)
        for layer, cache in zip(self.model.layers, kv_cache.unbind(0)):
            x = layer(x, cos_sin, cache, metadata)
        return self.model.norm(x)

    def load_weights(self, path: Path) -> None:
        """Fill every parameter from the safetensors files of a directory.

        Raises ValueError naming the tensor that is missing, unexpected or of another shape.
        """
        places = dict(self._checkpoint_places())
        for name, tensor in read_tensors(path):
            place = places.pop(name, None)
            if place is None:
                if name.endswith("rotary_emb.inv_freq"):  # derived from the config
                    continue
                if name == "lm_head.weight" and self.config.tie_word_embeddings:
                    continue  # tied: the embedding is the output layer, as in vLLM
                raise ValueError(f"{path}: unexpected tensor {name!r}")
            if place.shape != tensor.shape:
                raise ValueError(f"{path}: tensor {name!r} has shape {tuple(tensor.shape)}, "
                                 f"the config asks for {tuple(place.shape)}")
            place.copy_(tensor)
        if places:
            raise ValueError(f"{path}: missing tensors {sorted(places)}")

    def _checkpoint_places(self) -> Iterator[tuple[str, Tensor]]:
        """(name in the checkpoint, where it goes); the fused q, k, v have three places."""
        kv_size = self.config.num_key_value_heads * head_dim_of(self.config)
        q_size = self.config.num_attention_heads * head_dim_of(self.config)
        for name, parameter in self.named_parameters():  # a tied lm_head is not named twice
            if "qkv_proj" in name:
                places = parameter.data.split([q_size, kv_size, kv_size])
                for part, place in zip("qkv", places):
                    yield name.replace("qkv_proj", f"{part}_proj"), place
            else:
                yield name, parameter.data

    def pack(self) -> None:
        for module in self.modules():
            if isinstance(module, Linear):
                module.pack()


def read_tensors(path: Path) -> Iterator[tuple[str, Tensor]]:
    """All tensors of a checkpoint. Only safetensors are opened, and only those that the index
    names (without an index: model.safetensors)."""
    index = path / "model.safetensors.index.json"
    files: dict[str, list[str]] = {}
    if index.is_file():
        try:
            weight_map = json.loads(index.read_text())["weight_map"]
            for name, file in weight_map.items():
                files.setdefault(str(file), []).append(name)
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise ValueError(f"{index}: not a safetensors index ({error!r})") from error
    for file, names in files.items() or [("model.safetensors", [])]:
        if Path(file).name != file or not (path / file).is_file():
            raise ValueError(f"{path / file}: no such weight file (only safetensors are read)")
        try:
            with safe_open(path / file, framework="pt") as tensors:
                for name in names or tensors.keys():
                    yield name, tensors.get_tensor(name)
        except SafetensorError as error:
            raise ValueError(f"{path / file}: {error}") from error


def head_dim_of(config: Any) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def window_of(config: Any, layer: int) -> int | None:
    """How many last tokens a layer sees, its own included; None: all of them."""
    window = getattr(config, "sliding_window", None)
    if config.model_type == "mistral":  # has no layer_types: its window is for all layers
        return window
    layer_types = getattr(config, "layer_types", None) or []
    return window if layer_types and layer_types[layer] == "sliding_attention" else None


def check_supported(config: Any) -> None:
    """Raise ValueError, naming the setting, if the decoder would compute something else."""
    architectures = config.architectures or ()
    if not any(name in SUPPORTED_ARCHITECTURES for name in architectures):
        raise ValueError(f"architectures={list(architectures)}: supported are "
                         f"{', '.join(SUPPORTED_ARCHITECTURES)}")
    if getattr(config, "quantization_config", None):
        raise ValueError("quantization_config: quantized checkpoints are not supported")
    if config.hidden_act != "silu":
        raise ValueError(f"hidden_act={config.hidden_act!r}: only 'silu' is supported")
    rope = config.rope_parameters or {}
    if rope.get("rope_type") not in SUPPORTED_ROPE_TYPES:
        raise ValueError(f"rope_type={rope.get('rope_type')!r}: supported are "
                         f"{', '.join(SUPPORTED_ROPE_TYPES)}")
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise ValueError("partial_rotary_factor: rotating part of a head is not supported")
    if config.model_type == "llama" and getattr(config, "sliding_window", None):
        raise ValueError("sliding_window: Llama has none")
    for layer_type in getattr(config, "layer_types", None) or ():
        if layer_type not in ("full_attention", "sliding_attention"):
            raise ValueError(f"layer_types: {layer_type!r} is not supported")
        if layer_type == "sliding_attention" and not getattr(config, "sliding_window", None):
            raise ValueError("layer_types: 'sliding_attention' without a sliding_window")
