"""What does a user call?

`LLM` follows vLLM's offline class (vllm/entrypoints/llm.py): same names, same defaults. Under every
call lies one loop, `_step`:

    batch   = scheduler.schedule()            who computes how many tokens; blocks are taken here
    samples = model_runner.execute(batch)     copy blocks, forward, sample
    touched = scheduler.update(batch, samples)   append tokens, free the finished

Invariants: a call is checked as a whole before anything is queued; a caller's objects are neither
kept nor changed; a call that is left early leaves nothing behind; after an error within a step the
queues are empty and all blocks are free.

This is the last file. To see it run: example.py.
"""

import random
import threading
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from dataclasses import replace
from functools import wraps
from numbers import Integral
from pathlib import Path
from typing import Any

from tqdm import tqdm

from nanopage.block_manager import BlockManager
from nanopage.config import EngineConfig, open_checkpoint
from nanopage.metrics import Metrics
from nanopage.model_runner import ModelRunner
from nanopage.parallel import connect
from nanopage.proposals import BeamRequest, BeamSearchParams
from nanopage.scheduler import Scheduler
from nanopage.sequence import (
    CompletionOutput,
    Request,
    RequestOutput,
    SamplingParams,
    check_number,
    require,
)

Prompt = Any  # a string, token ids, or a dict of vLLM's with prompt or prompt_token_ids
Progress = bool | Callable[..., tqdm]  # False, True, or what makes a bar as tqdm does


def locked(method: Callable[..., Any]) -> Callable[..., Any]:
    """One thread at a time may touch the queues; a step on behalf of one call serves all."""
    @wraps(method)
    def under_lock(self: Any, *args: Any, **kwargs: Any) -> Any:
        with self.lock:
            return method(self, *args, **kwargs)
    return under_lock


class LLM:
    """A model and its engine. Several threads may call it: each call gets its own results.

    model: a directory with a transformers checkpoint, or a name on the model hub. The keyword
    arguments are the fields of `EngineConfig`. Under torchrun `rank` tells which process this is.

    Raises ValueError naming the argument, its value and what is allowed; TypeError for an unknown
    argument.
    """

    def __init__(self, model: str | Path, **options: Any) -> None:
        config = EngineConfig(**options)
        self.drafter = config.drafter
        self.rank = connect(config.tensor_parallel_size)
        checkpoint = open_checkpoint(model, config.tokenizer, config.generation_config)
        self.config = config.resolve(checkpoint.hf_config)
        self.vocab_size = checkpoint.hf_config.vocab_size
        self.tokenizer, self.end_token_ids = checkpoint.tokenizer, checkpoint.end_token_ids
        self.model_runner = ModelRunner(checkpoint.path, checkpoint.hf_config, self.config)
        self.max_model_len = self.model_runner.max_model_len
        self.sampling_defaults = checkpoint.sampling_defaults
        self.lock = threading.RLock()
        self.random = random.Random(config.seed)
        self.num_requests = 0
        self.total = Metrics(num_blocks=self.model_runner.num_blocks)
        # Those of add_request whose end `step` has not told yet, and those that it has news of.
        self.requests: dict[str, Request] = {}
        self.news: dict[str, Request] = {}
        self.scheduler = self._make_scheduler()

    def __repr__(self) -> str:
        config, runner = self.config, self.model_runner
        return (f"LLM({runner.path.name}, {config.device}, {str(config.dtype)[6:]}, attention "
                f"{runner.backend.name}, {runner.num_blocks} blocks of {config.block_size}, "
                f"sequences of up to {self.max_model_len} tokens)")

    # ---- the loop ----------------------------------------------------------------------------

    @locked
    def _step(self) -> None:
        """One step of the engine, for all calls at once."""
        try:
            batch = self.scheduler.schedule()
            if not batch.sequences:
                return
            samples = self.model_runner.execute(batch)
            touched = self.scheduler.update(batch, samples)
        except BaseException:
            # No half-written block may survive, so queues, pool and prefix cache start afresh.
            self.model_runner.has_failed = True
            for seq in self.scheduler.running + self.scheduler.waiting:
                self.scheduler.abort(seq.request)
            self.requests, self.news = {}, {}
            self.scheduler = self._make_scheduler()
            raise
        for request in touched:
            if request.request_id in self.requests:
                self.news[request.request_id] = request

    def _make_scheduler(self) -> Scheduler:
        manager = BlockManager(self.model_runner.num_blocks, self.config.block_size,
                               self.config.enable_prefix_caching)
        return Scheduler(manager, self.config.max_num_seqs, self.config.max_num_batched_tokens,
                         self.drafter, self.total)

    def _run(self, requests: list[Request]) -> Generator[None, None, None]:
        """Step until these have ended, with a pause after each. To close it early aborts them."""
        try:
            with self.lock:
                for request in requests:
                    self.scheduler.add(request)
            while any(not request.finished for request in requests):
                self._step()
                yield
        finally:
            with self.lock:
                for request in requests:
                    self.scheduler.abort(request)

    # ---- whole calls -------------------------------------------------------------------------

    def generate(self, prompts: Prompt,
                 sampling_params: SamplingParams | list[SamplingParams] | None = None,
                 use_tqdm: Progress = True, priority: list[int] | None = None,
                 lora_request: None = None) -> list[RequestOutput]:
        """Complete one prompt or many; returns a RequestOutput for each, in their order.

        A prompt is a string, a list of token ids, or a dict with "prompt" or "prompt_token_ids"
        and perhaps "cache_salt" (prompts with different salts share no cached blocks).
        Raises ValueError before anything runs.
        """
        prompts = as_list(prompts)
        require(lora_request is None, "lora_request", lora_request, "None")
        if sampling_params is None or isinstance(sampling_params, SamplingParams):
            sampling_params = [sampling_params or self.get_default_sampling_params()] * len(prompts)
        priority = [0] * len(prompts) if priority is None else priority
        for name, values in (("sampling_params", sampling_params), ("priority", priority)):
            is_list = isinstance(values, (list, tuple)) and len(values) == len(prompts)
            require(is_list, name, values, f"a list, one for each of the {len(prompts)} prompts")
        requests: list[Request] = []
        for given in zip(prompts, sampling_params, priority):
            try:
                requests.append(self._make_request(*given))
            except ValueError as error:
                raise ValueError(f"prompts[{len(requests)}]: {error}") from None
        return self._complete(requests, use_tqdm)

    def chat(self, messages: list[Any],
             sampling_params: SamplingParams | list[SamplingParams] | None = None,
             use_tqdm: Progress = True, lora_request: None = None,
             chat_template: str | None = None, add_generation_prompt: bool = True,
             continue_final_message: bool = False, tools: list[Any] | None = None,
             chat_template_kwargs: dict[str, Any] | None = None) -> list[RequestOutput]:
        """Answer one conversation, a list of {"role", "content"}, or a list of them.

        The last four arguments go into the model's chat template as they are.
        """
        require(self.tokenizer is not None, "tokenizer", None, "there for chat")
        require(isinstance(messages, (list, tuple)) and len(messages) > 0, "messages", messages,
                "a conversation or a list of them")
        prompts = []
        for conversation in [messages] if isinstance(messages[0], dict) else messages:
            is_list = isinstance(conversation, (list, tuple)) and len(conversation) > 0
            require(is_list and all(isinstance(message, dict) for message in conversation),
                    "messages", conversation, "a list of dicts with role and content")
            conversation = [join_parts(message) for message in conversation]
            try:
                text = self.tokenizer.apply_chat_template(
                    conversation, tokenize=False, chat_template=chat_template,
                    add_generation_prompt=add_generation_prompt,
                    continue_final_message=continue_final_message, tools=tools,
                    **(chat_template_kwargs or {}))
            except Exception as error:  # whatever a template in Jinja may raise
                raise ValueError(f"messages={conversation!r}: the chat_template does not take "
                                 f"them ({error})") from error
            # The template has written the special tokens already.
            ids = self._encode(text, add_special_tokens=False)
            prompts.append({"prompt": text, "prompt_token_ids": ids})
        return self.generate(prompts, sampling_params, use_tqdm, lora_request=lora_request)

    def beam_search(self, prompts: Prompt, params: BeamSearchParams) -> list[RequestOutput]:
        """The `beam_width` best completions of each prompt, best first, as its `outputs`.

        A beam's score is cumulative_logprob / generated length ** length_penalty.
        Raises ValueError if the beams of a prompt cannot run and be held all at once.
        """
        return self._complete(self._make_beam_requests(prompts, params), use_tqdm=False)

    def _complete(self, requests: list[Request], use_tqdm: Progress) -> list[RequestOutput]:
        require(isinstance(use_tqdm, bool) or callable(use_tqdm), "use_tqdm", use_tqdm,
                "True, False or what makes a bar")
        use_tqdm = use_tqdm if self.rank == 0 else False
        make_bar = use_tqdm if callable(use_tqdm) else tqdm
        with (make_bar(total=len(requests), desc="Processed prompts", miniters=0,
                       disable=not use_tqdm) as bar, closing(self._run(requests)) as steps):
            for _ in steps:
                if use_tqdm:
                    num_in = sum(len(r.prompt_token_ids) for r in requests
                                 if r.num_cached_tokens is not None)
                    num_out = sum(seq.num_generated_tokens for r in requests for seq in r.sequences)
                    rate = 1 / max(bar.format_dict["elapsed"], 1e-9)
                    bar.set_postfix_str(f"prompt: {num_in * rate:.0f} tok/s, "
                                        f"output: {num_out * rate:.0f} tok/s", refresh=False)
                    bar.update(sum(request.finished for request in requests) - bar.n)
        return [request.output() for request in requests]

    # ---- token by token ----------------------------------------------------------------------

    def stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None,
               priority: int = 0) -> Iterator[CompletionOutput]:
        """Yield what is new as it comes: CompletionOutputs with only new `text` and `token_ids`.

        No text ends in half a character, and none is part of a stop string. The last output of
        each completion has its finish_reason. Leaving the loop early aborts the request.
        """
        params = sampling_params or self.get_default_sampling_params()
        return self._stream(self._make_request(prompt, params, priority))

    def _stream(self, request: Request) -> Iterator[CompletionOutput]:
        # Tokens, characters and finish_reason of each completion that were shown so far.
        shown: list[tuple[int, int, str | None]] = [(0, 0, None)] * len(request.sequences)
        with closing(self._run([request])) as steps:
            while None in (finish_reason for _, _, finish_reason in shown):
                pieces = []
                with self.lock:
                    next(steps, None)
                    for i, seq in enumerate(request.sequences):
                        before, shown[i] = shown[i], seq.progress
                        if shown[i] != before:
                            pieces.append(seq.output(*before[:2]))
                yield from pieces

    # ---- step by step ------------------------------------------------------------------------

    @locked
    def add_request(self, prompt: Prompt, sampling_params: SamplingParams | None = None,
                    priority: int = 0) -> str:
        """Queue one request for `step`; returns its id. Raises ValueError, queueing nothing."""
        params = sampling_params or self.get_default_sampling_params()
        request = self._make_request(prompt, params, priority)
        self.requests[request.request_id] = request
        self.scheduler.add(request)
        return request.request_id

    @locked
    def step(self) -> list[RequestOutput]:
        """Run one step; returns the requests that got tokens or ended, as they are now.

        What another call did for them in the meantime, since it steps for all, counts as well.
        """
        self._step()
        news, self.news = self.news, {}
        for request in news.values():
            if request.finished:
                del self.requests[request.request_id]
        return [request.output() for request in news.values()]

    @locked
    def abort(self, request_id: str) -> None:
        """End a request of `add_request` now; an unknown or ended one is no error."""
        if isinstance(request_id, str) and request_id in self.requests:
            self.scheduler.abort(self.requests.pop(request_id))
            self.news.pop(request_id, None)

    def has_unfinished_requests(self) -> bool:
        return bool(self.requests)

    def get_tokenizer(self) -> Any:
        return self.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """What the model's generation_config.json asks for, and vLLM's defaults beside it."""
        return SamplingParams(**self.sampling_defaults)

    @locked
    def reset_prefix_cache(self) -> bool:
        """Forget what is cached; a block that is in use stays in use."""
        self.scheduler.block_manager.reset_prefix_cache()
        return True

    def num_free_blocks(self) -> int:
        """Blocks that nobody holds; those with a cached prefix are among them."""
        return self.scheduler.block_manager.num_free_blocks

    @locked
    def metrics(self) -> Metrics:
        """Counters since the start, and the pool as it is now."""
        manager = self.scheduler.block_manager
        return replace(self.total, num_used_blocks=manager.num_used_blocks,
                       num_cached_blocks=len(manager.cached))

    # ---- requests ----------------------------------------------------------------------------

    @locked
    def _make_request(self, prompt: Prompt, params: SamplingParams, priority: int,
                      kind: type[Request] = Request, num_beams: int = 1,
                      **others: Any) -> Request:
        """Check everything that the caller gave; nothing is queued yet."""
        require(isinstance(params, SamplingParams), "sampling_params", params, "a SamplingParams")
        params = replace(params)  # a checked copy of our own
        check_number("priority", priority, -2**63, 2**63 - 1)
        text, token_ids, salt = self._read_prompt(prompt)
        length = len(token_ids)
        if not 0 < length < self.max_model_len:
            raise ValueError(f"prompt has {length} tokens: must have at least 1 and fewer than "
                             f"max_model_len={self.max_model_len}")
        for token_id in params.stop_token_ids:
            check_number("stop_token_ids", token_id, 0, self.vocab_size - 1)
        require(not params.stop or self.tokenizer is not None, "stop", params.stop,
                "None, for the model has no tokenizer")
        max_tokens = min(params.max_tokens or self.max_model_len, self.max_model_len - length)
        # The last token's K and V are never written. n branches may run one at a time; beams run
        # together.
        manager = self.scheduler.block_manager
        num_needed = -(-(length + max_tokens - 1) // manager.block_size) * num_beams
        if num_needed > manager.num_blocks:
            raise ValueError(
                f"prompt of {length} tokens, max_tokens={max_tokens} and {num_beams} beam(s) need "
                f"{num_needed} blocks of {manager.block_size}, the whole pool has "
                f"num_blocks={manager.num_blocks}")
        self.num_requests += 1
        return kind(
            request_id=str(self.num_requests - 1), arrival=self.num_requests, priority=priority,
            prompt=text, prompt_token_ids=token_ids, params=params, max_tokens=max_tokens,
            seed=self.random.getrandbits(64) if params.seed is None else params.seed,
            end_token_ids=self.end_token_ids, tokenizer=self.tokenizer, cache_salt=salt, **others)

    def _make_beam_requests(self, prompts: Prompt, params: BeamSearchParams) -> list[Request]:
        require(isinstance(params, BeamSearchParams), "params", params, "a BeamSearchParams")
        params, most = replace(params), self.scheduler.max_num_seqs
        require(params.beam_width <= most, "beam_width", params.beam_width,
                f"at most {most}: so many run at once (max_num_seqs, max_num_batched_tokens)")
        sampling_params = params.to_sampling_params(len(self.end_token_ids))
        return [self._make_request(prompt, sampling_params, 0, BeamRequest, params.beam_width,
                                   beam_width=params.beam_width,
                                   length_penalty=params.length_penalty)
                for prompt in as_list(prompts)]

    def _read_prompt(self, prompt: Prompt) -> tuple[str | None, list[int], bytes]:
        fields = prompt if isinstance(prompt, dict) else (
            {"prompt": prompt} if isinstance(prompt, str) else {"prompt_token_ids": prompt})
        text, token_ids = fields.get("prompt"), fields.get("prompt_token_ids")
        salt = fields.get("cache_salt")
        is_known = set(fields) <= {"prompt", "prompt_token_ids", "cache_salt"}
        are_strings = isinstance(text, str | None) and isinstance(salt, str | None)
        require(is_known and are_strings and not (text is None and token_ids is None), "prompt",
                prompt, "a string, a list of token ids, or a dict with one of them as prompt or "
                "prompt_token_ids, and perhaps cache_salt")
        if token_ids is None:
            require(self.tokenizer is not None, "prompt", prompt,
                    "token ids, for the model has no tokenizer")
            token_ids = self._encode(text or "")
        require(is_sequence(token_ids), "prompt_token_ids", token_ids, "a list of token ids")
        for token_id in token_ids:
            check_number("prompt_token_ids", token_id, 0, self.vocab_size - 1)
        return text, [int(token_id) for token_id in token_ids], (salt or "").encode()

    @locked
    def _encode(self, text: str, **options: Any) -> list[int]:
        is_unicode = text.encode(errors="ignore").decode() == text  # no lone surrogates
        require(is_unicode, "prompt", text, "valid Unicode")
        return self.tokenizer(text, **options)["input_ids"]


def as_list(prompts: Prompt) -> list[Prompt]:
    """One prompt becomes a list of one."""
    if isinstance(prompts, (str, dict)):
        return [prompts]
    require(is_sequence(prompts), "prompts", prompts, "a prompt or a list of prompts")
    is_token_ids = len(prompts) > 0 and all(isinstance(item, Integral) for item in prompts)
    return [list(prompts)] if is_token_ids else list(prompts)


def is_sequence(value: Any) -> bool:
    """A list, a tuple, an array, a column of a data set; a string or a dict is one prompt."""
    return hasattr(value, "__len__") and hasattr(value, "__getitem__") and not isinstance(
        value, (str, bytes, dict))


def join_parts(message: dict[str, Any]) -> dict[str, Any]:
    """A message whose content is a string: parts of text are joined as vLLM joins them."""
    if not isinstance(message.get("content"), (list, tuple)):
        return message
    texts: list[Any] = [
        part.get("text") if isinstance(part, dict) and part.get("type") == "text" else part
        for part in message["content"]]
    require(all(isinstance(text, str) for text in texts), "content", message["content"],
            "a string, or parts {'type': 'text', 'text': ...}")
    return {**message, "content": "\n".join(texts)}
