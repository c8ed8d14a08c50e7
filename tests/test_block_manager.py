"""The allocator alone: random operations with the books checked, and each subtle line proven."""

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from oracles import check_invariants

from nanopage.block_manager import BlockManager
from nanopage.sequence import Request, SamplingParams, Sequence


def new_sequence(token_ids, salt=b"", n=1):
    request = Request(request_id="0", arrival=0, priority=0, prompt=None,
                      prompt_token_ids=list(token_ids), params=SamplingParams(n=n), max_tokens=16,
                      seed=0, end_token_ids=frozenset(), cache_salt=salt)
    return request.sequences[0]


def compute(manager, seq, end=None):
    """What the scheduler does with one sequence in one step; returns the copies."""
    end = seq.num_tokens if end is None else end
    assert manager.num_blocks_needed(seq, end) <= manager.num_free_blocks
    copies = manager.allocate(seq, end)
    manager.register(seq, end)
    manager.unwritten.clear()
    seq.num_computed_tokens = end
    return copies


def start(manager, token_ids, salt=b""):
    seq = new_sequence(token_ids, salt)
    manager.share_prefix(seq)
    return seq


def test_allocation_on_demand():
    manager = BlockManager(8, 4)
    seq = start(manager, range(9))
    compute(manager, seq)
    assert len(seq.block_table) == 3 and manager.num_used_blocks == 3
    for token in range(3):
        seq.token_ids.append(token)
        compute(manager, seq)
        assert len(seq.block_table) == 3
    seq.token_ids.append(3)
    compute(manager, seq)
    assert len(seq.block_table) == 4  # taken when the first token of the block is written
    check_invariants(manager, [seq])
    manager.free(seq)
    assert manager.num_free_blocks == 8


def test_scratch_block_is_never_handed_out():
    manager = BlockManager(3, 2)
    seq = start(manager, range(6))
    compute(manager, seq)
    assert sorted(seq.block_table) == [1, 2, 3] and manager.num_free_blocks == 0


def test_copy_on_write_of_a_shared_part_filled_block():
    """Without a copy, branches of one prompt overwrite each other in the block that all share."""
    manager = BlockManager(8, 4)
    parent = start(manager, range(6))
    compute(manager, parent)
    child = new_sequence(range(6))
    manager.fork(parent, child)
    assert child.block_table == parent.block_table and manager.num_used_blocks == 2
    parent.token_ids.append(7)
    child.token_ids.append(8)
    assert compute(manager, parent) == [(2, 3)]  # the first to write copies
    assert compute(manager, child) == []  # the second is the only owner by now
    assert parent.block_table == [1, 3] and child.block_table == [1, 2]
    check_invariants(manager, [parent, child])
    manager.free(parent)
    assert manager.blocks[1].ref_count == 1


def test_fork_on_a_block_boundary_copies_nothing():
    manager = BlockManager(8, 4)
    parent = start(manager, range(8))
    compute(manager, parent)
    child = new_sequence(range(8))
    manager.fork(parent, child)
    for seq in (parent, child):
        seq.token_ids.append(9)
        assert compute(manager, seq) == []
    assert parent.block_table[:2] == child.block_table[:2]
    assert parent.block_table[2] != child.block_table[2]


def test_prefix_hit_and_unequal_parent():
    """Fails if the parent is left out of the hash: equal blocks after unequal ones would match."""
    manager = BlockManager(16, 4)
    first = start(manager, [1, 1, 1, 1, 5, 6, 7, 8, 9])
    compute(manager, first)
    second = start(manager, [2, 2, 2, 2, 5, 6, 7, 8, 9])
    assert second.num_computed_tokens == 0
    compute(manager, second)
    third = start(manager, [2, 2, 2, 2, 5, 6, 7, 8, 3])
    assert third.block_table == second.block_table[:2] and third.num_computed_tokens == 8
    assert first.prefixes[1].hash != second.prefixes[1].hash
    check_invariants(manager, [first, second, third])


def test_full_hit_computes_one_token_in_a_copy():
    """Fails if a full hit computes nothing, or if it writes into the cached block."""
    manager = BlockManager(16, 4)
    first = start(manager, range(8))
    compute(manager, first)
    manager.free(first)
    second = start(manager, range(8))
    assert second.num_computed_tokens == 7
    cached = second.block_table[1]
    copies = compute(manager, second)
    assert copies == [(cached, second.block_table[1])] and second.block_table[1] != cached
    assert manager.blocks[cached].prefix is not None
    check_invariants(manager, [second])


def test_full_hit_without_room_for_the_copy():
    """A request as large as the pool, twice: the second must take its own last block anew."""
    manager = BlockManager(2, 4)
    first = start(manager, range(8))
    compute(manager, first)
    manager.free(first)
    second = start(manager, range(8))
    assert second.num_computed_tokens == 4
    assert compute(manager, second) == [] and manager.num_free_blocks == 0


def test_full_hit_on_a_block_that_is_still_unwritten():
    """The trap: such a block may be attended to in its step, but not copied before it."""
    manager = BlockManager(16, 4)
    first = start(manager, range(8))
    manager.allocate(first, 8)
    manager.register(first, 8)
    twin = start(manager, range(8))
    assert twin.num_computed_tokens == 4 and twin.block_table == first.block_table[:1]
    manager.unwritten.clear()
    late = start(manager, range(8))
    assert late.num_computed_tokens == 7


def test_blocks_are_freed_tail_first():
    """Freed head first, a chain loses its head to the next request, and with it all the rest."""
    manager = BlockManager(4, 4)
    first = start(manager, range(13))
    compute(manager, first)
    manager.free(first)
    other = start(manager, [50, 51, 52])
    compute(manager, other)
    manager.free(other)
    again = start(manager, range(13))
    assert again.num_computed_tokens == 12  # the part-filled block was reused first
    compute(manager, again)
    manager.free(again)
    longer = start(manager, [60, 61, 62, 63, 64, 65])
    compute(manager, longer)
    manager.free(longer)
    assert start(manager, range(13)).num_computed_tokens == 8  # then the deepest full one


def test_part_filled_blocks_do_not_push_out_cached_ones():
    """A block that nobody can hit must not push out a cached one, however old that is."""
    manager = BlockManager(6, 4)
    first = start(manager, range(9))
    compute(manager, first)
    manager.free(first)
    for start_id in range(20, 40, 4):
        short = start(manager, [start_id, start_id + 1])
        compute(manager, short)
        manager.free(short)
    assert start(manager, range(9)).num_computed_tokens == 8


def test_match_stops_at_a_hole():
    manager = BlockManager(16, 4)
    first = start(manager, range(13))
    compute(manager, first)
    hole = manager.blocks[first.block_table[0]]
    del manager.cached[hole.prefix.hash]
    hole.prefix = None
    assert start(manager, range(13)).num_computed_tokens == 0


def test_least_recently_used_goes_first():
    manager = BlockManager(4, 4)
    for tokens in ([1] * 4, [2] * 4, [3] * 4, [4] * 4):
        seq = start(manager, tokens)
        compute(manager, seq)
        manager.free(seq)
    touched = start(manager, [1] * 4 + [9])  # a hit takes the block out of the queue's middle
    assert touched.num_computed_tokens == 4
    manager.free(touched)
    seq = start(manager, [5] * 4)
    compute(manager, seq)
    hits = {t: start(manager, [t] * 4 + [0]).num_computed_tokens for t in (1, 2, 3, 4)}
    assert hits == {1: 4, 2: 0, 3: 4, 4: 4}


def test_a_hit_is_verified(monkeypatch):
    """Fails if equal hashes are believed: tokens, and the parent's identity, must match too."""
    monkeypatch.setattr("nanopage.block_manager.hash_block", lambda parent, content: b"same")
    manager = BlockManager(16, 2)
    first = start(manager, [1, 2, 3, 4, 5])
    compute(manager, first)
    assert start(manager, [7, 8, 3, 4, 5]).num_computed_tokens == 0


def test_a_forged_parent_does_not_pass(monkeypatch):
    """Two first blocks with one hash, then equal second blocks with equal "parent hashes"."""
    monkeypatch.setattr("nanopage.block_manager.hash_block",
                        lambda parent, content: bytes([len(parent) > 0, content[0] > 90]))
    manager = BlockManager(32, 2)
    forged = start(manager, [7, 8, 3, 4, 95, 96, 9])
    compute(manager, forged)
    honest = start(manager, [1, 2, 9])  # its first block takes the place of the forged one
    compute(manager, honest)
    longer = start(manager, [1, 2, 3, 4, 95, 96, 9])
    assert longer.block_table == honest.block_table[:1]
    compute(manager, longer)
    check_invariants(manager, [forged, honest, longer])


def test_salt_and_twins():
    manager = BlockManager(16, 4)
    first = start(manager, range(9), salt=b"a")
    compute(manager, first)
    assert start(manager, range(9), salt=b"b").num_computed_tokens == 0
    manager = BlockManager(16, 4)
    twins = [new_sequence(range(9)), new_sequence(range(9))]  # neither saw the other's blocks
    for seq in twins:
        compute(manager, seq)
    assert len(manager.cached) == 2
    assert start(manager, range(9)).block_table == twins[0].block_table[:2]


def test_hashing_is_done_once():
    manager = BlockManager(16, 4)
    seq = start(manager, range(16))
    compute(manager, seq)
    prefixes = list(seq.prefixes)
    manager.free(seq)
    manager.share_prefix(seq)
    assert all(a is b for a, b in zip(prefixes, seq.prefixes)) and len(seq.prefixes) == 4


class Allocator(RuleBasedStateMachine):
    """Random starts, chunks, appends, forks, frees; `contents` plays the device's memory."""

    @initialize(num_blocks=st.integers(4, 24), block_size=st.integers(1, 4), caching=st.booleans())
    def build(self, num_blocks, block_size, caching):
        self.manager = BlockManager(num_blocks, block_size, caching)
        self.live: list[Sequence] = []
        self.contents = {}  # slot -> the prefix of tokens that its K and V were computed from

    def slot(self, seq, position):
        size = self.manager.block_size
        return seq.block_table[position // size] * size + position % size

    def write(self, seq, end):
        if self.manager.num_blocks_needed(seq, end) > self.manager.num_free_blocks:
            return
        size = self.manager.block_size
        for source, destination in self.manager.allocate(seq, end):
            for offset in range(size):
                self.contents[destination * size + offset] = self.contents.get(
                    source * size + offset)
        for position in range(seq.num_computed_tokens, end):
            block = self.manager.blocks[seq.block_table[position // size]]
            assert block.ref_count == 1 and block.prefix is None, "wrote to a shared block"
            self.contents[self.slot(seq, position)] = tuple(seq.token_ids[:position + 1])
        self.manager.register(seq, end)
        self.manager.unwritten.clear()
        seq.num_computed_tokens = end

    @rule(prefix=st.integers(0, 2), tail=st.lists(st.integers(0, 1), max_size=6))
    def begin(self, prefix, tail):
        seq = start(self.manager, ([0, 1, 0, 0, 1, 1, 0, 1] * prefix + tail) or [0])
        self.live.append(seq)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def chunk(self, data):
        seq = data.draw(st.sampled_from(self.live))
        lag = seq.num_tokens - seq.num_computed_tokens
        if lag:
            self.write(seq, seq.num_computed_tokens + data.draw(st.integers(1, lag)))

    @precondition(lambda self: self.live)
    @rule(data=st.data(), token=st.integers(0, 1))
    def append(self, data, token):
        data.draw(st.sampled_from(self.live)).token_ids.append(token)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def fork(self, data):
        parent = data.draw(st.sampled_from(self.live))
        child = new_sequence(parent.token_ids)
        self.manager.fork(parent, child)
        self.live.append(child)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def free(self, data):
        seq = data.draw(st.sampled_from(self.live))
        self.live.remove(seq)
        self.manager.free(seq)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def preempt_and_return(self, data):
        seq = data.draw(st.sampled_from(self.live))
        self.manager.free(seq)
        self.manager.share_prefix(seq)

    @invariant()
    def books_balance(self):
        if hasattr(self, "manager"):
            check_invariants(self.manager, self.live)
            for seq in self.live:
                for position in range(seq.num_computed_tokens):
                    assert self.contents[self.slot(seq, position)] == tuple(
                        seq.token_ids[:position + 1])


TestAllocator = Allocator.TestCase
TestAllocator.pytestmark = [pytest.mark.timeout(120)]
