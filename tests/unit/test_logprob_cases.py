"""The op on hand-computed rows: the faults of public bug reports, with their right values."""

import math

import pytest
import torch

from rlcore.ops.logprob import VocabShard, vocab_parallel_logprob
from rlcore.sampling import SamplingSpec
from tests.oracle import make_logits


def score(z, spec, targets=None, entropy=False):
    """The op on one row repeated for each target (all ids by default)."""
    logits = torch.as_tensor(z, dtype=torch.float32)
    targets = list(range(len(logits))) if targets is None else targets
    x = logits.repeat(len(targets), 1).requires_grad_()
    return x, vocab_parallel_logprob(x, torch.tensor(targets), spec, entropy=entropy)


def logs(*probs):
    return torch.tensor(probs, dtype=torch.float64).log().float()


def kept(result):
    return result.keep_t.nonzero()[:, 0].tolist()


def expect(result, values):
    assert result.logprob_t.tolist() == pytest.approx(values, abs=1e-5)


def test_b01_top_p_acts_on_what_top_k_left(search):
    _, result = score(logs(0.38, 0.27, 0.19, 0.10, 0.06), SamplingSpec(top_k=3, top_p=0.7))
    assert kept(result) == [0, 1]
    expect(result, [-0.536801, -0.878550, -math.inf, -math.inf, -math.inf])


def test_b02_the_crossing_token_stays_and_equality_drops(search):
    _, result = score(logs(0.45, 0.30, 0.15, 0.10), SamplingSpec(top_p=0.6))
    assert kept(result) == [0, 1]
    expect(result, [-0.510826, -0.916291, -math.inf, -math.inf])
    ln2 = math.log(2)
    for dtype in (torch.float32, torch.float64):
        z = torch.tensor([[0, -ln2, -2 * ln2, -2 * ln2]], dtype=dtype).repeat(4, 1)
        result = vocab_parallel_logprob(z, torch.arange(4), SamplingSpec(top_p=0.75))
        assert kept(result) == [0, 1]
    x, result = score([2.0, 1.9, -1.0], SamplingSpec(top_p=1e-6))
    expect(result, [0.0, -math.inf, -math.inf])
    assert not torch.autograd.grad(result.logprob_t[0], x)[0].any()
    _, result = score(logs(0.3, 0.25, 0.2, 0.15, 0.1), SamplingSpec(top_k=1, top_p=0.5))
    assert kept(result) == [0] and result.logprob_t[0] == 0.0


@pytest.mark.parametrize(
    ("probs", "top_p", "count"),
    [
        ((0.4, 0.3, 0.2, 0.1), 0.7, 2),
        ((0.5, 0.3, 0.2), 0.8, 2),
        ((0.9, 0.05, 0.05), 0.9, 1),
        ((0.1,) * 10, 0.3, 3),
    ],
)
@pytest.mark.parametrize("shift", [0.0, 7.3])
def test_b02_equality_survives_float32_rounding(probs, top_p, count, shift, search):
    """Sums that hit p exactly on paper miss it by a rounding in float32; the cut must not flip with it."""
    _, result = score(logs(*probs) + shift, SamplingSpec(top_p=top_p))
    assert result.num_kept_t.tolist() == [count] * len(probs)


def test_b03_ties_share_their_weight(search):
    x, result = score([3.0, 1, 2, 2, 2, 0], SamplingSpec(top_k=2))
    assert kept(result) == [0, 2, 3, 4] and result.num_kept_t[0] == 2
    expect(result, [-0.313262, -math.inf, -1.313262, -1.313262, -1.313262, -math.inf])
    grad = torch.autograd.grad(result.logprob_t[0], x)[0][0]
    assert grad.tolist() == pytest.approx([0.268941, 0, *[-0.268941 / 3] * 3, 0], abs=1e-5)


def test_b03_ties_all(search):
    _, result = score([3.0, 1, 2, 2, 2, 0], SamplingSpec(top_k=2, ties="all"))
    assert kept(result) == [0, 2, 3, 4] and result.num_kept_t[0] == 4
    expect(result, [-0.743668, -math.inf, -1.743668, -1.743668, -1.743668, -math.inf])


def test_b03_a_whole_tied_group_counts_in_the_mass_that_top_p_divides(search):
    """Top-k 2 keeps all four ids tied at the cut: mass 1 + 4/e, so the first id alone is 0.40 of it."""
    _, result = score([3.0, 2, 2, 2, 2, 0], SamplingSpec(top_k=2, top_p=0.5, ties="all"))
    assert kept(result) == [0, 1, 2, 3, 4] and result.num_kept_t[0] == 5


def test_b03_a_bfloat16_tie_is_no_float32_tie(search):
    z = torch.tensor([[10.0, 10.02, 1.0]])
    fine = vocab_parallel_logprob(z.repeat(3, 1), torch.arange(3), SamplingSpec(top_k=1))
    coarse = vocab_parallel_logprob(z.bfloat16().repeat(3, 1), torch.arange(3), SamplingSpec(top_k=1))
    assert kept(fine) == [1] and kept(coarse) == [0, 1]
    assert coarse.num_kept_t[0] == 1 and coarse.logprob_t[0] == 0.0


def test_ties_shared_by_top_p_keep_the_minimal_count(search):
    """Four equal ids, p = 0.6: three of weight, spread over four, normaliser that of three."""
    _, result = score([0.0] * 4, SamplingSpec(top_p=0.6), entropy=True)
    assert kept(result) == [0, 1, 2, 3] and result.num_kept_t[0] == 3
    expect(result, [-math.log(3)] * 4)
    assert result.log_mass_t[0].item() == pytest.approx(math.log(0.75), abs=1e-6)
    assert result.entropy_t[0].item() == pytest.approx(math.log(3), abs=1e-6)


@pytest.mark.parametrize("top_k", [50, 4, 0, -1, None])
@pytest.mark.parametrize("top_p", [1.0, None])
def test_b05_off_values(top_k, top_p, search):
    _, result = score([0.2, -1, 0.7, 1.1], SamplingSpec(top_k=top_k, top_p=top_p))
    expect(result, [-1.688160, -2.888160, -1.188160, -0.788160])
    assert torch.equal(result.log_mass_t, torch.zeros(4))


def test_b05_top_p_still_applies_when_top_k_is_larger_than_the_vocabulary(search):
    _, result = score([0.2, -1, 0.7, 1.1], SamplingSpec(top_k=50, top_p=0.5))
    assert kept(result) == [2, 3]


def test_b05_top_p_one_keeps_an_underflowed_tail():
    _, result = score([0.0, -200.0, 1.0], SamplingSpec(top_p=1.0))
    assert result.logprob_t[1].item() == pytest.approx(-201.313262, abs=1e-4)


def test_b06_temperature_comes_before_the_filter_and_once(search):
    _, result = score([2.0, 1, 0, -1], SamplingSpec(temperature=0.5, top_p=0.9))
    assert kept(result) == [0, 1]
    expect(result, [-0.126928, -2.126928, -math.inf, -math.inf])
    with pytest.warns(UserWarning):
        spec = SamplingSpec(temperature=0.001)
    _, result = score([1.0, 0.99, 0.5], spec)
    assert result.logprob_t[:2].tolist() == pytest.approx([-0.313262, -1.313262], abs=1e-5)


def test_b07_min_p_acts_on_tempered_logits(search):
    _, result = score([2.0, 1, 0, -1], SamplingSpec(temperature=2.0, min_p=0.3))
    assert kept(result) == [0, 1, 2]
    expect(result, [-0.680270, -1.180270, -1.680270, -math.inf])


def test_b09_a_view_of_a_padded_buffer(search):
    inf = math.inf
    buffer = torch.tensor([[1, 2, 3, 0.5, -inf, -inf], [3, 0, 1, 2, -inf, -inf]])
    before = buffer.clone()
    for row, targets, values in ((0, (1, 2), (-1.313262, -0.313262)), (1, (0, 3), (-0.313262, -1.313262))):
        for target, value in zip(targets, values, strict=True):
            target_t = torch.tensor([target, target])
            view = buffer[:, :4]
            result = vocab_parallel_logprob(view, target_t, SamplingSpec(top_k=2))
            assert result.logprob_t[row].item() == pytest.approx(value, abs=1e-5)
            dense = vocab_parallel_logprob(view.contiguous(), target_t, SamplingSpec(top_k=2))
            assert torch.equal(result.logprob_t, dense.logprob_t)
    assert torch.equal(buffer, before)


def test_b09_other_strides_have_the_same_gradient(search):
    """Transposed and stepped views; the gradient has the view's shape."""
    base = make_logits("random", 12, 10, seed=5)
    for view_of in (lambda b: b.t(), lambda b: b[::2], lambda b: b[:, 1:9:2]):
        strided = base.clone().requires_grad_()
        dense = view_of(base).contiguous().requires_grad_()
        target_t = torch.zeros(dense.shape[0], dtype=torch.long)
        spec = SamplingSpec(top_k=3, top_p=0.9)
        a = vocab_parallel_logprob(view_of(strided), target_t, spec)
        b = vocab_parallel_logprob(dense, target_t, spec)
        (grad_a,) = torch.autograd.grad(a.unfiltered_logprob_t.sum() + a.log_mass_t.sum(), strided)
        (grad_b,) = torch.autograd.grad(b.unfiltered_logprob_t.sum() + b.log_mass_t.sum(), dense)
        # Not bit-equal: the order of a sum follows the strides.
        assert torch.allclose(view_of(grad_a), grad_b, atol=1e-6)


def test_b13_entropy_with_banned_entries():
    x, result = score([1.0, 0, -math.inf, -math.inf], SamplingSpec(), targets=[0], entropy=True)
    assert result.unfiltered_entropy_t.item() == pytest.approx(0.582203, abs=1e-6)
    (grad,) = torch.autograd.grad(result.unfiltered_entropy_t, x)
    assert grad[0].tolist() == pytest.approx([-0.196612, 0.196612, 0, 0], abs=1e-6)


def test_b15_neither_order_nor_repetition_changes_a_result():
    z = torch.tensor([[1.0, 0, -1]])
    before = z.clone()
    spec = SamplingSpec(temperature=0.5)
    for entropy in (True, False, True):
        result = vocab_parallel_logprob(z, torch.tensor([0]), spec, entropy=entropy)
        assert result.logprob_t.item() == pytest.approx(-0.142932, abs=1e-6)
        if entropy:
            assert result.entropy_t.item() == pytest.approx(0.441057, abs=1e-6)
    assert torch.equal(z, before)


def test_b18_processed_logprobs():
    _, result = score([1.0, 0, -1, -2], SamplingSpec(top_p=0.8), targets=[1])
    assert result.logprob_t.item() == pytest.approx(-1.313262, abs=1e-5)
    assert result.unfiltered_logprob_t.item() == pytest.approx(-1.440190, abs=1e-5)
    _, result = score([1.0, 0, -1, -2], SamplingSpec(temperature=0.5), targets=[1])
    assert result.logprob_t.item() == pytest.approx(-2.145078, abs=1e-5)


def test_a_shard_of_padding_only():
    """V=5 over 4 ranks of width 2: the last shard has no real column at all."""
    result = vocab_parallel_logprob(
        torch.randn(2, 2), torch.zeros(2, dtype=torch.long), SamplingSpec(top_k=3), None,
        VocabShard(start=6, vocab_size=5), validate=False,
    )  # fmt: skip
    assert torch.isnan(result.unfiltered_logprob_t).all()
