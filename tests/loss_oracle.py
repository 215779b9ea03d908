"""The whole step's loss in one piece: float64, unsharded, written from DESIGN.md sections 5 and 6.

No shared formula with what it judges: tokens are selected by row before any arithmetic, stops are `detach`,
and gradients come from autograd. Nothing of `rlcore.ops` or `rlcore.step_weights` is called.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from rlcore.batch import TrainBatch
from rlcore.config import ImportanceConfig, LossConfig

# Pins of the design: no log ratio or log weight above 20 nats is exponentiated; a KL is at most 10 nats.
MAX_LOG = 20.0
MAX_KL = 10.0
# What an infinite log weight counts as in a sum over a sequence.
INFINITE_LOG_WEIGHT = 1e8


@dataclass(frozen=True, kw_only=True)
class Scores:
    """What the policy being trained says about each token, `[S, L]`, token-aligned; as in `TokenLogprobs`."""

    logprob_sl: torch.Tensor
    unfiltered_sl: torch.Tensor
    keep_sl: torch.Tensor
    log_mass_sl: torch.Tensor
    num_kept_sl: torch.Tensor
    entropy_sl: torch.Tensor
    unfiltered_entropy_sl: torch.Tensor


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The step, as one number and its derivatives."""

    loss: float
    num_trained: int
    gradients: dict[str, torch.Tensor]
    """`logprob`, `unfiltered`, `entropy`: float64 `[S, L]`."""
    metrics: dict[str, float]
    """Everything but quantiles; a minimum over nothing is left out."""
    ratio_n: torch.Tensor
    """Ratios of the trained tokens, for quantiles."""
    passed_s: torch.Tensor
    """`[S]` bool: the sequence check lets it through."""
    weight_sl: torch.Tensor
    """Importance weights; 1 where there is none."""


def step_in_one_piece(
    batch: TrainBatch, scores: Scores, loss: LossConfig, importance: ImportanceConfig, truncates: bool
) -> Outcome:
    """Loss, gradients and metrics of all rows at once. Masked slots of any input may hold anything."""
    masks = _Masks.of(batch, scores, importance, truncates)
    leaves = {
        name: getattr(scores, f"{name}_sl").double().detach().clone().requires_grad_()
        for name in ("logprob", "unfiltered", "entropy")
    }
    metrics = _mask_metrics(batch, scores, masks)
    ratios, total = _add_policy(batch, leaves["logprob"], loss, masks, metrics)
    if loss.kl_coef > 0:
        kl = _add_kl(batch, leaves["unfiltered"], loss, masks, metrics)
        total = total + loss.kl_coef * kl if loss.kl_in == "loss" else total
    if loss.entropy_coef > 0:
        factors = _factors(loss, _counted(loss, masks))
        bonus = -sum((factors[row] * part.sum() for row, part in _rows(leaves["entropy"], masks.actor)), ZERO)
        metrics["loss/entropy"] = float(bonus.detach())
        total = total + loss.entropy_coef * bonus
    if loss.positive_nll_coef > 0:
        positive = masks.retained & (batch.advantage_sl > 0)
        picked = leaves["logprob"][positive & masks.actor]
        nll = -picked.sum() / max(1, int(positive.sum()))
        metrics["loss/positive_nll"] = float(nll.detach())
        total = total + loss.positive_nll_coef * nll
    if loss.entropy_coef > 0 or loss.entropy_metric:
        metrics["entropy/filtered"] = _mean(leaves["entropy"][masks.actor])
        metrics["entropy/unfiltered"] = _mean(scores.unfiltered_entropy_sl[masks.actor])
    metrics["loss/total"] = float(total.detach())
    found = torch.autograd.grad(
        total + 0.0 * _anchor(leaves), list(leaves.values()), allow_unused=True
    )  # a step without tokens has gradient 0, not no gradient
    if importance.correction != "none":
        metrics |= _importance_metrics(masks)
    return Outcome(
        loss=float(total.detach()),
        num_trained=int(masks.actor.sum()),
        gradients={
            name: torch.zeros_like(leaf) if grad is None else grad
            for (name, leaf), grad in zip(leaves.items(), found, strict=True)
        },
        metrics=metrics,
        ratio_n=ratios,
        passed_s=masks.passed_s,
        weight_sl=masks.weight,
    )


ZERO = torch.zeros((), dtype=torch.float64)


def _anchor(leaves: dict[str, torch.Tensor]) -> torch.Tensor:
    """0, attached to every leaf through slots that hold numbers."""
    return sum((leaf[torch.zeros_like(leaf, dtype=torch.bool)].sum() for leaf in leaves.values()), ZERO)


@dataclass(frozen=True)
class _Masks:
    """All `[S, L]` bool, and the weights."""

    asked: torch.Tensor
    valid: torch.Tensor
    retained: torch.Tensor
    actor: torch.Tensor
    filtered: torch.Tensor
    passed_s: torch.Tensor
    log_weight: torch.Tensor
    weight: torch.Tensor
    weighed: torch.Tensor

    @staticmethod
    def of(batch: TrainBatch, scores: Scores, importance: ImportanceConfig, truncates: bool) -> _Masks:
        asked = batch.token_mask_sl & batch.sample_mask_s[:, None]
        passed_s = torch.tensor(
            [_agrees(batch, row, asked, importance, truncates) for row in range(batch.num_sequences)]
        )
        valid = asked & passed_s[:, None]
        retained = valid if batch.keep_old_sl is None else valid & batch.keep_old_sl
        log_weight, weight, kept = _importance(batch, retained, importance)
        return _Masks(
            asked=asked,
            valid=valid,
            retained=retained,
            actor=retained & scores.keep_sl & kept,
            filtered=kept,
            passed_s=passed_s,
            log_weight=log_weight,
            weight=weight,
            weighed=retained & (batch.sampler_logprob_sl != -math.inf),
        )


def _agrees(
    batch: TrainBatch, row: int, asked: torch.Tensor, importance: ImportanceConfig, truncates: bool
) -> bool:
    """Mean of exp|sampler - old| over the row's tokens; -inf is skipped under truncation, else it rejects."""
    if importance.sequence_error_max is None:
        return True
    assert batch.old_logprob_sl is not None
    errors = []
    for sampler, old in zip(
        batch.sampler_logprob_sl[row][asked[row]].tolist(),
        batch.old_logprob_sl[row][asked[row]].tolist(),
        strict=True,
    ):
        if math.isnan(sampler) or math.isnan(old):
            return False
        if -math.inf in (sampler, old):
            if not truncates:
                return False
            continue
        errors.append(math.exp(min(abs(sampler - old), MAX_LOG)))
    return not errors or sum(errors) / len(errors) <= importance.sequence_error_max


def _importance(
    batch: TrainBatch, retained: torch.Tensor, importance: ImportanceConfig
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Log weights (0 outside `retained`), weights (1 outside), and what stays (all outside)."""
    log_sl = torch.zeros(retained.shape, dtype=torch.float64)
    weight_sl, kept_sl = torch.ones_like(log_sl), torch.ones_like(retained)
    if importance.correction == "none":
        return log_sl, weight_sl, kept_sl
    assert batch.old_logprob_sl is not None
    for row in range(batch.num_sequences):
        outside = retained[row] & (batch.sampler_logprob_sl[row] == -math.inf)
        weight_sl[row, outside], kept_sl[row, outside] = 0.0, False
        at = (retained[row] & ~outside).nonzero()[:, 0]
        if at.numel() == 0:
            continue
        log_n = batch.old_logprob_sl[row, at].double() - batch.sampler_logprob_sl[row, at].double()
        log_n = log_n.clamp(-INFINITE_LOG_WEIGHT, INFINITE_LOG_WEIGHT)
        log_sl[row, at] = log_n
        weight_sl[row, at], kept_sl[row, at] = _weigh(log_n, importance)
    return log_sl, weight_sl, kept_sl


def _weigh(log_n: torch.Tensor, importance: ImportanceConfig) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights and what stays of one sequence's tokens."""
    everything = torch.ones_like(log_n, dtype=torch.bool)
    by_sum = importance.correction == "sequence" or importance.statistic == "sum"
    statistic = log_n.sum() if by_sum else log_n.mean()
    match importance.correction:
        case "tis":
            return _capped_exp(log_n, importance.cap), everything
        case "sequence" | "geometric":
            return _capped_exp(statistic.expand_as(log_n), importance.cap), everything
    assert importance.low is not None and importance.high is not None
    low = math.log(importance.low) if importance.low > 0 else -math.inf
    if importance.correction == "icepop":
        stays = (log_n >= low) & (log_n <= math.log(importance.high))
        return torch.where(stays, _capped_exp(log_n, importance.high), 0.0), stays
    stays = ((statistic >= low) & (statistic <= math.log(importance.high))).expand_as(log_n)
    return torch.where(stays, _capped_exp(log_n, importance.cap), 0.0), stays


def _capped_exp(log: torch.Tensor, cap: float | None) -> torch.Tensor:
    highest = math.exp(MAX_LOG) if cap is None else cap
    return log.clamp(max=math.log(highest)).exp()


def _counted(loss: LossConfig, masks: _Masks) -> torch.Tensor:
    """The mask whose tokens the policy term is divided by."""
    by_name = {"valid": masks.valid, "retained": masks.retained, "retained_exact": masks.actor}
    return by_name[loss.actor_denominator]


def _factors(loss: LossConfig, counted: torch.Tensor) -> list[float]:
    """What one token of each row counts."""
    num_s = counted.sum(dim=1).tolist()
    num_sequences = max(1, sum(num > 0 for num in num_s))
    if loss.aggregation == "token_mean":
        return [1.0 / max(1, sum(num_s))] * len(num_s)
    if loss.aggregation == "seq_mean_token_mean":
        return [1.0 / (num_sequences * max(1, num)) for num in num_s]
    if loss.aggregation == "seq_mean_token_sum":
        return [1.0 / num_sequences] * len(num_s)
    assert loss.fixed_length is not None
    return [1.0 / (num_sequences * loss.fixed_length)] * len(num_s)


def _rows(value_sl: torch.Tensor, mask_sl: torch.Tensor) -> list[tuple[int, torch.Tensor]]:
    """Each row with tokens, and the values of those."""
    return [(row, value_sl[row][mask_sl[row]]) for row in range(len(mask_sl)) if bool(mask_sl[row].any())]


def _add_policy(
    batch: TrainBatch,
    logprob_sl: torch.Tensor,
    loss: LossConfig,
    masks: _Masks,
    metrics: dict[str, float],
) -> tuple[torch.Tensor, torch.Tensor]:
    """The ratios and the policy term; its diagnostics go to `metrics`."""
    factors = _factors(loss, _counted(loss, masks))
    total, seen = ZERO, []
    for row, x_n in _rows(logprob_sl, masks.actor):
        at = masks.actor[row]
        a_n = batch.advantage_sl[row][at].double()
        old_n = None if batch.old_logprob_sl is None else batch.old_logprob_sl[row][at].double()
        loss_n, log_ratio_n, low_n, high_n = _surrogate(loss, x_n, old_n, a_n)
        total = total + factors[row] * (masks.weight[row][at] * loss_n).sum()
        seen.append(torch.stack([log_ratio_n.detach(), low_n.double(), high_n.double()]))
    log_n, low_n, high_n = torch.cat([*seen, torch.zeros(3, 0, dtype=torch.float64)], dim=1)
    ratio_n = log_n.exp()
    metrics |= {
        "loss/policy": float(total.detach()),
        "ratio/mean": _mean(ratio_n),
        "ratio/clipped_low": _mean(low_n),
        "ratio/clipped_high": _mean(high_n),
        "ratio/kl_k1": -_mean(log_n),
        "ratio/kl_k3": _mean(ratio_n - 1 - log_n),
    }
    if ratio_n.numel():
        metrics |= {"ratio/min": float(ratio_n.min()), "ratio/max": float(ratio_n.max())}
    return ratio_n, total


def _surrogate(
    loss: LossConfig, x_n: torch.Tensor, old_n: torch.Tensor | None, a_n: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Loss, log ratio, and which bound decided, of one sequence's trained tokens."""
    never_n = torch.zeros_like(a_n, dtype=torch.bool)
    if loss.policy == "reinforce":
        return -a_n * x_n, torch.zeros_like(a_n), never_n, never_n
    if loss.policy == "on_policy":
        return -a_n * (x_n - x_n.detach()).exp(), torch.zeros_like(a_n), never_n, never_n
    assert old_n is not None
    raw_n = x_n - old_n
    if loss.policy == "gspo":
        # GSPO-token: the value of the sequence's ratio, the gradient of the token's own logprob.
        raw_n = raw_n.mean().detach() + x_n - x_n.detach()
    log_ratio_n = raw_n.clamp(max=MAX_LOG)
    ratio_n = log_ratio_n.exp()
    low, high = 1.0 - loss.ratio_clip_min, 1.0 + loss.ratio_clip_max
    if loss.policy == "cispo":
        weight_n = ratio_n.clamp(low, high).detach()
        return -weight_n * a_n * x_n, log_ratio_n, ratio_n < low, ratio_n > high
    loss_n = torch.maximum(-ratio_n * a_n, -ratio_n.clamp(low, high) * a_n)
    above_n = torch.where(a_n > 0, ratio_n > high, raw_n > MAX_LOG)
    if loss.ratio_clip_c is not None:
        loss_n = torch.where(a_n < 0, torch.minimum(loss_n, -loss.ratio_clip_c * a_n), loss_n)
        above_n = above_n | ((a_n < 0) & (ratio_n > loss.ratio_clip_c))
    return loss_n, log_ratio_n, (a_n < 0) & (ratio_n < low), above_n & (a_n != 0)


def _add_kl(
    batch: TrainBatch,
    unfiltered_sl: torch.Tensor,
    loss: LossConfig,
    masks: _Masks,
    metrics: dict[str, float],
) -> torch.Tensor:
    """The reference KL, over the valid tokens; its diagnostics go to `metrics`."""
    assert batch.reference_logprob_sl is not None
    factors = _factors(loss, masks.valid)
    total, values, clamped = ZERO, [], 0
    for row, x_n in _rows(unfiltered_sl, masks.valid):
        d_n = x_n - batch.reference_logprob_sl[row][masks.valid[row]].double()
        value_n, hit_n = _kl(d_n, loss.kl_type)
        if loss.kl_gradient == "score":
            # d E[v] = E[v's derivative + v x the derivative of the logprob].
            value_n = value_n + value_n.detach() * (x_n - x_n.detach())
        value_n = torch.where(hit_n, value_n.detach(), value_n)
        total = total + factors[row] * value_n.sum()
        values.append(value_n.detach())
        clamped += int(hit_n.sum())
    metrics |= {"kl/reference": _mean(torch.cat([*values, ZERO[None][:0]])), "kl/clamped": float(clamped)}
    if loss.kl_in == "loss":
        metrics["loss/kl"] = float(total.detach())
    return total


def _kl(d_n: torch.Tensor, name: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The estimator's value after both clamps, and where one of them acted."""
    bounded_n = d_n.clamp(-MAX_LOG, MAX_LOG)
    raw_n = {
        "k1": bounded_n,
        "k2": bounded_n**2 / 2,
        "mse": bounded_n**2 / 2,
        "k3": (-bounded_n).exp() - 1 + bounded_n,
        "abs": bounded_n.abs(),
    }[name]
    return raw_n.clamp(-MAX_KL, MAX_KL), (d_n.abs() > MAX_LOG) | (raw_n.abs() > MAX_KL)


def _mask_metrics(batch: TrainBatch, scores: Scores, masks: _Masks) -> dict[str, float]:
    """Where every token went, and the filter's diagnostics."""
    token, asked, keep = batch.token_mask_sl, masks.asked, scores.keep_sl
    keep_old = torch.ones_like(keep) if batch.keep_old_sl is None else batch.keep_old_sl
    predicted_s = (batch.length_s - 1).clamp(min=0)
    counts = {
        "prompt": predicted_s.sum() - token.sum(),
        "sample_masked": (token & ~asked).sum(),
        "dropped_keep_old": (asked & ~keep_old).sum(),
        "dropped_keep": (asked & keep_old & ~keep).sum(),
        "dropped_importance": (asked & keep_old & keep & ~masks.filtered).sum(),
        "dropped_sequence": (asked & keep_old & keep & masks.filtered & ~masks.valid).sum(),
        "trained": masks.actor.sum(),
        "valid": masks.valid.sum(),
        "retained": masks.retained.sum(),
    }
    metrics = {f"tokens/{name}": float(count) for name, count in counts.items()}
    metrics["filter/log_mass"] = _mean(scores.log_mass_sl[masks.valid])
    metrics["filter/num_kept"] = _mean(scores.num_kept_sl[masks.valid])
    metrics["filter/out_of_support"] = _mean(~keep[masks.valid])
    return metrics


def _importance_metrics(masks: _Masks) -> dict[str, float]:
    weight_n = masks.weight[masks.weighed]
    weight_n = weight_n[~torch.isnan(weight_n)]
    log_n = masks.log_weight[masks.weighed]
    raw_n = log_n[~torch.isnan(log_n)].clamp(max=MAX_LOG).exp()
    square = float((weight_n**2).sum())
    return {
        "importance/weight": _mean(weight_n),
        "importance/effective_size": float(weight_n.sum()) ** 2 / square if square else 0.0,
        "importance/raw_mean": _mean(raw_n),
        "importance/nan": float(torch.isnan(log_n).sum()),
        "importance/dropped": float((masks.retained & ~masks.filtered).sum()),
    }


def _mean(value_n: torch.Tensor) -> float:
    return float(value_n.detach().double().mean()) if value_n.numel() else 0.0
