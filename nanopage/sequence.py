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
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any

import xxhash

if TYPE_CHECKING:
    from nanopage.beam_search import BeamSearch


def check_number(name: str, value: Any, low: float, high: float = math.inf, *,
                 integer: bool = True, optional: bool = False) -> None:
    """Raise ValueError, naming the argument, unless `value` is a number in [low, high]."""
    if optional and value is None:
        return
    kind: Any = Integral if integer else Real
    is_number = isinstance(value, kind) and not isinstance(value, bool)
    fits = is_number and low <= value <= high
    if not fits or math.isinf(value):  # a NaN compares false, so it does not fit either
        upper = "" if math.isinf(high) else f" and at most {high}"
        raise ValueError(f"{name}={value!r}: must be {'an integer' if integer else 'a number'} "
                         f"of at least {low}{upper}{', or None' if optional else ''}")


def check_bool(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise ValueError(f"{name}={value!r}: must be True or False")


@dataclass
class SamplingParams:
    """How tokens are chosen and when to stop; names and defaults are those of vLLM.

    temperature: 0 (or less than 1e-5) is greedy. Filters come in transformers' order:
    temperature, top_k (0 or -1: off), top_p on the renormalised rest, min_p.
    seed: the same seed gives the same tokens, whatever else runs; None draws one.
    stop: strings that end the text; text leaves them out unless include_stop_str_in_output.
    logprobs: so many most likely tokens are reported beside the sampled one (-1: all of them).
    max_tokens: None means as many as the model length leaves.

    Raises ValueError naming the field, its value and what is allowed.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        check_number("n", self.n, 1, 16384)
        check_number("temperature", self.temperature, 0, integer=False)
        check_number("top_p", self.top_p, 0, 1, integer=False)
        if self.top_p == 0:
            raise ValueError(f"top_p={self.top_p!r}: must be greater than 0 and at most 1")
        check_number("top_k", self.top_k, -1)
        check_number("min_p", self.min_p, 0, 1, integer=False)
        check_number("seed", self.seed, -2**63, 2**63 - 1, optional=True)
        check_number("max_tokens", self.max_tokens, 1, optional=True)
        check_number("min_tokens", self.min_tokens, 0, self.max_tokens or math.inf)
        check_number("logprobs", self.logprobs, -1, optional=True)
        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens"):
            check_bool(name, getattr(self, name))
        stop = [self.stop] if isinstance(self.stop, str) else self.stop or []
        if not isinstance(stop, (list, tuple)) or not all(isinstance(s, str) and s for s in stop):
            raise ValueError(f"stop={self.stop!r}: must be a non-empty string, or a list of them")
        ids = self.stop_token_ids or []
        if not isinstance(ids, (list, tuple, set)):
            raise ValueError(f"stop_token_ids={ids!r}: must be a list of token ids")
        for token_id in ids:
            check_number("stop_token_ids", token_id, 0)

    @property
    def stop_strings(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else list(self.stop or [])

    @property
    def is_greedy(self) -> bool:
        return self.temperature < 1e-5


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


class Detokenizer:
    """The text of one sequence, token by token, with stop strings.

    A token is held back until it completes a character, and a byte token until the bytes end,
    since one wrong byte changes how its neighbours read. (tokenizers' DecodeStream raises there.)
    The last `held_back` characters are not shown yet, since they could be the beginning of a stop
    string. Tokens are decoded when someone looks (`catch_up`).
    """

    def __init__(self, tokenizer: Any, params: SamplingParams) -> None:
        self.tokenizer, self.params = tokenizer, params
        self.stop = params.stop_strings
        self.held_back = max((len(stop) for stop in self.stop), default=1) - 1
        self.text = ""
        # The ids that gave the latest piece: alone, the next ones might lose a leading space.
        self.context: list[int] = []
        self.context_text = ""
        self.pending: list[int] = []
        self.unread: list[int] = []

    def append(self, token_id: int) -> None:
        self.unread.append(token_id)

    def catch_up(self) -> None:
        for token_id in self.unread:
            self._read(token_id)
        self.unread = []

    def _read(self, token_id: int) -> None:
        self.pending.append(token_id)
        token = self.tokenizer.backend_tokenizer.id_to_token(token_id) or ""
        if token.startswith("<0x") or not self._decode([token_id]):  # bytes may still go on
            return
        decoded = self._decode(self.context + self.pending)
        piece = decoded[len(self.context_text):]
        if piece and not piece.endswith("\ufffd") and decoded.startswith(self.context_text):
            self.text += piece
            self.context, self.pending = self.pending, []
            self.context_text = self._decode(self.context)

    def flush(self, token_ids: list[int]) -> None:
        """After the last token: show what was held back in the middle of a character."""
        self.text = self._decode(token_ids)
        self.unread = []

    def _decode(self, token_ids: list[int]) -> str:
        return self.tokenizer.backend_tokenizer.decode(
            token_ids, skip_special_tokens=self.params.skip_special_tokens)

    def cut_at_stop(self, num_searched: int) -> str | None:
        """Cut the text at the first stop string that ends behind `num_searched` characters."""
        found = []
        for stop in self.stop:
            position = self.text.find(stop, max(0, num_searched - len(stop) + 1))
            if position >= 0:
                found.append((position, stop))
        if not found:
            return None
        position, stop = min(found)
        if self.params.include_stop_str_in_output:
            position += len(stop)
        self.text = self.text[:position]
        return stop


class Sequence:
    """One completion in the making: its tokens, its counters, its block table.

    `order` says who comes first: (priority, arrival, index); the smaller is served earlier.
    """

    __slots__ = ("request", "index", "order", "seed", "token_ids", "num_prompt_tokens",
                 "num_computed_tokens", "num_scheduled_tokens", "draft_token_ids", "ngrams",
                 "num_indexed_tokens", "block_table", "block_keys", "num_registered_blocks",
                 "prefix_id", "detokenizer", "logprobs", "cumulative_logprob", "candidates",
                 "finish_reason", "stop_reason")

    def __init__(self, request: Request, index: int, seed: int) -> None:
        self.request = request
        self.index = index
        self.order = (request.priority, request.arrival, index)
        self.seed = seed
        self.token_ids = list(request.prompt_token_ids)
        self.num_prompt_tokens = len(self.token_ids)
        self.num_computed_tokens = 0
        self.num_scheduled_tokens = 0
        self.draft_token_ids: list[int] = []
        self.ngrams: dict[tuple[int, ...], int] = {}  # see PromptLookup in scheduler.py
        self.num_indexed_tokens = 1
        self.block_table: list[int] = []
        # The prefix cache's notes: (hash, token bytes) of each full block, how many of them are
        # registered, and under which id the last of these is (see block_manager.py).
        self.block_keys: list[tuple[bytes, bytes]] = []
        self.num_registered_blocks = 0
        self.prefix_id = 0
        self.detokenizer = (Detokenizer(request.tokenizer, request.params)
                            if request.tokenizer is not None else None)
        self.logprobs: list[dict[int, Logprob]] | None = (
            None if request.params.logprobs is None else [])
        self.cumulative_logprob = 0.0
        self.candidates: dict[int, Logprob] | None = None  # a beam's offers, until all have some
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None

    def get_order(self) -> tuple[int, int, int]:
        return self.order

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_generated_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens:]

    def append_logprobs(self, token_id: int, logprobs: dict[int, Logprob]) -> None:
        if self.logprobs is None:
            return
        self.logprobs.append(logprobs)
        self.cumulative_logprob += logprobs[token_id].logprob

    @property
    def text(self) -> str:
        if self.detokenizer is None:
            return ""
        self.detokenizer.catch_up()
        return self.detokenizer.text

    def append(self, token_id: int) -> None:
        """Take one sampled token, and set finish_reason if it is the last."""
        self.token_ids.append(token_id)
        request = self.request
        num_generated = len(self.token_ids) - self.num_prompt_tokens
        may_stop = num_generated >= request.params.min_tokens
        if may_stop and token_id in request.stop_token_ids:
            self.finish_reason = "stop"
            if token_id not in request.end_token_ids:
                self.stop_reason = token_id
        elif num_generated >= request.max_tokens:
            self.finish_reason = "length"
        if self.detokenizer is not None:
            self._append_text(self.detokenizer, token_id, may_stop)

    def _append_text(self, detokenizer: Detokenizer, token_id: int, may_stop: bool) -> None:
        num_searched = len(detokenizer.text)
        detokenizer.append(token_id)
        if self.finish_reason is not None:
            detokenizer.flush(self.output_token_ids)
        elif detokenizer.stop:
            detokenizer.catch_up()
        if may_stop and detokenizer.stop:
            stop = detokenizer.cut_at_stop(num_searched)
            if stop is not None:
                self.finish_reason, self.stop_reason = "stop", stop

    @property
    def reports_logprob(self) -> bool:
        return self.logprobs is not None or self.request.beam_search is not None

    @property
    def progress(self) -> tuple[int, int, str | None]:
        """Tokens and characters that may be shown by now, and the reason if it is over."""
        num_chars = 0
        if self.detokenizer is not None:
            finished = self.finish_reason is not None
            num_chars = len(self.text)
            if not finished:
                num_chars = max(0, num_chars - self.detokenizer.held_back)
        return self.num_generated_tokens, num_chars, self.finish_reason

    def output(self, num_tokens_before: int = 0, num_chars_before: int = 0) -> CompletionOutput:
        """What is there, or only what is new since so many tokens and characters."""
        num_tokens, num_chars, _ = self.progress
        return CompletionOutput(
            index=self.index,
            text=self.text[num_chars_before:num_chars],
            token_ids=self.token_ids[self.num_prompt_tokens + num_tokens_before:],
            cumulative_logprob=self.cumulative_logprob if self.reports_logprob else None,
            logprobs=None if self.logprobs is None else self.logprobs[num_tokens_before:],
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
        )


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
    beam_search: BeamSearch | None = None  # then `sequences` are the live beams
    is_stepwise: bool = False  # came by add_request, so its output belongs to `step`
    num_cached_tokens: int | None = None
    sequences: list[Sequence] = field(init=False)

    def __post_init__(self) -> None:
        ends = frozenset() if self.params.ignore_eos else self.end_token_ids
        self.stop_token_ids = ends | frozenset(self.params.stop_token_ids or ())
        self.sequences = [Sequence(self, index, branch_seed(self.seed, index))
                          for index in range(self.params.n)]

    @property
    def finished(self) -> bool:
        return all(seq.finish_reason is not None for seq in self.sequences)

    def output(self) -> RequestOutput:
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=list(self.prompt_token_ids),
            outputs=[seq.output() for seq in self.sequences],
            finished=self.finished,
            num_cached_tokens=self.num_cached_tokens or 0,
        )


def branch_seed(seed: int, index: int) -> int:
    """Branch 0 has the request's own seed, so n = 1 and the first of n agree."""
    if index == 0:
        return seed
    return xxhash.xxh3_64_intdigest(index.to_bytes(8, "little"), seed=seed % 2**64)
