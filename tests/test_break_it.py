"""Each subtle line matters: change it, and the test that is named beside it fails.

`MUTATIONS` is the one place where they stand; README's table "Break it" is made of it. To print the
table: python tests/test_break_it.py
"""

import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parent.parent
pytestmark = [pytest.mark.break_it, pytest.mark.timeout(240)]


class Mutation(NamedTuple):
    """`old` stands once in nanopage/`file`; with `new` in its place `test` fails, and `why`."""

    file: str
    old: str
    new: str
    test: str
    why: str


MUTATIONS = [
    Mutation("block_manager.py", 'hash_block(parent.hash if parent else b"", content)',
             'hash_block(b"", content)',
             "test_block_manager.py::test_prefix_hit_and_unequal_parent",
             "The hash forgets the parent: equal blocks after unequal beginnings have one hash, "
             "and push each other out of the cache."),
    Mutation("block_manager.py", "min(len(hits) * self.block_size, seq.num_tokens - 1)",
             "len(hits) * self.block_size",
             "test_block_manager.py::test_full_hit_computes_one_token_in_a_copy",
             "A full hit computes nothing: there are no logits to sample the first token from."),
    Mutation("block_manager.py", "seq.block_table.pop()", "seq.block_table.pop(0)",
             "test_block_manager.py::test_blocks_are_freed_tail_first",
             "Blocks are freed head first: the head of a prefix is evicted first, and without it "
             "the rest cannot be found."),
    Mutation("block_manager.py", "block.ref_count > 1 or block.prefix is not None",
             "block.prefix is not None",
             "test_block_manager.py::test_copy_on_write_of_a_shared_part_filled_block",
             "A shared block is written in place: branches overwrite each other's keys."),
    Mutation("block_manager.py", "block.ref_count > 1 or block.prefix is not None",
             "block.ref_count > 1",
             "test_block_manager.py::test_full_hit_computes_one_token_in_a_copy",
             "A cached block is written in place: what others may find at any time changes under "
             "them."),
    Mutation("block_manager.py",
             "if found.content != own.content or found.parent is not own.parent:", "if False:",
             "test_block_manager.py::test_a_hit_is_verified",
             "A hit is believed for its hash alone: a collision is somebody else's answer."),
    Mutation("block_manager.py",
             "if found.content != own.content or found.parent is not own.parent:",
             "if found.content != own.content:",
             "test_block_manager.py::test_a_forged_parent_does_not_pass",
             "Only the block's own tokens are compared: a forged hash of the parent passes."),
    Mutation("block_manager.py", "if hits[-1] in self.unwritten or num_left == 0:",
             "if num_left == 0:",
             "test_block_manager.py::test_full_hit_on_a_block_that_is_still_unwritten",
             "A block that was registered in this step is copied before the forward pass writes "
             "it: the copy is garbage."),
    Mutation("block_manager.py", "if hits[-1] in self.unwritten or num_left == 0:",
             "if hits[-1] in self.unwritten:",
             "test_block_manager.py::test_full_hit_without_room_for_the_copy",
             "A full hit that fills the pool wants one block more, for its copy: it waits for "
             "ever."),
    Mutation("block_manager.py", "del self.free_queue[block.block_id]", "pass",
             "test_block_manager.py::test_full_hit_computes_one_token_in_a_copy",
             "A hit leaves its block in the free queue: it is handed out a second time."),
    Mutation("block_manager.py", "self.free_queue.move_to_end(block.block_id, last=False)", "pass",
             "test_block_manager.py::test_part_filled_blocks_do_not_push_out_cached_ones",
             "Blocks that nobody can hit queue up behind the cached ones, and push them out."),
    Mutation("scheduler.py", "seq.num_computed_tokens -= len(sampled) - num_kept", "pass",
             "test_speculation.py::test_blocks_of_rejected_drafts_are_given_back",
             "Rejected drafts count as computed: the keys of tokens that were never there stay."),
    Mutation("scheduler.py", "self.block_manager.trim(seq)", "pass",
             "test_speculation.py::test_blocks_of_rejected_drafts_are_given_back",
             "The blocks that rejected drafts took are kept: blocks without a token."),
    Mutation("scheduler.py", "batch.num_tokens - (len(unserved) - 1)", "batch.num_tokens",
             "test_equals_transformers.py::test_priority_and_starvation",
             "A long prompt takes the whole budget: those behind it in order get no token."),
    Mutation("scheduler.py", "headroom: ClassVar[int] = 32", "headroom: ClassVar[int] = 0",
             "test_equals_transformers.py::test_a_newcomer_that_would_fill_the_pool_waits",
             "Whoever fits is admitted: in the next steps the running have no block to grow into, "
             "and the newcomer is preempted."),
    Mutation("sampler.py", "column([row.uniform for row in rows])",
             "column([(i + 0.5) / len(rows) for i in range(len(rows))])",
             "test_sampling.py::test_seeded_request_is_a_pure_function",
             "Random numbers go by the place in the batch: a seeded text depends on who runs "
             "beside it."),
    Mutation("model_runner.py", "(self.block_tables[:, :width], block_tables, 0)",
             "(self.block_tables[:, :width], block_tables, 1)",
             "test_decode_graph.py::test_padding_writes_to_the_scratch_block",
             "The padding of a captured batch writes to block 1 instead of block 0: into the cache "
             "of whoever holds it."),
    Mutation("model_runner.py", "max_context_len=self.max_model_len",
             "max_context_len=self.block_size",
             "test_decode_graph.py::test_a_graph_holds_the_longest_sequence",
             "A graph is captured for too small a length: the kernel drops the keys behind it, and "
             "raises nothing."),
    Mutation("attention.py", "hidden = (distances < 0)", "hidden = (distances < -1)",
             "test_equals_transformers.py::test_chunks_do_not_attend_ahead",
             "A query sees one key too many, in a slot that the prompt has not written yet."),
]


def table():
    rows = [f"| `{m.file}` | `{m.old}` → `{m.new}` | {m.why} | `{m.test}` |" for m in MUTATIONS]
    return "\n".join(["| file | change | what goes wrong | the test that fails |",
                      "| --- | --- | --- | --- |", *rows])


def run_copy(folder, mutation, names):
    """The named tests on a copy of package and tests, with one change or none."""
    ignored = shutil.ignore_patterns("__pycache__")
    for part in ("nanopage", "tests"):
        shutil.copytree(ROOT / part, folder / part, ignore=ignored)
    shutil.copy(ROOT / "pyproject.toml", folder)
    if mutation is not None:
        file = folder / "nanopage" / mutation.file
        source = file.read_text()
        assert source.count(mutation.old) == 1, f"{mutation.old} must stand once in the file"
        file.write_text(source.replace(mutation.old, mutation.new))
    check = "import sys, nanopage, pytest; assert nanopage.__file__.startswith(sys.argv[1]); "
    return subprocess.run(
        [sys.executable, "-c", check + "sys.exit(pytest.main(sys.argv[2:]))", str(folder),
         "-q", "-p", "no:cacheprovider", *(f"tests/{name}" for name in names)],
        cwd=folder, env={**os.environ, "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True)


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """What came of each mutation, and last of none; as many at once as there are cores."""
    names = list(dict.fromkeys(mutation.test for mutation in MUTATIONS))
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        runs = [pool.submit(run_copy, tmp_path_factory.mktemp("copy"), None, names)]
        runs += [pool.submit(run_copy, tmp_path_factory.mktemp("copy"), mutation, [mutation.test])
                 for mutation in MUTATIONS]
        unchanged, *mutated = [run.result() for run in runs]
    return [*mutated, unchanged]


def test_without_mutations_all_pass(results):
    assert results[-1].returncode == 0, results[-1].stdout + results[-1].stderr


@pytest.mark.parametrize("number", range(len(MUTATIONS)))
def test_each_is_noticed(results, number):
    result = results[number]
    # 1: tests ran and failed; a file that cannot be imported gives another status.
    assert result.returncode == 1, result.stdout + result.stderr
    assert f"FAILED tests/{MUTATIONS[number].test}" in result.stdout, result.stdout


if __name__ == "__main__":
    print(table())
