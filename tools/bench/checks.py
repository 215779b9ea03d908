"""Do the methods agree? Run before anything is timed or reported; a difference raises `CheckFailed`.

Tolerances: logprobs 1e-5, absolute or relative above 1; gradients 1e-5 absolute for each entry (plus the
rounding of a bfloat16 gradient), and 1e-3 of a row's summed absolute gradient. At a cut, methods may differ
about ids that tie or whose order float32 rounding decides: entries from the lower to the higher of the two
cuts are compared as a sum, and a row whose own target is such an id is skipped; at most 5% of the rows may
be.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch

from rlcore.collectives import all_gather, all_reduce_, group_size
from rlcore.ops.logprob import TokenLogprobs, vocab_parallel_logprob
from rlcore.ops.reference import reference_logprob
from tools.bench.problem import Problem, shard_sizes
from tools.bench.ranks import CheckFailed

TOLERANCE = 1e-5
ROW_TOLERANCE = 1e-3
MAX_SKIPPED = 0.05
# Half a unit in the last place of a bfloat16 result, on each side of the comparison.
BFLOAT16_ROUNDING = 2.0**-7
# Rows that are also compared with the float64 reference, which sorts them one by one.
REFERENCE_ROWS = 8


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What one method says about a problem."""

    name: str
    logprob_t: torch.Tensor
    """`[t]`, -inf outside the support."""
    grad_tv: torch.Tensor
    """`[t, v]`: gradient in the logits under the problem's upstream gradient."""


def outcome_of(name: str, problem: Problem, logprob_t: torch.Tensor) -> Outcome:
    """Runs the backward of a method's logprobs."""
    (grad_tv,) = torch.autograd.grad(logprob_t, problem.logits_tv, problem.upstream_t)
    return Outcome(name=name, logprob_t=logprob_t.detach(), grad_tv=grad_tv)


def check_all(problem: Problem, others: Iterable[Outcome]) -> None:
    """Ours equals the float64 reference on a few rows, and every other method on all of them."""
    check_reference(outcome_of("ours", problem, _ours(problem).logprob_t), problem)
    # A threshold from topk keeps the whole tied group, which is this rule of ours.
    keeps_ties = problem.spec.effective_top_p is None
    like_others = replace(problem, spec=replace(problem.spec, ties="all")) if keeps_ties else problem
    ours = outcome_of("ours", problem, _ours(like_others).logprob_t)
    for other in others:
        check_agreement(ours, other, problem)


def _ours(problem: Problem) -> TokenLogprobs:
    return vocab_parallel_logprob(
        problem.logits_tv,
        problem.target_t,
        problem.spec,
        problem.tp_group,
        problem.vocab,
        backend=problem.backend,
    )


def check_agreement(ours: Outcome, other: Outcome, problem: Problem) -> None:
    """Same logprobs, same gradients, up to the tolerances above. The verdict is the same on every rank."""
    group = problem.tp_group
    cut_t, other_cut_t = _cut(ours, problem), _cut(other, problem)
    z_tv = problem.logits_tv.detach().float()
    differs_t = torch.isinf(ours.logprob_t) != torch.isinf(other.logprob_t)
    target_z_t = _target_logits(problem)
    # Where only ours scores the target it must be the last id that ours keeps, and the other way round.
    lowest_t = torch.where(torch.isinf(ours.logprob_t), other_cut_t, cut_t)
    at_cut_t = differs_t & (target_z_t == lowest_t)
    _require(~(differs_t & ~at_cut_t), "scores targets the other one drops", ours, other)
    if int(at_cut_t.sum()) > MAX_SKIPPED * len(at_cut_t):
        raise CheckFailed(
            f"{ours.name} and {other.name} differ about the target in {int(at_cut_t.sum())} of "
            f"{len(at_cut_t)} rows"
        )
    both_t = torch.isfinite(ours.logprob_t) & torch.isfinite(other.logprob_t)
    gap_t = torch.where(both_t, ours.logprob_t - other.logprob_t, 0.0).abs()
    bound_t = TOLERANCE * torch.where(both_t, other.logprob_t, 0.0).abs().clamp(min=1.0)
    _require(gap_t <= bound_t, "logprobs differ", ours, other, gap_t)

    ours_tv = torch.where(at_cut_t[:, None], 0.0, ours.grad_tv.float())
    other_tv = torch.where(at_cut_t[:, None], 0.0, other.grad_tv.float())
    low_t, high_t = torch.minimum(cut_t, other_cut_t), torch.maximum(cut_t, other_cut_t)
    near_tv = (z_tv >= low_t[:, None]) & (z_tv <= high_t[:, None])
    gap_tv = torch.where(near_tv, 0.0, ours_tv - other_tv).abs()
    rounding = BFLOAT16_ROUNDING if ours.grad_tv.dtype == torch.bfloat16 else 0.0
    entry_t = (gap_tv - rounding * other_tv.abs()).amax(dim=1)
    # An entry is a probability times the row's upstream gradient, whose rounding it has.
    scale_t = problem.upstream_t.abs().clamp(min=1.0)
    differ_t = all_reduce_(entry_t, "max", group)
    _require(differ_t <= TOLERANCE * scale_t, "gradients differ", ours, other, entry_t)
    near_t = torch.where(near_tv, ours_tv - other_tv, 0.0).double().sum(dim=1)
    row_t2 = torch.stack([gap_tv.double().sum(dim=1), other_tv.double().abs().sum(dim=1)], dim=1)
    row_t2 = all_reduce_(row_t2, "sum", group)
    near_t = all_reduce_(near_t, "sum", group).abs()
    allowed_t = (ROW_TOLERANCE + rounding) * row_t2[:, 1] + TOLERANCE
    _require(row_t2[:, 0] <= allowed_t, "gradients differ over the row", ours, other, row_t2[:, 0])
    _require(near_t <= allowed_t, "gradients differ at the cut", ours, other, near_t)


def check_floor(floor: Outcome, problem: Problem) -> None:
    """The floor equals the op's unfiltered logprob of the same rows."""
    ours = outcome_of("ours, unfiltered", problem, _ours(problem).unfiltered_logprob_t)
    check_agreement(ours, floor, problem)


def check_reference(ours: Outcome, problem: Problem) -> None:
    """The first rows equal the unsharded float64 reference."""
    few = problem.first(min(REFERENCE_ROWS, problem.num_tokens))
    widths = shard_sizes(few.vocab.vocab_size, group_size(few.tp_group))
    own_tv = few.logits_tv.detach().float()
    padded_tv = torch.nn.functional.pad(own_tv, (0, max(widths) - own_tv.shape[1]))
    parts = all_gather(padded_tv, few.tp_group)
    whole_tV = torch.cat([part[:, :width] for part, width in zip(parts, widths, strict=True)], dim=1)
    whole_tV = whole_tV.double().requires_grad_()
    reference = reference_logprob(whole_tV, few.target_t, few.spec)
    total = torch.where(reference.keep_t, reference.logprob_t, 0.0).mul(few.upstream_t.double()).sum()
    (grad_tV,) = torch.autograd.grad(total, whole_tV)
    own = slice(few.vocab.start, few.vocab.start + own_tv.shape[1])
    expected = Outcome(
        name="float64 reference",
        logprob_t=reference.logprob_t.detach().float(),
        grad_tv=grad_tV[:, own].to(ours.grad_tv.dtype),
    )
    rows = slice(0, few.num_tokens)
    check_agreement(replace(ours, logprob_t=ours.logprob_t[rows], grad_tv=ours.grad_tv[rows]), expected, few)


def _cut(outcome: Outcome, problem: Problem) -> torch.Tensor:
    """`[t]`: smallest logit of the whole row with a gradient; +inf where the row has none."""
    z_tv = problem.logits_tv.detach().float()
    smallest_t = torch.where(outcome.grad_tv != 0, z_tv, torch.inf).amin(dim=1)
    return all_reduce_(smallest_t, "min", problem.tp_group)


def _target_logits(problem: Problem) -> torch.Tensor:
    """`[t]`: on every rank."""
    column_t = problem.target_t - problem.vocab.start
    here_t = (column_t >= 0) & (column_t < problem.logits_tv.shape[1])
    own_t = problem.logits_tv.detach().float().gather(1, torch.where(here_t, column_t, 0)[:, None])[:, 0]
    return all_reduce_(torch.where(here_t, own_t, -torch.inf), "max", problem.tp_group)


def _require(
    good_t: torch.Tensor, what: str, ours: Outcome, other: Outcome, gap_t: torch.Tensor | None = None
) -> None:
    if bool(good_t.all()):
        return
    row = int((~good_t).nonzero()[0])
    gap = "" if gap_t is None else f" by {float(gap_t[row]):.3g}"
    raise CheckFailed(
        f"{ours.name} against {other.name}: {what}{gap} in row {row} "
        f"({int((~good_t).sum())} of {len(good_t)} rows)"
    )
