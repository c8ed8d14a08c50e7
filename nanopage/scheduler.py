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

Next: attention.py, how tokens find their keys; then layers.py, the decoder around it.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from dataclasses import dataclass, field
from typing import ClassVar

from nanopage.block_manager import BlockManager
from nanopage.metrics import Metrics
from nanopage.proposals import BeamRequest, PromptLookup
from nanopage.sequence import Batch, Request, Sample, Sequence


@dataclass
class Scheduler:
    """The waiting and the running, and the loop that moves them.

    Allocation on demand admits a request as soon as its prompt fits, and soon preempts it again if
    that takes the blocks into which the others are about to grow. So a newcomer leaves room for
    `headroom` more tokens of each running sequence, though at most for an eighth of the pool. (vLLM
    V0 calls such a reserve the watermark.)
    """

    block_manager: BlockManager
    max_num_seqs: int  # at most the budget, for each gets a token in every step
    max_num_batched_tokens: int
    drafter: PromptLookup | None = None
    metrics: Metrics = field(default_factory=Metrics)
    waiting: list[Sequence] = field(default_factory=list)
    running: list[Sequence] = field(default_factory=list)
    headroom: ClassVar[int] = 32  # more leaves blocks unused, less computes more again

    def add(self, request: Request) -> None:
        """Queue a request; its other branches appear when its prompt is computed."""
        insort(self.waiting, request.sequences[0])

    def abort(self, request: Request) -> None:
        """Drop a request wherever it is; its blocks are free at once. An ended one stays as is."""
        for seq in request.sequences:
            seq.finish_reason = seq.finish_reason or "abort"
        for seq in self.running:  # nobody else holds blocks
            if seq.finish_reason is not None:
                self.block_manager.free(seq)
        self.running = [seq for seq in self.running if seq.finish_reason is None]
        self.waiting = [seq for seq in self.waiting if seq.finish_reason is None]

    # ---- before the forward pass -------------------------------------------------------------

    def schedule(self) -> Batch:
        """Choose the tokens of the next step and take the blocks that they will be written to."""
        batch = Batch()
        self._schedule_running(batch)
        # The blocks of the preempted are for those who lacked them, not for newcomers.
        if not batch.num_preemptions:
            self._admit_waiting(batch)
        if self.running and not batch.sequences:
            # Only beams are left that wait for their siblings, and these find no room.
            self._preempt_last(self.running, batch)
            self._admit_waiting(batch)
        if self.drafter is not None:
            self._add_drafts(batch, self.drafter)
        self.metrics.count_schedule(batch, self.block_manager, self.running)
        return batch

    def _schedule_running(self, batch: Batch) -> None:
        """Serve the running in order; who finds no block takes those of the last in order."""
        manager, free = self.block_manager, self.block_manager.free_queue
        served: list[Sequence] = []
        unserved = deque(self.running)
        while unserved:
            seq = unserved[0]
            num_new = len(seq.token_ids) - seq.num_computed_tokens
            if num_new == 0:  # a beam that waits for its siblings
                served.append(unserved.popleft())
                continue
            if num_new > 1:  # leave one token for each of those behind: decodes never starve
                num_left = self.max_num_batched_tokens - batch.num_tokens - (len(unserved) - 1)
                num_new = min(num_new, num_left)
            end = seq.num_computed_tokens + num_new
            while (num_needed := manager.num_blocks_needed(seq, end)) > len(free):
                self._preempt_last(unserved, batch)
                if not unserved:  # it was the last itself
                    break
            else:
                served.append(unserved.popleft())
                self._schedule_tokens(batch, seq, num_new, num_needed)
        self.running = served

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
            headroom = 0 if isinstance(seq.request, BeamRequest) else self.headroom
            num_reserved = min(len(self.running) * headroom // manager.block_size,
                               manager.num_blocks // 8)
            if num_needed + num_reserved > manager.num_free_blocks:
                manager.free(seq)
                break
            insort(self.running, seq)  # first: an interrupt between the two must not lose it
            del self.waiting[0]
            batch.admitted.append(seq)
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

    def _add_drafts(self, batch: Batch, drafter: PromptLookup) -> None:
        """Speculate with what is left of budget and blocks: a draft displaces nobody."""
        manager = self.block_manager
        for seq in batch.sequences:
            request, num_generated = seq.request, seq.num_generated_tokens
            if (num_generated == 0 or isinstance(request, BeamRequest)
                    or seq.num_computed_tokens + seq.num_scheduled_tokens < seq.num_tokens):
                continue
            num_slots = manager.block_size * (len(seq.block_table) + manager.num_free_blocks)
            draft = drafter.propose(seq, min(
                self.max_num_batched_tokens - batch.num_tokens,
                request.max_tokens - num_generated - 1,
                num_slots - seq.num_tokens), len(batch.sequences))
            manager.extend(seq, seq.num_tokens + len(draft))
            seq.draft_token_ids = draft
            seq.num_scheduled_tokens += len(draft)
            batch.num_tokens += len(draft)
            batch.num_drafts += len(draft)

    def _preempt_last(self, queue: list[Sequence] | deque[Sequence], batch: Batch) -> None:
        """Recompute it later: nothing is swapped out, and often the prefix cache still has it."""
        seq = queue[-1]
        self.block_manager.free(seq)
        seq.candidates = None
        insort(self.waiting, seq)
        queue.pop()  # last: an interrupt must not lose it
        batch.num_preemptions += 1

    # ---- after the forward pass --------------------------------------------------------------

    def update(self, batch: Batch, samples: list[list[Sample]]) -> list[Request]:
        """Append what was sampled, free what is finished; returns the requests with new tokens.

        samples: for each sequence of the batch none (its prompt is not yet complete), one for each
        branch (it is now), or one more than it has drafts.
        """
        self.block_manager.unwritten.clear()
        touched: dict[Request, None] = {}
        num_sampled = num_generated = 0
        for seq, sampled in zip(batch.sequences, samples):
            seq.num_computed_tokens += seq.num_scheduled_tokens
            if not sampled:
                continue
            request = seq.request
            touched[request] = None
            num_sampled += len(sampled)
            if isinstance(request, BeamRequest):
                seq.candidates = sampled[0][1]
                num_generated += 1
                if all(beam.candidates is not None for beam in request.sequences):
                    self._advance_beams(request)
            elif len(seq.token_ids) == seq.num_prompt_tokens:
                num_generated += self._fork(request, sampled)
            else:
                num_generated += self._accept(seq, sampled)
        self.running = [seq for seq in self.running if seq.finish_reason is None]
        # Forks may be more than can run at once: the last in order come later, as if preempted.
        while len(self.running) > self.max_num_seqs:
            self._preempt_last(self.running, batch)
        self.metrics.count_update(batch, num_sampled, num_generated)
        return list(touched)

    def _accept(self, seq: Sequence, sampled: list[Sample]) -> int:
        """Keep drafts while they are what was sampled, and the first sample that differs.

        A plain decode is a draft of length 0. With a deterministic draft this leaves the
        distribution as it is: a draft is accepted with its own probability, and a differing sample
        is distributed as if there had been no draft. What a rejected draft wrote is overwritten:
        num_computed_tokens does not advance over it. Returns how many were kept.
        """
        draft, num_kept = seq.draft_token_ids, 0
        for token_id, logprobs in sampled:
            seq.append(token_id, logprobs)
            num_kept += 1
            is_drafted = num_kept <= len(draft) and token_id == draft[num_kept - 1]
            if not is_drafted or seq.finish_reason is not None:
                break
        if seq.finish_reason is not None:
            self.block_manager.free(seq)
        elif draft:
            seq.num_computed_tokens -= len(sampled) - num_kept
            seq.draft_token_ids = []
            self.block_manager.trim(seq)
        return num_kept

    def _fork(self, request: Request, sampled: list[Sample]) -> int:
        """The prompt was computed once; here it becomes n branches that share its blocks."""
        first, *others = request.sequences
        for child in others:
            self.block_manager.fork(first, child)
            insort(self.running, child)
        for child, sample in zip(request.sequences, sampled):
            self._accept(child, [sample])
        return len(sampled)

    def _advance_beams(self, request: BeamRequest) -> None:
        """Every live beam has made its offers: the best continue, the blocks of the rest are freed.

        A beam continues by being forked, once or several times, and dropped.
        """
        beams = request.sequences
        survivors = request.advance()
        for beam, child in survivors:
            self.block_manager.fork(beam, child)
        for beam in beams:
            self.block_manager.free(beam)
        # In one assignment: an interrupt must find the request in the queue, before or after.
        others = [seq for seq in self.running if seq.request is not request]
        self.running = sorted(others + [child for _, child in survivors])
