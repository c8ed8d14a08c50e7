"""What is a request?

A *request* is a prompt with its sampling parameters. It owns one *sequence* per completion
(`n` of them, or the live beams), and a sequence is what is scheduled. The one picture to keep in
mind is the token line of a sequence:

     0 ......... num_computed_tokens ......... num_tokens ..... + drafts
     |  KV in cache      |  scheduled in this step   |

    [0, num_computed_tokens)           keys and values are in the cache
    [num_computed_tokens, num_tokens)  the lag: tokens that are known but not computed
    [num_tokens, + len(draft))         guessed tokens that this step will verify

Everything the engine does moves `num_computed_tokens` towards `num_tokens`; everything it samples
moves `num_tokens` one further.

Invariants: num_computed_tokens <= num_tokens = len(token_ids); the block table covers every
computed token; nothing in here knows of a device.

Next: block_manager.py, where the keys and values of a sequence live.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import xxhash

from nanopage.arguments import CarriedSamplingParams, between, check_number, require
from nanopage.text import Detokenizer

# ---- what a caller may ask for ---------------------------------------------------------------


@dataclass
class SamplingParams(CarriedSamplingParams):
    """How tokens are chosen and when to stop; names and defaults are those of vLLM.

    temperature: 0 (or less than 1e-5) is greedy. Filters come in transformers' order:
    temperature, top_k (0 or -1: off), top_p on the renormalised rest, min_p.
    seed: the same seed gives the same tokens, whatever else runs; None draws one.
    stop: strings that end the text; text leaves them out unless include_stop_str_in_output.
    logprobs: so many most likely tokens are reported beside the sampled one (-1: all of them).
    max_tokens: None means as many as the model length leaves.

    Raises ValueError naming the field, its value and what is allowed.
    """

    n: int = between(1, 16384, default=1)
    temperature: float = between(0, 1e38, default=1.0)
    top_p: float = between(0, 1, default=1.0)
    top_k: int = between(-1, default=0)
    min_p: float = between(0, 1, default=0.0)
    seed: int | None = between(-2**63, 2**63 - 1, default=None)
    stop: Any = None  # a string or several; a list after construction, as is the next
    stop_token_ids: Any = None
    ignore_eos: bool = False
    max_tokens: int | None = between(1, default=16)
    min_tokens: int = between(0, default=0)
    logprobs: int | None = between(-1, default=None)
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        # vLLM's other spellings.
        self.seed = None if self.seed == -1 else self.seed
        self.logprobs = 1 if self.logprobs is True else self.logprobs
        super().__post_init__()
        require(self.top_p > 0, "top_p", self.top_p, "greater than 0 and at most 1")
        check_number("min_tokens", self.min_tokens, 0, self.max_tokens or math.inf)
        stop = [self.stop] if isinstance(self.stop, str) else self.stop or []
        is_text = isinstance(stop, (list, tuple)) and all(isinstance(s, str) and s for s in stop)
        require(is_text, "stop", self.stop, "a string that is not empty, or a list of them")
        ids = [] if self.stop_token_ids is None else self.stop_token_ids
        require(isinstance(ids, (list, tuple, set)), "stop_token_ids", ids, "a list of token ids")
        for token_id in ids:
            check_number("stop_token_ids", token_id, 0)
        self.stop, self.stop_token_ids = list(stop), list(ids)


# ---- what a caller gets ----------------------------------------------------------------------


@dataclass
class Logprob:
    """Raw log-softmax of one token; rank 1 is the most likely."""

    logprob: float
    rank: int
    decoded_token: str | None = None


@dataclass
class CompletionOutput:
    """One completion of a request (vLLM: outputs.py)."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass
class RequestOutput:
    """A request as its caller sees it: the prompt and all completions so far."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int = 0
    prompt_logprobs: None = None  # scripts that were written for vLLM read these two
    metrics: None = None


# ---- one completion --------------------------------------------------------------------------


class Sequence:
    """One completion in the making: its tokens, its counters, its block table.

    `order` says who comes first: (priority, arrival, index); the smaller is served earlier.
    """

    def __init__(self, request: Request, index: int) -> None:
        self.request, self.index = request, index
        self.order = (request.priority, request.arrival, index)
        self.seed = request.seed  # that of the first: so n = 1 and the first of n agree
        if index > 0:
            number = index.to_bytes(8, "little")
            self.seed = xxhash.xxh3_64_intdigest(number, seed=request.seed % 2**64)
        self.token_ids = list(request.prompt_token_ids)
        self.num_prompt_tokens = len(self.token_ids)
        self.num_computed_tokens = self.num_scheduled_tokens = 0
        self.draft_token_ids: list[int] = []
        self.draft_notes: Any = None  # the drafter's
        self.block_table: list[int] = []
        # The full blocks' prefixes, as far as hashed, and how many of them others may find.
        self.prefixes: list[Any] = []
        self.num_registered_blocks = 0
        self.detokenizer = Detokenizer(
            request.tokenizer, request.params.skip_special_tokens)
        has_logprobs = request.params.logprobs is not None
        self.logprobs: list[dict[int, Logprob]] | None = [] if has_logprobs else None
        self.cumulative_logprob = 0.0 if has_logprobs else None
        self.candidates: dict[int, Logprob] | None = None  # a beam's offers, until all have some
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None

    def __lt__(self, other: Sequence) -> bool:
        return self.order < other.order

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_generated_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens:]

    def append(self, token_id: int, logprobs: dict[int, Logprob]) -> None:
        """Take one sampled token, and set finish_reason if it is the last."""
        request = self.request
        if self.logprobs is not None and self.cumulative_logprob is not None:
            self.logprobs.append(logprobs)
            self.cumulative_logprob += logprobs[token_id].logprob
            self.detokenizer.read(self.output_token_ids)
            for other, logprob in logprobs.items():
                logprob.decoded_token = self.detokenizer.peek(other)
        self.token_ids.append(token_id)
        num_generated = len(self.token_ids) - self.num_prompt_tokens
        may_stop = num_generated >= request.params.min_tokens
        if may_stop and token_id in request.stop_token_ids:
            self.finish_reason = "stop"
            if token_id not in request.end_token_ids:
                self.stop_reason = token_id
        elif num_generated >= request.max_tokens:
            self.finish_reason = "length"
        if self.finish_reason is not None or request.params.stop:
            self.read_text(may_stop)

    def read_text(self, may_stop: bool = True) -> None:
        num_searched, params = len(self.detokenizer.text), self.request.params
        if self.finish_reason is None:
            self.detokenizer.read(self.output_token_ids)
        else:  # the token that ended it has no part in the text, as in vLLM
            is_cut = self.finish_reason == "stop" and not params.include_stop_str_in_output
            self.detokenizer.finish(self.output_token_ids[:-1 if is_cut else None])
        stop = self.detokenizer.cut(params.stop if may_stop else [], num_searched,
                                    params.include_stop_str_in_output)
        if stop is not None:
            self.finish_reason, self.stop_reason = "stop", stop

    @property
    def progress(self) -> tuple[int, int, str | None]:
        """Tokens and characters that may be shown by now, and the reason if it is over.

        Until then the last characters are held back: they may be the beginning of a stop string.
        """
        num_held_back = 0
        if self.finish_reason is None:
            self.detokenizer.read(self.output_token_ids)
            if not self.request.params.include_stop_str_in_output:
                num_held_back = max(map(len, self.request.params.stop), default=1) - 1
        num_chars = max(0, len(self.detokenizer.text) - num_held_back)
        return self.num_generated_tokens, num_chars, self.finish_reason

    def output(self, num_tokens_before: int = 0, num_chars_before: int = 0) -> CompletionOutput:
        """What is there, or only what is new since so many tokens and characters."""
        _, num_chars, finish_reason = self.progress
        logprobs = None if self.logprobs is None else self.logprobs[num_tokens_before:]
        return CompletionOutput(
            self.index, self.detokenizer.text[num_chars_before:num_chars],
            self.output_token_ids[num_tokens_before:], self.cumulative_logprob, logprobs,
            finish_reason, self.stop_reason)


@dataclass(eq=False)
class Request:
    """A prompt and what its completions have in common.

    max_tokens is what the parameters and the model length leave; stop_token_ids is the set that
    ends a sequence, end_token_ids the part of it that the model itself names.
    """

    request_id: str
    arrival: int
    priority: int
    prompt: str | None
    prompt_token_ids: list[int]
    params: SamplingParams
    max_tokens: int
    seed: int
    end_token_ids: frozenset[int]
    tokenizer: Any = None
    cache_salt: bytes = b""
    num_cached_tokens: int | None = None  # None until it first runs
    sequences: list[Sequence] = field(init=False)

    def __post_init__(self) -> None:
        ends = frozenset() if self.params.ignore_eos else self.end_token_ids
        self.stop_token_ids = ends | frozenset(self.params.stop_token_ids)
        self.sequences = [Sequence(self, index) for index in range(self.params.n)]

    @property
    def finished(self) -> bool:
        return all(seq.finish_reason is not None for seq in self.sequences)

    def output(self) -> RequestOutput:
        return RequestOutput(
            self.request_id, self.prompt, list(self.prompt_token_ids),
            [seq.output() for seq in self.sequences], self.finished, self.num_cached_tokens or 0)


# ---- what one step computes ------------------------------------------------------------------

Sample = tuple[int, dict[int, Logprob]]  # a token, and logprobs where they were asked for


@dataclass
class Batch:
    """The next num_scheduled_tokens of each sequence, drafts included; made by the scheduler."""

    sequences: list[Sequence] = field(default_factory=list)
    num_tokens: int = 0
    num_drafts: int = 0
    copies: list[tuple[int, int]] = field(default_factory=list)  # blocks, before the forward pass
    admitted: list[Sequence] = field(default_factory=list)
    num_preemptions: int = 0
