"""What is computed?

One decoder serves Llama, Mistral, Qwen2 and Qwen3; what differs (biases, query and key norms, head
size, sliding windows, RoPE) is read from the transformers config, not from the class name. The
hidden state is flat, [num_tokens, hidden]: sequences of any length lie one behind the other, and
only attention knows where one ends.

Invariants: every tensor of the checkpoint has exactly one place in a parameter, and every parameter
is filled; the names of parameters are those of the checkpoint until `fuse`.

Next: sampler.py, which turns logits into tokens.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from nanopage.attention import AttentionMetadata, Backend
from nanopage.parallel import all_reduce, cut, embed


def window_of(config: Any, layer: int) -> int | None:
    """How many last tokens a layer sees, its own included; None: all of them."""
    layer_types = getattr(config, "layer_types", None)
    is_sliding = config.model_type == "mistral"  # names no layer_types: its window is for all
    if layer_types:
        is_sliding = layer_types[layer] == "sliding_attention"
    return getattr(config, "sliding_window", None) if is_sliding else None


def rope_tables(config: Any, num_positions: int) -> tuple[Tensor, Tensor]:
    """cos and sin for `rotate`, [num_positions, 1, head_dim], as transformers computes them."""
    rotary = LlamaRotaryEmbedding(config)  # the same for all four families, scaling included
    cos, sin = rotary(torch.zeros(1), torch.arange(num_positions)[:, None])
    half = sin.shape[-1] // 2
    # The sign of "rotate half" is in the table: x * cos + swapped halves * (-sin, sin).
    return cos, torch.cat([-sin[..., :half], sin[..., half:]], dim=-1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x: [num_tokens, heads, head_dim]; cos, sin: [num_tokens, 1, head_dim]."""
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, dims=-1), sin)


class Attention(nn.Module):
    def __init__(self, config: Any, layer: int, backend: Backend) -> None:
        super().__init__()
        self.backend = backend
        self.num_heads, self.num_kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.head_dim = config.head_dim
        self.window = window_of(config, layer)
        # Mistral has none, whatever its config says, and Qwen2 those of q, k and v.
        bias = config.model_type in ("llama", "qwen3") and config.attention_bias
        qkv_bias = bias or config.model_type == "qwen2"
        hidden, q_size = config.hidden_size, self.num_heads * self.head_dim
        kv_size = self.num_kv_heads * self.head_dim
        self.q_proj = nn.Linear(hidden, q_size, qkv_bias)
        self.k_proj = nn.Linear(hidden, kv_size, qkv_bias)
        self.v_proj = nn.Linear(hidden, kv_size, qkv_bias)
        self.o_proj = nn.Linear(q_size, hidden, bias)
        self.has_qk_norm = config.model_type == "qwen3"
        if self.has_qk_norm:
            self.q_norm = nn.RMSNorm(self.head_dim, config.rms_norm_eps)
            self.k_norm = nn.RMSNorm(self.head_dim, config.rms_norm_eps)

    def fuse(self) -> None:
        """Make one matrix of q, k and v, after loading: one product instead of three."""
        parts = [self.q_proj, self.k_proj, self.v_proj]
        del self.q_proj, self.k_proj, self.v_proj
        self.qkv_proj = nn.Linear(1, 1, parts[0].bias is not None)
        for name in dict(self.qkv_proj.named_parameters()):  # weight, and perhaps bias
            fused = torch.cat([getattr(part, name) for part in parts])
            setattr(self.qkv_proj, name, nn.Parameter(fused, requires_grad=False))

    def forward(self, x: Tensor, cos_sin: tuple[Tensor, Tensor], cache: Tensor,
                metadata: AttentionMetadata) -> Tensor:
        qkv = self.qkv_proj(x).view(len(x), -1, self.head_dim)  # [num_tokens, all heads, head_dim]
        sizes = [self.num_heads, self.num_kv_heads]
        qk, v = qkv.split([sum(sizes), self.num_kv_heads], dim=1)
        if self.has_qk_norm:
            q, k = qk.split(sizes, dim=1)
            qk = torch.cat([self.q_norm(q), self.k_norm(k)], dim=1)
        q, k = rotate(qk, *cos_sin).split(sizes, dim=1)
        # All K and V of the step are written before anyone attends: a block that this very step
        # fills may therefore be shared within it.
        self.backend.store(k, v, cache, metadata)
        out = self.backend.attend(q, cache, metadata, self.head_dim ** -0.5, self.window)
        return self.o_proj(out.flatten(1))


class MLP(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        bias = getattr(config, "mlp_bias", False)
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias)
        self.act: nn.Module = nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act(self.gate_proj(x)).mul_(self.up_proj(x)))


class DecoderLayer(nn.Module):
    def __init__(self, config: Any, layer: int, backend: Backend) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config, layer, backend)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, cos_sin: tuple[Tensor, Tensor], cache: Tensor,
                metadata: AttentionMetadata) -> Tensor:
        x = x + all_reduce(self.self_attn(self.input_layernorm(x), cos_sin, cache, metadata))
        return x + all_reduce(self.mlp(self.post_attention_layernorm(x)))


class CausalLM(nn.Module):
    """Made without memory (on "meta"); `load_weights` puts the checkpoint's tensors in place."""

    def __init__(self, config: Any, backend: Backend, max_position: int,
                 device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self.config, self.device, self.dtype = config, device, dtype
        with torch.device("meta"):
            layers = [DecoderLayer(config, i, backend) for i in range(config.num_hidden_layers)]
            self.model: Any = nn.ModuleDict({
                "embed_tokens": nn.Embedding(config.vocab_size, config.hidden_size),
                "layers": nn.ModuleList(layers),
                "norm": nn.RMSNorm(config.hidden_size, config.rms_norm_eps)})
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.requires_grad_(False)
        cos, sin = rope_tables(config, max_position)
        self.cos, self.sin = cos.to(device, dtype), sin.to(device, dtype)

    def forward(self, token_ids: Tensor, kv_cache: Tensor, metadata: AttentionMetadata) -> Tensor:
        """token_ids: [num_tokens]. Returns hidden states [num_tokens, hidden]."""
        x = embed(self.model["embed_tokens"], token_ids)
        # Padding may stand behind the last position that there is; any angle will do for it.
        positions = metadata.positions.clamp(max=len(self.cos) - 1)
        # [num_tokens, 1, head_dim] each
        cos_sin = self.cos.index_select(0, positions), self.sin.index_select(0, positions)
        for layer, cache in zip(self.model["layers"], kv_cache.unbind(0)):
            x = layer(x, cos_sin, cache, metadata)
        return self.model["norm"](x)

    def load_weights(self, path: Path) -> None:
        """Fill every parameter from the safetensors files of a directory.

        Raises ValueError naming the tensor that is missing, unexpected or of another shape.
        """
        tensors: dict[str, Tensor] = {}
        for name, tensor in read_tensors(path):
            if not name.endswith("rotary_emb.inv_freq"):  # derived from the config
                prefix = "" if name.startswith(("model.", "lm_head.")) else "model."
                tensors[prefix + name] = cut(name, tensor).to(self.device, self.dtype)
        if self.config.tie_word_embeddings:
            # The embedding is the output layer, whatever else the file holds, as in vLLM.
            head = tensors.get("lm_head.weight", torch.empty(0))
            tensors["lm_head.weight"] = tensors.setdefault("model.embed_tokens.weight", head)
        try:
            missing, unexpected = self.load_state_dict(tensors, strict=False, assign=True)
        except RuntimeError as error:  # a wrong shape
            raise ValueError(f"{path}: {error}") from error
        if missing or unexpected:
            raise ValueError(f"{path}: missing tensors {missing}, unexpected tensors {unexpected}")
        for layer in self.model["layers"]:
            layer.self_attn.fuse()


def read_tensors(path: Path) -> Iterator[tuple[str, Tensor]]:
    """All tensors of a checkpoint. Only safetensors are opened, and only those that the index
    names (without an index: model.safetensors)."""
    index = path / "model.safetensors.index.json"
    files: dict[str, list[str]] = {} if index.is_file() else {"model.safetensors": []}
    source = index
    try:
        if index.is_file():
            for name, file in json.loads(index.read_text())["weight_map"].items():
                files.setdefault(str(file), []).append(name)
        for file, names in files.items():
            source = path / file
            if Path(file).name != file or not source.is_file():
                raise ValueError("no such weight file (only safetensors are read)")
            with safe_open(source, framework="pt") as tensors:
                for name in names or tensors.keys():
                    yield name, tensors.get_tensor(name)
    except (SafetensorError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise ValueError(f"{source}: {error!r}") from error
