"""Where does the KV cache of a sequence live?

The cache is a pool of equal blocks. A sequence holds a *block table*: entry i names the block with
the keys and values of its tokens [i * block_size, (i + 1) * block_size). The slot of the token at
`position` is therefore

    block_table[position // block_size] * block_size + position % block_size

Blocks are taken when a sequence starts to write into them, shared by counting references, and
copied before a write if anyone else can see them. (Kwon et al., "Efficient Memory Management for
Large Language Model Serving with PagedAttention", 2023, sections 4.2 to 4.4; in vLLM:
v1/core/block_pool.py and v1/core/kv_cache_manager.py.)

Invariants (the tests check them after every step):
  - every entry of a live block table has ref_count >= 1, and the sum of all ref_counts is the sum
    of the lengths of the tables;
  - a block is either free or referenced; block 0, the scratch block, is neither: padding writes
    there, so no kernel needs a condition;
  - a block with a prefix is full and is never written; nobody writes to a block that others see.

Next: scheduler.py, which decides whose tokens are computed next.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from typing import Any

import xxhash

from nanopage.sequence import Sequence


def hash_block(parent_hash: bytes, content: bytes) -> bytes:
    """The chained hash: the parent's hash is the salt, so one other token changes all after it."""
    return xxhash.xxh3_128_digest(parent_hash + content)


class Prefix:
    """All tokens up to the end of one full block: that block's, and its parent's before it.

    xxhash is fast and not cryptographic, so equal hashes prove nothing. A hit is believed if the
    block's own tokens are equal, and if its parent is the very object that was matched before it:
    an object cannot be forged, as the parent's hash could.
    """

    __slots__ = ("parent", "content", "hash")

    def __init__(self, parent: Prefix | None, content: bytes) -> None:
        self.parent, self.content = parent, content
        self.hash: bytes = hash_block(parent.hash if parent else b"", content)


class Block:
    """One page of the pool; `prefix` is set only while it is full and can be found by others."""

    __slots__ = ("block_id", "ref_count", "prefix")

    def __init__(self, block_id: int) -> None:
        self.block_id = block_id
        self.ref_count = 0
        self.prefix: Prefix | None = None


class BlockManager:
    """Owns the pool: who holds which block, which blocks are free, which prefixes are cached."""

    def __init__(self, num_blocks: int, block_size: int, enable_prefix_caching: bool = True):
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.blocks = [Block(block_id) for block_id in range(num_blocks + 1)]
        # The free queue is the eviction order: blocks are taken at the head and given back at the
        # tail, so least recently used goes first. An OrderedDict is a linked list with an index;
        # a deque could not remove a block from its middle, which is what a prefix hit does.
        self.free_queue: OrderedDict[int, Block] = OrderedDict(
            (block.block_id, block) for block in self.blocks[1:])
        self.cached: dict[bytes, Block] = {}
        # Registered in this step: to be written by the coming forward pass, so it may be attended
        # to in it, but not copied before it. `Scheduler.update` clears it after the pass.
        self.unwritten: set[Block] = set()

    @property
    def num_free_blocks(self) -> int:
        return len(self.free_queue)

    @property
    def num_used_blocks(self) -> int:
        return self.num_blocks - len(self.free_queue)

    # ---- allocation on demand, copy-on-write -------------------------------------------------

    def must_copy(self, seq: Sequence) -> bool:
        """Whether others see the block that `seq` writes into next.

        Only the first block of a write can be such a one, for those behind it are new.
        """
        index = seq.num_computed_tokens // self.block_size
        if index == len(seq.block_table):
            return False
        block = self.blocks[seq.block_table[index]]
        return block.ref_count > 1 or block.prefix is not None

    def num_blocks_needed(self, seq: Sequence, end: int) -> int:
        """Blocks to take before the tokens [num_computed_tokens, end) can be written."""
        return -(-end // self.block_size) - len(seq.block_table) + self.must_copy(seq)

    def allocate(self, seq: Sequence, end: int) -> list[tuple[int, int]]:
        """Give `seq` blocks of its own for the tokens [num_computed_tokens, end).

        Returns the (source, destination) pairs to be copied before the forward pass. The caller
        has made sure that `num_blocks_needed` are free.
        """
        copies = []
        if self.must_copy(seq):
            index, own = seq.num_computed_tokens // self.block_size, self._take()
            copies.append((seq.block_table[index], own.block_id))
            # Whoever takes it in this step writes only after all copies have read.
            self._release(self.blocks[seq.block_table[index]])
            seq.block_table[index] = own.block_id
        self.extend(seq, end)
        return copies

    def extend(self, seq: Sequence, end: int) -> None:
        """Append free blocks until the table covers the tokens [0, end)."""
        while len(seq.block_table) * self.block_size < end:
            seq.block_table.append(self._take().block_id)

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Let `child` share every block of `parent`; whoever writes first will copy."""
        child.block_table = list(parent.block_table)
        for block_id in child.block_table:
            self.blocks[block_id].ref_count += 1
        child.num_computed_tokens = parent.num_computed_tokens
        child.prefixes = list(parent.prefixes)
        child.num_registered_blocks = parent.num_registered_blocks

    def trim(self, seq: Sequence) -> None:
        """Give back the blocks behind the last computed token, the last one first.

        For rejected drafts that is where their keys were. For a sequence that is freed it is every
        block, and the head of its prefix comes last into the queue, so it is evicted last: the
        head is what more requests share, and without it the tail cannot be found.
        """
        while len(seq.block_table) > -(-seq.num_computed_tokens // self.block_size):
            self._release(self.blocks[seq.block_table.pop()])

    def free(self, seq: Sequence) -> None:
        """Drop all references; what was computed is forgotten, perhaps to be computed again."""
        seq.num_computed_tokens = seq.num_registered_blocks = 0
        self.trim(seq)

    def _take(self) -> Block:
        _, block = self.free_queue.popitem(last=False)
        self._forget(block)  # evicted: a free block keeps its content until this moment
        block.ref_count = 1
        return block

    def _release(self, block: Block) -> None:
        block.ref_count -= 1
        if block.ref_count == 0:
            self.free_queue[block.block_id] = block
            if block.prefix is None:  # no one can hit it, so it is the first to be reused
                self.free_queue.move_to_end(block.block_id, last=False)

    # ---- prefix caching ----------------------------------------------------------------------

    def share_prefix(self, seq: Sequence) -> None:
        """Start a sequence without blocks on the longest cached prefix of its tokens.

        The last token is computed in any case, since its logits are needed: where every block is
        cached, num_computed_tokens is num_tokens - 1, and copy-on-write takes the last block.
        """
        if not self.enable_prefix_caching:
            return
        hits: list[Block] = []
        self._extend_prefixes(seq, seq.num_tokens)
        for i in range(len(seq.prefixes)):
            block = self._find(seq, i)
            if block is None:
                break
            hits.append(block)
        if hits and len(hits) * self.block_size == seq.num_tokens:
            num_left = self.num_free_blocks - sum(block.ref_count == 0 for block in hits)
            # The last block has no content yet, or there is no room for a copy: compute it whole.
            if hits[-1] in self.unwritten or num_left == 0:
                hits.pop()
        for block in hits:
            if block.ref_count == 0:
                del self.free_queue[block.block_id]
            block.ref_count += 1
            seq.block_table.append(block.block_id)
        seq.num_registered_blocks = len(hits)
        seq.num_computed_tokens = min(len(hits) * self.block_size, seq.num_tokens - 1)

    def _find(self, seq: Sequence, i: int) -> Block | None:
        """The cached block with the tokens of block i of `seq`; those before it were found."""
        own = seq.prefixes[i]
        block = self.cached.get(own.hash)
        if block is None or block.prefix is own:
            return block
        found: Any = block.prefix
        if found.content != own.content or found.parent is not own.parent:
            return None
        seq.prefixes[i] = found  # from now on the one that all share
        if i + 1 < len(seq.prefixes):
            seq.prefixes[i + 1].parent = found
        return block

    def _extend_prefixes(self, seq: Sequence, end: int) -> None:
        """Hash the full blocks of the tokens [0, end) that were not hashed before."""
        size, start = 8 * self.block_size, len(seq.prefixes) * self.block_size
        tokens = array("q", seq.token_ids[start:end]).tobytes()
        parent = seq.prefixes[-1] if seq.prefixes else None
        for i in range(0, len(tokens) - size + 1, size):
            parent = Prefix(parent, tokens[i:i + size] + seq.request.cache_salt)
            seq.prefixes.append(parent)

    def register(self, seq: Sequence, end: int) -> None:
        """Make the full blocks of the tokens [0, end) known to others.

        This happens when a chunk is scheduled, not after it ran: within a forward pass every
        layer writes all keys and values before it attends, so a second sequence of the same step
        may share them already.
        """
        if not self.enable_prefix_caching:
            return
        self._extend_prefixes(seq, end)
        for i in range(seq.num_registered_blocks, end // self.block_size):
            if self._find(seq, i) is None:  # or a twin was first, and its block stays the one
                block, prefix = self.blocks[seq.block_table[i]], seq.prefixes[i]
                if prefix.hash in self.cached:  # a collision, or a prefix whose parent was evicted
                    self._forget(self.cached[prefix.hash])
                block.prefix, self.cached[prefix.hash] = prefix, block
                self.unwritten.add(block)
            seq.num_registered_blocks = i + 1

    def reset_prefix_cache(self) -> None:
        for block in list(self.cached.values()):
            self._forget(block)

    def _forget(self, block: Block) -> None:
        if block.prefix is not None:
            del self.cached[block.prefix.hash]
            block.prefix = None
