"""The Triton kernels in Triton's interpreter, without a GPU. Run by test_triton_passes.py in a process of its
own.

The interpreter has to be chosen before anything imports Triton: TRITON_INTERPRET=1 pytest THIS_FILE. It is
slow, so rows are short here and tiles are shortened with them.
"""

import dataclasses
import math

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from rlcore.ops import bracket, triton_passes
from rlcore.ops import filter as support_filter
from rlcore.ops.logprob import TokenLogprobs, VocabShard, vocab_parallel_logprob
from rlcore.ops.passes import EAGER, Wanted, select_passes
from rlcore.ops.reference import reference_logprob
from rlcore.sampling import RowSampling, SamplingSpec
from tests.oracle import DIFFERENTIABLE, ROW_KINDS, TOLERANCE, assert_close, assert_same_values, make_logits
from tests.pass_oracle import DTYPES, ROUNDING, assert_identical, check_gradient, check_passes, hard_logits


@pytest.fixture(autouse=True)
def short_tiles(monkeypatch):
    """128 columns a program."""
    monkeypatch.setattr(triton_passes, "TILE_BLOCKS", 2)


@pytest.fixture
def passes():
    return select_passes("triton", torch.zeros(1, 1))


# --- each pass equals the eager one -----------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_passes_equal_the_eager_ones(passes, dtype):
    """150 columns: two tiles, the last block and the last tile not full."""
    assert passes.name == "triton"
    logits = hard_logits(150, dtype)
    check_passes(passes, logits, None)
    check_gradient(passes, logits)


@pytest.mark.parametrize("num_columns", [1, 64, 128, 129])
def test_passes_at_the_edges_of_blocks_and_tiles(passes, num_columns):
    check_passes(passes, hard_logits(num_columns, torch.float32)[1:3], None)


def test_picked_rows_of_a_padded_buffer(passes):
    """Rows are read where they lie; what lies behind a row (NaN here) is not read."""
    buffer = torch.full((8, 80), math.nan)
    buffer[:, :70] = hard_logits(70, torch.float32)
    check_passes(passes, buffer[:, :70], torch.tensor([4, 2, 2, 0]))


@pytest.mark.parametrize("view_of", [lambda x: x.t(), lambda x: x[:, ::2], lambda x: x[::2]])
def test_views_whose_columns_are_not_neighbours(passes, view_of):
    view = view_of(make_logits("tied", 6, 6, seed=3))
    check_passes(passes, view, torch.tensor([2, 1]))
    check_gradient(passes, view)


def test_no_rows(passes):
    logits = torch.zeros(0, 300)
    none, sums = torch.zeros(0), torch.zeros(0, 3)
    assert_identical(
        passes.pivot_sums(logits, None, none, none, sums),
        EAGER.pivot_sums(logits, None, none, none, sums),
        "",
    )
    assert passes.exp_sums(logits, None, none, none, none, False).shape == (0, 4)
    assert passes.gradient(
        logits, None, none, none, none, none, torch.zeros(0, 8), Wanted(True, True, False)
    ).shape == (0, 300)


def test_a_row_has_the_same_bits_whatever_rows_it_comes_with(passes):
    logits = hard_logits(300, torch.float32)[:4]
    ones, zeros = torch.ones(4), torch.zeros(4)
    together = passes.exp_sums(logits, None, ones, zeros, zeros, True)
    for row in range(4):
        alone = passes.exp_sums(logits[row : row + 1], None, ones[:1], zeros[:1], zeros[:1], True)
        assert torch.equal(alone[0], together[row])


# --- the op equals the reference ----------------------------------------------------------------------

TIES = st.sampled_from(["share", "all", "share"])


def specs(ties):
    return st.builds(
        SamplingSpec,
        temperature=st.sampled_from([1.0, 0.7, 1.3]),
        top_k=st.sampled_from([3, 20, None, 1, 150]),
        top_p=st.sampled_from([0.9, None, 0.5, 0.999, 1e-6]),
        min_p=st.sampled_from([0.0, 0.05]),
        ties=st.just(ties),
    )


@st.composite
def problems(draw, kind):
    """(logits, target, one spec for all rows or one each, padding columns, short lists?)."""
    num_rows, num_columns = draw(st.sampled_from([3, 1, 4])), draw(st.sampled_from([65, 130, 200, 64, 2]))
    seed = draw(st.integers(0, 1000))
    dtype = draw(st.sampled_from(DTYPES))
    logits = make_logits(kind, num_rows, num_columns, seed).to(dtype)
    target_t = torch.tensor(
        draw(st.lists(st.integers(0, num_columns - 1), min_size=num_rows, max_size=num_rows))
    )
    count = num_rows if draw(st.integers(0, 2)) else 1
    row_specs = draw(st.lists(specs(draw(TIES)), min_size=count, max_size=count))
    return logits, target_t, row_specs, draw(st.sampled_from([0, 3])), draw(st.booleans())


@pytest.mark.parametrize("kind", ROW_KINDS)
@settings(max_examples=9, deadline=None, derandomize=True, phases=[Phase.generate])
@given(data=st.data())
def test_the_op_equals_the_reference(kind, data):
    logits, target_t, row_specs, padding, short_lists = data.draw(problems(kind))
    with pytest.MonkeyPatch.context() as patch:
        if short_lists:  # nearly every row is searched: pivots, cuts, picked rows
            patch.setattr(support_filter, "MAX_CANDIDATES", 0)
            patch.setattr(support_filter, "NUCLEUS_CANDIDATES", 2)
            patch.setattr(bracket, "NUM_LISTED", 3)
            patch.setattr(bracket, "SAMPLE_FROM_ELEMENTS", 0)
            patch.setattr(bracket, "SAMPLE_STRIDE", 2)
        check_op(logits, target_t, row_specs, padding)


def check_op(
    logits: torch.Tensor, target_t: torch.Tensor, row_specs: list[SamplingSpec], padding: int
) -> None:
    """Values to 1e-5; the gradient of one weighted sum of all outputs to 1e-5 and one rounding."""
    num_rows, num_columns = logits.shape
    buffer = torch.full((num_rows, num_columns + padding), math.nan, dtype=logits.dtype)
    buffer[:, :num_columns] = logits
    buffer.requires_grad_()
    spec = row_specs[0] if len(row_specs) == 1 else RowSampling.of(row_specs)
    shard = VocabShard(start=0, vocab_size=num_columns)
    ours = vocab_parallel_logprob(buffer, target_t, spec, None, shard, entropy=True, backend="triton")

    whole = logits.double().requires_grad_()
    each = row_specs * num_rows if len(row_specs) == 1 else row_specs
    rows = [reference_logprob(whole[i : i + 1], target_t[i : i + 1], each[i]) for i in range(num_rows)]
    names = (*DIFFERENTIABLE, "keep_t", "num_kept_t")
    reference = TokenLogprobs(**{n: torch.cat([getattr(row, n) for row in rows]) for n in names})
    assert_same_values(ours, reference, hint=row_specs)

    generator = torch.Generator().manual_seed(num_columns)
    weights = [torch.randn(num_rows, generator=generator) for _ in DIFFERENTIABLE]
    grads = []
    for result, x in ((ours, buffer), (reference, whole)):
        values = [getattr(result, name) for name in DIFFERENTIABLE]
        terms = [torch.where(v.isfinite(), v, 0.0) * w for v, w in zip(values, weights, strict=True)]
        grads.append(torch.autograd.grad(torch.stack(terms).sum(), x)[0].double())
    assert not grads[0][:, num_columns:].any()
    assert_close(grads[0][:, :num_columns], grads[1], TOLERANCE + ROUNDING[logits.dtype], row_specs)


@pytest.mark.parametrize("ties", ["share", "all"])
def test_a_long_nucleus_is_searched_with_the_kernels(passes, monkeypatch, ties):
    """Flat rows of 600 ids with the real limits: candidates do not settle them."""
    called = []

    def pivot_sums(logits_tv, row_u, *arguments):
        called.append(row_u.tolist())
        return passes.pivot_sums(logits_tv, row_u, *arguments)

    monkeypatch.setattr(triton_passes, "PASSES", dataclasses.replace(passes, pivot_sums=pivot_sums))
    logits = torch.cat([make_logits("flat", 2, 600, seed=1), make_logits("peaked", 2, 600, seed=1)])
    check_op(logits, torch.tensor([0, 599, 5, 300]), [SamplingSpec(top_p=0.9, temperature=0.7, ties=ties)], 3)
    # Rows that are narrow enough drop out of the later passes; those that candidates settle are in none.
    assert called and called[0] == [0, 1] and all(set(rows) <= {0, 1} for rows in called)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_broken_row_is_named(bad):
    logits = make_logits("random", 3, 140, seed=0)
    logits[1, 130] = bad
    with pytest.raises(ValueError, match="row 1"):
        vocab_parallel_logprob(logits, torch.zeros(3).long(), SamplingSpec(top_k=2), backend="triton")
