"""What one token's loss counts: multipliers, so that loss = sum(loss_t x multiplier_t) over every microbatch
and rank.

All denominators belong to the whole step and are known before its first forward (`LossCounts`). The mask that
counts is the caller's choice (`actor_denominator`): a token that counts and has loss 0, because a filter or
the current policy dropped it, stays in the denominator.

Which method wants which: DAPO, PPO `token_mean`; GRPO, GSPO `seq_mean_token_mean`; `seq_mean_token_sum`
weighs sequences by their length; Dr.GRPO `fixed_length`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from rlcore.collectives import Group, all_reduce_
from rlcore.ops.segments import Segments, segment_sums


@dataclass(frozen=True, kw_only=True)
class LossCounts:
    """The counting tokens and sequences of a step."""

    num_tokens: torch.Tensor
    """0-dim: tokens that count, over all microbatches and ranks."""
    num_sequences: torch.Tensor
    """0-dim: sequences with at least one counting token, over all microbatches and data-parallel ranks."""
    num_tokens_s: torch.Tensor
    """`[num_segments]`: counting tokens of each sequence of this microbatch, over its CP ranks."""


def count_tokens(mask_t: torch.Tensor, segments: Segments, cp_group: Group = None) -> torch.Tensor:
    """`[num_segments]` float64: counting tokens of each sequence, over all CP ranks.

    Collectives: one all-reduce (sum) of 16 bytes a sequence over `cp_group`, whatever the data.
    """
    return segment_sums(torch.zeros_like(mask_t, dtype=torch.float32), mask_t, segments, cp_group)[:, 1]


def count_sequences(num_tokens_s: torch.Tensor) -> torch.Tensor:
    """0-dim float64: sequences with at least one counting token; a fully masked one is in no mean.

    To be summed over microbatches and data-parallel ranks, and not over CP ranks: they hold the same
    sequences.
    """
    return (num_tokens_s > 0).sum().double()


def count_step(per_sequence: Sequence[torch.Tensor], dp_group: Group = None) -> list[LossCounts]:
    """The counts of several masks over a step, from each one's counting tokens `[num_segments]`: those of all
    the step's sequences on this data-parallel rank, over its CP ranks.

    Collectives: one all-reduce of two float64 a mask over `dp_group`, whatever the data: an empty rank adds
    zeros.
    """
    own = [
        number
        for num_tokens_s in per_sequence
        for number in (num_tokens_s.double().sum(), count_sequences(num_tokens_s))
    ]
    total = all_reduce_(torch.stack(own), "sum", dp_group)
    return [
        LossCounts(num_tokens=tokens, num_sequences=sequences, num_tokens_s=num_tokens_s)
        for num_tokens_s, (tokens, sequences) in zip(per_sequence, total.view(-1, 2), strict=True)
    ]


def token_mean(mask_t: torch.Tensor, counts: LossCounts) -> torch.Tensor:
    """1 / tokens of the step. The multipliers below share this contract:

    Shapes: `mask_t [t]` bool, the mask that was counted; result `[t]` float32, 0 outside it. Layout: any.
    Collectives: none. Backward: none. Mutates: nothing. A count of 0 gives 0, because nothing counts then.
    Source: DAPO (Yu et al. 2025).
    """
    return _where(mask_t, 1.0 / counts.num_tokens.double().clamp(min=1))


def seq_mean_token_mean(mask_t: torch.Tensor, segments: Segments, counts: LossCounts) -> torch.Tensor:
    """1 / (sequences of the step x the sequence's own tokens): the mean over sequences of their token means.

    Contract as `token_mean`. Source: GRPO (Shao et al. 2024), equation 3.
    """
    num_sequences = counts.num_sequences.double().clamp(min=1)
    inverse_s = 1.0 / (num_sequences * counts.num_tokens_s.double().clamp(min=1))
    return _where(mask_t, segments.pick(inverse_s))


def seq_mean_token_sum(mask_t: torch.Tensor, counts: LossCounts) -> torch.Tensor:
    """1 / sequences of the step: the mean over sequences of their token sums.

    Contract as `token_mean`. Source: policy gradient of whole sequences (Williams 1992).
    """
    return _where(mask_t, 1.0 / counts.num_sequences.double().clamp(min=1))


def fixed_length(mask_t: torch.Tensor, counts: LossCounts, length: int) -> torch.Tensor:
    """1 / (sequences of the step x `length`), the same constant for every sequence, such as the length limit.

    Contract as `token_mean`. `ValueError` for a length that is not positive.
    Source: Dr.GRPO (Liu et al. 2025).
    """
    if not length > 0:
        raise ValueError(f"fixed length {length}: expected the number of tokens to divide by, more than 0.")
    return _where(mask_t, 1.0 / (counts.num_sequences.double().clamp(min=1) * length))


def _where(mask_t: torch.Tensor, multiplier: torch.Tensor) -> torch.Tensor:
    return torch.where(mask_t, multiplier, 0.0).float()
