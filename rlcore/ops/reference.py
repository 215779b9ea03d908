"""The specification: unsharded, slow, obvious, float64. Tests and benchmarks compare everything with this
file.

Gradients come from plain autograd, so nothing here shares a formula with the fast implementations.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from rlcore.ops.logprob import TokenLogprobs
from rlcore.sampling import SamplingSpec


def reference_logprob(logits_tv: torch.Tensor, target_t: torch.Tensor, spec: SamplingSpec) -> TokenLogprobs:
    """Truncated and plain log-probability of each target, all columns of `logits_tv [T, V]` being real ids.

    Returns float64 fields; differentiable in `logits_tv`. An all -inf row or a NaN is an error naming the
    row.
    """
    z_tv = _tempered(logits_tv, spec)
    weight_tv = (
        torch.stack([support_weights(row, spec) for row in z_tv.detach()]) if len(z_tv) else z_tv.detach()
    )
    return _score(z_tv, weight_tv, target_t)


def reference_replay(
    logits_tv: torch.Tensor, target_t: torch.Tensor, spec: SamplingSpec, kept_ids: Sequence[Sequence[int]]
) -> TokenLogprobs:
    """`reference_logprob` with the support of each row given: its kept ids and the target, less what is
    banned.
    """
    z_tv = _tempered(logits_tv, spec)
    weight_tv = torch.zeros_like(z_tv.detach())
    for row, kept in enumerate(kept_ids):
        for token_id in {*kept, int(target_t[row])}:
            weight_tv[row, token_id] = float(z_tv[row, token_id] > -math.inf)
        if not weight_tv[row].any():
            raise ValueError(f"row {row}: every id of its support is banned.")
    return _score(z_tv, weight_tv, target_t)


def reference_penalised(
    logits_tv: torch.Tensor,
    prompt_ids: Sequence[Sequence[int]],
    response_ids: Sequence[Sequence[int]],
    specs: Sequence[SamplingSpec],
) -> torch.Tensor:
    """float64 logits after the penalties, from each row's own prompt, earlier response and parameters.

    Repetition, then frequency, then presence, each over a whole row of counts, as vLLM's sampler does.
    """
    out = []
    for z_v, prompt, response, spec in zip(logits_tv.double(), prompt_ids, response_ids, specs, strict=True):
        in_prompt_v, count_v = torch.zeros_like(z_v).bool(), torch.zeros_like(z_v)
        for token_id in prompt:
            in_prompt_v[token_id] = True
        for token_id in response:
            count_v[token_id] += 1
        seen_v = in_prompt_v | (count_v > 0)
        factor_v = torch.where(z_v > 0, 1.0 / spec.repetition_penalty, spec.repetition_penalty)
        z_v = torch.where(seen_v, z_v * factor_v, z_v)
        z_v = z_v - spec.frequency_penalty * count_v
        out.append(z_v - spec.presence_penalty * (count_v > 0))
    return torch.stack(out) if out else logits_tv.double()


def _tempered(logits_tv: torch.Tensor, spec: SamplingSpec) -> torch.Tensor:
    """float64 logits over the temperature; an error naming the first row that nothing can be scored in."""
    z_tv = logits_tv.double() / spec.effective_temperature
    bad = ~(torch.isfinite(z_tv) | torch.isneginf(z_tv)).all(dim=1) | torch.isneginf(z_tv).all(dim=1)
    if bad.any():
        raise ValueError(f"row {int(bad.nonzero()[0])}: a NaN or +inf logit, or no finite logit.")
    return z_tv


def _score(z_tv: torch.Tensor, weight_tv: torch.Tensor, target_t: torch.Tensor) -> TokenLogprobs:
    """Everything that is said about a token, from tempered logits and the weight of each id."""
    rows = torch.arange(len(z_tv), device=z_tv.device)

    lse_t = torch.logsumexp(z_tv, dim=1)
    kept_tv = weight_tv > 0
    lse_kept_t = torch.logsumexp(
        z_tv.masked_fill(~kept_tv, -math.inf) + weight_tv.clamp(min=1e-300).log(), dim=1
    )
    keep_t = kept_tv[rows, target_t]
    z_target_t = z_tv[rows, target_t]
    logprob_t = torch.where(keep_t, torch.where(keep_t, z_target_t, 0.0) - lse_kept_t, -math.inf)
    return TokenLogprobs(
        logprob_t=logprob_t,
        unfiltered_logprob_t=z_target_t - lse_t,
        keep_t=keep_t,
        log_mass_t=lse_kept_t - lse_t,
        num_kept_t=weight_tv.sum(dim=1).round().long(),
        entropy_t=_entropy(z_tv, weight_tv, lse_kept_t),
        unfiltered_entropy_t=_entropy(z_tv, torch.ones_like(weight_tv), lse_t),
    )


def support_weights(z_v: torch.Tensor, spec: SamplingSpec) -> torch.Tensor:
    """Weight in [0, 1] of every id of one row of tempered logits `z_v [V]`: 0 dropped, 1 kept, between: a
    shared tie.

    min-p, then top-k on what is left, then top-p on what is left, as vLLM's sampler does.
    """
    order = torch.argsort(z_v, descending=True, stable=True)
    values = z_v[order]
    probs = torch.softmax(values, dim=0)
    alive = values > -math.inf
    if spec.min_p > 0:
        alive &= probs >= math.exp(spec.min_p_cut) * probs[0]
    count = int(alive.sum())
    if spec.effective_top_k is not None and spec.effective_top_k < count:
        count = _widen(values, spec.effective_top_k, spec)
    if spec.effective_top_p is not None:
        kept = probs[:count] / probs[:count].sum()
        above = torch.cumsum(kept, dim=0) - kept
        minimal = max(1, int((above < spec.top_p_cut).sum()))
        count = minimal if spec.ties == "share" else min(count, _widen(values, minimal, spec))
    return _spread(order, values, count)


def _widen(values: torch.Tensor, count: int, spec: SamplingSpec) -> int:
    """`count`, or with `ties="all"` the count that includes everything tied with the last one kept."""
    if spec.ties == "share":
        return count
    return int((values >= values[count - 1]).sum())


def _spread(order: torch.Tensor, values: torch.Tensor, count: int) -> torch.Tensor:
    """Weight 1 above the cut value; the group tied at it shares what is left of `count` evenly."""
    cut = values[count - 1]
    weight = (values > cut).double()
    tied = values == cut
    weight[tied] = (count - int((values > cut).sum())) / int(tied.sum())
    return torch.zeros_like(weight).index_put_((order,), weight)


def _entropy(z_tv: torch.Tensor, weight_tv: torch.Tensor, lse_t: torch.Tensor) -> torch.Tensor:
    """Sum of weight * p * -log p with p = exp(z - lse); entries without mass contribute exactly 0, gradient
    too.
    """
    counts = (weight_tv > 0) & (z_tv > -math.inf)
    logprob_tv = torch.where(counts, z_tv - lse_t[:, None], 0.0)
    return -(torch.where(counts, weight_tv, 0.0) * logprob_tv.exp() * logprob_tv).sum(dim=1)
