"""The captured decode step, without capture: static buffers, padding, replay, and a lint."""

import pytest
import torch
from models import make_config, make_engine
from oracles import check_idle, generate, hf_greedy, prompts_of
from torch._subclasses.fake_tensor import FakeTensorMode

from nanopage import SamplingParams
from nanopage.attention import AttentionMetadata, VarlenAttention
from nanopage.layers import CausalLM
from nanopage.model_runner import DecodeGraph

NGRAM = dict(method="ngram", num_speculative_tokens=3, prompt_lookup_min=2, prompt_lookup_max=3)


def static(llm):
    """Use the static-buffer path, with the function itself in place of a captured graph."""
    llm.model_runner.capture_decode(lambda function: function)
    return llm


@pytest.mark.timeout(120)
@pytest.mark.parametrize("max_num_seqs", [1, 3, 7, 20, 50])
def test_static_decode_for_every_batch_size(r_model, max_num_seqs):
    """Padding rows, dirty rows of a larger batch before, and a largest size that is not round."""
    llm = static(make_engine(r_model, max_num_seqs=max_num_seqs, num_blocks=1024))
    graph = llm.model_runner.decode_graph
    assert graph.sizes[-1] == max_num_seqs and graph.sizes == sorted(graph.sizes)
    addresses = [t.data_ptr() for t in (graph.token_ids, graph.context_lens, graph.block_tables)]
    prompts = prompts_of([3 + i % 17 for i in range(max_num_seqs)])
    expected = [hf_greedy(r_model, prompt, 4) for prompt in prompts]
    llm.model_runner.kv_cache.fill_(float("nan"))
    sizes = range(1, max_num_seqs + 1) if max_num_seqs <= 20 else (1, 2, 17, 33, 48, 49, 50)
    for num in [max_num_seqs, *sizes]:
        assert generate(llm, prompts[:num], max_tokens=4) == expected[:num]
    assert addresses == [t.data_ptr() for t in (graph.token_ids, graph.context_lens,
                                                graph.block_tables)]
    check_idle(llm, r_model)


def test_static_decode_long_and_short_contexts(r_model):
    """A length frozen at capture silently drops keys of longer contexts: short, long, short."""
    llm = static(make_engine(r_model))
    for length in (10, 400, 10):
        prompt = prompts_of([length])[0]
        assert generate(llm, [prompt], max_tokens=24) == [hf_greedy(r_model, prompt, 24)]


def test_static_decode_touches_no_other_block(r_model):
    llm = static(make_engine(r_model))
    generate(llm, prompts_of([9, 13]), max_tokens=4)
    mine = llm.add_request(prompts_of([5], seed=3)[0], SamplingParams(temperature=0, max_tokens=9))
    llm.step()
    before = llm.model_runner.kv_cache.clone()
    own = list(llm.scheduler.running[0].block_table)
    llm.step()
    others = [i for i in range(1, before.shape[2]) if i not in own]
    assert torch.equal(before[:, :, others], llm.model_runner.kv_cache[:, :, others])
    llm.abort(mine)


@pytest.fixture
def graph_and_metadata():
    """Graphs of blocks of 4 for up to 4 sequences of 40 tokens; what each forward was given."""
    seen = []

    def forward(token_ids, metadata):
        seen.append(metadata)
        return torch.zeros(len(token_ids), 1)

    return DecodeGraph(forward, 4, 40, 4, torch.device("cpu"), lambda function: function), seen


def test_padding_writes_to_the_scratch_block(graph_and_metadata):
    """A row that pads a batch of three to four wrote to a block that somebody holds."""
    graph, seen = graph_and_metadata
    tables = torch.tensor([[1, 2, 3], [4, 5, 0], [6, 0, 0], [7, 8, 9]], dtype=torch.int32)
    lens = torch.tensor([9, 5, 1, 12], dtype=torch.int32)
    for num_seqs, slots in ((4, [12, 20, 24, 39]), (3, [12, 20, 24, 0])):
        graph.replay(torch.ones(num_seqs, dtype=torch.int32), lens[:num_seqs], tables[:num_seqs])
        assert seen[-1].slot_mapping.tolist() == slots


def test_a_graph_holds_the_longest_sequence(graph_and_metadata):
    """What a graph freezes must do for every later batch, the longest included."""
    graph, seen = graph_and_metadata
    for run in graph.runs.values():
        run()
        assert seen[-1].max_context_len == 40 and seen[-1].block_tables.shape[1] * 4 >= 40


@pytest.mark.parametrize("options", [dict(speculative_config=NGRAM), dict(num_blocks=20)])
def test_static_decode_with_everything_else(model_dir, options):
    path = model_dir("llama", vocab_size=16, initializer_range=0.2)
    llm = static(make_engine(path, **options))
    prompts = prompts_of([9, 17, 30, 5], vocab=16)
    assert generate(llm, prompts, max_tokens=20) == [hf_greedy(path, p, 20) for p in prompts]
    check_idle(llm)


def test_kernels_on_static_buffers(model_dir, kernels):
    """Too narrow a table fails at the last token of max_model_len; a dirty one shows old blocks."""
    path = model_dir("qwen3", max_position_embeddings=1024)
    params = SamplingParams(temperature=0, max_tokens=2, logprobs=1)
    for backend in ("flash", "varlen"):
        llm = static(make_engine(path, dtype="bfloat16", block_size=256, num_blocks=12,
                                 max_model_len=512, max_num_seqs=3, attention_backend=backend))
        plain = make_engine(path, dtype="bfloat16", block_size=256, num_blocks=12,
                            max_model_len=512, attention_backend=backend)
        for lengths in ([510], [511], [400, 20], [20, 30, 40], [5]):
            prompts = prompts_of(lengths)
            for a, b in zip(llm.generate(prompts, params, use_tqdm=False),
                            plain.generate(prompts, params, use_tqdm=False)):
                assert a.outputs[0].token_ids == b.outputs[0].token_ids
        with pytest.raises(ValueError, match="max_model_len=512"):
            llm.generate(prompts_of([512]), params, use_tqdm=False)
        check_idle(llm)


# ---- a lint for capture ----------------------------------------------------------------------


def run_captured_body(config, body=lambda hidden: hidden):
    """Trace a decode step on fake CUDA tensors: host synchronisation raises."""
    backend = VarlenAttention()
    model = CausalLM(config, backend, 512, torch.device("cpu"), torch.bfloat16)
    for layer in model.model["layers"]:
        layer.self_attn.fuse()
    head_dim = model.model["layers"][0].self_attn.head_dim
    size, device = 4, torch.device("cuda")
    with FakeTensorMode(), torch.inference_mode():
        with device:
            weights = {name: torch.empty(weight.shape, dtype=torch.bfloat16)
                       for name, weight in model.named_parameters()}
            model.cos, model.sin = torch.empty(2, 512, 1, head_dim, dtype=torch.bfloat16).unbind(0)
            cache = torch.empty(3, 2, 5, *backend.block_shape(256, 2, head_dim),
                                dtype=torch.bfloat16)
            borders = torch.arange(size + 1, dtype=torch.int32)
            lens, tables = torch.ones(size).int(), torch.zeros(size, 2).int()
        metadata = AttentionMetadata.build(borders, lens, tables, size, 256, max_query_len=1,
                                           max_context_len=512, query_len=1)
        return body(torch.func.functional_call(model, weights, (lens, cache, metadata)))


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_captured_body_never_waits_for_the_device(family):
    config = make_config(family)
    config.head_dim = getattr(config, "head_dim", None) or 16  # as Checkpoint fills it in
    assert run_captured_body(config).shape == (4, 64)
    for sync in (lambda x: x.sum().item(), lambda x: x.masked_select(x > 0),
                 lambda x: x + torch.ones(64, 4).T, lambda x: x.nonzero(), lambda x: x.tolist()):
        with pytest.raises(Exception):  # noqa: B017  (each is refused by another exception)
            run_captured_body(config, sync)
