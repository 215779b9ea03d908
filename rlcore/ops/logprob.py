"""THE OP: log-probability of each target under the truncated and the whole distribution, vocabulary sharded
over TP.

One call, one backward, both distributions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from rlcore.collectives import Group, group_rank, group_size
from rlcore.ops.filter import find_support
from rlcore.ops.inputs import check_coverage, check_ids, check_shapes
from rlcore.ops.passes import EAGER, Passes, Wanted, compute_dtype, select_passes, temper
from rlcore.ops.penalties import PenaltyTokens, penalised_logits
from rlcore.ops.replay import (
    REPLAY_MODES,
    LocalTargets,
    Replayed,
    ReplayedRows,
    ReplayMode,
    SamplingMask,
    replay_rows,
    write_replayed_gradient_,
)
from rlcore.ops.rows import RowParams, RowStats, Support
from rlcore.sampling import RowSampling, SamplingSpec


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
    spec: SamplingSpec | RowSampling,
    tp_group: Group = None,
    vocab: VocabShard | None = None,
    *,
    replay: SamplingMask | None = None,
    replay_mode: ReplayMode = "replay",
    penalties: PenaltyTokens | None = None,
    entropy: bool = False,
    backend: str = "auto",
    validate: bool | None = None,
) -> TokenLogprobs:
    """Truncated and plain log-probability of each target, exact under TP.

    Maths: z = penalised logits / T; support = min-p, then top-k, then top-p of what is left, or the ids of
        `replay` and the target; logprob = z[target] - lse(support).
    Shapes: `logits_tv [t, v]`, this rank's columns, any strides; `target_t [t]`, ids of the whole vocabulary.
    Dtypes: logits of any float dtype; maths and results in float32 (float64 for float64 logits).
    Layout: `vocab` says which ids the columns are; None takes shards of one width in rank order, without
        padding. `t`, targets, replay and penalties are the same on all ranks; `t` and V need not divide.
    Collectives: over `tp_group`, those of `find_support`; with replay one all-gather of 7 numbers and one of
        4 float64 a token. Backward: none.
    Backward: writes `[t, v]` from the logits, O(t) saved numbers and the replayed ids; differentiable in
        `logits_tv` through all but keep and count (the support is held constant). Once.
    Mutates: nothing. Penalties make one copy of the logits.

    `replay_mode`: `recompute` and `audit` search as if there were no replay (`audit_supports` compares both).
    `validate`: check shapes, ids and rows and raise; it reads values back, so None checks CPU tensors only.
    Without it a broken row gives NaN in `unfiltered_logprob_t` for the caller to refuse.

    Raises `ValueError` for mixed shapes, ids outside [0, V), rows with NaN, +inf, or nothing finite, a mask
    that does not fit, penalties without the tokens they count; the message names the row or the field.
    """
    check_shapes(logits_tv, target_t)
    vocab = vocab or _equal_shard(logits_tv, tp_group)
    validate = logits_tv.device.type == "cpu" if validate is None else validate
    passes = select_passes(backend, logits_tv)
    replay = replay if _replays(replay_mode) else None
    if validate:
        check_coverage(logits_tv, vocab.start, vocab.vocab_size, tp_group)
        check_ids(target_t, vocab.vocab_size, replay, penalties)
    if spec.penalises and penalties is not None:
        logits_tv = penalised_logits(logits_tv, penalties, spec, vocab.start)
        spec = spec.without_penalties()
    distribution = spec if replay is None else Replayed(spec, replay)
    outputs = _TruncatedLogprob.apply(logits_tv, target_t, passes, distribution, (tp_group, vocab), entropy)
    result = TokenLogprobs(
        logprob_t=outputs[0],
        unfiltered_logprob_t=outputs[1],
        log_mass_t=outputs[2],
        keep_t=outputs[5],
        num_kept_t=outputs[6],
        entropy_t=outputs[3] if entropy else None,
        unfiltered_entropy_t=outputs[4] if entropy else None,
    )
    if validate:
        check_rows(result)
    return result


def _replays(replay_mode: str) -> bool:
    """Is the mask used? Raises `ValueError` naming the modes there are for one that is not."""
    if replay_mode not in REPLAY_MODES:
        raise ValueError(
            f"replay_mode={replay_mode!r}: expected one of {', '.join(map(repr, REPLAY_MODES))}."
        )
    return replay_mode == "replay"


def check_rows(result: TokenLogprobs, first_row: int = 0) -> None:
    """Raises `ValueError` naming the first row whose logits were NaN, +inf or all -inf. The same on every TP
    rank. `first_row`: the whole's row that the result's first one is.
    """
    broken_t = torch.isnan(result.unfiltered_logprob_t)
    if broken_t.any():
        row = first_row + int(broken_t.nonzero()[0])
        raise ValueError(
            f"logits row {row} has a NaN or +inf, or no finite entry (under replay: among its kept ids) ("
            f"{int(broken_t.sum())} of {len(broken_t)} rows do): "
            "the model's output is broken. Check the weights, the learning rate and the input of that row."
        )


@dataclass(frozen=True, kw_only=True)
class ScoredRows:
    """What a backward needs besides the logits: O(t) numbers."""

    params: RowParams
    stats: RowStats
    support: Support
    here_t: torch.Tensor
    """`[t]` bool: the target is one of this shard's columns."""
    column_t: torch.Tensor
    """`[t]` int64: which."""
    keep_t: torch.Tensor
    """`[t]` bool."""
    target_z_t: torch.Tensor
    """`[t]`: the target's tempered logit."""
    replayed: ReplayedRows | None = None
    """The support that was replayed; None when it was searched."""


def score_rows(
    passes: Passes,
    logits_tv: torch.Tensor,
    target_t: torch.Tensor,
    spec: SamplingSpec | RowSampling | Replayed,
    tp_group: Group,
    vocab: VocabShard,
    entropy: bool,
) -> tuple[TokenLogprobs, ScoredRows]:
    """The op without autograd and penalties; `rows_gradient` is its backward."""
    columns_tv = real_tv = real_columns(logits_tv, vocab)
    dtype = compute_dtype(logits_tv)
    mask = None
    if isinstance(spec, Replayed):
        spec, mask = spec.spec, spec.mask
    params = RowParams.of(spec, logits_tv, vocab.vocab_size, dtype)
    params = params if mask is None else params.untruncated()
    here_t, column_t = _local_column(target_t, real_tv.shape[1], vocab)
    if real_tv.shape[1] == 0:
        # A shard of padding only: one banned id, so that the passes have something to read.
        real_tv = torch.full((logits_tv.shape[0], 1), -math.inf, dtype=dtype, device=logits_tv.device)
    picked_t = temper(real_tv.gather(1, column_t[:, None]), params.temperature_t)[:, 0]
    z_t = torch.where(here_t, picked_t, -math.inf)
    z_t, stats, support = find_support(passes, real_tv, z_t, params, tp_group, entropy)
    replayed = None
    if mask is not None:
        targets = LocalTargets(start=vocab.start, here_t=here_t, column_t=column_t)
        replayed = replay_rows(columns_tv, mask, targets, params.temperature_t, stats, tp_group, entropy)
    saved = ScoredRows(
        params=params,
        stats=stats,
        support=support if replayed is None else replayed.support(dtype),
        here_t=here_t,
        column_t=column_t,
        keep_t=_kept(z_t, support) if replayed is None else z_t > -math.inf,
        target_z_t=z_t,
        replayed=replayed,
    )
    return _result(saved, entropy), saved


def _kept(z_t: torch.Tensor, support: Support) -> torch.Tensor:
    """`[t]` bool: the value is inside the support."""
    keep_t = (z_t > support.threshold_t) | ((z_t == support.threshold_t) & (support.share_t > 0))
    return keep_t & (z_t > -math.inf)


def _result(saved: ScoredRows, entropy: bool) -> TokenLogprobs:
    """The numbers of each token from what is known of its row."""
    stats, support, replayed = saved.stats, saved.support, saved.replayed
    y_t = saved.target_z_t - stats.max_t
    logprob_t = y_t - support.log_sum_t
    unfiltered_t = y_t - stats.log_sum_t
    log_mass_t = support.log_sum_t - stats.log_sum_t
    if replayed is not None:
        # Replayed ids may lie far below the row's largest: float32 differences would lose digits there.
        logprob_t = (saved.target_z_t.double() - stats.max_t.double() - replayed.log_sum_t).to(y_t.dtype)
        log_mass_t = (replayed.log_sum_t - stats.sum_t.log()).to(y_t.dtype)
        unfiltered_t = torch.where(replayed.log_sum_t.isnan(), math.nan, unfiltered_t)
    return TokenLogprobs(
        logprob_t=torch.where(saved.keep_t, logprob_t, -math.inf),
        unfiltered_logprob_t=unfiltered_t,
        keep_t=saved.keep_t,
        log_mass_t=log_mass_t.clamp(max=0.0),
        num_kept_t=support.num_kept_t,
        entropy_t=support.entropy_t if entropy else None,
        unfiltered_entropy_t=stats.entropy_t if entropy else None,
    )


def rows_gradient(
    passes: Passes,
    logits_tv: torch.Tensor,
    vocab: VocabShard,
    saved: ScoredRows,
    upstream: Sequence[torch.Tensor | None],
    entropy: bool,
) -> torch.Tensor:
    """`[t, v]` gradient of the logits; `upstream`: of logprob, unfiltered one, log mass, both entropies."""
    stats, support, temperature_t = saved.stats, saved.support, saved.params.temperature_t
    zero_t = torch.zeros_like(stats.max_t)
    # Autograd hands in None for an output that no gradient reaches.
    kept, whole = (any(upstream[i] is not None for i in needs) for needs in ((0, 2, 3), (1, 2, 4)))
    wanted = Wanted(kept=kept, whole=whole, entropy=entropy)
    grads = [zero_t if grad is None else grad for grad in upstream]
    # Selected before any product: an infinite incoming gradient of a dropped token must not meet a zero.
    grads[0] = torch.where(saved.keep_t, grads[0], 0.0)
    terms_tc = _gradient_terms(grads, stats, support)
    real_tv = real_columns(logits_tv, vocab)
    width = real_tv.shape[1]
    if width == 0:
        return torch.zeros_like(logits_tv, memory_format=torch.contiguous_format)
    arguments = (stats.max_t, support.threshold_t, support.share_t, terms_tc, wanted)
    grad_tv = passes.gradient(real_tv, None, temperature_t, *arguments)
    if saved.replayed is not None:
        write_replayed_gradient_(grad_tv, real_tv, saved.replayed, stats, temperature_t, grads)
    else:
        # The target's entry is written whole, in the compute dtype, not added to a rounded one.
        ones_t = torch.ones_like(temperature_t)
        target_t = EAGER.gradient(saved.target_z_t[:, None], None, ones_t, *arguments)[:, 0]
        target_t = (target_t + grads[0] + grads[1]) / temperature_t
        old_t = grad_tv.gather(1, saved.column_t[:, None])[:, 0]
        new_t = torch.where(saved.here_t, target_t.to(grad_tv.dtype), old_t)
        # An indexed write: `scatter_` makes a float32 copy of the whole tensor on a CPU where it is bfloat16.
        grad_tv[torch.arange(grad_tv.shape[0], device=grad_tv.device), saved.column_t] = new_t
    padding = logits_tv.shape[1] - width
    return torch.nn.functional.pad(grad_tv, (0, padding)) if padding else grad_tv


def _gradient_terms(grads: Sequence[torch.Tensor], stats: RowStats, support: Support) -> torch.Tensor:
    """`[t, 8]`: p (scale + slope (y - shift)) for the kept p and the whole p, p = exp(y - log).

    In the order kept log, kept scale, whole log, whole scale, kept slope, kept shift, whole slope, whole
    shift. Scales come from logprobs and log mass, slopes and shifts from entropies: dH/dz = -p (z - E[z]),
    E[z] = log - H.
    """
    logprob_t, unfiltered_t, mass_t, entropy_t, whole_entropy_t = grads
    terms = [
        support.log_sum_t,
        mass_t - logprob_t,
        stats.log_sum_t,
        -mass_t - unfiltered_t,
        -entropy_t,
        support.log_sum_t - support.entropy_t,
        -whole_entropy_t,
        stats.log_sum_t - stats.entropy_t,
    ]
    return torch.stack(terms, dim=1)


class _TruncatedLogprob(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits_tv: torch.Tensor,
        target_t: torch.Tensor,
        passes: Passes,
        spec: SamplingSpec | RowSampling | Replayed,
        shard: tuple[Group, VocabShard],
        entropy: bool,
    ) -> tuple[torch.Tensor, ...]:
        result, saved = score_rows(passes, logits_tv, target_t, spec, *shard, entropy)
        ctx.save_for_backward(logits_tv)
        # O(t) tensors that no caller can see, so they need no version check.
        ctx.saved, ctx.passes, ctx.vocab, ctx.entropy = saved, passes, shard[1], entropy
        ctx.mark_non_differentiable(result.keep_t, result.num_kept_t)
        ctx.set_materialize_grads(False)
        none = result.logprob_t.new_empty(0)
        return (
            result.logprob_t,
            result.unfiltered_logprob_t,
            result.log_mass_t,
            none if result.entropy_t is None else result.entropy_t.clone(),
            none if result.unfiltered_entropy_t is None else result.unfiltered_entropy_t.clone(),
            result.keep_t,
            result.num_kept_t,
        )

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        (logits_tv,) = ctx.saved_tensors
        grad_tv = rows_gradient(ctx.passes, logits_tv, ctx.vocab, ctx.saved, grads[:5], ctx.entropy)
        return grad_tv, None, None, None, None, None


def real_columns(logits_tv: torch.Tensor, vocab: VocabShard) -> torch.Tensor:
    """A view without this shard's padding columns."""
    return logits_tv[:, : max(0, min(logits_tv.shape[1], vocab.vocab_size - vocab.start))]


def _local_column(target_t: torch.Tensor, width: int, vocab: VocabShard) -> tuple[torch.Tensor, torch.Tensor]:
    """`[t]` bool: the target is one of this shard's columns; `[t]` int64: which (0 where it is not)."""
    column_t = target_t - vocab.start
    here_t = (column_t >= 0) & (column_t < width)
    return here_t, torch.where(here_t, column_t, 0)


def _equal_shard(logits_tv: torch.Tensor, tp_group: Group) -> VocabShard:
    """Shards of one width in rank order, without padding."""
    width = logits_tv.shape[-1]
    return VocabShard(start=group_rank(tp_group) * width, vocab_size=width * group_size(tp_group))
