"""Who computes next?

There is no "prefill" and no "decode" here. In every step each sequence lags by
num_tokens - num_computed_tokens, and the step hands out a budget of tokens:

    decode              the sequence lags by 1
    prefill             it lags by its prompt
    chunked prefill     it lags by more than the budget left, and gets what is left
    prefix-cache hit    it starts with num_computed_tokens > 0
    preemption          its blocks are freed and num_computed_tokens is 0 again
    speculation         drafted tokens make it lag by 1 + the number of drafts

(vLLM: v1/core/sched/scheduler.py, whose opening note of `schedule` says the same.)

Invariants: a live sequence is in exactly one of `running` and `waiting`, both sorted by
Sequence.order; no step exceeds max_num_batched_tokens; a waiting sequence holds no block. The
first in order can have every block of the pool by preempting the others, and no request is
admitted that the whole pool could not hold: so the first always finishes, and then the next.

Next: config.py, the settings; then attention.py, how tokens find their keys and values.
"""

from bisect import insort
from dataclasses import dataclass, field

from nanopage.beam_search import BeamSearch
from nanopage.block_manager import BlockManager
from nanopage.sequence import Logprob, Request, Sequence


@dataclass
class Batch:
    """What one step computes: the next num_scheduled_tokens of each sequence, drafts included."""

    sequences: list[Sequence] = field(default_factory=list)
    num_tokens: int = 0
    copies: list[tuple[int, int]] = field(default_factory=list)  # blocks, before the forward pass


@dataclass
class Samples:
    """What one step sampled: a list for each sequence of the batch, in any order.

    The list is empty for a prompt that is not yet complete; it has one token for each branch
    where a prompt forks, and otherwise 1 + len(draft_token_ids).
    """

    sequences: list[Sequence]
    token_ids: list[list[int]]
    logprobs: list[list[dict[int, Logprob]]]  # empty dicts where none were asked for


@dataclass
class Metrics:
    """Counters since the engine started; blocks are counted without the scratch block."""

    num_blocks: int = 0
    num_used_blocks: int = 0
    num_cached_blocks: int = 0
    peak_used_blocks: int = 0
    num_preemptions: int = 0
    prefix_queried_tokens: int = 0
    prefix_hit_tokens: int = 0
    num_prompt_tokens: int = 0
    num_generated_tokens: int = 0
    num_steps: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_saved_blocks: int = 0  # sum of references - blocks in use, at the peak
    num_allocated_slots: int = 0  # summed over the steps, as is the next
    num_empty_slots: int = 0

    @property
    def kv_waste(self) -> float:
        """Share of the allocated slots that hold no token, mean over all steps."""
        return self.num_empty_slots / max(1, self.num_allocated_slots)

    @property
    def tokens_per_sequence_and_step(self) -> float:
        """1 without speculation; each accepted draft saves a sequence a step."""
        num_sampled = self.num_generated_tokens - self.num_accepted_tokens
        return self.num_generated_tokens / max(1, num_sampled)


@dataclass(frozen=True)
class PromptLookup:
    """Drafts without a draft model: what followed the last tokens when they came up before.

    Names as in vLLM's speculative_config, method "ngram" (v1/spec_decode/ngram_proposer.py). Each
    sequence keeps an index from n-gram to the position behind its latest occurrence: a step adds
    one entry for each n and looks up at most as many, however long the text.
    """

    num_speculative_tokens: int
    prompt_lookup_min: int
    prompt_lookup_max: int

    def propose(self, seq: Sequence, most: int) -> list[int]:
        """At most `most` tokens; none if the last n-gram is new, the longest n first."""
        token_ids, index = seq.token_ids, seq.ngrams
        sizes = range(self.prompt_lookup_max, self.prompt_lookup_min - 1, -1)
        for end in range(seq.num_indexed_tokens, len(token_ids)):
            for n in sizes:
                index[tuple(token_ids[max(0, end - n):end])] = end
        seq.num_indexed_tokens = len(token_ids)
        for n in sizes:
            found = index.get(tuple(token_ids[-n:]))
            if found is not None:
                return token_ids[found:found + min(most, self.num_speculative_tokens)]
        return []


class Scheduler:
    """The waiting and the running, and the loop that moves them.

    Allocation on demand admits a request as soon as its prompt fits, and soon preempts it again if
    that takes the blocks into which the others are about to grow. So a newcomer leaves room for
    `headroom` more tokens of each running sequence, though at most for an eighth of the pool. (vLLM
    V0 calls such a reserve the watermark.)
    """

    headroom = 32  # more leaves blocks unused, less computes more preempted sequences again

    def __init__(self, block_manager: BlockManager, max_num_seqs: int,
                 max_num_batched_tokens: int, drafter: PromptLookup | None = None,
                 metrics: Metrics | None = None) -> None:
        self.block_manager = block_manager
        self.drafter = drafter
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_num_seqs = max_num_seqs  # at most the budget: see EngineConfig.max_decodes
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.metrics = metrics or Metrics()
        self.num_finished = 0  # in this step

    def add(self, request: Request) -> None:
        """Queue a request; its other branches appear when its prompt is computed."""
        insort(self.waiting, request.sequences[0], key=Sequence.get_order)

    def abort(self, request: Request) -> None:
        """Drop a request wherever it is; its blocks are free at once."""
        for seq in request.sequences:
            if seq.finish_reason is None:
                seq.finish_reason = "abort"
                self.block_manager.free(seq)
        self.running = [seq for seq in self.running if seq.request is not request]
        self.waiting = [seq for seq in self.waiting if seq.request is not request]

    # ---- before the forward pass -------------------------------------------------------------

    def schedule(self) -> Batch:
        """Choose the tokens of the next step and take the blocks that they will be written to."""
        while True:
            batch = Batch()
            num_preempted = self._schedule_running(batch)
            # The blocks of the preempted are for those who lacked them, not for newcomers.
            if not num_preempted:
                self._admit_waiting(batch)
            if batch.sequences or not self.running:
                break
            # Only beams are left that wait for their siblings, and these find no room.
            self._preempt(self.running.pop())
        if self.drafter is not None:
            self._add_drafts(batch, self.drafter)
        self._count_blocks(batch)
        return batch

    def _schedule_running(self, batch: Batch) -> int:
        manager, running = self.block_manager, self.running
        budget = self.max_num_batched_tokens
        num_preempted = 0
        i = 0
        while i < len(running):
            seq = running[i]
            i += 1
            num_new = len(seq.token_ids) - seq.num_computed_tokens
            if num_new == 0:  # a beam that waits for its siblings
                continue
            if num_new > 1:  # leave one token for each of those behind: decodes never starve
                num_new = min(num_new, budget - batch.num_tokens - (len(running) - i))
            end = seq.num_computed_tokens + num_new
            num_needed = manager.num_blocks_needed(seq, end)
            while num_needed > manager.num_free_blocks:
                victim = running.pop()  # lowest priority, latest arrival; perhaps seq itself
                self._preempt(victim)
                num_preempted += 1
                if victim is seq:
                    return num_preempted
                num_needed = manager.num_blocks_needed(seq, end)
            self._schedule_tokens(batch, seq, num_new, num_needed)
        return num_preempted

    def _admit_waiting(self, batch: Batch) -> None:
        manager = self.block_manager
        while (self.waiting and len(self.running) < self.max_num_seqs
               and batch.num_tokens < self.max_num_batched_tokens):
            seq = self.waiting[0]
            manager.share_prefix(seq)
            num_hit = seq.num_computed_tokens
            num_new = min(seq.num_tokens - num_hit, self.max_num_batched_tokens - batch.num_tokens)
            num_needed = manager.num_blocks_needed(seq, num_hit + num_new)
            # Beams wait for each other, so the rest of a beam search is let in wherever it fits.
            headroom = 0 if seq.request.beam_search is not None else self.headroom
            num_reserved = min(len(self.running) * headroom // manager.block_size,
                               manager.num_blocks // 8)
            if num_needed + num_reserved > manager.num_free_blocks:
                manager.free(seq)
                break
            self.waiting.pop(0)
            insort(self.running, seq, key=Sequence.get_order)
            self._count_admission(seq)
            self._schedule_tokens(batch, seq, num_new, num_needed)

    def _schedule_tokens(self, batch: Batch, seq: Sequence, num_new: int, num_needed: int) -> None:
        manager = self.block_manager
        end = seq.num_computed_tokens + num_new
        if num_needed:
            batch.copies += manager.allocate(seq, end)
        if end // manager.block_size > seq.num_registered_blocks:
            manager.register(seq, end)
        seq.num_scheduled_tokens = num_new
        batch.sequences.append(seq)
        batch.num_tokens += num_new
        self.metrics.num_empty_slots += len(seq.block_table) * manager.block_size - end

    def _add_drafts(self, batch: Batch, drafter: PromptLookup) -> None:
        """Speculate with what is left of budget and blocks: a draft displaces nobody."""
        manager = self.block_manager
        for seq in batch.sequences:
            request, num_generated = seq.request, seq.num_generated_tokens
            if (num_generated == 0 or request.beam_search is not None
                    or seq.num_computed_tokens + seq.num_scheduled_tokens < seq.num_tokens):
                continue
            num_slots = manager.block_size * (len(seq.block_table) + manager.num_free_blocks)
            draft = drafter.propose(seq, min(
                self.max_num_batched_tokens - batch.num_tokens,
                request.max_tokens - num_generated - 1,
                num_slots - seq.num_tokens))
            manager.extend(seq, seq.num_tokens + len(draft))
            seq.draft_token_ids = draft
            seq.num_scheduled_tokens += len(draft)
            batch.num_tokens += len(draft)
            self.metrics.num_draft_tokens += len(draft)

    def _preempt(self, seq: Sequence) -> None:
        """Recompute later: nothing is swapped out, and often the prefix cache still has it."""
        self.block_manager.free(seq)
        seq.candidates = None
        insort(self.waiting, seq, key=Sequence.get_order)
        self.metrics.num_preemptions += 1

    def _count_admission(self, seq: Sequence) -> None:
        metrics, request = self.metrics, seq.request
        if self.block_manager.enable_prefix_caching:
            metrics.prefix_queried_tokens += seq.num_tokens
            metrics.prefix_hit_tokens += seq.num_computed_tokens
        if request.num_cached_tokens is None:  # what it hits after a preemption is not its merit
            request.num_cached_tokens = seq.num_computed_tokens
            metrics.num_prompt_tokens += seq.num_prompt_tokens

    def _count_blocks(self, batch: Batch) -> None:
        manager, metrics = self.block_manager, self.metrics
        num_used = manager.num_used_blocks
        metrics.num_allocated_slots += num_used * manager.block_size
        if num_used > metrics.peak_used_blocks:
            metrics.peak_used_blocks = num_used
            num_references = sum(len(seq.block_table) for seq in self.running)
            metrics.num_saved_blocks = num_references - num_used
        metrics.num_steps += bool(batch.sequences)

    # ---- after the forward pass --------------------------------------------------------------

    def update(self, samples: Samples) -> list[Request]:
        """Append what was sampled, free what is finished; returns the requests with new tokens."""
        self.block_manager.step_done()
        touched: dict[Request, None] = {}
        for i, seq in enumerate(samples.sequences):
            seq.num_computed_tokens += seq.num_scheduled_tokens
            token_ids = samples.token_ids[i]
            if not token_ids:
                continue
            touched[seq.request] = None
            logprobs = samples.logprobs[i]
            if seq.request.beam_search is not None:
                seq.candidates = logprobs[0]
                if all(beam.candidates is not None for beam in seq.request.sequences):
                    self._advance_beams(seq.request, seq.request.beam_search)
            elif seq.draft_token_ids:
                self._verify(seq, token_ids, logprobs)
            elif len(token_ids) == 1:
                self._append(seq, token_ids, logprobs)
            else:
                self._fork(seq, token_ids, logprobs)
        if self.num_finished:
            self.running = [seq for seq in self.running if seq.finish_reason is None]
            self.num_finished = 0
        # Forks may be more than can run at once: the last in order come later, as if preempted.
        while len(self.running) > self.max_num_seqs:
            self._preempt(self.running.pop())
        return list(touched)

    def _append(self, seq: Sequence, token_ids: list[int],
                logprobs: list[dict[int, Logprob]]) -> None:
        for j, token_id in enumerate(token_ids):
            seq.append_logprobs(token_id, logprobs[j])
            seq.append(token_id)
            self.metrics.num_generated_tokens += 1
            if seq.finish_reason is not None:
                self.block_manager.free(seq)
                self.num_finished += 1
                return

    def _verify(self, seq: Sequence, token_ids: list[int],
                logprobs: list[dict[int, Logprob]]) -> None:
        """Keep drafts while they are what was sampled, and the first sample that differs.

        With a deterministic draft this leaves the distribution as it is: a draft is accepted with
        its own probability, and a differing sample is distributed as if there had been no draft.
        What a rejected draft wrote is overwritten: num_computed_tokens does not advance over it.
        """
        draft, seq.draft_token_ids = seq.draft_token_ids, []
        num_accepted = 0
        while num_accepted < len(draft) and draft[num_accepted] == token_ids[num_accepted]:
            num_accepted += 1
        seq.num_computed_tokens -= len(draft) - num_accepted
        num_before = seq.num_tokens
        self._append(seq, token_ids[:num_accepted + 1], logprobs)
        self.block_manager.trim(seq)
        self.metrics.num_accepted_tokens += seq.num_tokens - num_before - 1

    def _fork(self, seq: Sequence, token_ids: list[int],
              logprobs: list[dict[int, Logprob]]) -> None:
        """The prompt was computed once; here it becomes n branches that share its blocks."""
        branches = seq.request.sequences
        for child in branches[1:]:
            self.block_manager.fork(seq, child)
            insort(self.running, child, key=Sequence.get_order)
        for j, child in enumerate(branches):
            self._append(child, token_ids[j:j + 1], logprobs[j:j + 1])

    def _advance_beams(self, request: Request, search: BeamSearch) -> None:
        """Every live beam has made its offers: the best continue, the blocks of the rest are freed.

        A beam continues by being forked, once or several times, and dropped.
        """
        beams = request.sequences
        candidates = search.rank(beams)
        children = [candidate.grow(index) for index, candidate in enumerate(candidates)]
        for candidate, child in zip(candidates, children):
            self.block_manager.fork(candidate.beam, child)
        for beam in beams:
            self.block_manager.free(beam)
        self.running = [seq for seq in self.running if seq.request is not request]
        for child in children:
            insort(self.running, child, key=Sequence.get_order)
        self.metrics.num_generated_tokens += len(children)
        request.sequences = children or search.results()
