"""The op in one process: the float64 reference over a grid, and the hand-computed cases."""

import dataclasses
import itertools
import math

import pytest
import torch

from rlcore.ops import bracket, passes
from rlcore.ops import filter as support_filter
from rlcore.ops.logprob import TokenLogprobs, VocabShard, vocab_parallel_logprob
from rlcore.ops.reference import reference_logprob
from rlcore.sampling import RowSampling, SamplingSpec
from tests.oracle import (
    DIFFERENTIABLE,
    ROW_KINDS,
    TOLERANCE,
    assert_close,
    assert_same_values,
    check_shard,
    gradients,
    make_logits,
    make_weights,
)

# top_k 1: a single id; 4: candidates; 20: more than many rows have finite entries. top_p 1e-6: one id; 0.999:
# long tails.
SPECS = [
    SamplingSpec(temperature=t, top_k=k, top_p=p, min_p=m, ties=ties)
    for t, k, p, m, ties in itertools.product(
        (1.0, 0.7), (None, 1, 4, 20), (None, 1e-6, 0.5, 0.999), (0.0, 0.05), ("share", "all")
    )
]


@pytest.mark.parametrize("kind", ROW_KINDS)
@pytest.mark.parametrize(
    "vocab_size", [1, 5, 300]
)  # a single id; fewer ids than top_k; more than one histogram bin's worth
def test_equals_the_reference(kind, vocab_size, search):
    logits = make_logits(kind, 6, vocab_size, seed=vocab_size)
    target_t = torch.arange(6) % vocab_size
    # Every third spec, another third for each kind: all of them are seen, and the file stays under a minute.
    for spec in SPECS[ROW_KINDS.index(kind) % 3 :: 3]:
        check_shard(logits, target_t, spec, slice(0, vocab_size), None, padding=3)


@pytest.mark.parametrize("kind", ["random", "flat", "tied", "banned"])
def test_wide_rows_equal_the_reference(kind):
    """With the real limits: more values than are listed, nuclei of thousands, tied groups longer than a
    listing.
    """
    logits = make_logits(kind, 4, 5000, seed=1)
    target_t = torch.tensor([0, 17, 2500, 4999])
    for spec in (
        SamplingSpec(top_p=0.9),
        SamplingSpec(top_k=1500),
        SamplingSpec(top_k=1500, top_p=0.8, min_p=1e-4),
        SamplingSpec(top_k=700, top_p=0.97, temperature=0.7),
        SamplingSpec(top_p=0.6, ties="all"),
        SamplingSpec(min_p=0.5, top_p=0.99),
    ):
        check_shard(logits, target_t, spec, slice(0, 5000), None)


def test_each_row_may_have_its_own_parameters(search):
    """Mixed requests in one batch give what each row gives alone."""
    specs = [
        SamplingSpec(),
        SamplingSpec(top_k=3),
        SamplingSpec(temperature=0.6, top_p=0.8),
        SamplingSpec(min_p=0.2),
        SamplingSpec(top_k=40, top_p=0.95, min_p=0.01, temperature=1.3),
        SamplingSpec(top_k=1000),
        SamplingSpec(top_k=1, top_p=0.5),
    ]
    logits = make_logits("tied", len(specs), 60, seed=9)
    target_t = logits.argsort(dim=1, descending=True)[:, 1]
    weights = make_weights(len(specs), seed=2)
    x = logits.clone().requires_grad_()
    mixed = vocab_parallel_logprob(x, target_t, RowSampling.of(specs), entropy=True)
    grads = gradients(mixed, x, weights)
    for row, spec in enumerate(specs):
        y = logits[row : row + 1].double().clone().requires_grad_()
        alone = reference_logprob(y, target_t[row : row + 1], spec)
        one = TokenLogprobs(
            **{f.name: getattr(mixed, f.name)[row : row + 1] for f in dataclasses.fields(mixed)}
        )
        assert_same_values(one, alone, hint=spec)
        expected = gradients(alone, y, {name: w[row : row + 1] for name, w in weights.items()})
        for name, grad in expected.items():
            assert_close(grads[name][row : row + 1].double(), grad, TOLERANCE, (spec, name))


def test_a_row_without_top_p_shares_its_ties_beside_one_that_has_it(search):
    """A top-k that cuts a tied group keeps its share of it, whatever the other rows ask for."""
    logits = torch.tensor([[3.0, 2.0, 2.0, 2.0, 1.0]]).repeat(2, 1)
    specs = [SamplingSpec(top_k=3), SamplingSpec(top_k=4, top_p=0.99)]
    result = vocab_parallel_logprob(logits, torch.zeros(2, dtype=torch.long), RowSampling.of(specs))
    assert result.num_kept_t.tolist() == [3, 4]


def test_min_p_of_one_keeps_the_largest_of_large_logits(search):
    """Next to 90 the rounding band of the cut is less than a float32 step: the cut is the largest itself."""
    logits = torch.tensor([[90.0, 89.0, 90.0]])
    result = vocab_parallel_logprob(logits, torch.tensor([2]), SamplingSpec(min_p=1.0, top_k=2))
    assert result.keep_t[0] and result.num_kept_t[0] == 2
    result = vocab_parallel_logprob(logits, torch.tensor([2]), SamplingSpec(min_p=1.0))
    assert result.keep_t[0] and result.num_kept_t[0] == 2


def test_per_row_parameters_are_checked():
    with pytest.raises(ValueError, match="2 rows for logits of 3 rows"):
        vocab_parallel_logprob(torch.zeros(3, 4), torch.zeros(3).long(), RowSampling.of([SamplingSpec()] * 2))
    with pytest.raises(ValueError, match="same `ties`"):
        RowSampling.of([SamplingSpec(), SamplingSpec(ties="all")])


@pytest.mark.parametrize("kind", ["random", "tied", "banned"])
def test_the_compiled_backend_equals_the_reference(kind):
    """One compilation serves every width and number of rows."""
    for vocab_size, spec in (
        (130, SamplingSpec(temperature=0.7, top_k=20, top_p=0.9)),
        (1000, SamplingSpec(top_p=0.9)),
        (1000, SamplingSpec(top_k=300, top_p=0.9, min_p=0.001, ties="all")),
    ):
        logits = make_logits(kind, 5, vocab_size, seed=4)
        check_shard(logits, torch.arange(5), spec, slice(0, vocab_size), None, padding=3, backend="compile")


def test_an_unknown_backend_names_those_there_are():
    with pytest.raises(ValueError, match="'auto', 'torch', 'compile'"):
        vocab_parallel_logprob(torch.zeros(1, 4), torch.zeros(1).long(), SamplingSpec(), backend="cuda")


def test_gradcheck_in_float64(search):
    """Finite differences agree with the hand-written backward for every output."""
    logits = make_logits("random", 3, 9, seed=0).double().requires_grad_()
    target_t = torch.tensor([1, 4, 8])
    spec = SamplingSpec(temperature=0.8, top_k=6, top_p=0.95)

    def outputs(x):
        result = vocab_parallel_logprob(x, target_t, spec, entropy=True)
        values = [getattr(result, name) for name in DIFFERENTIABLE]
        return tuple(torch.where(torch.isfinite(v), v, 0.0) for v in values)

    assert torch.autograd.gradcheck(outputs, (logits,), eps=1e-7, atol=1e-6)


def test_results_do_not_depend_on_the_chunk_size(search, monkeypatch):
    logits = make_logits("tied", 7, 130, seed=3)
    target_t = torch.arange(7)
    spec = SamplingSpec(top_k=9, top_p=0.8)
    weights = make_weights(7, seed=1)

    def run():
        x = logits.clone().requires_grad_()
        result = vocab_parallel_logprob(x, target_t, spec, entropy=True)
        return [getattr(result, n) for n in DIFFERENTIABLE] + list(gradients(result, x, weights).values())

    whole = run()
    for elements in (1, 150, 220):
        monkeypatch.setattr(passes, "CHUNK_ELEMENTS", elements)
        for ours, expected in zip(run(), whole, strict=True):
            assert torch.equal(ours, expected)


def test_a_sample_of_the_columns_changes_no_result(monkeypatch):
    """A top-p so close to 1 that the float32 sums of a pass and the float64 sums of a listing disagree on
    which value reaches it: what decides must not depend on where the search came from.
    """
    logits = -torch.arange(65.0)[None].half()
    monkeypatch.setattr(support_filter, "MAX_CANDIDATES", 1)
    monkeypatch.setattr(bracket, "SAMPLE_STRIDE", 2)
    counts = set()
    for listed, candidates, sample_from in itertools.product((1, 2, 3, 64), (1, 2), (0, 1 << 60)):
        monkeypatch.setattr(bracket, "NUM_LISTED", listed)
        monkeypatch.setattr(support_filter, "NUCLEUS_CANDIDATES", candidates)
        monkeypatch.setattr(bracket, "SAMPLE_FROM_ELEMENTS", sample_from)
        spec = SamplingSpec(temperature=2.0, top_p=1 - 1e-7)
        counts.add(int(vocab_parallel_logprob(logits, torch.tensor([0]), spec).num_kept_t))
    assert len(counts) == 1


def test_rows_of_any_range_take_few_passes(monkeypatch):
    """A large top-k cuts at a value that may lie millions of nats below the largest."""
    passes_made = []
    pivot_sums = bracket.OpenRows.pivot_sums

    def counted(rows, pivot_up):
        passes_made.append(len(pivot_up))
        return pivot_sums(rows, pivot_up)

    monkeypatch.setattr(bracket.OpenRows, "pivot_sums", counted)
    logits = make_logits("random", 2, 20_000, seed=4)
    for scale, dtype in ((1e6, torch.float32), (1e37, torch.float32), (1e200, torch.float64)):
        passes_made.clear()
        result = vocab_parallel_logprob(
            logits.to(dtype) * scale, torch.tensor([0, 1]), SamplingSpec(top_k=5000)
        )
        assert result.num_kept_t.tolist() == [5000, 5000]
        assert len(passes_made) <= 60, (scale, len(passes_made))


def test_parameters_of_a_row_have_the_precision_of_a_spec():
    logits = make_logits("random", 2, 30, seed=6).double()
    target_t = logits.argmax(dim=1)
    spec = SamplingSpec(temperature=0.3, top_k=4)
    one = vocab_parallel_logprob(logits, target_t, spec)
    rows = vocab_parallel_logprob(logits, target_t, RowSampling.of([spec] * 2))
    assert torch.equal(rows.logprob_t, one.logprob_t)


def test_the_reference_entropy_of_very_negative_rows_is_finite():
    """A dropped id weighs nothing even where the log-normaliser lies below what exp can hold."""
    logits = torch.tensor([[-1000.0, -1001.0, -math.inf]], requires_grad=True)
    result = reference_logprob(logits, torch.tensor([0]), SamplingSpec(top_k=1))
    assert result.entropy_t is not None and result.entropy_t.item() == 0.0
    (grad,) = torch.autograd.grad(result.entropy_t.sum(), logits)
    assert not grad.any()


def test_bfloat16_logits_are_computed_in_float32():
    """The gradient comes back in the logits' own dtype."""
    logits = make_logits("bfloat16", 4, 40, seed=0)
    target_t = torch.arange(4)
    spec = SamplingSpec(top_k=5, top_p=0.9)
    low = logits.bfloat16().requires_grad_()
    ours = vocab_parallel_logprob(low, target_t, spec)
    expected = vocab_parallel_logprob(logits, target_t, spec)
    assert ours.logprob_t.dtype == torch.float32
    assert torch.equal(ours.logprob_t, expected.logprob_t)
    (grad,) = torch.autograd.grad(torch.where(ours.keep_t, ours.logprob_t, 0.0).sum(), low)
    assert grad.dtype == torch.bfloat16


def test_no_tokens():
    logits = torch.zeros(0, 7, requires_grad=True)
    result = vocab_parallel_logprob(
        logits, torch.zeros(0, dtype=torch.long), SamplingSpec(top_k=3, top_p=0.9), entropy=True
    )
    assert result.logprob_t.shape == (0,)
    (grad,) = torch.autograd.grad(result.logprob_t.sum(), logits)
    assert grad.shape == (0, 7)


def test_infinite_upstream_gradient_of_a_dropped_token_is_harmless():
    """-inf logprobs invite infinite upstream gradients; the row must stay finite."""
    logits = torch.tensor([[2.0, 1.0, 0.0]], requires_grad=True)
    result = vocab_parallel_logprob(logits, torch.tensor([2]), SamplingSpec(top_k=1))
    assert not result.keep_t[0] and result.logprob_t[0] == -math.inf
    (grad,) = torch.autograd.grad(result.logprob_t, logits, torch.tensor([math.inf]))
    assert torch.equal(grad, torch.zeros(1, 3))


# --- bad input ------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_broken_row_is_named(bad, search):
    logits = torch.randn(5, 8)
    logits[3, 2] = bad
    with pytest.raises(ValueError, match="row 3"):
        vocab_parallel_logprob(logits, torch.zeros(5, dtype=torch.long), SamplingSpec(top_k=2, top_p=0.9))
    with pytest.raises(ValueError, match="row 3"):
        reference_logprob(logits, torch.zeros(5, dtype=torch.long), SamplingSpec(top_k=2, top_p=0.9))


def test_an_all_banned_row_is_named():
    logits = torch.zeros(3, 4)
    logits[1] = -math.inf
    with pytest.raises(ValueError, match="row 1"):
        vocab_parallel_logprob(logits, torch.zeros(3, dtype=torch.long), SamplingSpec())


def test_without_validation_a_broken_row_is_nan_and_its_neighbours_are_not():
    logits = torch.zeros(3, 4)
    logits[1, 0] = math.nan
    result = vocab_parallel_logprob(
        logits, torch.zeros(3, dtype=torch.long), SamplingSpec(top_k=2), validate=False
    )
    assert torch.isnan(result.unfiltered_logprob_t).tolist() == [False, True, False]


@pytest.mark.parametrize(
    ("logits", "target", "message"),
    [
        (torch.zeros(2, 4), torch.tensor([0, 4]), r"target 4 in row 1 .* \[0, 4\)"),
        (torch.zeros(2, 4), torch.tensor([-100, 0]), "target -100 in row 0"),
        (torch.zeros(2, 4), torch.tensor([0]), r"\[t, v\]"),
        (torch.zeros(2, 2, 4), torch.tensor([0, 1]), r"\[t, v\]"),
        (torch.zeros(2, 4), torch.tensor([0.0, 1.0]), "integer ids"),
        (torch.zeros(2, 4), torch.tensor([0, 1], dtype=torch.uint8), "int32 or int64"),
        (torch.zeros(()), torch.tensor([0, 1]), r"\[t, v\]"),
        (torch.zeros(2, 4).long(), torch.tensor([0, 1]), "float dtype"),
    ],
)
def test_bad_arguments_are_named(logits, target, message):
    with pytest.raises(ValueError, match=message):
        vocab_parallel_logprob(logits, target, SamplingSpec())


def test_columns_that_no_rank_holds_are_refused():
    """8 of 20 ids and nobody else: a target among the other 12 would silently be out of every support."""
    with pytest.raises(ValueError, match="ids 0 to 8 for a vocabulary of 20"):
        vocab_parallel_logprob(
            torch.zeros(2, 8),
            torch.zeros(2).long(),
            SamplingSpec(),
            vocab=VocabShard(start=0, vocab_size=20),
        )
