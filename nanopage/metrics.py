"""What is counted?

A leaf: the scheduler calls it once before and once after each step, and nothing depends on it but
`LLM.metrics()` and bench.py.

Invariants: counters only grow, and a fault restarts none; blocks are counted without the scratch
block.

Next: proposals.py, or back to scheduler.py.
"""

from dataclasses import dataclass

from nanopage.block_manager import BlockManager
from nanopage.sequence import Batch, Sequence


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

    def count_schedule(self, batch: Batch, manager: BlockManager, running: list[Sequence]) -> None:
        num_used, size = manager.num_used_blocks, manager.block_size
        self.num_steps += bool(batch.sequences)
        self.num_draft_tokens += batch.num_drafts
        self.num_allocated_slots += num_used * size
        self.num_empty_slots += sum(
            len(seq.block_table) * size - seq.num_computed_tokens - seq.num_scheduled_tokens
            for seq in batch.sequences)
        if num_used > self.peak_used_blocks:
            self.peak_used_blocks = num_used
            num_references = sum(len(seq.block_table) for seq in running)
            self.num_saved_blocks = num_references - num_used
        for seq in batch.admitted:
            if seq.request.num_cached_tokens is None:  # one that comes back is no new work
                seq.request.num_cached_tokens = seq.num_computed_tokens
                self.num_prompt_tokens += seq.num_prompt_tokens
                self.prefix_queried_tokens += seq.num_tokens * manager.enable_prefix_caching
                self.prefix_hit_tokens += seq.num_computed_tokens

    def count_update(self, batch: Batch, num_sampled: int, num_generated: int) -> None:
        self.num_preemptions += batch.num_preemptions
        self.num_generated_tokens += num_generated
        self.num_accepted_tokens += batch.num_drafts - (num_sampled - num_generated)
