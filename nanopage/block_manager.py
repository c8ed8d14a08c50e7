"""Where does the KV cache of a sequence live?

The cache is a pool of equal blocks. A sequence holds a *block table*: entry i names the block with
the keys and values of its tokens [i * block_size, (i + 1) * block_size). The slot of the token at
`position` is therefore

    block_table[position // block_size] * block_size + position % block_size

Blocks are taken when a sequence starts to write into them, shared by counting references, and
copied before a write if anyone else can see them. (Kwon et al., "Efficient Memory Management for
Large Language Model Serving with PagedAttention", 2023, sections 4.2 to 4.4; in vLLM:
v1/core/block_pool.py and v1/core/kv_cache_manager.py.)

Invariants, checked by `check_invariants`:
  - every entry of a live block table has ref_count >= 1, and the sum of all ref_counts is the sum
    of the lengths of the tables;
  - a block is either free or referenced; block 0, the scratch block, is neither: padding writes
    there, so no kernel needs a condition;
  - a block with a hash is full and is never written; nobody writes to a block that others see.

Next: beam_search.py, the one feature whose sequences compete (or at once scheduler.py).
"""

from array import array
from collections import OrderedDict
from collections.abc import Iterable
from itertools import count

import xxhash

from nanopage.sequence import Sequence


class Block:
    """One page. `content` and `parent_id` say which prefix `block_hash` stands for."""

    __slots__ = ("block_id", "ref_count", "block_hash", "content", "parent_id", "prefix_id")

    def __init__(self, block_id: int) -> None:
        self.block_id = block_id
        self.ref_count = 0
        self.block_hash: bytes | None = None  # set only while full and registered
        self.content = b""
        self.parent_id = 0
        self.prefix_id = 0


def hash_block(parent_hash: bytes, content: bytes) -> bytes:
    """The chained hash: the parent's hash is the salt, so one other token changes all after it."""
    return xxhash.xxh3_128_digest(parent_hash + content)


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
        self.prefix_ids = count(1)
        # Registered in this step: to be written by the coming forward pass, so it may be attended
        # to in it, but not copied before it.
        self.unwritten: set[int] = set()

    @property
    def num_free_blocks(self) -> int:
        return len(self.free_queue)

    @property
    def num_used_blocks(self) -> int:
        return self.num_blocks - len(self.free_queue)

    # ---- allocation on demand, copy-on-write -------------------------------------------------

    def num_blocks_needed(self, seq: Sequence, end: int) -> int:
        """Blocks to take before the tokens [num_computed_tokens, end) can be written."""
        table = seq.block_table
        num_needed = -(-end // self.block_size) - len(table)
        first_written = seq.num_computed_tokens // self.block_size
        if first_written < len(table):
            block = self.blocks[table[first_written]]
            if block.ref_count > 1 or block.block_hash is not None:
                num_needed += 1
        return num_needed

    def allocate(self, seq: Sequence, end: int) -> list[tuple[int, int]]:
        """Give `seq` blocks of its own for the tokens [num_computed_tokens, end).

        Only the first of them can lie in a block that others see: it is then replaced by a copy
        (copy-on-write). Returns the (source, destination) pairs to be copied before the forward
        pass. The caller has made sure that `num_blocks_needed` are free.
        """
        copies = []
        table = seq.block_table
        first_written = seq.num_computed_tokens // self.block_size
        if first_written < len(table):
            shared = self.blocks[table[first_written]]
            if shared.ref_count > 1 or shared.block_hash is not None:
                own = self._take()
                table[first_written] = own.block_id
                self._release(shared)
                copies.append((shared.block_id, own.block_id))
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
        child.block_keys = list(parent.block_keys)
        child.num_registered_blocks = parent.num_registered_blocks
        child.prefix_id = parent.prefix_id

    def trim(self, seq: Sequence) -> None:
        """Give back the blocks behind the last computed token (they held rejected drafts)."""
        while len(seq.block_table) > -(-seq.num_computed_tokens // self.block_size):
            self._release(self.blocks[seq.block_table.pop()])

    def free(self, seq: Sequence) -> None:
        """Drop all references, tail first, so the head of a prefix is evicted last.

        The head is what more requests share, and without it the tail cannot be found.
        """
        for block_id in reversed(seq.block_table):
            self._release(self.blocks[block_id])
        seq.block_table = []
        seq.num_computed_tokens = 0
        seq.num_registered_blocks = 0
        seq.prefix_id = 0

    def _take(self) -> Block:
        _, block = self.free_queue.popitem(last=False)
        if block.block_hash is not None:
            self._forget(block)  # evicted: a free block keeps its content until this moment
        block.ref_count = 1
        return block

    def _release(self, block: Block) -> None:
        block.ref_count -= 1
        if block.ref_count == 0:
            self.free_queue[block.block_id] = block
            if block.block_hash is None:  # no one can hit it, so it is the first to be reused
                self.free_queue.move_to_end(block.block_id, last=False)

    # ---- prefix caching ----------------------------------------------------------------------

    def share_prefix(self, seq: Sequence) -> None:
        """Start a sequence without blocks on the longest cached prefix of its tokens.

        The last token is computed in any case, since its logits are needed: where every block is
        cached, num_computed_tokens is num_tokens - 1, and copy-on-write takes the last block.
        """
        hits = self._find_prefix(seq)
        if len(hits) * self.block_size == seq.num_tokens:
            num_left = self.num_free_blocks - sum(block.ref_count == 0 for block in hits)
            # The last block has no content yet, or there is no room for a copy: compute it whole.
            if hits[-1].block_id in self.unwritten or num_left == 0:
                hits.pop()
        for block in hits:
            if block.ref_count == 0:
                del self.free_queue[block.block_id]
            block.ref_count += 1
            seq.block_table.append(block.block_id)
            seq.prefix_id = block.prefix_id
        seq.num_registered_blocks = len(hits)
        seq.num_computed_tokens = min(len(hits) * self.block_size, seq.num_tokens - 1)

    def _find_prefix(self, seq: Sequence) -> list[Block]:
        """The chain of cached blocks, each verified.

        xxhash is fast and not cryptographic, so equal hashes prove nothing: the tokens must be
        equal too, and the parent must be the very prefix that was matched so far. Its hash would
        not do as proof, since that may be forged as well; hence a number given at registration.
        """
        hits: list[Block] = []
        if not self.enable_prefix_caching:
            return hits
        self._extend_keys(seq, seq.num_tokens)
        parent_id = 0
        for block_hash, content in seq.block_keys:
            block = self.cached.get(block_hash)
            if block is None or block.content != content or block.parent_id != parent_id:
                break
            hits.append(block)
            parent_id = block.prefix_id
        return hits

    def register(self, seq: Sequence, end: int) -> None:
        """Make the full blocks of the tokens [0, end) known to others.

        This happens when a chunk is scheduled, not after it ran: within a forward pass every
        layer writes all keys and values before it attends, so a second sequence of the same step
        may share them already.
        """
        num_full = end // self.block_size
        if not self.enable_prefix_caching or num_full <= seq.num_registered_blocks:
            return
        self._extend_keys(seq, num_full * self.block_size)
        for i in range(seq.num_registered_blocks, num_full):
            block_hash, content = seq.block_keys[i]
            block = self.cached.get(block_hash)
            if block is None or block.content != content or block.parent_id != seq.prefix_id:
                if block is not None:  # a collision, or a prefix whose parent was evicted
                    self._forget(block)
                block = self.blocks[seq.block_table[i]]
                block.block_hash, block.content = block_hash, content
                block.parent_id, block.prefix_id = seq.prefix_id, next(self.prefix_ids)
                self.cached[block_hash] = block
                self.unwritten.add(block.block_id)
            seq.prefix_id = block.prefix_id  # where a twin was first, its block stays the one
        seq.num_registered_blocks = num_full

    def step_done(self) -> None:
        """The forward pass has written what was registered in this step."""
        self.unwritten.clear()

    def _extend_keys(self, seq: Sequence, end: int) -> None:
        """Hash the full blocks of the tokens [0, end) that were not hashed before."""
        keys = seq.block_keys
        size = self.block_size
        for start in range(len(keys) * size, end - size + 1, size):
            content = array("q", seq.token_ids[start:start + size]).tobytes()
            content += seq.request.cache_salt
            keys.append((hash_block(keys[-1][0] if keys else b"", content), content))

    def _forget(self, block: Block) -> None:
        if block.block_hash is not None:
            del self.cached[block.block_hash]
        block.block_hash, block.content = None, b""

    # ---- for tests ---------------------------------------------------------------------------

    def check_invariants(self, sequences: Iterable[Sequence]) -> None:
        """Raise AssertionError if the books do not balance; `sequences` are all the live ones."""
        references = [0] * len(self.blocks)
        for seq in sequences:
            assert seq.num_computed_tokens <= seq.num_tokens
            assert len(seq.block_table) * self.block_size >= seq.num_computed_tokens
            for block_id in seq.block_table:
                references[block_id] += 1
        assert references[0] == 0, "the scratch block was handed out"
        for block, expected in zip(self.blocks, references):
            assert block.ref_count == expected, (block.block_id, block.ref_count, expected)
            if block.block_id:
                assert (block.ref_count == 0) == (block.block_id in self.free_queue)
            if block.block_hash is not None:
                assert self.cached[block.block_hash] is block
                assert block.content
        assert sum(b.block_hash is not None for b in self.blocks) == len(self.cached)
