"""What may a caller give?

A leaf: limits stand beside defaults, and `require` says the refusals. Scripts that were written
for vLLM carry arguments along that mean nothing here. Two tables name them: at its neutral value
such an argument is accepted, since it changes nothing, and any other value is refused, never
ignored.

Invariants: a refusal names the argument, its value and what is allowed, before any work is done.

Next: sequence.py, which opens with what a caller may ask for.
"""

import math
from dataclasses import MISSING, dataclass, field, fields
from numbers import Integral, Real
from typing import Any


def require(is_met: bool, name: str, value: Any, allowed: str) -> None:
    """Raise ValueError, naming the argument and its value, unless it is what is allowed."""
    if not is_met:
        raise ValueError(f"{name}={value!r:.200}: must be {allowed}")


def check_number(name: str, value: Any, low: float, high: float = math.inf, *,
                 integer: bool = True) -> None:
    """Raise ValueError, naming the argument, unless `value` is a number in [low, high]."""
    is_number = isinstance(value, Integral if integer else Real) and not isinstance(value, bool)
    # A NaN compares false, so it does not fit either.
    require(is_number and low <= value <= high and abs(value) != math.inf, name, value,
            f"{'an integer' if integer else 'a number'} of at least {low} and at most {high}")


def between(low: float, high: float = math.inf, *, default: Any = MISSING) -> Any:
    """A field of a `Checked` dataclass, with its limits; None is allowed if it is the default."""
    return field(default=default, metadata={"limits": (low, high)})


def neutral(*values: Any, instead: str) -> Any:
    """A field that is accepted at these values, the first being its default; `instead` says why."""
    return field(default=values[0], kw_only=True, repr=False,
                 metadata={"neutral": values, "instead": instead})


class Checked:
    """A dataclass that raises ValueError, naming the field, for a wrong type or limit."""

    def __post_init__(self: Any) -> None:
        for entry in fields(self):
            name, value, kind = entry.name, getattr(self, entry.name), str(entry.type)
            if value not in entry.metadata.get("neutral", [value]):
                raise ValueError(f"{name}={value!r:.200}: nanopage {entry.metadata['instead']}")
            if value is None and ("None" in kind or entry.default is None):
                continue
            require("bool" not in kind or isinstance(value, bool), name, value, "True or False")
            if "limits" in entry.metadata:
                check_number(name, value, *entry.metadata["limits"], integer="int" in kind)
                # Numpy's numbers overflow where Python's do not; some of these classes are frozen.
                object.__setattr__(self, name, int(value) if "int" in kind else float(value))


# ---- what scripts for vLLM carry along ---------------------------------------------------------


@dataclass(frozen=True)
class CarriedEngineArguments(Checked):
    """Arguments of vLLM's `LLM`, each with the values that change nothing."""

    trust_remote_code: Any = neutral(False, True, instead="runs no code of a checkpoint")
    pipeline_parallel_size: Any = neutral(1, None, instead="cuts layers, see tensor_parallel_size")
    distributed_executor_backend: Any = neutral(None, "mp", instead="is started by torchrun")
    disable_custom_all_reduce: Any = neutral(False, True, instead="calls NCCL or gloo")
    quantization: Any = neutral(None, instead="computes in float32, bfloat16 or float16")
    kv_cache_dtype: Any = neutral("auto", instead="keeps K and V in the dtype it computes in")
    load_format: Any = neutral("auto", "safetensors", instead="reads safetensors only")
    download_dir: Any = neutral(None, instead="leaves the cache to the model hub's library")
    revision: Any = neutral(None, instead="takes the newest; give a directory for another one")
    tokenizer_revision: Any = neutral(None, instead="takes the newest; give a directory instead")
    tokenizer_mode: Any = neutral("auto", instead="takes the model's tokenizer.json")
    skip_tokenizer_init: Any = neutral(False, instead="loads the tokenizer where there is one")
    hf_overrides: Any = neutral(None, {}, instead="computes what the model's config says")
    enable_chunked_prefill: Any = neutral(None, True, instead="always cuts a prompt to the budget")
    scheduling_policy: Any = neutral("fcfs", "priority", instead="goes by priority, then arrival")
    async_scheduling: Any = neutral(None, False, instead="schedules a step when it knows the last")
    swap_space: Any = neutral(4, 0, None, instead="swaps nothing out, it computes again")
    cpu_offload_gb: Any = neutral(0, instead="keeps all weights on the device")
    compilation_config: Any = neutral(None, {}, instead="compiles nothing, see enforce_eager")
    enable_lora: Any = neutral(False, None, instead="has no LoRA")
    disable_log_stats: Any = neutral(True, False, instead="logs no statistics, see metrics()")
    max_logprobs: Any = neutral(20, -1, instead="reports as many as a request asks for")


@dataclass
class CarriedSamplingParams(Checked):
    """Fields of vLLM's `SamplingParams`, likewise."""

    presence_penalty: Any = neutral(0.0, instead="penalises no tokens")
    frequency_penalty: Any = neutral(0.0, instead="penalises no tokens")
    repetition_penalty: Any = neutral(1.0, instead="penalises no tokens")
    logit_bias: Any = neutral(None, {}, instead="takes the logits as they are")
    allowed_token_ids: Any = neutral(None, instead="takes the logits as they are")
    bad_words: Any = neutral(None, [], instead="takes the logits as they are")
    logits_processors: Any = neutral(None, [], instead="takes the logits as they are")
    structured_outputs: Any = neutral(None, instead="follows no grammar")
    prompt_logprobs: Any = neutral(None, instead="reports logprobs of what it generates")
    truncate_prompt_tokens: Any = neutral(None, instead="cuts no prompt")
    detokenize: Any = neutral(True, instead="always makes text where there is a tokenizer")
    spaces_between_special_tokens: Any = neutral(True, instead="decodes as the tokenizer does")
    extra_args: Any = neutral(None, {}, instead="has no plug-ins")
