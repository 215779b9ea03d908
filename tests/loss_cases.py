"""Every loss, aggregation and importance correction by name, and the textbook formula of each loss.

The formulas are written as in the papers, for autograd, on rows of unpadded sequences where a sequence
matters.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from rlcore.ops.aggregation import (
    LossCounts,
    count_step,
    count_tokens,
    fixed_length,
    seq_mean_token_mean,
    seq_mean_token_sum,
    token_mean,
)
from rlcore.ops.importance import (
    SequenceFilter,
    WeightBounds,
    geometric,
    icepop,
    seq_mask_tis,
    sequence,
    tis,
)
from rlcore.ops.kl import KL_ESTIMATORS, KLRule
from rlcore.ops.loss import (
    ClipBounds,
    PolicyTokens,
    cispo_terms,
    clip_terms,
    entropy_terms,
    on_policy_terms,
    positive_nll_terms,
    reinforce_terms,
)
from rlcore.ops.segments import Segments
from rlcore.ops.sequence_loss import gspo_terms

BOUNDS = ClipBounds(low=0.2, high=0.28)
DUAL = ClipBounds(low=0.2, high=0.28, dual=3.0)

LOSSES = {
    "clip": lambda tokens, segments, group=None: clip_terms(tokens, BOUNDS),
    "dual_clip": lambda tokens, segments, group=None: clip_terms(tokens, DUAL),
    "gspo": lambda tokens, segments, group=None: gspo_terms(tokens, BOUNDS, segments, group),
    "gspo_dual": lambda tokens, segments, group=None: gspo_terms(tokens, DUAL, segments, group),
    "cispo": lambda tokens, segments, group=None: cispo_terms(tokens, BOUNDS),
    "reinforce": lambda tokens, segments, group=None: reinforce_terms(tokens),
    "on_policy": lambda tokens, segments, group=None: on_policy_terms(tokens),
    "positive_nll": lambda tokens, segments, group=None: positive_nll_terms(tokens, tokens.advantage_t > 0),
    "entropy": lambda tokens, segments, group=None: entropy_terms(
        tokens.logprob_t, tokens.mask_t, tokens.multiplier_t
    ),
}

AGGREGATIONS = {
    "token_mean": lambda mask, segments, counts: token_mean(mask, counts),
    "seq_mean_token_mean": seq_mean_token_mean,
    "seq_mean_token_sum": lambda mask, segments, counts: seq_mean_token_sum(mask, counts),
    "fixed_length": lambda mask, segments, counts: fixed_length(mask, counts, 7),
}

FILTER_BOUNDS = WeightBounds(low=0.5, high=5.0)
CORRECTIONS = {
    "none": None,
    "tis": lambda old, gen, mask, segments, group=None: tis(old, gen, mask, 2.0),
    "icepop": lambda old, gen, mask, segments, group=None: icepop(old, gen, mask, FILTER_BOUNDS),
    "seq_mask_tis": lambda old, gen, mask, segments, group=None: seq_mask_tis(
        old, gen, mask, segments, SequenceFilter(bounds=FILTER_BOUNDS, cap=2.0), group
    ),
    "seq_mask_tis_sum_raw": lambda old, gen, mask, segments, group=None: seq_mask_tis(
        old, gen, mask, segments, SequenceFilter(bounds=FILTER_BOUNDS, cap=None, statistic="sum"), group
    ),
    "sequence": lambda old, gen, mask, segments, group=None: sequence(old, gen, mask, segments, 2.0, group),
    "geometric": lambda old, gen, mask, segments, group=None: geometric(old, gen, mask, segments, 2.0, group),
}

KLS = {
    f"{name}_{gradient}": lambda x, reference, mask, name=name, gradient=gradient: KL_ESTIMATORS[name](
        x, reference, mask, KLRule(gradient=gradient)
    )
    for name in KL_ESTIMATORS
    for gradient in ("score", "plain")
}


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Tokens, their sequences, and what the sampler said."""

    tokens: PolicyTokens
    segments: Segments
    sampler_logprob_t: torch.Tensor

    def permuted(self, order_t: torch.Tensor) -> Batch:
        """The same tokens in another order (a prefix or a choice of them for a rank's share)."""
        tokens = {name: value for name, value in vars(self.tokens).items() if value is not None}
        return Batch(
            tokens=PolicyTokens(**{name: value[order_t] for name, value in tokens.items()}),
            segments=replace(self.segments, segment_t=self.segments.segment_t[order_t]),
            sampler_logprob_t=self.sampler_logprob_t[order_t],
        )


def counts_of(mask_t: torch.Tensor, segments: Segments, group=None) -> LossCounts:
    """The counts of a step that is this one microbatch; `mask_t` is this CP rank's."""
    return count_step([count_tokens(mask_t, segments, group)])[0]


def make_batch(lengths, seed=0, dtype=torch.float64, masked=0.25) -> Batch:
    """Sequences of these lengths and three filler tokens; advantages and weights per sequence."""
    generator = torch.Generator().manual_seed(seed)
    num_tokens = sum(lengths) + 3

    def draw(size=num_tokens):
        return torch.randn(size, generator=generator, dtype=torch.float64)

    segment_t = torch.cat(
        [torch.full((length,), index) for index, length in enumerate(lengths)] + [torch.full((3,), -1)]
    )
    old_t = draw() - 3.0
    # Both signs, whatever the seed.
    sign = torch.tensor([1.0, -1.0]).repeat(len(lengths))[: len(lengths) + 1]
    per_sequence = draw(len(lengths) + 1).abs() * sign
    mask_t = (torch.rand(num_tokens, generator=generator) >= masked) & (segment_t >= 0)
    tokens = PolicyTokens(
        logprob_t=(old_t + 0.3 * draw()).to(dtype),
        old_logprob_t=old_t.to(dtype),
        advantage_t=per_sequence[segment_t].to(dtype),
        mask_t=mask_t,
    )
    return Batch(
        tokens=tokens,
        segments=Segments(segment_t=segment_t, num_segments=len(lengths)),
        sampler_logprob_t=(old_t + 0.3 * draw()).to(dtype),
    )


def reference_loss(name: str, batch: Batch, x_t: torch.Tensor) -> torch.Tensor:
    """`[t]`, 0 where masked; gradients by autograd, stops by detach. float64 in, float64 out."""
    tokens, mask_t = batch.tokens, batch.tokens.mask_t
    loss_t = torch.zeros_like(x_t)
    for index in range(batch.segments.num_segments):
        at = ((batch.segments.segment_t == index) & mask_t).nonzero()[:, 0]
        if at.numel():
            own = (x_t[at], tokens.old_logprob_t[at], tokens.advantage_t[at])
            loss_t = loss_t.index_put((at,), _formula(name, *own).expand(at.numel()))
    if tokens.weight_t is not None:
        loss_t = loss_t * torch.where(mask_t, tokens.weight_t, 0.0)
    return loss_t


def _formula(name, x_t, old_t, advantage_t):
    ratio_t = (x_t - old_t).exp()
    if name.startswith("gspo"):
        ratio_t = (x_t - old_t).mean().exp().expand_as(x_t)
    if name in ("clip", "dual_clip", "gspo", "gspo_dual"):
        loss_t = -torch.minimum(ratio_t * advantage_t, ratio_t.clamp(0.8, 1.28) * advantage_t)
        if "dual" in name:
            loss_t = torch.where(advantage_t < 0, torch.minimum(loss_t, -3.0 * advantage_t), loss_t)
        return loss_t
    return {
        "cispo": lambda: -ratio_t.clamp(0.8, 1.28).detach() * advantage_t * x_t,
        "reinforce": lambda: -advantage_t * x_t,
        "on_policy": lambda: -advantage_t * (x_t - x_t.detach()).exp(),
        "positive_nll": lambda: torch.where(advantage_t > 0, -x_t, 0.0),
        "entropy": lambda: -x_t,
    }[name]()
