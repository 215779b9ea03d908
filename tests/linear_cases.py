"""Small heads and a loss that reads every output, for the tests of the fused head."""

from __future__ import annotations

import math

import torch

from rlcore.ops.logprob import TokenLogprobs


def make_head(num_tokens, vocab_size, width, seed=0, dtype=torch.float64, padding=0):
    """Hidden states and a head weight whose padding rows are NaN: nobody may read them."""
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(num_tokens, width, generator=generator, dtype=torch.float64).to(dtype)
    weight = torch.randn(vocab_size + padding, width, generator=generator, dtype=torch.float64).to(dtype)
    weight[vocab_size:] = math.nan
    target_t = torch.randint(0, vocab_size, (num_tokens,), generator=generator)
    return hidden.requires_grad_(), weight.requires_grad_(), target_t


def weighted_sum(result: TokenLogprobs, weights: dict[str, torch.Tensor]) -> torch.Tensor:
    """A loss that reads every output, -inf left out."""
    total = result.log_mass_t.new_zeros(())
    for name, weight_t in weights.items():
        value_t = getattr(result, name)
        total = total + (torch.where(torch.isfinite(value_t), value_t, 0.0) * weight_t).sum()
    return total


def sum_of_chunk(weights):
    """The same loss for `linear_logprob_loss`; reports the chunk."""

    def loss_of_chunk(scores, chunk):
        return weighted_sum(scores, {name: w[chunk] for name, w in weights.items()}), chunk

    return loss_of_chunk


def assert_near(ours: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    """Difference relative to the largest entry: a matmul's rounding grows with what it sums. Not all zero."""
    scale = float(expected.abs().max())
    assert scale > 0 and ours.shape == expected.shape
    difference = float((ours.double() - expected.double()).abs().max())
    assert difference <= tolerance * scale, (difference, scale)
