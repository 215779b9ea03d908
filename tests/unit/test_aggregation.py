"""Token multipliers: hand-computed means, fully masked sequences, packing, empty steps (B34)."""

import pytest
import torch

from rlcore.ops.aggregation import (
    LossCounts,
    count_sequences,
    count_tokens,
    fixed_length,
    seq_mean_token_mean,
    seq_mean_token_sum,
    token_mean,
)
from rlcore.ops.segments import Segments
from tests.loss_cases import AGGREGATIONS, counts_of

# Three interleaved sequences: token losses 1, 3 (and a masked 100), 1, and a fully masked one; filler.
LOSS_T = torch.tensor([1.0, 1.0, 100.0, 3.0, 7.0, 9.0])
MASK_T = torch.tensor([1, 1, 0, 1, 0, 0]).bool()
SEGMENTS = Segments(segment_t=torch.tensor([0, 1, 0, 0, 2, -1]), num_segments=3)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("token_mean", 5 / 3),
        # B34 c: sequence means 2 and 1, the fully masked row is in no mean: 1.5, not 1
        ("seq_mean_token_mean", 1.5),
        ("seq_mean_token_sum", 5 / 2),
        ("fixed_length", 5 / (2 * 7)),
    ],
)
def test_values_and_gradients_by_hand(name, expected):
    x = LOSS_T.clone().requires_grad_()
    multiplier_t = AGGREGATIONS[name](MASK_T, SEGMENTS, counts_of(MASK_T, SEGMENTS))
    value = (x * multiplier_t).sum()
    assert value.item() == pytest.approx(expected)
    gradients = {
        "token_mean": [1 / 3, 1 / 3, 0, 1 / 3, 0, 0],
        "seq_mean_token_mean": [1 / 4, 1 / 2, 0, 1 / 4, 0, 0],
        "seq_mean_token_sum": [1 / 2, 1 / 2, 0, 1 / 2, 0, 0],
        "fixed_length": [1 / 14, 1 / 14, 0, 1 / 14, 0, 0],
    }
    assert torch.autograd.grad(value, x)[0].tolist() == pytest.approx(gradients[name])
    assert multiplier_t.dtype == torch.float32


@pytest.mark.parametrize(
    ("lengths", "masked"), [([4, 2, 2], [2]), ([4, 4, 4], [1, 2])], ids=["truncated", "two masked rows"]
)
def test_b34ab_masked_samples_are_in_no_count(lengths, masked):
    """Loss 1 per token: 6 / 6 and 4 / 4 for the mean of tokens and of sequences alike."""
    segment_t = torch.tensor([index for index, length in enumerate(lengths) for _ in range(length)])
    segments = Segments(segment_t=segment_t, num_segments=3)
    mask_t = ~torch.isin(segment_t, torch.tensor(masked))
    for name in ("token_mean", "seq_mean_token_mean"):
        multiplier_t = AGGREGATIONS[name](mask_t, segments, counts_of(mask_t, segments))
        assert multiplier_t.sum().item() == pytest.approx(1.0)


def test_counts_are_of_the_step_and_not_of_the_microbatch():
    """Two microbatches: 3 tokens in 2 sequences, then 1 in 1. Parts add up to the value of the whole."""
    other = Segments(segment_t=torch.tensor([0, 0]), num_segments=1)
    other_mask_t, other_loss_t = torch.tensor([0, 1]).bool(), torch.tensor([50.0, 6.0])
    first_s, second_s = count_tokens(MASK_T, SEGMENTS), count_tokens(other_mask_t, other)
    assert first_s.tolist() == [2, 1, 0] and second_s.tolist() == [1]
    num_sequences = count_sequences(first_s) + count_sequences(second_s)
    assert num_sequences == 3
    for name, expected in (
        ("token_mean", 11 / 4),
        ("seq_mean_token_mean", (2 + 1 + 6) / 3),
        ("seq_mean_token_sum", 11 / 3),
        ("fixed_length", 11 / 21),
    ):
        total = 0.0
        parts = ((LOSS_T, MASK_T, SEGMENTS, first_s), (other_loss_t, other_mask_t, other, second_s))
        for loss_t, mask_t, segments, count_s in parts:
            counts = LossCounts(
                num_tokens=torch.tensor(4.0), num_sequences=num_sequences, num_tokens_s=count_s
            )
            total += float((loss_t * AGGREGATIONS[name](mask_t, segments, counts)).sum())
        assert total == pytest.approx(expected), name


def test_b34d_a_token_that_counts_and_has_no_loss_stays_in_the_denominator():
    """The counting mask is the caller's; a filter zeroes a token's loss (here the second): 3 / 2, not 3 /
    1."""
    mask_t = torch.tensor([1, 1]).bool()
    segments = Segments(segment_t=torch.tensor([0, 0]), num_segments=1)
    multiplier_t = seq_mean_token_mean(mask_t, segments, counts_of(mask_t, segments))
    assert (torch.tensor([3.0, 0.0]) * multiplier_t).sum().item() == 1.5


@pytest.mark.parametrize("name", AGGREGATIONS)
def test_a_step_without_tokens_is_zero_and_no_nan(name):
    mask_t = torch.zeros(6).bool()
    multiplier_t = AGGREGATIONS[name](mask_t, SEGMENTS, counts_of(mask_t, SEGMENTS))
    assert multiplier_t.tolist() == [0.0] * 6


def test_more_sequences_than_a_lane_and_lengths_that_are_no_multiple_of_it():
    """Sums run in 16 lanes: 37 tokens leave a rest, 20 sequences and a single one."""
    segment_t = torch.arange(37) * 7 % 20
    segments = Segments(segment_t=segment_t, num_segments=20)
    expected = torch.bincount(segment_t, minlength=20)
    assert torch.equal(count_tokens(torch.ones(37).bool(), segments), expected.double())
    one = Segments(segment_t=torch.zeros(37, dtype=torch.int64), num_segments=1)
    assert count_tokens(torch.ones(37).bool(), one).tolist() == [37.0]


@pytest.mark.parametrize("length", [0, -3, float("nan")])
def test_a_length_that_means_nothing_is_refused(length):
    with pytest.raises(ValueError, match="fixed length"):
        fixed_length(MASK_T, counts_of(MASK_T, SEGMENTS), length)


def test_half_a_million_tokens_do_not_round_away():
    """1 / (N x n) is computed in float64 and rounded once."""
    counts = LossCounts(
        num_tokens=torch.tensor(524_289.0), num_sequences=torch.tensor(3.0), num_tokens_s=torch.tensor([3.0])
    )
    mask_t = torch.ones(1).bool()
    one = Segments(segment_t=torch.tensor([0]), num_segments=1)
    assert token_mean(mask_t, counts).item() == pytest.approx(1 / 524_289, rel=1e-7)
    assert seq_mean_token_mean(mask_t, one, counts).item() == pytest.approx(1 / 9, rel=1e-7)
    assert seq_mean_token_sum(mask_t, counts).item() == pytest.approx(1 / 3, rel=1e-7)
