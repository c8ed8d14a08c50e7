"""One oracle over all features: greedy tokens are transformers' own, whatever the settings."""

import pytest
import torch
from models import make_engine, make_model
from oracles import check_idle, check_logprobs, generate, hf_greedy, hf_logprobs, prompts_of

from nanopage import SamplingParams
from nanopage.scheduler import Scheduler

LLAMA3 = dict(rope_type="llama3", rope_theta=10000.0, factor=8.0, low_freq_factor=1.0,
              high_freq_factor=4.0, original_max_position_embeddings=32)
YARN = dict(rope_type="yarn", rope_theta=10000.0, factor=4.0, original_max_position_embeddings=64)
LINEAR = dict(rope_type="linear", rope_theta=10000.0, factor=2.0)
VARIANTS = {
    "llama": ("llama", {}),
    "llama-tied": ("llama", dict(tie_word_embeddings=True)),
    "llama-biases": ("llama", dict(attention_bias=True, mlp_bias=True)),
    "llama-llama3": ("llama", dict(rope_parameters=LLAMA3)),
    "llama-yarn": ("llama", dict(rope_parameters=YARN)),
    "llama-linear": ("llama", dict(rope_parameters=LINEAR)),
    "llama-mha": ("llama", dict(num_key_value_heads=4)),
    "llama-mqa": ("llama", dict(num_key_value_heads=1)),
    "mistral": ("mistral", {}),
    "mistral-head-dim": ("mistral", dict(head_dim=32)),
    "mistral-window": ("mistral", dict(sliding_window=8)),
    "qwen2": ("qwen2", {}),
    "qwen2-window": ("qwen2", dict(use_sliding_window=True, sliding_window=6,
                                   max_window_layers=1)),
    "qwen2-window-pattern": ("qwen2", dict(
        use_sliding_window=True, sliding_window=6,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"])),
    "qwen3": ("qwen3", {}),
    "qwen3-biases-tied": ("qwen3", dict(attention_bias=True, tie_word_embeddings=True)),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_family(model_dir, variant):
    """A bias, norm, head size, window or RoPE setting left out changes nearly every token."""
    family, changes = VARIANTS[variant]
    path = model_dir(family, **changes)
    prompts = prompts_of([1, 5, 17, 40])
    expected = [hf_greedy(path, prompt, 24) for prompt in prompts]
    for options in (dict(), dict(block_size=16, max_num_batched_tokens=7)):
        llm = make_engine(path, **options)
        assert generate(llm, prompts, max_tokens=24) == expected
        assert generate(llm, prompts, max_tokens=24) == expected  # from the prefix cache
        check_idle(llm)


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("block_size", [1, 4, 16, 256])
def test_block_sizes_and_budgets(r_model, block_size, caching):
    prompts = prompts_of([1, 3, 4, 5, 16, 21, 33, 64])
    expected = [hf_greedy(r_model, prompt, 20) for prompt in prompts]
    for budget in (1, 2, 5, 16, 64, 512):
        llm = make_engine(r_model, block_size=block_size, max_num_batched_tokens=budget,
                          enable_prefix_caching=caching, num_blocks=1024 // block_size)
        assert generate(llm, prompts, max_tokens=20) == expected, budget
        check_idle(llm)


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("num_blocks", [14, 20, 40])
def test_small_pools_preempt(r_model, num_blocks, caching):
    prompts = prompts_of([9, 17, 30, 5, 12, 21])
    llm = make_engine(r_model, num_blocks=num_blocks, enable_prefix_caching=caching)
    assert generate(llm, prompts, max_tokens=24) == [hf_greedy(r_model, p, 24) for p in prompts]
    assert llm.metrics().num_preemptions > 0
    check_idle(llm)


def test_boundaries(r_model):
    """A block too few or too many where prompt or completion just fills one: try every length."""
    for caching in (True, False):
        llm = make_engine(r_model, num_blocks=16, enable_prefix_caching=caching)
        most = [0]
        execute = llm.model_runner.execute

        def counted(batch, execute=execute, llm=llm, most=most):
            most[0] = max(most[0], 16 - llm.num_free_blocks())
            return execute(batch)

        llm.model_runner.execute = counted
        for length in range(1, 14):
            prompt = prompts_of([length], seed=length)[0]
            for max_tokens in range(1, 10):
                most[0] = 0
                tokens = generate(llm, [prompt], max_tokens=max_tokens)[0]
                assert tokens == hf_greedy(r_model, prompt, max_tokens)
                assert most[0] <= -(-(length + max_tokens) // 4)
        check_idle(llm)


def test_chunks_do_not_attend_ahead(r_model):
    """A chunk attended to slots not yet written; here they hold NaN, whatever the budget."""
    prompts = [prompts_of([length], seed=length)[0] for length in range(1, 22)]
    expected = [hf_greedy(r_model, prompt, 6) for prompt in prompts]
    for budget in (1, 3, 4, 5, 8, 64):
        llm = make_engine(r_model, max_num_batched_tokens=budget)
        llm.model_runner.kv_cache.fill_(float("nan"))
        assert [generate(llm, [p], max_tokens=6)[0] for p in prompts] == expected, budget
        llm = make_engine(r_model, max_num_batched_tokens=budget)
        llm.model_runner.kv_cache.fill_(float("nan"))
        assert generate(llm, prompts, max_tokens=6) == expected, budget


@pytest.mark.parametrize("budget", [1, 3, 5, 64])
def test_twins(r_model, budget):
    """Equal prompts in one call share blocks that are only written in that very step."""
    for length in range(4, 13):
        prompt = prompts_of([length], seed=length)[0]
        expected = hf_greedy(r_model, prompt, 6)
        for num_twins in (2, 3, 5):
            llm = make_engine(r_model, max_num_batched_tokens=budget)
            llm.model_runner.kv_cache.fill_(float("nan"))
            assert generate(llm, [prompt] * num_twins, max_tokens=6) == [expected] * num_twins
            check_idle(llm)


def test_twins_then_eviction(r_model):
    """A later registration of a prefix displaced the first one, and its eviction then failed."""
    prompt = prompts_of([13])[0]
    for budget in (64, 5):
        llm = make_engine(r_model, num_blocks=24, max_num_batched_tokens=budget)
        assert generate(llm, [prompt] * 3, max_tokens=8) == [hf_greedy(r_model, prompt, 8)] * 3
        fillers = prompts_of([20, 20, 20], seed=9)
        assert generate(llm, fillers, max_tokens=4) == [hf_greedy(r_model, f, 4) for f in fillers]
        assert generate(llm, [prompt], max_tokens=8) == [hf_greedy(r_model, prompt, 8)]
        check_idle(llm, r_model)


def test_full_hits(r_model):
    """A prompt that is cached to its last token has nothing to compute, but needs its logits."""
    for length in range(1, 18):
        llm = make_engine(r_model)
        prompt = prompts_of([length], seed=length)[0]
        for attempt in range(2):
            output = llm.generate(prompt, SamplingParams(temperature=0, max_tokens=6), False)[0]
            assert output.outputs[0].token_ids == hf_greedy(r_model, prompt, 6)
            assert output.num_cached_tokens < length
            if attempt and length >= 5:
                assert 0 < output.num_cached_tokens
            if attempt and length % 4 == 0:
                assert output.num_cached_tokens == length - 1  # one token computed, not a block
        longer = prompt + [3]
        assert generate(llm, [longer], max_tokens=6) == [hf_greedy(r_model, longer, 6)]
        check_idle(llm)


def test_newcomers_leave_room_to_the_running(r_model, monkeypatch):
    """Admitted as soon as they fit, they are soon preempted, and computed again."""
    prompts = prompts_of([4, 20, 9, 13] * 6)
    expected = [hf_greedy(r_model, p, 24) for p in prompts]
    num_computed = []
    for headroom in (0, 32):
        monkeypatch.setattr(Scheduler, "headroom", headroom)
        llm = make_engine(r_model, num_blocks=64, enable_prefix_caching=False)
        num_tokens = count_tokens(llm)
        assert generate(llm, prompts, max_tokens=24) == expected
        assert llm.metrics().num_preemptions > 0
        num_computed.append(sum(num_tokens))
        check_idle(llm)
    assert num_computed[1] < 0.9 * num_computed[0], num_computed


def test_a_newcomer_that_would_fill_the_pool_waits(r_model):
    """Let in without a reserve, it is preempted at once: nobody has a block to grow into."""
    llm = make_engine(r_model, num_blocks=10)
    prompts = prompts_of([4, 32])
    for prompt in prompts:
        llm.add_request(prompt, SamplingParams(temperature=0, max_tokens=8))
        llm.step()
    while llm.has_unfinished_requests():
        llm.step()
    assert llm.metrics().num_preemptions == 0
    check_idle(llm)


def count_tokens(llm):
    """The number of tokens of each step from now on."""
    num_tokens, execute = [], llm.model_runner.execute

    def counted(batch):
        num_tokens.append(batch.num_tokens)
        return execute(batch)

    llm.model_runner.execute = counted
    return num_tokens


def test_forced_hash_collisions(r_model, monkeypatch):
    """With a hash of two values, a hit that is not verified is somebody else's answer."""
    monkeypatch.setattr("nanopage.block_manager.hash_block",
                        lambda parent, content: bytes([sum(parent + content) % 2]))
    shared = prompts_of([8], seed=99)[0]
    prompts = [shared[:4 * (i % 3)] + p for i, p in enumerate(prompts_of([9] * 20))]
    llm = make_engine(r_model, num_blocks=64)
    for _ in range(2):
        assert generate(llm, prompts, max_tokens=6) == [hf_greedy(r_model, p, 6) for p in prompts]
        check_idle(llm)


def test_recompute_after_preemption(r_model):
    """What comes back after preemption was taken for a decode, since it has output tokens."""
    prompts = prompts_of([9, 9])
    llm = make_engine(r_model, num_blocks=6)
    assert generate(llm, prompts, max_tokens=12) == [hf_greedy(r_model, p, 12) for p in prompts]
    assert llm.metrics().num_preemptions > 0
    check_idle(llm)
    prompts = prompts_of([3, 3, 3])
    for caching in (True, False):
        llm = make_engine(r_model, num_blocks=7, max_num_batched_tokens=5,
                          enable_prefix_caching=caching)
        tokens = generate(llm, prompts, max_tokens=20)
        assert tokens == [hf_greedy(r_model, p, 20) for p in prompts]
        assert llm.metrics().num_preemptions > 0
        check_idle(llm)


def test_outgrowing_the_pool(r_model):
    """A request that can never fit waits for ever; it is refused with the numbers instead."""
    llm = make_engine(r_model, num_blocks=4, max_model_len=64)
    with pytest.raises(ValueError, match="num_blocks=4"):
        generate(llm, prompts_of([40]))
    short = [1, 2, 3, 4, 5]
    assert generate(llm, [short], max_tokens=5) == [hf_greedy(r_model, short, 5)]
    prompts = prompts_of([6, 6])
    assert generate(llm, prompts, max_tokens=8) == [hf_greedy(r_model, p, 8) for p in prompts]
    check_idle(llm, r_model)
    llm = make_engine(r_model, num_blocks=2, max_model_len=64)
    prompt = prompts_of([7])[0]
    with pytest.raises(ValueError, match="num_blocks=2"):
        generate(llm, [prompt], max_tokens=6)
    assert generate(llm, [prompt], max_tokens=2) == [hf_greedy(r_model, prompt, 2)]
    check_idle(llm, r_model)


def test_a_common_prefix_is_computed_once(r_model):
    prefix = prompts_of([256])[0]
    prompts = [prefix + tail for tail in prompts_of([5] * 64, seed=1)]
    llm = make_engine(r_model, num_blocks=4096, max_num_batched_tokens=2048)
    plain = make_engine(r_model, num_blocks=8192, enable_prefix_caching=False)
    answers = generate(llm, prompts, max_tokens=8)
    assert answers == generate(plain, prompts, max_tokens=8)
    assert answers[:3] == [hf_greedy(r_model, p, 8) for p in prompts[:3]]
    assert llm.metrics().prefix_hit_tokens >= 63 * 240
    assert llm.metrics().prefix_queried_tokens == 64 * 261


def test_priority_and_starvation(r_model):
    """A decode gets its token in every step, however long the prompt beside it."""
    llm = make_engine(r_model, max_num_batched_tokens=4, max_num_seqs=4)
    first = llm.add_request([1, 2, 3], SamplingParams(temperature=0, max_tokens=20))
    llm.step()
    long = llm.add_request(prompts_of([100])[0], SamplingParams(temperature=0, max_tokens=2),
                           priority=-1)
    counts = []
    while llm.has_unfinished_requests():
        for output in llm.step():
            if output.request_id == first:
                counts.append(len(output.outputs[0].token_ids))
    assert counts == list(range(2, 21)) and long != first
    check_idle(llm)


def test_priority_order(r_model):
    llm = make_engine(r_model, max_num_seqs=1)
    params = SamplingParams(temperature=0, max_tokens=2)
    # Unequal prompts, the shortest with the least priority: a queue by length would show.
    ids = [llm.add_request([1, 2, 3][p:], params, priority=p) for p in (2, 0, 1, 0)]
    ended = []
    while llm.has_unfinished_requests():
        ended += [output.request_id for output in llm.step() if output.finished]
    assert ended == [ids[1], ids[3], ids[2], ids[0]]


def test_cache_salt(r_model):
    prompt = prompts_of([12])[0]
    llm = make_engine(r_model)
    salted = [{"prompt_token_ids": prompt, "cache_salt": salt} for salt in ("a", "b", "a")]
    outputs = [llm.generate(p, SamplingParams(temperature=0), use_tqdm=False)[0] for p in salted]
    assert [output.num_cached_tokens for output in outputs] == [0, 0, 11]
    assert len({tuple(output.outputs[0].token_ids) for output in outputs}) == 1


def test_waste_is_under_a_block_per_sequence(r_model):
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(16, 200, (64,), generator=generator).tolist()
    llm = make_engine(r_model, block_size=16, num_blocks=2048, enable_prefix_caching=False)
    generate(llm, prompts_of(lengths), max_tokens=32)
    # On average half a block of each sequence is empty: 8 of about 124 slots.
    mean_length = sum(lengths) / 64 + 16
    assert llm.metrics().kv_waste == pytest.approx(7.5 / (mean_length + 7.5), rel=0.2)


def test_sampled_logprobs_under_pressure(r_model):
    """Wrong keys under sampling and preemption show in the logprobs, whatever was drawn."""
    prompts = prompts_of([9, 17, 30, 5])
    llm = make_engine(r_model, num_blocks=16, max_num_batched_tokens=9)
    params = SamplingParams(temperature=1.3, seed=3, max_tokens=20, logprobs=2)
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert llm.metrics().num_preemptions > 0
    for prompt, output in zip(prompts, outputs):
        check_logprobs(r_model, prompt, output.outputs[0])


def test_sharded(tmp_path):
    import transformers
    path = make_model(tmp_path / "one", "qwen2")
    model = transformers.AutoModelForCausalLM.from_pretrained(path)
    model.save_pretrained(tmp_path / "many", max_shard_size="60KB")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 3
    prompts = prompts_of([5, 20])
    llm = make_engine(str(tmp_path / "many"))
    assert generate(llm, prompts, max_tokens=16) == [hf_greedy(path, p, 16) for p in prompts]


def test_prompt_logits_in_bfloat16(model_dir):
    path = model_dir("llama")
    prompt = prompts_of([12])[0]
    llm = make_engine(path, dtype="bfloat16")
    params = SamplingParams(temperature=0, max_tokens=1, logprobs=-1)
    completion = llm.generate(prompt, params, use_tqdm=False)[0].outputs[0]
    expected = hf_logprobs(path, prompt, completion.token_ids, torch.bfloat16)
    got = torch.tensor([completion.logprobs[0][i].logprob for i in range(128)])
    assert (got - expected[0]).abs().max() < 0.35 and len(completion.logprobs[0]) == 128
