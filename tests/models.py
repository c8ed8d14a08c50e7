"""Models and tokenizers that are made on the spot: no test needs a download for them.

R-model: random weights, large enough that every token of the context matters: it sees wrong KV.
S-model: a table says which token follows which: it sees wrong text, stops and distributions.
"""

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
)

from nanopage import LLM

FAMILIES = {"llama": LlamaConfig, "mistral": MistralConfig, "qwen2": Qwen2Config,
            "qwen3": Qwen3Config}


def make_engine(model, **options):
    options = {**dict(dtype="float32", device="cpu", block_size=4, num_blocks=256), **options}
    return LLM(model, **options)


def make_config(family="llama", **changes):
    sizes = dict(vocab_size=128, hidden_size=64, intermediate_size=96, num_hidden_layers=3,
                 num_attention_heads=4, num_key_value_heads=2, initializer_range=0.3,
                 max_position_embeddings=512, bos_token_id=None, eos_token_id=None,
                 pad_token_id=0, tie_word_embeddings=False)
    if family == "qwen3":
        sizes["head_dim"] = 32
    if family == "mistral":
        sizes["sliding_window"] = None
    return FAMILIES[family](**{**sizes, **changes})


def make_model(path, family="llama", seed=0, **changes):
    """Save a random model in which every weight counts; returns the path as a string."""
    torch.manual_seed(seed)
    config = make_config(family, **changes)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):  # transformers starts these at 0 and the norms at 1
                parameter.normal_(0, 0.3)
            elif "norm" in name:
                parameter.uniform_(0.5, 1.5)
    model.save_pretrained(path)
    return str(path)


def make_table_model(path, table, vocab_size=259, tokenizer=None, eos_token_id=257):
    """Save a model whose next-token logits are a row of `table`: [current, next]."""
    config = LlamaConfig(vocab_size=vocab_size, hidden_size=264, intermediate_size=8,
                         num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=4,
                         tie_word_embeddings=False, rms_norm_eps=1e-12, bos_token_id=None,
                         eos_token_id=eos_token_id, pad_token_id=None,
                         max_position_embeddings=512)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.fill_(1.0 if "norm" in name else 0.0)
        model.model.embed_tokens.weight.copy_(torch.eye(vocab_size, 264))
        model.lm_head.weight[:, :vocab_size] = table.T[:, :264] / 264 ** 0.5
    model.save_pretrained(path)
    if tokenizer is not None:
        tokenizer.save_pretrained(path)
    return str(path)


def byte_tokenizer():
    """One token per byte (ids 0 to 255), then <s>, </s>, <|end|>."""
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    vocab = {chr(byte): byte for byte in printable}
    vocab.update({chr(256 + i): byte for i, byte in enumerate(others)})
    assert set(vocab) == set(alphabet)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>", "<|end|>"])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>",
                                   clean_up_tokenization_spaces=False)


def byte_fallback_tokenizer():
    """Llama 2's and Mistral's kind: words with a leading mark, bytes for what has no word."""
    words = ["▁", "▁a", "▁the", "b", "c", "▁▁", "é", "漢", "llo", "▁he",
             "▁true", "true"]
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    tokenizer = Tokenizer(models.BPE(vocab={name: i for i, name in enumerate(names)}, merges=[],
                                     byte_fallback=True, unk_token="<unk>"))
    tokenizer.decoder = decoders.Sequence([
        decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(),
        decoders.Strip(" ", 1, 0)])
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>")
