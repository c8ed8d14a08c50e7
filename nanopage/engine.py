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
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import closing
from dataclasses import fields, replace
from numbers import Integral
from pathlib import Path
from typing import Any

from tqdm import tqdm

from nanopage.arguments import check_number, require
from nanopage.block_manager import BlockManager
from nanopage.config import Checkpoint, EngineConfig
from nanopage.metrics import Metrics
from nanopage.model_runner import ModelRunner
from nanopage.parallel import connect
from nanopage.proposals import BeamRequest, BeamSearchParams
from nanopage.scheduler import Scheduler
from nanopage.sequence import CompletionOutput, Request, RequestOutput, SamplingParams

PROMPT_FIELDS = ("prompt", "prompt_token_ids", "cache_salt")
Prompt = Any  # a string, token ids, or a dict with some of these fields
TextPrompt = TokensPrompt = dict  # as scripts write it: TokensPrompt(prompt_token_ids=[1, 2])
Progress = bool | Callable[..., tqdm]  # False, True, or what makes a bar as tqdm does


class LLM:
    """A model and its engine. Several threads may call it: each call gets its own results.

    model: a directory with a transformers checkpoint, or a name on the model hub. The keyword
    arguments are the fields of `EngineConfig`. Under torchrun `rank` tells which process this is.

    Raises ValueError naming the argument, its value and what is allowed; TypeError for an unknown
    argument.
    """

    def __init__(self, model: str | Path, **options: Any) -> None:
        names = [entry.name for entry in fields(EngineConfig)]
        unknown = sorted(set(options) - set(names))
        if unknown:
            raise TypeError(f"unknown {unknown}: LLM takes model, {', '.join(reversed(names))}")
        config = EngineConfig(**options)
        self.drafter = config.drafter
        self.rank = connect(config.tensor_parallel_size)
        checkpoint = Checkpoint(model, config.tokenizer, config.generation_config)
        self.config = config.resolve(checkpoint.hf_config)
        self.vocab_size = checkpoint.hf_config.vocab_size
        self.tokenizer, self.end_token_ids = checkpoint.tokenizer, checkpoint.end_token_ids
        self.sampling_defaults = checkpoint.sampling_defaults
        self.model_runner = ModelRunner(checkpoint.path, checkpoint.hf_config, self.config)
        self.max_model_len = self.model_runner.max_model_len
        # One thread at a time touches the queues; a step on behalf of one call serves all calls.
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

    def _step(self) -> None:
        """One step of the engine, for all calls at once; whoever calls it holds the lock."""
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
                with self.lock:
                    self._step()
                yield
        finally:
            with self.lock:
                for request in requests:
                    self.scheduler.abort(request)

    # ---- whole calls -------------------------------------------------------------------------

    def generate(self, prompts: Prompt,
                 sampling_params: SamplingParams | list[Any] | None = None,
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
            sampling_params = [self._or_default(sampling_params)] * len(prompts)
        priority = [0] * len(prompts) if priority is None else priority
        for name, values, kind in (("sampling_params", sampling_params, "a SamplingParams"),
                                   ("priority", priority, "None")):
            is_list = isinstance(values, (list, tuple)) and len(values) == len(prompts)
            require(is_list, name, values,
                    f"{kind}, or a list with one for each of the {len(prompts)} prompts")
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

    def beam_search(self, prompts: Prompt, params: BeamSearchParams,
                    use_tqdm: Progress = False) -> list[RequestOutput]:
        """The `beam_width` best completions of each prompt, best first, as its `outputs`.

        A beam's score is cumulative_logprob / generated length ** length_penalty.
        Raises ValueError if the beams of a prompt cannot run and be held all at once.
        """
        require(isinstance(params, BeamSearchParams), "params", params, "a BeamSearchParams")
        params, most = replace(params), self.scheduler.max_num_seqs
        require(params.beam_width <= most, "beam_width", params.beam_width,
                f"at most {most}: so many run at once (max_num_seqs, max_num_batched_tokens)")
        sampling_params = params.to_sampling_params(len(self.end_token_ids))
        return self._complete([self._make_request(prompt, sampling_params, beams=params)
                               for prompt in as_list(prompts)], use_tqdm)

    def _complete(self, requests: list[Request], use_tqdm: Progress) -> list[RequestOutput]:
        require(isinstance(use_tqdm, bool) or callable(use_tqdm), "use_tqdm", use_tqdm,
                "True, False or what makes a bar")
        use_tqdm = use_tqdm if self.rank == 0 else False
        make_bar, before = use_tqdm if callable(use_tqdm) else tqdm, replace(self.total)
        with (make_bar(total=len(requests), desc="Processed prompts", miniters=0,
                       disable=not use_tqdm) as bar, closing(self._run(requests)) as steps):
            for _ in steps:
                if use_tqdm:
                    seconds = max(bar.format_dict["elapsed"], 1e-9)
                    speed = (self.total.num_prompt_tokens - before.num_prompt_tokens) / seconds
                    output_speed = (self.total.num_generated_tokens
                                    - before.num_generated_tokens) / seconds
                    bar.set_postfix_str(f"prompt: {speed:.0f} tok/s, "
                                        f"output: {output_speed:.0f} tok/s", refresh=False)
                    bar.update(sum(request.finished for request in requests) - bar.n)
        return [request.output() for request in requests]

    # ---- token by token ----------------------------------------------------------------------

    def stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None,
               priority: int = 0) -> Iterator[CompletionOutput]:
        """Yield what is new as it comes: CompletionOutputs with only new `text` and `token_ids`.

        No text ends in half a character, and none is part of a stop string. The last output of
        each completion has its finish_reason. Leaving the loop early aborts the request.
        """
        return self._stream(self._make_request(prompt, self._or_default(sampling_params), priority))

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

    def add_request(self, prompt: Prompt, sampling_params: SamplingParams | None = None,
                    priority: int = 0) -> str:
        """Queue one request for `step`; returns its id. Raises ValueError, queueing nothing."""
        request = self._make_request(prompt, self._or_default(sampling_params), priority)
        with self.lock:
            self.requests[request.request_id] = request
            self.scheduler.add(request)
        return request.request_id

    def step(self) -> list[RequestOutput]:
        """Run one step; returns the requests that got tokens or ended, as they are now.

        What another call did for them in the meantime, since it steps for all, counts as well.
        """
        with self.lock:
            self._step()
            news, self.news = list(self.news.values()), {}
            for request in news:
                if request.finished:
                    del self.requests[request.request_id]
            return [request.output() for request in news]

    def abort(self, request_id: str) -> None:
        """End a request of `add_request` now; an unknown or ended one is no error."""
        with self.lock:
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

    def _or_default(self, params: SamplingParams | None) -> SamplingParams:
        return self.get_default_sampling_params() if params is None else params

    def reset_prefix_cache(self) -> bool:
        """Forget what is cached; a block that is in use stays in use."""
        with self.lock:
            self.scheduler.block_manager.reset_prefix_cache()
        return True

    def num_free_blocks(self) -> int:
        """Blocks that nobody holds; those with a cached prefix are among them."""
        return self.scheduler.block_manager.num_free_blocks

    def metrics(self) -> Metrics:
        """Counters since the start, and the pool as it is now."""
        with self.lock:
            manager = self.scheduler.block_manager
            return replace(self.total, num_used_blocks=manager.num_used_blocks,
                           num_cached_blocks=len(manager.cached))

    # ---- requests ----------------------------------------------------------------------------

    def _make_request(self, prompt: Prompt, params: SamplingParams, priority: int = 0,
                      beams: BeamSearchParams | None = None) -> Request:
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
        num_beams = beams.beam_width if beams else 1
        manager = self.scheduler.block_manager
        num_needed = -(-(length + max_tokens - 1) // manager.block_size) * num_beams
        if num_needed > manager.num_blocks:
            raise ValueError(
                f"prompt of {length} tokens, max_tokens={max_tokens} and {num_beams} beam(s) need "
                f"{num_needed} blocks of {manager.block_size}, the whole pool has "
                f"num_blocks={manager.num_blocks}")
        with self.lock:
            self.num_requests += 1
            common: dict[str, Any] = dict(
                request_id=str(self.num_requests - 1), arrival=self.num_requests,
                priority=priority, prompt=text, prompt_token_ids=token_ids, params=params,
                max_tokens=max_tokens, end_token_ids=self.end_token_ids, tokenizer=self.tokenizer,
                seed=self.random.getrandbits(64) if params.seed is None else params.seed,
                cache_salt=salt)
        return Request(**common) if beams is None else BeamRequest(**common, beams=beams)

    def _read_prompt(self, prompt: Prompt) -> tuple[str | None, list[int], bytes]:
        given = {"prompt": prompt} if isinstance(prompt, str) else prompt
        given = given if isinstance(given, Mapping) else {"prompt_token_ids": given}
        text, token_ids, salt = (given.get(name) for name in PROMPT_FIELDS)
        is_known = (set(given) <= set(PROMPT_FIELDS) and isinstance(text, str | None)
                    and isinstance(salt, str | None))
        require(is_known and not (text is None and token_ids is None), "prompt", prompt,
                f"a string, a list of token ids, or a dict of {', '.join(PROMPT_FIELDS)}")
        token_ids = self._encode(text or "") if token_ids is None else to_plain(token_ids)
        require(is_sequence(token_ids), "prompt_token_ids", token_ids, "a list of token ids")
        for token_id in token_ids:
            check_number("prompt_token_ids", token_id, 0, self.vocab_size - 1)
        salt = (salt or "").encode(errors="surrogatepass")
        return text, [int(token_id) for token_id in token_ids], salt

    def _encode(self, text: str, **options: Any) -> list[int]:
        require(self.tokenizer is not None, "prompt", text,
                "token ids, for the model has no tokenizer")
        is_unicode = text.encode(errors="ignore").decode() == text  # no lone surrogates
        require(is_unicode, "prompt", text, "valid Unicode")
        with self.lock:
            return self.tokenizer(text, **options)["input_ids"]


def as_list(prompts: Prompt) -> list[Prompt]:
    """One prompt becomes a list of one."""
    if isinstance(prompts, (str, Mapping)):
        return [prompts]
    prompts = to_plain(prompts)
    require(is_sequence(prompts), "prompts", prompts, "a prompt or a list of prompts")
    is_token_ids = len(prompts) > 0 and all(isinstance(item, Integral) for item in prompts)
    return [list(prompts)] if is_token_ids else list(prompts)


def is_sequence(value: Any) -> bool:
    """A list, a tuple, an array, a column of a data set; a string or a dict is one prompt."""
    return hasattr(value, "__len__") and hasattr(value, "__getitem__") and not isinstance(
        value, (str, bytes, Mapping))


def to_plain(values: Any) -> Any:
    """A list in place of an array or a tensor, whose items are no Python numbers."""
    return values.tolist() if hasattr(values, "tolist") else values


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
