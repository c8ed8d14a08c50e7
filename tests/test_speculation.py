"""Drafts make a sequence lag by more than one, and never change an answer."""

import pytest
import torch
from models import make_engine, make_table_model
from oracles import check_idle, check_logprobs, generate, hf_greedy, prompts_of

from nanopage import SamplingParams, demo
from nanopage.proposals import PromptLookup
from nanopage.sequence import Request, Sequence

NGRAM = dict(method="ngram", num_speculative_tokens=4, prompt_lookup_min=2, prompt_lookup_max=4)


def speculating(model, **options):
    return make_engine(model, **{**dict(speculative_config=NGRAM), **options})


def repetitive_prompts():
    phrase = prompts_of([5], seed=77)[0]
    return [sum((phrase + noise for noise in prompts_of([2] * 4, seed=i)), []) + phrase[:3]
            for i in range(4)] + prompts_of([1, 2, 13])


def propose(token_ids, **changes):
    seq = Sequence(Request("0", 0, 0, None, token_ids, SamplingParams(), 16, 0, frozenset()), 0)
    drafter = PromptLookup(**{**NGRAM, **changes})
    return drafter.propose(seq, 9), drafter, seq


def test_drafts():
    assert propose([1, 2, 3, 4, 5, 1, 2])[0] == [3, 4, 5, 1]
    assert propose([1, 2, 9, 8, 1, 2, 7, 6, 1, 2])[0] == [7, 6, 1, 2]  # the latest occurrence
    assert propose([7, 1, 2, 9, 8, 3, 1, 2, 6, 7, 1, 2])[0] == [9, 8, 3, 1]  # the longest n first
    assert propose([1, 2, 3, 4])[0] == [] and propose([5])[0] == [] and propose([5, 5])[0] == []
    assert propose([5, 5, 5])[0] == [5]
    assert propose([1, 2, 3, 1, 2], num_speculative_tokens=1)[0] == [3]
    draft, drafter, seq = propose([1, 2, 3, 4, 5, 1, 2])
    seq.token_ids += [3, 9, 1, 2]
    assert drafter.propose(seq, 2) == [3, 9]  # the index follows the text


def test_among_many_a_draft_must_be_sure():
    """Rejected drafts took a third of the speed from sixteen sequences of prose."""
    _, drafter, seq = propose([1, 2, 3, 4, 5, 6, 7, 8, 1, 2])
    seq.token_ids += [3, 4]
    assert drafter.propose(seq, 9, num_running=7) == []  # two guesses came true so far
    seq.token_ids += [5]
    assert drafter.propose(seq, 9, num_running=7) == [6, 7, 8, 1]
    seq.token_ids += [6, 9]
    assert drafter.propose(seq, 9, num_running=5) == []  # the 9 was not guessed
    seq.token_ids += [1, 2]
    assert drafter.propose(seq, 9, num_running=5) == []
    assert drafter.propose(seq, 9, num_running=4) == [3, 4, 5, 6]  # among few, always


@pytest.mark.parametrize("options", [
    dict(), dict(block_size=1), dict(block_size=16), dict(max_num_batched_tokens=9),
    dict(num_blocks=24), dict(num_blocks=24, enable_prefix_caching=False, max_num_seqs=3),
])
def test_greedy_is_unchanged(model_dir, options):
    """Speculation changed the greedy answer: drafting and plain requests in one batch, twice."""
    # Few tokens and flat weights: the model repeats itself, so drafts are made and often wrong.
    path = model_dir("llama", vocab_size=16, initializer_range=0.2)
    prompts = [[token % 16 for token in prompt] for prompt in repetitive_prompts()]
    llm = speculating(path, **options)
    for _ in range(2):
        assert generate(llm, prompts, max_tokens=40) == [hf_greedy(path, p, 40) for p in prompts]
        check_idle(llm)
    metrics = llm.metrics()
    assert 0 < metrics.num_accepted_tokens < metrics.num_draft_tokens


@pytest.mark.parametrize("options", [dict(), dict(num_blocks=40, max_num_batched_tokens=20)])
def test_seeded_sampling_is_unchanged(model_dir, options):
    path = model_dir("llama", vocab_size=16, initializer_range=0.2)
    prompts = [[token % 16 for token in prompt] for prompt in repetitive_prompts()]
    params = [SamplingParams(n=n, seed=i, temperature=0.7, top_p=0.9, max_tokens=30, logprobs=1,
                             min_tokens=i, stop_token_ids=[3])
              for i, n in enumerate((1, 4, 2, 1, 1, 3, 1))]
    expected = make_engine(path).generate(prompts, params, use_tqdm=False)
    llm = speculating(path, **options)
    got = llm.generate(prompts, params, use_tqdm=False)
    for prompt, a, b in zip(prompts, expected, got):
        for one, other in zip(a.outputs, b.outputs):
            assert one.token_ids == other.token_ids
            assert (one.finish_reason, one.stop_reason) == (other.finish_reason, other.stop_reason)
            check_logprobs(path, prompt, other)
    assert llm.metrics().num_accepted_tokens > 0
    check_idle(llm)


@pytest.fixture(scope="session")
def cycle(tmp_path_factory):
    """Greedy output is 0 1 2 3 4 5 0 1 ..."""
    table = torch.zeros(8, 8)
    for token in range(6):
        table[token, (token + 1) % 6] = 9.0
    return make_table_model(tmp_path_factory.mktemp("cycle"), table, vocab_size=8,
                            eos_token_id=None)


def test_full_acceptance(cycle):
    """With all drafts right and accepted, the steps fall to about a fifth."""
    llm = speculating(cycle)
    tokens = generate(llm, [[0, 1, 2, 3, 4, 5, 0]], max_tokens=100)[0]
    assert tokens == [(1 + i) % 6 for i in range(100)]
    assert llm.metrics().num_steps <= 22
    assert llm.metrics().num_draft_tokens == llm.metrics().num_accepted_tokens
    check_idle(llm)


def test_limits_hold(cycle):
    """Drafts went beyond the model's length, the budget, or the blocks that were free."""
    prompt = [i % 6 for i in range(27)]
    eight = {**NGRAM, "num_speculative_tokens": 8}
    llm = speculating(cycle, max_model_len=32, speculative_config=eight)
    completion = llm.generate(prompt, SamplingParams(temperature=0, max_tokens=99), False)[0]
    assert completion.outputs[0].token_ids == [3, 4, 5, 0, 1]
    assert completion.outputs[0].finish_reason == "length"
    assert llm.metrics().num_steps == 2  # one token, then one and three drafts
    llm = speculating(cycle, max_num_batched_tokens=4, speculative_config=eight)
    schedule, sizes = llm.scheduler.schedule, []

    def watched():
        batch = schedule()
        assert batch.num_tokens == sum(seq.num_scheduled_tokens for seq in batch.sequences)
        sizes.append(batch.num_tokens)
        return batch

    llm.scheduler.schedule = watched
    expected = [(3 + i) % 6 for i in range(20)]
    assert generate(llm, [prompt] * 2, max_tokens=20) == [expected] * 2
    assert max(sizes) == 4
    for num_blocks in (12, 13, 24, 25):  # one sequence or two fill the pool exactly
        num_prompts = num_blocks // 12
        llm = speculating(cycle, num_blocks=num_blocks, speculative_config=eight,
                          enable_prefix_caching=False)
        assert generate(llm, [prompt] * num_prompts, max_tokens=20) == [expected] * num_prompts
        assert llm.metrics().num_preemptions == 0 and llm.metrics().num_accepted_tokens > 0
        check_idle(llm)


def test_blocks_of_rejected_drafts_are_given_back(model_dir):
    path = model_dir("llama", vocab_size=16, initializer_range=0.2)
    llm = speculating(path, block_size=1)
    prompt = [token % 16 for token in repetitive_prompts()[0]]
    llm.add_request(prompt, SamplingParams(temperature=0, max_tokens=40))
    while llm.has_unfinished_requests():
        llm.step()
        for seq in llm.scheduler.running:
            assert len(seq.block_table) == seq.num_computed_tokens
    assert llm.metrics().num_draft_tokens > llm.metrics().num_accepted_tokens


def test_rejected_drafts_are_not_cached(model_dir):
    """Rejected drafts were cached under the key of tokens that were never there."""
    path = model_dir("llama", vocab_size=16, initializer_range=0.2)
    for prompt in repetitive_prompts()[:4]:
        prompt = [token % 16 for token in prompt]
        llm = speculating(path)
        execute, rejected = llm.model_runner.execute, []

        def watched(batch, execute=execute, rejected=rejected):
            drafts = [list(seq.token_ids) + seq.draft_token_ids for seq in batch.sequences
                      if seq.draft_token_ids]
            rejected += drafts
            return execute(batch)

        llm.model_runner.execute = watched
        output = generate(llm, [prompt], max_tokens=24)[0]
        assert rejected
        for follow_up in [*(ids + [1, 2, 3, 4, 5] for ids in rejected),
                          prompt + output + [1, 2, 3, 4, 5]]:
            assert generate(llm, [follow_up], max_tokens=6) == [hf_greedy(path, follow_up, 6)]
        check_idle(llm)


@pytest.mark.parametrize("filters, expected", [
    (dict(), [0.4, 0.3, 0.2, 0.1]), (dict(top_k=3), [4 / 9, 3 / 9, 2 / 9, 0]),
    (dict(top_p=0.65), [4 / 7, 3 / 7, 0, 0]),
])
def test_distribution_is_kept(tmp_path, filters, expected):
    table = torch.full((8, 8), -60.0)
    table[:, :4] = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()
    path = make_table_model(tmp_path, table, vocab_size=8, eos_token_id=None)
    llm = speculating(path, num_blocks=1024, max_num_seqs=1)  # alone, each drafts whatever it can
    outputs = llm.generate([[0, 1, 0, 1]] * 20, SamplingParams(max_tokens=100, **filters), False)
    assert llm.metrics().num_accepted_tokens > 100
    counts = torch.zeros(8)
    for output in outputs:
        counts += torch.bincount(torch.tensor(output.outputs[0].token_ids), minlength=8)
    for token_id, p in enumerate(expected + [0] * 4):
        assert abs(counts[token_id] - 2000 * p) <= 4 * (2000 * p * (1 - p)) ** 0.5


def test_stops_inside_a_draft(cycle, text_model, script):
    llm = speculating(cycle)
    params = SamplingParams(temperature=0, max_tokens=50, stop_token_ids=[3], min_tokens=9)
    completion = llm.generate([[0, 1, 2, 3, 4, 5, 0, 1]], params, use_tqdm=False)[0].outputs[0]
    assert completion.token_ids == [2, 4, 5, 0, 1, 2, 4, 5, 0, 1, 2, 3] or (
        completion.token_ids[-1] == 3 and completion.token_ids.count(3) == 1)
    check_idle(llm)
    llm = speculating(text_model)
    script("abcabcabcabcabXcabc")
    completion = llm.generate("p", SamplingParams(temperature=0, max_tokens=19, stop="bXc"),
                              use_tqdm=False)[0].outputs[0]
    assert completion.text == "abcabcabcabca" and completion.stop_reason == "bXc"
    pieces = list(llm.stream("p", SamplingParams(temperature=0, max_tokens=19, stop="bXc")))
    assert "".join(piece.text for piece in pieces) == completion.text
    assert llm.metrics().num_accepted_tokens > 0
    check_idle(llm)


@pytest.mark.parametrize("bad", [
    "ngram", {}, dict(method="eagle"), dict(method="ngram"), {**NGRAM, "model": "x"},
    {**NGRAM, "num_speculative_tokens": 0}, {**NGRAM, "prompt_lookup_min": 0},
    {**NGRAM, "prompt_lookup_max": 1},
])
def test_bad_settings(r_model, bad):
    with pytest.raises(ValueError, match="speculative|prompt_lookup"):
        speculating(r_model, speculative_config=bad)


@pytest.mark.timeout(300)
def test_on_a_real_model():
    path = str(demo.model_path())
    text = "def area(width, height):\n    return width * height\n\n"
    llm = speculating(path, block_size=16, num_blocks=512, max_num_batched_tokens=64)
    prompts = llm.tokenizer(["Repeat this code:\n" + text * 3, "Once upon a time"])["input_ids"]
    expected = [hf_greedy(path, prompt, 64) for prompt in prompts]
    assert generate(llm, prompts, max_tokens=64) == expected
    metrics = llm.metrics()
    num_sampled = metrics.num_generated_tokens - metrics.num_accepted_tokens
    assert metrics.num_generated_tokens / num_sampled > 1.2
    check_idle(llm)
