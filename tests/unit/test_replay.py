"""Replayed supports, one process: generated cases against the reference, cases by hand, bad masks, audit."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlcore.metrics import reduce_metrics
from rlcore.ops.audit import audit_supports, gathered_quantiles
from rlcore.ops.logprob import VocabShard, vocab_parallel_logprob
from rlcore.ops.reference import reference_replay, support_weights
from rlcore.ops.replay import Replayed
from rlcore.sampling import RowSampling, SamplingSpec
from rlcore.sampling_mask import SamplingMask
from tests.oracle import (
    DIFFERENTIABLE,
    ROW_KINDS,
    assert_close,
    assert_same_values,
    gradients,
    make_logits,
    make_weights,
)
from tests.replay_oracle import Shard, check_replayed

# Small, and the same examples every time.
SWEEP = settings(max_examples=50, deadline=None, derandomize=True)
PLAIN = SamplingSpec()


def score(rows, targets, kept_ids, spec=PLAIN, **options):
    """The op on rows given as lists."""
    logits = torch.tensor(rows, dtype=torch.float32).requires_grad_()
    mask = SamplingMask.from_lists(kept_ids)
    return logits, vocab_parallel_logprob(logits, torch.tensor(targets), spec, replay=mask, **options)


@st.composite
def cases(draw):
    """Logits of every kind and dtype, targets inside and outside the listed ids, ids listed twice."""
    num_rows, vocab_size = draw(st.integers(1, 5)), draw(st.integers(1, 90))
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float64]))
    logits = make_logits(draw(st.sampled_from(ROW_KINDS)), num_rows, vocab_size, draw(st.integers(0, 99)))
    ids = st.integers(0, vocab_size - 1)
    kept_ids = [draw(st.lists(ids, min_size=1, max_size=vocab_size + 3)) for _ in range(num_rows)]
    target_t = torch.tensor([draw(ids) for _ in range(num_rows)])
    for row, kept in enumerate(kept_ids):
        # A support without a finite logit is an error; that is another test.
        if logits[row, [*kept, int(target_t[row])]].isneginf().all():
            kept.append(vocab_size // 2)
    temperature = draw(st.sampled_from([1.0, 0.7, 1.3]))
    padding = draw(st.integers(0, 3))
    return logits.to(dtype), target_t, SamplingSpec(temperature=temperature), kept_ids, padding


@SWEEP
@given(cases())
def test_equals_the_reference(case):
    logits, target_t, spec, kept_ids, padding = case
    check_replayed(logits, target_t, spec, kept_ids, Shard(start=0, stop=logits.shape[1], padding=padding))


@SWEEP
@given(cases(), st.integers(1, 6))
def test_chunks_of_rows_are_bit_identical_to_the_whole(case, size):
    """`rows` cuts the mask as the logits are cut, whatever the size."""
    logits, target_t, spec, kept_ids, _ = case
    mask = SamplingMask.from_lists(kept_ids)
    whole = vocab_parallel_logprob(logits, target_t, spec, replay=mask, entropy=True)
    for start in range(0, len(logits), size):
        rows = slice(start, start + size)
        part = vocab_parallel_logprob(
            logits[rows], target_t[rows], spec, replay=mask.rows(rows), entropy=True
        )
        for name in (*DIFFERENTIABLE, "keep_t", "num_kept_t"):
            assert torch.equal(getattr(part, name), getattr(whole, name)[rows]), name


def test_the_compiled_backend_equals_the_reference():
    logits = make_logits("random", 4, 700, seed=4)
    kept_ids = [row.topk(30).indices.tolist() for row in logits]
    check_replayed(
        logits, torch.arange(4), SamplingSpec(temperature=0.7), kept_ids, Shard(start=0, stop=700), "compile"
    )


def test_a_row_by_hand():
    """exp(z) = 8, 4, 2, 1; kept {1, 3} and the target 0: 8 of 13 inside, 13 of 15 in all."""
    row = [math.log(8), math.log(4), math.log(2), 0.0]
    logits, result = score([row], [0], [[3, 1]], entropy=True)
    p = [8 / 13, 4 / 13, 1 / 13]
    assert result.logprob_t.item() == pytest.approx(math.log(8 / 13), abs=1e-6)
    assert result.unfiltered_logprob_t.item() == pytest.approx(math.log(8 / 15), abs=1e-6)
    assert result.log_mass_t.item() == pytest.approx(math.log(13 / 15), abs=1e-6)
    assert result.entropy_t.item() == pytest.approx(-sum(x * math.log(x) for x in p), abs=1e-6)
    assert result.num_kept_t.item() == 3 and bool(result.keep_t)
    (grad,) = torch.autograd.grad(result.logprob_t.sum(), logits)
    assert grad[0].tolist() == pytest.approx([5 / 13, -4 / 13, 0, -1 / 13], abs=1e-6)


def test_a_listed_id_counts_once_and_the_target_too():
    _, once = score([[1.0, 2.0, 3.0]], [1], [[1, 2]])
    _, often = score([[1.0, 2.0, 3.0]], [1], [[2, 1, 2, 2, 1]])
    assert once.logprob_t.item() == pytest.approx(-1.313262, abs=1e-6)
    assert torch.equal(once.logprob_t, often.logprob_t) and often.num_kept_t.item() == 2


def test_banned_ids_contribute_nothing():
    """A banned target is no token the sampler can have drawn: it is not kept."""
    rows = [[1.0, -math.inf, 3.0, -math.inf]] * 2
    logits, result = score(rows, [0, 3], [[1, 2], [1, 2]], entropy=True)
    assert result.num_kept_t.tolist() == [2, 1] and result.keep_t.tolist() == [True, False]
    assert result.logprob_t[0].item() == pytest.approx(-2.126928, abs=1e-6)
    assert result.logprob_t[1].item() == -math.inf
    for name, grad in gradients(result, logits, make_weights(2, seed=0)).items():
        assert grad.isfinite().all() and not grad[:, [1, 3]].any(), name


def test_a_support_without_a_finite_logit_is_a_broken_row():
    rows = [[1.0, 2.0, 3.0], [1.0, -math.inf, -math.inf]]
    with pytest.raises(ValueError, match=r"row 1 .*\(under replay"):
        score(rows, [0, 2], [[0], [1]])
    _, result = score(rows, [0, 2], [[0], [1]], validate=False)
    assert result.unfiltered_logprob_t.isnan().tolist() == [False, True]
    with pytest.raises(ValueError, match="row 1"):
        reference_replay(torch.tensor(rows), torch.tensor([0, 2]), PLAIN, [[0], [1]])


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_broken_logit_is_named_wherever_it_stands(bad):
    with pytest.raises(ValueError, match="row 1"):
        score([[1.0, 2.0, 3.0], [1.0, 2.0, bad]], [0, 0], [[1], [1]])


def test_ids_far_below_the_largest_keep_their_digits():
    """Their exp relative to the row's largest is 0 in float64, let alone float32."""
    rows = [[1000.0, 0.25, 0.0, -0.75]]
    logits, result = score(rows, [1], [[2, 3]], entropy=True)
    reference = reference_replay(torch.tensor(rows), torch.tensor([1]), PLAIN, [[2, 3]])
    assert_same_values(result, reference)
    assert result.logprob_t.item() == pytest.approx(-0.763922, abs=1e-6)
    (grad,) = torch.autograd.grad(result.logprob_t.sum(), logits)
    assert grad[0].tolist() == pytest.approx([0, 0.534165, -0.362793, -0.171372], abs=1e-5)


def test_gradcheck_in_float64():
    """Finite differences agree with the hand-written backward for every output."""
    logits = make_logits("random", 3, 9, seed=0).double().requires_grad_()
    mask = SamplingMask.from_lists([[1, 5, 5], [0], [8, 2, 3, 7]])

    def outputs(x):
        spec = SamplingSpec(temperature=0.8)
        result = vocab_parallel_logprob(x, torch.tensor([1, 4, 8]), spec, replay=mask, entropy=True)
        return tuple(getattr(result, name) for name in DIFFERENTIABLE)

    assert torch.autograd.gradcheck(outputs, (logits,), eps=1e-7, atol=1e-6)


def test_each_row_may_have_its_own_temperature():
    """Truncation in the spec is replaced by the mask."""
    specs = [SamplingSpec(temperature=t, top_k=1, min_p=0.9) for t in (0.5, 1.0, 2.0)]
    logits = make_logits("random", 3, 20, seed=2)
    target_t, kept_ids = torch.tensor([3, 4, 5]), [[1, 2], [3, 4], [19]]
    mask = SamplingMask.from_lists(kept_ids)
    mixed = vocab_parallel_logprob(logits, target_t, RowSampling.of(specs), replay=mask)
    for row, spec in enumerate(specs):
        alone = reference_replay(logits[row : row + 1], target_t[row : row + 1], spec, [kept_ids[row]])
        assert_close(mixed.logprob_t[row : row + 1].double(), alone.logprob_t, 1e-5, row)
    chunk = Replayed(RowSampling.of(specs), mask).rows(slice(1, 3))
    assert chunk.spec.temperature_t.tolist() == [1.0, 2.0] and chunk.mask.token_ids.tolist() == [3, 4, 19]


@pytest.mark.parametrize("mode", ["recompute", "audit"])
def test_other_modes_search(mode):
    """Bit for bit what the op says without a mask, which may even be nonsense."""
    logits, target_t = make_logits("random", 4, 50, seed=6), torch.arange(4)
    spec = SamplingSpec(top_k=7, top_p=0.9)
    nonsense = SamplingMask.from_lists([[99]])
    ours = vocab_parallel_logprob(logits, target_t, spec, replay=nonsense, replay_mode=mode)
    plain = vocab_parallel_logprob(logits, target_t, spec)
    assert torch.equal(ours.logprob_t, plain.logprob_t) and torch.equal(ours.num_kept_t, plain.num_kept_t)


def test_the_sampler_s_own_support_gives_the_searched_numbers():
    """Replaying exactly what a search keeps changes nothing, gradients included."""
    logits, spec = make_logits("random", 5, 80, seed=8), SamplingSpec(temperature=0.9, top_k=12, top_p=0.8)
    weight_tv = torch.stack([support_weights(row / 0.9, spec) for row in logits.double()])
    target_t, weights = logits.argmax(dim=1), make_weights(5, seed=3)
    results = []
    for mask in (None, SamplingMask.from_lists([w.nonzero()[:, 0].tolist() for w in weight_tv])):
        x = logits.clone().requires_grad_()
        result = vocab_parallel_logprob(x, target_t, spec, replay=mask, entropy=True)
        results.append((result, gradients(result, x, weights)))
    (searched, searched_grads), (replayed, replayed_grads) = results
    assert_same_values(replayed, searched)
    for name in DIFFERENTIABLE:
        assert_close(replayed_grads[name], searched_grads[name], 1e-5, name)


def test_without_validation_an_empty_row_has_its_target_alone():
    """What masked rows of a batch, which no sampler drew, are scored as: finite and harmless."""
    logits, result = score([[1.0, 2.0], [1.0, 2.0]], [0, 1], [[], [0]], validate=False)
    assert result.logprob_t.tolist() == pytest.approx([0.0, -0.313262], abs=1e-6)
    (grad,) = torch.autograd.grad(result.logprob_t.sum(), logits)
    assert not grad[0].any()


def test_int64_ids_views_and_no_rows():
    logits = make_logits("random", 6, 20, seed=1)
    mask = SamplingMask(
        torch.tensor([4, 5, 6], dtype=torch.int64), torch.tensor([0, 1, 3], dtype=torch.int32)
    )
    view = vocab_parallel_logprob(
        logits.t()[::2][:2], torch.zeros(2).long(), PLAIN, replay=SamplingMask.from_lists([[1], [2, 3]])
    )
    dense = vocab_parallel_logprob(
        logits.t()[::2][:2].contiguous(),
        torch.zeros(2).long(),
        PLAIN,
        replay=SamplingMask.from_lists([[1], [2, 3]]),
    )
    assert torch.equal(view.logprob_t, dense.logprob_t)
    narrow = SamplingMask.from_lists([[4], [5, 6]])
    wide = vocab_parallel_logprob(logits[:2], torch.zeros(2).long(), PLAIN, replay=mask)
    assert torch.equal(
        wide.logprob_t,
        vocab_parallel_logprob(logits[:2], torch.zeros(2).long(), PLAIN, replay=narrow).logprob_t,
    )
    x = torch.zeros(0, 7, requires_grad=True)
    result = vocab_parallel_logprob(x, torch.zeros(0).long(), PLAIN, replay=SamplingMask.from_lists([]))
    (grad,) = torch.autograd.grad(result.logprob_t.sum(), x)
    assert result.logprob_t.shape == (0,) and grad.shape == (0, 7)


# --- bad masks ------------------------------------------------------------------------------------


def mask_of(ids, offsets, dtype=torch.int64):
    return SamplingMask(torch.tensor(ids, dtype=torch.int32), torch.tensor(offsets, dtype=dtype))


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (mask_of([1, 2], [0, 1, 2]), "describe 2 rows, the logits have 3: expected 4 offsets, got 3"),
        (mask_of([1, 2, 3], [0, 2, 1, 3]), "fall from 2 to 1 in row 1"),
        (mask_of([1, 2], [0, 1, 2, 2]), "row 2 lists no id"),
        (mask_of([1, 2, 3, 0], [0, 1, 2, 3]), "from 0 to 3 for 4 ids: expected 0 to 4"),
        (mask_of([0, 1, 2, 3], [1, 2, 3, 4]), "from 1 to 4 for 4 ids"),
        (mask_of([1, 2, 4], [0, 1, 2, 3]), r"id 4 in row 2 is outside the vocabulary \[0, 4\)"),
        (mask_of([1, -1, 2], [0, 1, 2, 3]), "id -1 in row 1"),
        (mask_of([1, 2, 3], [0.0, 1, 2, 3], torch.float32), "offsets is torch.float32"),
        (
            SamplingMask(torch.zeros(1, 3).int(), torch.arange(4)),
            r"token_ids is torch.int32 of shape \(1, 3\)",
        ),
        (SamplingMask(torch.zeros(0).int(), torch.zeros(0).long()), "offsets is empty"),
    ],
)
def test_a_mask_that_does_not_fit_is_named(mask, message):
    with pytest.raises(ValueError, match=message):
        vocab_parallel_logprob(torch.zeros(3, 4), torch.zeros(3).long(), PLAIN, replay=mask)
    with pytest.raises(ValueError, match=message):
        mask.check(3, 4)


def test_masked_rows_may_be_empty_at_the_border():
    mask = SamplingMask.from_lists([[], [1], []])
    mask.check(3, 4, needed_t=torch.tensor([False, True, False]))
    with pytest.raises(ValueError, match=r"row 2 lists no id \(1 of 3"):
        mask.check(3, 4, needed_t=torch.tensor([False, True, True]))
    with pytest.raises(ValueError, match="step of 1"):
        mask.rows(slice(0, 3, 2))
    with pytest.raises(ValueError, match="'recompute', 'replay', 'audit'"):
        vocab_parallel_logprob(torch.zeros(1, 2), torch.zeros(1).long(), PLAIN, replay_mode="both")


# --- audit ----------------------------------------------------------------------------------------


def audit(rows, targets, kept_ids, spec):
    logits = torch.tensor(rows)
    distribution = Replayed(spec, SamplingMask.from_lists(kept_ids))
    vocab = VocabShard(start=0, vocab_size=logits.shape[1])
    return audit_supports(logits, torch.tensor(targets), distribution, None, vocab)


def test_audit_by_hand():
    """exp(z) = 8, 4, 2, 1, top-k 2 keeps {0, 1}. Same ids; one of three common, target lost; a subset."""
    row = [math.log(8), math.log(4), math.log(2), 0.0]
    report = audit([row] * 3, [0, 2, 0], [[0, 1], [0, 2], [0]], SamplingSpec(top_k=2))
    assert report.jaccard_t.tolist() == pytest.approx([1, 1 / 3, 1 / 2])
    assert report.num_replayed_t.tolist() == [2, 2, 1] and report.num_recomputed_t.tolist() == [2, 2, 2]
    differences = [0, math.log(10 / 12), math.log(8 / 12)]
    assert report.log_mass_difference_t.tolist() == pytest.approx(differences, abs=1e-6)
    assert report.out_of_support_t.tolist() == [False, True, False]
    metrics = reduce_metrics(report.metrics(torch.tensor([True, True, False])))
    assert metrics["audit/jaccard"] == pytest.approx(2 / 3)
    assert metrics["audit/out_of_support"] == 0.5 and metrics["audit/num_replayed"] == 2.0


def test_audit_does_not_mind_which_tied_ids_were_kept():
    """Top-k 2 keeps id 0 and one of weight of {1, 2, 3}: any one of them is the same support; two are not."""
    report = audit([[3.0, 1, 1, 1, 0]] * 3, [0, 0, 0], [[0, 1], [0, 3], [0, 1, 2]], SamplingSpec(top_k=2))
    assert report.jaccard_t.tolist() == pytest.approx([1, 1, 2 / 3])
    everything = audit([[3.0, 1, -math.inf]], [0], [[0, 1, 2]], PLAIN)
    assert everything.jaccard_t.item() == 1.0 and everything.num_recomputed_t.item() == 2


@SWEEP
@given(cases(), st.sampled_from([SamplingSpec(top_k=3), SamplingSpec(top_p=0.8), SamplingSpec(min_p=0.1)]))
def test_audit_equals_sets_of_ids(case, spec):
    """Jaccard from the reference's weights, id by id."""
    logits, target_t, _, kept_ids, _ = case
    vocab = VocabShard(start=0, vocab_size=logits.shape[1])
    mask = SamplingMask.from_lists(kept_ids)
    report = audit_supports(logits, target_t, Replayed(spec, mask), None, vocab)
    for row, kept in enumerate(kept_ids):
        weights = support_weights(logits[row].double(), spec)
        ids = [i for i in {*kept, int(target_t[row])} if logits[row, i] > -math.inf]
        certain = sum(bool(weights[i] == 1) for i in ids)
        tied = sum(0 < weights[i] < 1 for i in ids)
        common = certain + min(int(tied), round(float(weights[(weights > 0) & (weights < 1)].sum())))
        union = len(ids) + round(float(weights.sum())) - common
        assert report.jaccard_t[row].item() == pytest.approx(common / union)
        assert report.num_replayed_t[row] == len(ids)
        assert report.out_of_support_t[row].item() == (weights[target_t[row]] == 0)


def test_quantiles_are_those_of_the_valid_values():
    value_t = torch.tensor([5, 1, 9, 3, 7, 100])
    valid_t = torch.tensor([True] * 5 + [False])
    assert gathered_quantiles(value_t, valid_t, [0.0, 0.5, 0.8, 1.0]).tolist() == [1.0, 5.0, 7.0, 9.0]
    assert gathered_quantiles(value_t, valid_t & False, [0.5]).isnan().all()
