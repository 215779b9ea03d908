"""Penalties in one process: the reference over generated histories, hand-computed rows, bad input."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlcore.ops import penalties
from rlcore.ops.draw import draw_tokens
from rlcore.ops.logprob import VocabShard, vocab_parallel_logprob
from rlcore.ops.penalties import PenaltyTokens, penalised_logits
from rlcore.ops.reference import reference_penalised
from rlcore.sampling import RowSampling, SamplingSpec
from rlcore.sampling_mask import SamplingMask
from tests.oracle import DIFFERENTIABLE, ROW_KINDS, make_logits
from tests.replay_oracle import History, Shard, check_penalised

# Small, and the same examples every time.
SWEEP = settings(max_examples=50, deadline=None, derandomize=True)
ALL = SamplingSpec(repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=-0.7, temperature=0.8)


def history(ids, prompt_lengths, lengths):
    return History(
        ids_sl=torch.tensor(ids),
        prompt_length_s=torch.tensor(prompt_lengths),
        length_s=torch.tensor(lengths),
    )


def penalise(rows, of_history, **penalties_of):
    """The penalised logits of rows given as lists."""
    return penalised_logits(torch.tensor(rows), of_history.tokens(), SamplingSpec(**penalties_of)).tolist()


@st.composite
def cases(draw):
    """Powers of two and quarters: float32 and float64 agree about ties, so the cuts do."""
    num_sequences, length = draw(st.integers(1, 3)), draw(st.integers(1, 7))
    vocab_size = draw(st.integers(1, 40))
    # Fewer ids than the vocabulary repeat more often.
    num_ids = draw(st.integers(1, vocab_size))
    past = History.random(num_sequences, length, num_ids, draw(st.integers(0, 99)))
    kind = draw(st.sampled_from(ROW_KINDS))
    num_rows = num_sequences * length
    logits = make_logits(kind, num_rows, vocab_size, draw(st.integers(0, 99)))
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float64]))
    values = {
        "repetition_penalty": st.sampled_from([1.0, 2.0, 0.5]),
        "presence_penalty": st.sampled_from([0.0, 0.5, -2.0]),
        "frequency_penalty": st.sampled_from([0.0, 0.25, -0.75]),
    }
    filters = draw(st.sampled_from([{}, {"top_k": 3}, {"top_p": 0.8}]))
    num_specs = draw(st.sampled_from([1, num_rows]))
    specs = [
        SamplingSpec(**filters, **{name: draw(value) for name, value in values.items()})
        for _ in range(num_specs)
    ]
    return logits.to(dtype), specs, past, draw(st.integers(0, 3))


@SWEEP
@given(cases())
def test_equals_the_reference(case):
    logits, specs, past, padding = case
    target_t = torch.arange(logits.shape[0]) % logits.shape[1]
    check_penalised(logits, target_t, specs, past, Shard(start=0, stop=logits.shape[1], padding=padding))


def test_other_numbers_equal_the_reference():
    """Penalties that are no powers of two, over a long sequence and one that is all prompt."""
    past = history(torch.randint(0, 30, (2, 40)).tolist(), [5, 40], [38, 40])
    logits = make_logits("random", 80, 200, seed=3)
    check_penalised(logits, logits.argmax(dim=1), [ALL], past, Shard(start=0, stop=200))


def test_each_penalty_by_hand():
    """Prompt 0, 1; response 1, 2, 1. The last row has seen all of it: 0 once, 1 three times, 2 once."""
    past = history([[0, 1, 1, 2, 1]], [2], [5])
    rows = [[2.0, -2.0, 0.0, 4.0]] * 5
    assert penalise(rows, past, repetition_penalty=2.0) == [
        [1.0, -2.0, 0.0, 4.0],
        [1.0, -4.0, 0.0, 4.0],
        [1.0, -4.0, 0.0, 4.0],
        [1.0, -4.0, 0.0, 4.0],
        [1.0, -4.0, 0.0, 4.0],
    ]
    assert penalise(rows, past, frequency_penalty=0.5) == [
        [2.0, -2.0, 0.0, 4.0],
        [2.0, -2.0, 0.0, 4.0],
        [2.0, -2.5, 0.0, 4.0],
        [2.0, -2.5, -0.5, 4.0],
        [2.0, -3.0, -0.5, 4.0],
    ]
    assert penalise(rows, past, presence_penalty=1.0)[-1] == [2.0, -3.0, -1.0, 4.0]
    # Repetition acts on the logit itself: a sign that frequency changes afterwards plays no part.
    both = penalise(rows, past, repetition_penalty=2.0, frequency_penalty=2.0, presence_penalty=-1.0)
    assert both[-1] == [1.0, -7.0, -1.0, 4.0]


def test_the_prompt_counts_for_repetition_alone():
    past = history([[3, 3, 1]], [3], [3])
    rows = [[1.0, 1.0, 1.0, 1.0]] * 3
    assert penalise(rows, past, frequency_penalty=1.0, presence_penalty=1.0) == rows
    assert penalise(rows, past, repetition_penalty=4.0) == [
        [1.0, 1.0, 1.0, 0.25],
        [1.0, 1.0, 1.0, 0.25],
        [1.0, 0.25, 1.0, 0.25],
    ]


def test_the_first_row_has_seen_the_first_token_and_padding_nothing():
    past = history([[2, 0, 0], [1, 1, 1]], [0, 1], [1, 2])
    rows = [[1.0, 1.0, 1.0]] * 6
    assert penalise(rows, past, presence_penalty=0.5) == [
        [1.0, 1.0, 0.5],
        [1.0, 1.0, 1.0],
        [1.0, 1.0, 1.0],
        [1.0, 1.0, 1.0],
        [1.0, 0.5, 1.0],
        [1.0, 1.0, 1.0],
    ]


def test_rows_in_any_order():
    """Packing and context parallelism pick rows by index; chunks are slices."""
    past = History.random(3, 6, 9, seed=4)
    logits = make_logits("random", 18, 9, seed=4)
    whole = penalised_logits(logits, past.tokens(), ALL)
    order = torch.randperm(18, generator=torch.Generator().manual_seed(0))
    assert torch.equal(penalised_logits(logits[order], past.tokens().rows(order), ALL), whole[order])
    chunk = slice(5, 11)
    assert torch.equal(penalised_logits(logits[chunk], past.tokens().rows(chunk), ALL), whole[chunk])


def test_results_do_not_depend_on_the_chunk_size(monkeypatch):
    past, logits = History.random(2, 8, 5, seed=1), make_logits("tied", 16, 12, seed=1)
    specs = [SamplingSpec(repetition_penalty=1.0 + i / 8, frequency_penalty=i / 16) for i in range(16)]

    def run():
        x = logits.clone().requires_grad_()
        out = penalised_logits(x, past.tokens(), RowSampling.of(specs))
        return out, torch.autograd.grad((out * logits).sum(), x)[0]

    whole = run()
    for most in (1, 7, 20):
        monkeypatch.setattr(penalties, "MAX_ENTRIES", most)
        for ours, expected in zip(run(), whole, strict=True):
            assert torch.equal(ours, expected)


def test_gradcheck_in_float64():
    """Penalties alone, and through every output of the op."""
    past = History.random(2, 4, 6, seed=5)
    logits = make_logits("random", 8, 9, seed=2).double().requires_grad_()
    assert torch.autograd.gradcheck(lambda x: penalised_logits(x, past.tokens(), ALL), (logits,))

    def outputs(x):
        result = vocab_parallel_logprob(x, x.argmax(dim=1), ALL, penalties=past.tokens(), entropy=True)
        return tuple(getattr(result, name) for name in DIFFERENTIABLE)

    assert torch.autograd.gradcheck(outputs, (logits,), eps=1e-7, atol=1e-6)


def test_the_slope_is_that_of_the_logit():
    """Positive: 1 / r; others, zero among them: r. Frequency and presence only shift."""
    past = history([[0, 1, 2]], [0], [3])
    x = torch.tensor([[3.0, -3.0, 0.0, 3.0]] * 3, requires_grad=True)
    spec = SamplingSpec(repetition_penalty=4.0, frequency_penalty=2.0, presence_penalty=2.0)
    upstream = torch.ones(3, 4)
    (grad,) = torch.autograd.grad(penalised_logits(x, past.tokens(), spec), x, upstream)
    assert grad[2].tolist() == [0.25, 4.0, 4.0, 1.0]
    assert torch.equal(upstream, torch.ones(3, 4)), "the incoming gradient was modified"


def test_bfloat16_logits_are_penalised_in_float32():
    """The sampler converts before it penalises; rounding the result to bfloat16 would make ties."""
    past = history([[0]], [1], [1])
    x = torch.tensor([[1.0, 0.7]]).bfloat16().requires_grad_()
    out = penalised_logits(x, past.tokens(), SamplingSpec(repetition_penalty=1.1))
    assert out.dtype == torch.float32 and out[0, 0].item() == pytest.approx(1 / 1.1, abs=1e-7)
    assert torch.autograd.grad(out.sum(), x)[0].dtype == torch.bfloat16


def test_banned_ids_stay_banned():
    past = history([[0, 1]], [0], [2])
    out = penalise([[-math.inf, 1.0]] * 2, past, repetition_penalty=0.5, frequency_penalty=-2.0)
    assert out == [[-math.inf, 1.0], [-math.inf, 4.0]]


def test_penalties_come_before_the_replayed_support():
    past = History.random(2, 3, 6, seed=7)
    logits = make_logits("random", 6, 10, seed=7)
    mask = SamplingMask.from_lists([[i, i + 2] for i in range(6)])
    target_t = torch.arange(6)
    ours = vocab_parallel_logprob(logits, target_t, ALL, penalties=past.tokens(), replay=mask)
    penalised = reference_penalised(logits, *past.before(), [ALL] * 6).float()
    expected = vocab_parallel_logprob(penalised, target_t, ALL.without_penalties(), replay=mask)
    assert torch.allclose(ours.logprob_t, expected.logprob_t, atol=1e-6)


def test_memory_follows_the_tokens_not_the_history():
    """A few numbers per token, though the rows of this sequence have seen two million ids."""
    ids_sl = torch.arange(2000)[None]
    tokens = PenaltyTokens.of(ids_sl, torch.tensor([0]), torch.tensor([2000]))
    held = sum(v.untyped_storage().nbytes() for v in vars(tokens).values() if isinstance(v, torch.Tensor))
    assert int(tokens.num_seen_t.sum()) == 2000 * 2001 // 2
    assert held <= 8 * 6 * 2000


# --- bad input ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("repetition_penalty", 0.0),
        ("repetition_penalty", -1.0),
        ("repetition_penalty", math.inf),
        ("presence_penalty", 2.1),
        ("presence_penalty", math.nan),
        ("frequency_penalty", -2.5),
        ("frequency_penalty", "1"),
    ],
)
def test_values_no_sampler_accepts_are_refused(field, value):
    with pytest.raises(ValueError, match=field):
        SamplingSpec(**{field: value})


def test_the_spec_knows_its_penalties():
    spec = SamplingSpec(top_k=5, repetition_penalty=1.5, presence_penalty=-2)
    assert spec.penalises and spec.penalty_fields == "repetition_penalty=1.5, presence_penalty=-2"
    penalties_of = {"repetition_penalty": 1.5, "presence_penalty": -2.0, "frequency_penalty": 0.0}
    assert {name: spec.to_vllm()[name] for name in penalties_of} == penalties_of
    assert spec.without_penalties() == SamplingSpec(top_k=5)
    assert spec.unfiltered().repetition_penalty == 1.5 and not spec.unfiltered().truncates
    assert not SamplingSpec().penalises and "repetition_penalty" not in SamplingSpec().to_vllm()
    mixed = RowSampling.of([SamplingSpec(), spec])
    assert mixed.penalises and mixed.rows(slice(1, 2)).presence_penalty_t.tolist() == [-2.0]
    assert not RowSampling.of([SamplingSpec()]).penalises and not mixed.without_penalties().penalises


@pytest.mark.parametrize("per_row", [False, True])
def test_penalties_without_their_tokens_are_refused(per_row):
    spec = SamplingSpec(frequency_penalty=0.5)
    given_spec = RowSampling.of([spec, spec]) if per_row else spec
    logits, target_t = torch.zeros(2, 4), torch.zeros(2).long()
    with pytest.raises(ValueError, match=r"frequency_penalty.*PenaltyTokens"):
        vocab_parallel_logprob(logits, target_t, given_spec)
    with pytest.raises(ValueError, match="frequency_penalty"):
        draw_tokens(logits, given_spec, None, VocabShard(start=0, vocab_size=4), torch.Generator())


def test_tokens_that_do_not_fit_are_named():
    tokens = history([[0, 7]], [1], [2]).tokens()
    with pytest.raises(ValueError, match="2 rows for logits of 3 rows"):
        penalised_logits(torch.zeros(3, 9), tokens, ALL)
    with pytest.raises(ValueError, match=r"penalty token 7, first seen by row 1, is outside"):
        vocab_parallel_logprob(torch.zeros(2, 4), torch.zeros(2).long(), ALL, penalties=tokens)
    with pytest.raises(ValueError, match="penalty token -1, first seen by row"):
        history([[0, 1], [-1, 1]], [1, 1], [2, 2]).tokens().check(4, 4)
    with pytest.raises(ValueError, match="sequence 1 has a prompt of 3 and 2 tokens in 2 columns"):
        history([[0, 1], [0, 1]], [1, 3], [2, 2]).tokens()
    with pytest.raises(ValueError, match=r"expected \[S, L\]"):
        history([[0, 1], [0, 1]], [1], [2, 2]).tokens()


def test_no_rows_and_neutral_penalties():
    empty = history(torch.zeros(0, 3).long().tolist(), [], [])
    assert penalised_logits(torch.zeros(0, 4), empty_tokens(), ALL).shape == (0, 4)
    assert empty.ids_sl.shape[0] == 0
    past, logits = History.random(1, 4, 5, seed=0), make_logits("random", 4, 5, seed=0)
    target_t = torch.arange(4)
    plain = vocab_parallel_logprob(logits, target_t, SamplingSpec(top_k=2))
    given_too = vocab_parallel_logprob(logits, target_t, SamplingSpec(top_k=2), penalties=past.tokens())
    assert torch.equal(plain.logprob_t, given_too.logprob_t)


def empty_tokens():
    return PenaltyTokens.of(torch.zeros(0, 3).long(), torch.zeros(0).long(), torch.zeros(0).long())


def test_ids_that_are_no_integers_are_refused():
    with pytest.raises(ValueError, match="float32"):
        PenaltyTokens.of(torch.tensor([[1.5, 2.0]]), torch.tensor([1]), torch.tensor([2]))
