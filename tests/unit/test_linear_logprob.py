"""The fused head in one process: the float64 reference, both forms, chunk sizes, memory, matmul counts."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlcore.ops.linear_logprob import DIFFERENTIABLE, linear_logprob_loss, linear_vocab_parallel_logprob
from rlcore.ops.logprob import TokenLogprobs, VocabShard, vocab_parallel_logprob
from rlcore.ops.passes import EAGER
from rlcore.ops.reference import reference_logprob
from rlcore.sampling import RowSampling, SamplingSpec
from tests.linear_cases import assert_near, make_head, sum_of_chunk, weighted_sum
from tests.oracle import assert_close, assert_same_values, make_weights

SPECS = [
    SamplingSpec(),
    SamplingSpec(temperature=0.7, top_k=4, top_p=0.9),
    SamplingSpec(top_p=0.8, min_p=0.01),
    SamplingSpec(min_p=0.1, ties="all", temperature=1.3),
    SamplingSpec(top_k=15, ties="all"),
]
# Not a divisor of 11 tokens and one; one token at a time; more than there are.
CHUNKS = [4, 1, 64]


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("chunk_tokens", CHUNKS)
def test_equals_the_reference_on_the_whole_logits(spec, chunk_tokens):
    """Every output and its gradient in hidden and weight, in float64: no cut is decided by rounding."""
    hidden, weight, target_t = make_head(11, 37, 6, padding=3)
    vocab = VocabShard(start=0, vocab_size=37)
    whole_h, whole_w = hidden.detach().clone().requires_grad_(), weight.detach()[:37].requires_grad_()
    reference = reference_logprob(whole_h @ whole_w.t(), target_t, spec)
    before = hidden.detach().clone(), weight.detach().clone()
    ours = linear_vocab_parallel_logprob(
        hidden, weight, target_t, spec, None, vocab, entropy=True, chunk_tokens=chunk_tokens
    )
    assert_same_values(ours, reference, tolerance=1e-9, hint=spec)
    weights = make_weights(11, seed=3)
    for name in DIFFERENTIABLE:
        one = {name: weights[name].double()}
        expected = torch.autograd.grad(weighted_sum(reference, one), (whole_h, whole_w), retain_graph=True)
        grads = torch.autograd.grad(weighted_sum(ours, one), (hidden, weight), retain_graph=True)
        assert_close(grads[0], expected[0], 1e-9, (spec, name))
        assert_close(grads[1][:37], expected[1], 1e-9, (spec, name))
        assert not grads[1][37:].any(), "padding rows have a gradient"
    assert torch.equal(hidden, before[0]) and torch.equal(weight.nan_to_num(5), before[1].nan_to_num(5))


SPEC_DRAWS = st.builds(
    SamplingSpec,
    temperature=st.sampled_from([0.5, 1.0, 1.75]),
    top_k=st.sampled_from([None, 1, 3, 9]),
    top_p=st.sampled_from([None, 0.2, 0.75, 0.99]),
    min_p=st.sampled_from([0.0, 0.1]),
    ties=st.just("share"),
)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    spec=st.lists(SPEC_DRAWS, min_size=9, max_size=9),
    num_tokens=st.integers(1, 9),
    vocab_size=st.integers(1, 40),
    padding=st.integers(0, 3),
    chunk_tokens=st.integers(1, 10),
    tied=st.booleans(),
    seed=st.integers(0, 999),
)
def test_any_shape_and_parameters_equal_the_reference(
    spec, num_tokens, vocab_size, padding, chunk_tokens, tied, seed
):
    """Parameters of each row, whole-number logits full of ties, widths and chunks that divide nothing."""
    hidden, weight, target_t = make_head(num_tokens, vocab_size, 3, seed=seed, padding=padding)
    if tied:
        hidden.data.round_(), weight.data.round_()
    specs, vocab = spec[:num_tokens], VocabShard(start=0, vocab_size=vocab_size)
    weights = {name: w.double() for name, w in make_weights(num_tokens, seed=seed).items()}
    rows = RowSampling.of(specs)
    ours = linear_vocab_parallel_logprob(
        hidden, weight, target_t, rows, None, vocab, entropy=True, chunk_tokens=chunk_tokens
    )
    loss, _ = linear_logprob_loss(
        hidden, weight, target_t, rows, sum_of_chunk(weights), None, vocab,
        entropy=True, chunk_tokens=chunk_tokens,
    )  # fmt: skip
    total = torch.zeros((), dtype=torch.float64)
    for row, alone in enumerate(specs):
        logits = hidden[row : row + 1] @ weight[:vocab_size].t()
        one = reference_logprob(logits, target_t[row : row + 1], alone)
        part = {
            name: getattr(ours, name)[row : row + 1] for name in (*DIFFERENTIABLE, "keep_t", "num_kept_t")
        }
        assert_same_values(TokenLogprobs(**part), one, tolerance=1e-9, hint=(row, alone))
        total = total + weighted_sum(one, {name: w[row : row + 1] for name, w in weights.items()})
    expected = torch.autograd.grad(total, (hidden, weight))
    for value in (weighted_sum(ours, weights), loss):
        for grad, whole in zip(torch.autograd.grad(value, (hidden, weight)), expected, strict=True):
            # A share of 1/3 is a float32 number in the op.
            assert_close(grad.nan_to_num(7.0), whole.nan_to_num(7.0), 1e-6, specs)


@pytest.mark.parametrize("entropy", [False, True])
def test_float64_gradcheck_of_both_forms(entropy):
    hidden, weight, target_t = make_head(5, 9, 3, seed=4)
    spec = SamplingSpec(temperature=0.8, top_k=5, top_p=0.95)
    names = DIFFERENTIABLE if entropy else DIFFERENTIABLE[:3]
    keep_t = linear_vocab_parallel_logprob(hidden, weight, target_t, spec).keep_t
    assert keep_t.any() and not keep_t.all()

    def outputs(hidden, weight):
        result = linear_vocab_parallel_logprob(
            hidden, weight, target_t, spec, entropy=entropy, chunk_tokens=2
        )
        return tuple(
            torch.where(keep_t, getattr(result, name), 0.0) if name == "logprob_t" else getattr(result, name)
            for name in names
        )

    weights = {name: w.double() for name, w in make_weights(5, seed=1).items() if name in names}

    def loss(hidden, weight):
        return linear_logprob_loss(
            hidden, weight, target_t, spec, sum_of_chunk(weights), entropy=entropy, chunk_tokens=2
        )[0]

    assert torch.autograd.gradcheck(outputs, (hidden, weight))
    assert torch.autograd.gradcheck(loss, (hidden, weight))


@pytest.mark.parametrize("chunk_tokens", CHUNKS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equals_the_op_on_the_same_logits(dtype, chunk_tokens):
    """Same dtype of logits as a plain matmul gives: a chunk's rounding is the op's own."""
    hidden, weight, target_t = make_head(11, 300, 16, dtype=dtype)
    spec = SamplingSpec(temperature=0.9, top_k=20, top_p=0.9)
    plain = vocab_parallel_logprob(hidden @ weight.t(), target_t, spec, entropy=True)
    ours = linear_vocab_parallel_logprob(
        hidden, weight, target_t, spec, entropy=True, chunk_tokens=chunk_tokens
    )
    assert_same_values(ours, plain, tolerance=1e-6)
    weights = make_weights(11, seed=5)
    expected = torch.autograd.grad(weighted_sum(plain, weights), (hidden, weight))
    grads = torch.autograd.grad(weighted_sum(ours, weights), (hidden, weight))
    tolerance = 1e-6 if dtype == torch.float32 else 2**-7
    for grad, whole in zip(grads, expected, strict=True):
        assert grad.dtype == dtype
        assert_near(grad, whole, tolerance)


def test_results_are_bit_identical_for_every_chunk_size():
    """Small integers: every matmul is exact, so the logits do not depend on the chunk. Nothing else may."""
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randint(-3, 4, (13, 8), generator=generator).float().requires_grad_()
    weight = torch.randint(-3, 4, (500, 8), generator=generator).float().requires_grad_()
    target_t = torch.randint(0, 500, (13,), generator=generator)
    for spec in (*SPECS, SamplingSpec(top_p=0.9, temperature=30.0)):
        results, hidden_grads = [], []
        for chunk_tokens in (13, 1, 2, 5, 8):
            result = linear_vocab_parallel_logprob(
                hidden, weight, target_t, spec, entropy=True, chunk_tokens=chunk_tokens
            )
            results.append(result)
            hidden_grads.append(
                torch.autograd.grad(weighted_sum(result, make_weights(13, seed=2)), hidden)[0]
            )
        for result, grad in zip(results[1:], hidden_grads[1:], strict=True):
            for name in (*DIFFERENTIABLE, "keep_t", "num_kept_t"):
                assert torch.equal(getattr(result, name), getattr(results[0], name)), (spec, name)
            # The gradient's matmul sums non-integers, in an order that is the library's choice.
            assert_near(grad, hidden_grads[0], 1e-6)


def test_each_row_keeps_its_own_parameters():
    specs = [SPECS[row % 3] for row in range(7)]
    hidden, weight, target_t = make_head(7, 40, 5, seed=8)
    whole = vocab_parallel_logprob(hidden @ weight.t(), target_t, RowSampling.of(specs), entropy=True)
    ours = linear_vocab_parallel_logprob(
        hidden, weight, target_t, RowSampling.of(specs), entropy=True, chunk_tokens=3
    )
    assert_same_values(ours, whole, tolerance=1e-9)
    with pytest.raises(ValueError, match="of 6 rows for 7 tokens"):
        linear_vocab_parallel_logprob(hidden, weight, target_t, RowSampling.of(specs[:6]), chunk_tokens=3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("chunk_tokens", CHUNKS)
@pytest.mark.parametrize("entropy", [False, True])
def test_both_forms_have_the_same_loss_and_gradients(dtype, chunk_tokens, entropy):
    hidden, weight, target_t = make_head(11, 50, 8, dtype=dtype, padding=2)
    vocab, spec = VocabShard(start=0, vocab_size=50), SamplingSpec(temperature=0.8, top_k=12, top_p=0.9)
    weights = make_weights(11, seed=6)
    if not entropy:
        weights = {name: weights[name] for name in DIFFERENTIABLE[:3]}
    # Tokens 4 to 7 are masked, a whole chunk of 4.
    weights = {name: torch.where(torch.arange(11) // 4 == 1, 0.0, w) for name, w in weights.items()}
    result = linear_vocab_parallel_logprob(
        hidden, weight, target_t, spec, None, vocab, entropy=entropy, chunk_tokens=chunk_tokens
    )
    two_pass = weighted_sum(result, weights)
    expected = torch.autograd.grad(2.5 * two_pass, (hidden, weight))
    loss, reports = linear_logprob_loss(
        hidden, weight, target_t, spec, sum_of_chunk(weights), None, vocab,
        entropy=entropy, chunk_tokens=chunk_tokens,
    )  # fmt: skip
    assert loss.item() == pytest.approx(two_pass.item(), abs=1e-5)
    stops = [*range(chunk_tokens, 11, chunk_tokens), 11]
    assert reports == [slice(start, stop) for start, stop in zip([0, *stops], stops, strict=False)]
    for _ in range(2):  # a second backward finds the stored gradients unscaled
        grads = torch.autograd.grad(2.5 * loss, (hidden, weight), retain_graph=True)
        for grad, value in zip(grads, expected, strict=True):
            assert grad.dtype == dtype
            # bfloat16: 2.5 is applied before the first rounding in one form and after it in the other.
            assert_near(grad, value, 1e-6 if dtype == torch.float32 else 2**-7)


def test_a_half_precision_weight_gradient_is_summed_in_float32():
    """512 chunks of one token: sums kept in bfloat16 would stop growing after some hundred equal terms."""
    hidden = torch.ones(512, 2, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.zeros(4, 2, dtype=torch.bfloat16, requires_grad=True)
    target_t = torch.zeros(512, dtype=torch.long)
    result = linear_vocab_parallel_logprob(hidden, weight, target_t, SamplingSpec(), chunk_tokens=1)
    (two_pass,) = torch.autograd.grad(result.logprob_t.sum(), weight)
    loss, _ = linear_logprob_loss(
        hidden, weight, target_t, SamplingSpec(), lambda s, _: (s.logprob_t.sum(), None), chunk_tokens=1
    )
    (stored,) = torch.autograd.grad(loss, weight)
    # p is 1/4 for each id: 512 x 3/4 for the target, -512 / 4 for the others; all exact in bfloat16.
    for grad in (two_pass, stored):
        assert grad[:, 0].tolist() == [384.0, -128.0, -128.0, -128.0]


def test_a_factor_is_not_rounded_to_half_precision():
    """1/3 in bfloat16 is off by 2e-3 / 3: every gradient would be biased alike."""
    hidden = torch.ones(1, 2, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.tensor([[0.0, 0.0], [3.0, 5.0]], dtype=torch.bfloat16, requires_grad=True)
    loss, _ = linear_logprob_loss(
        hidden, weight, torch.tensor([0]), SamplingSpec(), lambda s, _: (s.logprob_t.sum(), None)
    )
    (grad,) = torch.autograd.grad(loss * (1 / 3), hidden)
    # p(1) = 1 / (1 + exp(-8)) rounds to 1: the gradient is -(3, 5), and a third of it is rounded once.
    assert torch.equal(grad, (torch.tensor([[-3.0, -5.0]]) * (1 / 3)).bfloat16())


def test_no_tokens_give_a_differentiable_zero():
    hidden, weight, target_t = make_head(0, 9, 4, dtype=torch.float32)
    for entropy in (False, True):
        result = linear_vocab_parallel_logprob(hidden, weight, target_t, SPECS[1], entropy=entropy)
        assert result.logprob_t.shape == (0,) and result.keep_t.dtype == torch.bool
        assert result.num_kept_t.dtype == torch.int64 and (result.entropy_t is None) != entropy
        loss, reports = linear_logprob_loss(
            hidden, weight, target_t, SPECS[1], lambda s, c: (s.logprob_t.sum(), c), entropy=entropy
        )
        assert loss.item() == 0 and reports == [slice(0, 0)]
        for value in (loss, result.logprob_t.sum()):
            grads = torch.autograd.grad(value, (hidden, weight))
            assert grads[0].shape == (0, 4) and torch.equal(grads[1], torch.zeros(9, 4))


def test_masked_tokens_and_constant_summands_have_no_gradient():
    """A chunk whose summand does not depend on any output, and masked tokens whose logprob is -inf."""
    hidden, weight, target_t = make_head(6, 20, 4, dtype=torch.float32)
    mask_t = torch.tensor([True, True, False, False, False, True])

    def loss_of_chunk(scores, chunk):
        if not mask_t[chunk].any():
            return torch.zeros(()), "none"
        return torch.where(mask_t[chunk] & scores.keep_t, scores.logprob_t, 0.0).sum(), "some"

    loss, reports = linear_logprob_loss(
        hidden, weight, target_t, SamplingSpec(top_k=2), loss_of_chunk, chunk_tokens=2
    )
    assert reports == ["some", "none", "some"]
    result = linear_vocab_parallel_logprob(hidden, weight, target_t, SamplingSpec(top_k=2))
    assert (result.logprob_t[2:5] == -math.inf).any()
    expected = torch.where(mask_t & result.keep_t, result.logprob_t, 0.0).sum()
    assert loss.item() == pytest.approx(expected.item(), abs=1e-6)
    grads = torch.autograd.grad(loss, (hidden, weight))
    for grad, value in zip(grads, torch.autograd.grad(expected, (hidden, weight)), strict=True):
        assert torch.allclose(grad, value, atol=1e-6)
    assert not grads[0][2:5].any()


def test_backend_is_chosen_by_the_whole_chunk(monkeypatch):
    """The last, shorter chunk must not switch implementations."""
    seen = []

    def select(backend, logits):
        seen.append((backend, tuple(logits.shape)))
        return EAGER

    monkeypatch.setattr("rlcore.ops.linear_head.select_passes", select)
    hidden, weight, target_t = make_head(7, 9, 4, dtype=torch.float32, padding=1)
    linear_vocab_parallel_logprob(
        hidden, weight, target_t, SPECS[0], None, VocabShard(start=0, vocab_size=9),
        chunk_tokens=4, backend="torch",
    )  # fmt: skip
    assert seen == [("torch", (4, 9))] * 2


def test_broken_rows_are_named_by_their_place_in_the_whole():
    hidden, weight, target_t = make_head(7, 9, 4, dtype=torch.float32)
    hidden.data[5, 1] = math.nan
    for call in (
        lambda **options: linear_vocab_parallel_logprob(hidden, weight, target_t, SPECS[1], **options),
        lambda **options: linear_logprob_loss(
            hidden, weight, target_t, SPECS[1], lambda s, _: (s.log_mass_t.sum(), None), **options
        ),
    ):
        with pytest.raises(ValueError, match="row 5 has a NaN"):
            call(chunk_tokens=2)
        call(chunk_tokens=2, validate=False)


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        (lambda h, w, t: (h[None], w, t), {}, r"expected \[t, D\] and \[v, D\]"),
        (lambda h, w, t: (h, w[:, :2], t), {}, r"\(7, 4\), head weight of shape \(9, 2\)"),
        (lambda h, w, t: (h, w.bfloat16(), t), {}, "float32 and the head weight torch.bfloat16"),
        (lambda h, w, t: (h, w, t[:5]), {}, r"targets of shape \(5,\)"),
        (lambda h, w, t: (h, w, t.float()), {}, "expected integer ids"),
        (lambda h, w, t: (h, w, t + 9), {}, "outside the vocabulary"),
        (lambda h, w, t: (h, w, t), {"chunk_tokens": 0}, "chunk_tokens=0"),
        (lambda h, w, t: (h, w, t), {"backend": "magic"}, "'torch'"),
        (
            lambda h, w, t: (h, w, t),
            {"sequence_parallel": True, "reduce_hidden_grad": False},
            "Set reduce_hidden_grad=True",
        ),
    ],
)
def test_what_does_not_fit_is_refused(change, options, message):
    hidden, weight, target_t = change(*make_head(7, 9, 4, dtype=torch.float32))
    with pytest.raises(ValueError, match=message):
        linear_vocab_parallel_logprob(hidden, weight, target_t, SPECS[0], **options)
    with pytest.raises(ValueError, match=message):
        linear_logprob_loss(
            hidden, weight, target_t, SPECS[0], lambda s, _: (s.logprob_t.sum(), None), **options
        )


def test_unknown_options_and_summands_of_tokens_are_refused():
    hidden, weight, target_t = make_head(7, 9, 4, dtype=torch.float32)
    with pytest.raises(TypeError, match="chunk_size"):
        linear_vocab_parallel_logprob(hidden, weight, target_t, SPECS[0], chunk_size=3)  # pyright: ignore
    with pytest.raises(ValueError, match=r"returned \(4,\) for tokens 0 to 4: expected a 0-dim"):
        linear_logprob_loss(
            hidden, weight, target_t, SPECS[0], lambda s, _: (s.logprob_t, None), chunk_tokens=4
        )


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_a_gpu_both_forms_equal_the_cpu(dtype):
    """bfloat16 takes another matmul there: half-precision operands, a float32 result."""
    hidden, weight, target_t = make_head(37, 500, 32, dtype=dtype)
    weights = make_weights(37, seed=6)
    loss, _ = linear_logprob_loss(
        hidden, weight, target_t, SamplingSpec(), sum_of_chunk(weights), entropy=True, chunk_tokens=8
    )
    expected = torch.autograd.grad(loss, (hidden, weight))
    there = [tensor.detach().cuda().requires_grad_() for tensor in (hidden, weight)]
    weights = {name: w.cuda() for name, w in weights.items()}
    options = {"entropy": True, "chunk_tokens": 8, "validate": True}
    loss, _ = linear_logprob_loss(*there, target_t.cuda(), SamplingSpec(), sum_of_chunk(weights), **options)
    result = linear_vocab_parallel_logprob(*there, target_t.cuda(), SamplingSpec(), **options)
    for value in (loss, weighted_sum(result, weights)):
        for grad, cpu in zip(torch.autograd.grad(value, there), expected, strict=True):
            assert_near(grad.cpu(), cpu, 1e-3 if dtype == torch.float32 else 2**-5)
