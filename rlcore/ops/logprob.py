"""THE OP: log-probability of each target under the truncated and the whole distribution, vocabulary sharded
over TP.

One call, one backward, both distributions.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from rlcore.collectives import Group, group_rank, group_size
from rlcore.ops.filter import find_support
from rlcore.ops.rows import compute_dtype, finite, row_chunks, temper
from rlcore.sampling import SamplingSpec


@dataclass(frozen=True, kw_only=True)
class VocabShard:
    """Which ids this rank's columns stand for."""

    start: int
    """Id of the first column."""
    vocab_size: int
    """Real vocabulary size V; columns of ids >= V are padding and never count."""

    @staticmethod
    def even(padded_size: int, vocab_size: int, tp_group: Group) -> VocabShard:
        """The shard of this rank when `padded_size` columns are cut evenly over the group, as Megatron
        does.
        """
        width = padded_size // group_size(tp_group)
        if width * group_size(tp_group) != padded_size:
            raise ValueError(
                f"a padded vocabulary of {padded_size} does not divide over {group_size(tp_group)} ranks; "
                "pad it to a "
                "multiple, or build VocabShard(start=..., vocab_size=...) for uneven shards."
            )
        return VocabShard(start=group_rank(tp_group) * width, vocab_size=vocab_size)


@dataclass(frozen=True, kw_only=True)
class TokenLogprobs:
    """What the op says about each token. `[t]`, float32 (float64 for float64 logits) unless stated."""

    logprob_t: torch.Tensor
    """Under the truncated distribution; -inf where `keep_t` is False, with gradient exactly 0 there."""
    unfiltered_logprob_t: torch.Tensor
    """Under the whole distribution at the same temperature. NaN marks a row the model broke (NaN, +inf, all
    -inf).
    """
    keep_t: torch.Tensor
    """bool: the target is inside the support."""
    log_mass_t: torch.Tensor
    """Log of the probability mass of the support, <= 0."""
    num_kept_t: torch.Tensor
    """int64: size of the support; a group tied at the cut counts its share."""
    entropy_t: torch.Tensor | None
    """Entropy of the truncated distribution, in nats; None unless asked for."""
    unfiltered_entropy_t: torch.Tensor | None
    """Entropy of the whole distribution, in nats; None unless asked for."""


def vocab_parallel_logprob(
    logits_tv: torch.Tensor,
    target_t: torch.Tensor,
    spec: SamplingSpec,
    tp_group: Group = None,
    vocab: VocabShard | None = None,
    *,
    entropy: bool = False,
    validate: bool | None = None,
) -> TokenLogprobs:
    """Truncated and plain log-probability of each target, exact under TP.

    Maths: z = logits / T; support = min-p, then top-k, then top-p of what is left; logprob = z[target] -
        lse(support).
    Shapes: `logits_tv [t, v]`, this rank's columns, any strides; `target_t [t]`, ids of the whole vocabulary;
        both entropies are `[t]`.
    Dtypes: logits of any float dtype; maths and results in float32 (float64 for float64 logits); target
        int64.
    Layout: `vocab` says which ids the columns are; None takes shards of one width in rank order, without
        padding. `t` and the target are the same on all ranks of `tp_group`; `t` and V need not divide by
        anything.
    Collectives: over `tp_group`, from the spec alone: one all-gather of 5 numbers a token (6 + k with top_k
        <= 1024); one all-reduce of 3 numbers for min-p alone; four all-reduces of 512 numbers for each of a
        larger top-k and a top-p without a small top-k, and one of 1 number with `entropy`. Backward: none.
    Backward: writes `[t, v]` from the logits and O(t) saved numbers; differentiable in `logits_tv` through
        logprob, unfiltered logprob, log mass and both entropies (the support is held constant). Once.
    Mutates: nothing.

    `validate`: check shapes, ids and rows and raise; it reads values back, so None checks CPU tensors only.
    Without it a broken row gives NaN in `unfiltered_logprob_t` for the caller to refuse.

    Raises `ValueError` for mixed shapes, target ids outside [0, V), and rows with NaN, +inf, or nothing
    finite; the message names the row.
    """
    vocab = vocab or VocabShard(
        start=group_rank(tp_group) * _width(logits_tv), vocab_size=_whole_width(logits_tv, tp_group)
    )
    _check_shapes(logits_tv, target_t)
    validate = logits_tv.device.type == "cpu" if validate is None else validate
    if validate:
        _check_targets(target_t, vocab.vocab_size)
    outputs = _TruncatedLogprob.apply(logits_tv, target_t, spec, tp_group, vocab, entropy)
    result = TokenLogprobs(
        logprob_t=outputs[0],
        unfiltered_logprob_t=outputs[1],
        log_mass_t=outputs[2],
        keep_t=outputs[3],
        num_kept_t=outputs[4],
        entropy_t=outputs[5] if entropy else None,
        unfiltered_entropy_t=outputs[6] if entropy else None,
    )
    if validate:
        check_rows(result)
    return result


def check_rows(result: TokenLogprobs) -> None:
    """Raises `ValueError` naming the first row whose logits were NaN, +inf or all -inf. The same on every TP
    rank.
    """
    broken_t = torch.isnan(result.unfiltered_logprob_t)
    if broken_t.any():
        row = int(broken_t.nonzero()[0])
        raise ValueError(
            f"logits row {row} has a NaN or +inf, or no finite entry ({int(broken_t.sum())} of "
            f"{len(broken_t)} rows do): "
            "the model's output is broken. Check the weights, the learning rate and the input of that row."
        )


class _TruncatedLogprob(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits_tv: torch.Tensor,
        target_t: torch.Tensor,
        spec: SamplingSpec,
        tp_group: Group,
        vocab: VocabShard,
        entropy: bool,
    ) -> tuple[torch.Tensor, ...]:
        real_tv = real_columns(logits_tv, vocab)
        here_t, column_t = _local_column(target_t, real_tv.shape[1], vocab)
        z_target_t = _gather_target(real_tv, here_t, column_t, spec)
        z_target_t, stats, support = find_support(
            real_tv, z_target_t, spec, tp_group, vocab.vocab_size, entropy
        )
        y_target_t = z_target_t - stats.max_t
        keep_t = (z_target_t >= support.threshold_t) & (z_target_t > -math.inf)
        logprob_t = torch.where(keep_t, y_target_t - support.log_sum_t, -math.inf)
        unfiltered_t = y_target_t - stats.log_sum_t
        log_mass_t = (support.log_sum_t - stats.log_sum_t).clamp(max=0.0)
        none = torch.empty(0, dtype=logprob_t.dtype, device=logprob_t.device)
        entropy_t = support.entropy_t if support.entropy_t is not None else none
        whole_entropy_t = stats.entropy_t if stats.entropy_t is not None else none
        ctx.save_for_backward(
            logits_tv,
            here_t,
            column_t,
            keep_t,
            stats.max_t,
            stats.log_sum_t,
            support.threshold_t,
            support.share_t,
            support.log_sum_t,
            entropy_t,
            whole_entropy_t,
        )
        ctx.spec, ctx.vocab, ctx.entropy = spec, vocab, entropy
        ctx.mark_non_differentiable(keep_t, support.num_kept_t)
        ctx.set_materialize_grads(False)
        return logprob_t, unfiltered_t, log_mass_t, keep_t, support.num_kept_t, entropy_t, whole_entropy_t

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        logits_tv, here_t, column_t, keep_t, max_t, log_sum_t, *kept = ctx.saved_tensors
        threshold_t, share_t, kept_log_sum_t, entropy_t, whole_entropy_t = kept
        zero_t = torch.zeros_like(max_t)
        grad_logprob_t, grad_unfiltered_t, grad_mass_t, _, _, grad_entropy_t, grad_whole_entropy_t = (
            zero_t if grad is None else grad for grad in grads
        )
        # Selected before any product: an infinite incoming gradient of a dropped token must not meet a zero.
        grad_logprob_t = torch.where(keep_t, grad_logprob_t, 0.0)
        grad_tv = torch.zeros_like(logits_tv, memory_format=torch.contiguous_format)
        real_tv, real_grad_tv = real_columns(logits_tv, ctx.vocab), real_columns(grad_tv, ctx.vocab)
        target_grad_t = torch.where(here_t, grad_logprob_t + grad_unfiltered_t, 0.0)
        for rows in row_chunks(real_tv):
            z_tv = temper(real_tv[rows], ctx.spec)
            y_tv = z_tv - max_t[rows, None]
            weight_tv = support_weight(z_tv, threshold_t[rows], share_t[rows])
            kept_p_tv = weight_tv * (y_tv - kept_log_sum_t[rows, None]).clamp(max=0.0).exp()
            whole_p_tv = (y_tv - log_sum_t[rows, None]).exp()
            part_tv = kept_p_tv * (grad_mass_t - grad_logprob_t)[rows, None]
            part_tv -= whole_p_tv * (grad_mass_t + grad_unfiltered_t)[rows, None]
            if ctx.entropy:
                part_tv -= (
                    grad_entropy_t[rows, None]
                    * kept_p_tv
                    * (finite(y_tv) - (kept_log_sum_t - entropy_t)[rows, None])
                )
                part_tv -= (
                    grad_whole_entropy_t[rows, None]
                    * whole_p_tv
                    * (finite(y_tv) - (log_sum_t - whole_entropy_t)[rows, None])
                )
            part_tv.scatter_add_(1, column_t[rows, None], target_grad_t[rows, None]) if part_tv.shape[
                1
            ] else None
            real_grad_tv[rows] = (part_tv / ctx.spec.effective_temperature).to(grad_tv.dtype)
        return grad_tv, None, None, None, None, None


def support_weight(z_tv: torch.Tensor, threshold_t: torch.Tensor, share_t: torch.Tensor) -> torch.Tensor:
    """`[t, v]`: 1 above the row's threshold, the share at it, 0 below."""
    at_tv = torch.where(z_tv == threshold_t[:, None], share_t[:, None], 0.0)
    return torch.where(z_tv > threshold_t[:, None], 1.0, at_tv)


def real_columns(logits_tv: torch.Tensor, vocab: VocabShard) -> torch.Tensor:
    """A view without this shard's padding columns."""
    return logits_tv[:, : max(0, min(logits_tv.shape[1], vocab.vocab_size - vocab.start))]


def _local_column(target_t: torch.Tensor, width: int, vocab: VocabShard) -> tuple[torch.Tensor, torch.Tensor]:
    """`[t]` bool: the target is one of this shard's columns; `[t]` int64: which (0 where it is not)."""
    column_t = target_t - vocab.start
    here_t = (column_t >= 0) & (column_t < width)
    return here_t, torch.where(here_t, column_t, 0)


def _gather_target(
    real_tv: torch.Tensor, here_t: torch.Tensor, column_t: torch.Tensor, spec: SamplingSpec
) -> torch.Tensor:
    """`[t]`: the target's tempered logit on the rank that holds it, -inf on the others."""
    if real_tv.shape[1] == 0:
        return torch.full(here_t.shape, -math.inf, dtype=compute_dtype(real_tv), device=real_tv.device)
    picked_t = temper(real_tv.gather(1, column_t[:, None]), spec)[:, 0]
    return torch.where(here_t, picked_t, -math.inf)


def _width(logits_tv: torch.Tensor) -> int:
    return logits_tv.shape[-1]


def _whole_width(logits_tv: torch.Tensor, tp_group: Group) -> int:
    return logits_tv.shape[-1] * group_size(tp_group)


def _check_shapes(logits_tv: torch.Tensor, target_t: torch.Tensor) -> None:
    if logits_tv.dim() != 2 or target_t.dim() != 1 or logits_tv.shape[0] != target_t.shape[0]:
        raise ValueError(
            f"logits of shape {tuple(logits_tv.shape)} and targets of shape {tuple(target_t.shape)}: "
            "expected [t, v] and "
            "[t]. Flatten batch and sequence into one token axis."
        )
    if not logits_tv.is_floating_point() or target_t.is_floating_point() or target_t.dtype == torch.bool:
        raise ValueError(
            f"logits are {logits_tv.dtype} and targets {target_t.dtype}: expected a float dtype and integer "
            "ids."
        )


def _check_targets(target_t: torch.Tensor, vocab_size: int) -> None:
    bad_t = (target_t < 0) | (target_t >= vocab_size)
    if bad_t.any():
        row = int(bad_t.nonzero()[0])
        raise ValueError(
            f"target {int(target_t[row])} in row {row} is outside the vocabulary [0, {vocab_size}). "
            "Give masked positions any valid id, such as 0."
        )
