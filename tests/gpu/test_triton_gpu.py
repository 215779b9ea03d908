"""The Triton kernels on a real GPU: each pass against the eager one there, the op against the reference."""

import pytest
import torch

from rlcore.ops import bracket
from rlcore.ops import filter as support_filter
from rlcore.ops.logprob import vocab_parallel_logprob
from rlcore.ops.passes import EAGER, select_passes
from rlcore.ops.reference import reference_logprob
from rlcore.sampling import SamplingSpec
from tests.oracle import (
    DIFFERENTIABLE,
    ROW_KINDS,
    TOLERANCE,
    assert_close,
    assert_same_values,
    gradients,
    make_logits,
    make_weights,
)
from tests.pass_oracle import DTYPES, check_gradient, check_passes, hard_logits

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

SPECS = (
    SamplingSpec(top_k=50, top_p=0.95),
    SamplingSpec(top_p=0.95, temperature=0.7),
    SamplingSpec(top_k=1500, top_p=0.8, min_p=1e-4),
    SamplingSpec(top_p=0.6, ties="all"),
    SamplingSpec(temperature=1.3),
)


@pytest.fixture
def passes():
    return select_passes("auto", torch.zeros(1, 1, device="cuda"))


def test_auto_takes_triton(passes):
    assert passes.name == "triton"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_columns", [1, 300, 50257, 75968])  # odd widths: rows that do not start aligned
def test_passes_equal_the_eager_ones(passes, dtype, num_columns):
    logits = hard_logits(num_columns, dtype).cuda()
    check_passes(passes, logits, None)
    check_passes(passes, logits, torch.tensor([4, 2, 2, 0], device="cuda"))
    check_gradient(passes, logits)


def test_passes_on_views(passes):
    base = hard_logits(300, torch.float32).cuda()
    for view in (base[:, 3:250], base[:, ::2], base[:5, :5].t(), base[1:2].expand(4, 300)):
        check_passes(passes, view, torch.tensor([3, 1], device="cuda"))
        check_gradient(passes, view)


def test_quotients_are_those_of_torch(passes):
    """A million logits and temperatures: every block maximum equals the eager one bit for bit."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(1 << 14, 64, generator=generator).mul(10).cuda()
    temperature_t = torch.rand(1 << 14, generator=generator).add(0.01).cuda()
    below_t = torch.full_like(temperature_t, torch.inf)
    arguments = (logits, None, temperature_t, below_t)
    assert torch.equal(passes.block_maxima(*arguments), EAGER.block_maxima(*arguments))


def test_a_row_has_the_same_bits_whatever_rows_it_comes_with(passes):
    logits = make_logits("flat", 64, 75968, seed=0).cuda()
    ones_t, zeros_t = torch.ones(64, device="cuda"), torch.zeros(64, device="cuda")
    whole = passes.exp_sums(logits, None, ones_t, zeros_t, zeros_t, True)
    for rows in (1, 7, 33):
        few_t = zeros_t[:rows]
        part = passes.exp_sums(logits[:rows], None, ones_t[:rows], few_t, few_t, True)
        assert torch.equal(part, whole[:rows])


@pytest.mark.parametrize("kind", ROW_KINDS)
@pytest.mark.parametrize("short_lists", [False, True])
def test_the_op_equals_the_reference(kind, short_lists, monkeypatch):
    """Values and gradients; with short lists nearly every row is searched."""
    if short_lists:
        monkeypatch.setattr(support_filter, "MAX_CANDIDATES", 0)
        monkeypatch.setattr(support_filter, "NUCLEUS_CANDIDATES", 2)
        monkeypatch.setattr(bracket, "NUM_LISTED", 3)
        monkeypatch.setattr(bracket, "SAMPLE_FROM_ELEMENTS", 0)
        monkeypatch.setattr(bracket, "SAMPLE_STRIDE", 2)
    vocab_size = 300 if short_lists else 5000
    logits = make_logits(kind, 6, vocab_size, seed=1)
    target_t = torch.tensor([0, 17, 150, vocab_size - 1, vocab_size - 2, 1])
    weights = make_weights(6, seed=3)
    for spec in SPECS:
        whole = logits.double().requires_grad_()
        reference = reference_logprob(whole, target_t, spec)
        expected = gradients(reference, whole, weights)
        on_gpu = logits.cuda().requires_grad_()
        ours = vocab_parallel_logprob(on_gpu, target_t.cuda(), spec, entropy=True, validate=True)
        moved = type(ours)(**{name: value.cpu() for name, value in vars(ours).items()})
        assert_same_values(moved, reference, hint=spec)
        on_gpu_weights = {name: weight.cuda() for name, weight in weights.items()}
        for name, grad in gradients(ours, on_gpu, on_gpu_weights).items():
            assert_close(grad.cpu().double(), expected[name], TOLERANCE, (spec, name))


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("kind", ["random", "flat", "tied"])
def test_real_sizes_in_bfloat16_equal_the_eager_backend(spec, kind):
    """V=151,936: the same support, values to 1e-5, gradients to one rounding.

    A sum's seventh digit may move the cut of a flat row by one id of 10^5.
    """
    generator = torch.Generator(device="cuda").manual_seed(0)
    logits = torch.randn(256, 151936, generator=generator, device="cuda") * 3
    logits = {"random": logits, "flat": logits * 1e-3, "tied": logits.round()}[kind].bfloat16()
    target_t = torch.randint(0, 151936, (256,), generator=generator, device="cuda")
    results, grads = [], []
    for backend in ("triton", "torch"):
        x = logits.clone().requires_grad_()
        result = vocab_parallel_logprob(x, target_t, spec, entropy=True, backend=backend)
        values = [getattr(result, name) for name in DIFFERENTIABLE]
        total = torch.stack([torch.where(v.isfinite(), v, 0.0) for v in values]).sum()
        grads.append(torch.autograd.grad(total, x)[0].double())
        results.append(result)
    ours, eager = results
    assert bool(((ours.num_kept_t - eager.num_kept_t).abs() <= eager.num_kept_t // 100_000).all())
    assert torch.equal(ours.keep_t, eager.keep_t)
    for name in DIFFERENTIABLE:
        assert_close(getattr(ours, name).double(), getattr(eager, name).double(), TOLERANCE, name)
    difference, size = (grads[0] - grads[1]).abs(), grads[1].abs()
    assert bool((difference <= 1e-6 + 2.0**-7 * size).all()), difference.max()
