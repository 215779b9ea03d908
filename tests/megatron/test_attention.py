"""The core attention alone, in float64, against dense softmax over each sequence; what it refuses."""

from __future__ import annotations

import math
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from tests.rank_pool import run_ranks

pytestmark = [pytest.mark.megatron, pytest.mark.distributed]

LENGTHS = (16, 8, 32, 8)
SCALE = 0.3


def make_problem(batch=1, heads=4, query_groups=2, dim=3, dtype=torch.float64):
    generator = torch.Generator().manual_seed(4)
    shape = (sum(LENGTHS), batch)
    return [
        torch.randn(*shape, count, dim, dtype=torch.float64, generator=generator).to(dtype)
        for count in (heads, query_groups, query_groups, heads)
    ]


def dense(query, key, value):
    """Softmax over the whole row with everything masked but one's own sequence up to oneself."""
    segment_t = torch.arange(len(LENGTHS)).repeat_interleave(torch.tensor(LENGTHS))
    sees_tt = (segment_t[:, None] == segment_t) & torch.ones(len(segment_t), len(segment_t)).tril().bool()
    key, value = (x.repeat_interleave(query.shape[2] // key.shape[2], dim=2) for x in (key, value))
    score = torch.einsum("qbhd,kbhd->bhqk", query, key) * SCALE
    probability = score.masked_fill(~sees_tt, -math.inf).softmax(-1)
    return torch.einsum("bhqk,kbhd->qbhd", probability, value)


def dense_with_gradients(query, key, value, weight):
    inputs = [x.clone().requires_grad_() for x in (query, key, value)]
    out = dense(*inputs)
    return [out.detach(), *torch.autograd.grad((out * weight).sum(), inputs)]


def _share(rank, world_size, batch, query_groups, block):
    import torch.distributed as dist

    from megatron_worker import attention
    from rlcore.collectives import record_collectives
    from rlcore.layout.context_parallel import ZigZag

    group = dist.group.WORLD if world_size > 1 else None
    layout = ZigZag.of_lengths(LENGTHS, world_size)
    *inputs, weight = (layout.split(x, group) for x in make_problem(batch, query_groups=query_groups))
    inputs = [x.clone().requires_grad_() for x in inputs]
    before, attention.QUERY_BLOCK = attention.QUERY_BLOCK, block
    try:
        with record_collectives() as calls:
            out = attention.zigzag_attention(*inputs, LENGTHS, group, SCALE)
            gradients = torch.autograd.grad((out * weight).sum(), inputs)
    finally:
        attention.QUERY_BLOCK = before
    return [out.detach(), *gradients], [(call.kind, call.num_bytes) for call in calls]


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize(
    ("batch", "query_groups", "block"),
    [(1, 2, 1024), (1, 2, 3), (2, 4, 5), (1, 1, 1)],  # blocks of one query, and ones that do not divide
)
def test_zigzag_attention_equals_dense_softmax(world_size, batch, query_groups, block):
    """Values and gradients to 1e-12: those of keys and values add up over the ranks that read them."""
    problem = make_problem(batch, query_groups=query_groups)
    expected = dense_with_gradients(*problem)
    from rlcore.layout.context_parallel import ZigZag

    layout = ZigZag.of_lengths(LENGTHS, world_size)
    own_bytes = 8 * 2 * problem[1].numel() // world_size
    for rank, (ours, calls) in enumerate(run_ranks(_share, world_size, batch, query_groups, block)):
        for value, reference in zip(ours, expected, strict=True):
            torch.testing.assert_close(value, reference[layout.owned_rt[rank]], rtol=0, atol=1e-12)
        both = [("all_gather", own_bytes), ("reduce_scatter", own_bytes * world_size)]
        assert calls == (both if world_size > 1 else [])


def test_nothing_of_size_t_by_t(monkeypatch):
    """Each call reads one sequence's keys, and a mask exists for a block of its queries only."""
    import torch.nn.functional as F

    from megatron_worker import attention

    seen, real = [], F.scaled_dot_product_attention

    def watch(query, key, value, **options):
        mask = options["attn_mask"]
        seen.append((key.shape[2], 0 if mask is None else mask.numel()))
        return real(query, key, value, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", watch)
    monkeypatch.setattr(attention, "QUERY_BLOCK", 4)
    query, key, value, _ = make_problem()
    attention.zigzag_attention(query, key, value, LENGTHS, None, SCALE)
    assert seen == [(length, 0) for length in LENGTHS]
    seen.clear()
    attention.last_queries_attention(query[-10:], key, value, SCALE)
    assert seen == [(58, 4 * 58), (62, 4 * 62), (64, 2 * 64)]


def test_masks_are_not_kept_for_backward():
    """256 queries, 1,024 keys, blocks of 32: a mask of floats takes 128 KiB, all of them 1 MiB. After forward
    only the result is alive (and the pieces it was joined from are not); backward holds a few masks."""
    from megatron_worker import attention
    from tests.unit.test_linear_memory import Recorder

    query, key, value = (
        torch.randn(n, 1, 1, 8, requires_grad=True, generator=torch.Generator().manual_seed(0))
        for n in (256, 1024, 1024)
    )
    with mock.patch.object(attention, "QUERY_BLOCK", 32), Recorder(query, key, value) as recorder:
        out = attention.last_queries_attention(query, key, value, SCALE)
        kept = recorder.live
        out.sum().backward()
    block_bytes = 32 * 1024 * 4
    assert kept < block_bytes and recorder.peak < 4 * block_bytes


def test_half_precision_stays_within_its_rounding():
    """bfloat16 in and out: within one part in 128 of the largest value."""
    from megatron_worker.attention import zigzag_attention

    problem = make_problem(dtype=torch.bfloat16)
    expected = dense(*(x.double() for x in problem[:3]))
    ours = zigzag_attention(*problem[:3], LENGTHS, None, SCALE)
    assert ours.dtype == torch.bfloat16
    assert float((ours.double() - expected).abs().max()) <= float(expected.abs().max()) / 128


def make_module(**changes):
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.transformer_config import TransformerConfig

    from megatron_worker.attention import CausalAttention

    values = {
        "attention_dropout": 0.0,
        **{k: v for k, v in changes.items() if k in TransformerConfig.__dict__},
    }
    config = TransformerConfig(num_layers=1, hidden_size=12, num_attention_heads=4, kv_channels=3, **values)
    return CausalAttention(
        config=config,
        layer_number=1,
        attn_mask_type=changes.get("attn_mask_type", AttnMaskType.causal),
        attention_type=changes.get("attention_type", "self"),
        softmax_scale=changes.get("softmax_scale"),
        pg_collection=SimpleNamespace(cp=None),
    )


def test_the_module_takes_what_megatron_s_layers_hand_it():
    """Packed with and without the dummy batch axis, padded rows, one query over a cache; default scale
    1 / sqrt(head width)."""
    from megatron_worker.attention import packed_seq_params
    from rlcore.layout.packing import PackedLayout

    query, key, value, _ = make_problem()
    params = packed_seq_params(PackedLayout.of_rows(LENGTHS))
    module = make_module(softmax_scale=SCALE)
    expected = dense(query, key, value).flatten(2)
    packed = module(query, key, value, None, packed_seq_params=params)
    squeezed = module(query[:, 0], key[:, 0], value[:, 0], None, packed_seq_params=params)
    torch.testing.assert_close(packed, expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(squeezed, expected[:, 0], rtol=0, atol=1e-12)
    first = slice(0, LENGTHS[0])
    rows = module(query[first], key[first], value[first], None)
    torch.testing.assert_close(rows, expected[first], rtol=0, atol=1e-12)
    last = module(query[first][-1:], key[first], value[first], None)
    torch.testing.assert_close(last, expected[first][-1:], rtol=0, atol=1e-12)
    scaled = make_module()(query * (SCALE * math.sqrt(3)), key, value, None, packed_seq_params=params)
    torch.testing.assert_close(scaled, expected, rtol=0, atol=1e-12)


def test_what_it_does_not_compute_is_refused():
    from megatron.core.transformer.enums import AttnMaskType

    from megatron_worker.attention import last_queries_attention, zigzag_attention

    for changes, message in (
        ({"attention_dropout": 0.1}, "attention_dropout=0.1 is not supported, expected 0.0"),
        ({"window_size": (4, 0)}, "window_size"),
        ({"softmax_type": "off-by-one"}, "softmax_type='off-by-one'"),
        ({"attn_mask_type": AttnMaskType.padding}, "attn_mask_type"),
        ({"attention_type": "cross"}, "attention_type='cross'"),
    ):
        with pytest.raises(ValueError, match=message):
            make_module(**changes)
    query, key, value, _ = make_problem()
    with pytest.raises(ValueError, match="takes no attention mask"):
        make_module()(query, key, value, torch.zeros(1, 1, 64, 64).bool())
    with pytest.raises(ValueError, match=r"64 queries and 64 keys .* hold 63 tokens"):
        zigzag_attention(query, key, value, (*LENGTHS[:3], 7), None, SCALE)
    with pytest.raises(ValueError, match="5 queries but 4 keys"):
        last_queries_attention(query[:5], key[:4], value[:4], SCALE)
