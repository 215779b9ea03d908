"""Refusing a step with NaN or inf: on all ranks together, after the backward and before the optimizer."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from megatron.core.distributed import DistributedDataParallel

from megatron_worker.chunks import Model, chunks_of
from megatron_worker.microbatch_loss import LossReport
from rlcore.batch import StepResult
from rlcore.collectives import all_gather
from rlcore.groups import ParallelGroups

# Broken samples that each rank names.
NUM_NAMED = 8
_FINE, _BROKEN_LOSS, _BROKEN_GRADIENT = range(3)


def refuse_broken_step(
    reports: Sequence[LossReport], model: Model, groups: ParallelGroups, device: torch.device
) -> StepResult | None:
    """The refusal, the same on every rank, when any saw NaN or inf in logits, loss or gradients; else None.

    `reports`: of this rank's microbatches on the last stage, empty elsewhere. Collectives: one all-gather of
    10 int64 over the world. A broken loss is named before the gradients that it broke.
    """
    own = torch.full((2 + NUM_NAMED,), -1, dtype=torch.int64, device=device)
    own[0], own[1] = _FINE, groups.dp_rank
    if reports and bool(torch.stack([report.is_broken for report in reports]).any()):
        own[0] = _BROKEN_LOSS
        rows = torch.stack([report.broken_s for report in reports]).any(dim=0).nonzero()[:NUM_NAMED, 0]
        own[2 : 2 + rows.shape[0]] = rows
    elif not gradients_are_finite(model):
        own[0] = _BROKEN_GRADIENT
    # Every rank waits here for all others, so none goes on to the optimizer alone.
    gathered = all_gather(own, groups.world).tolist()
    worst = [kind for kind, *_ in gathered]
    if _BROKEN_LOSS in worst:
        samples = sorted({(dp_rank, row) for _, dp_rank, *rows in gathered for row in rows if row >= 0})
        return StepResult(
            metrics={},
            stepped=False,
            refused=True,
            broken_samples=tuple(samples),
            reason=broken_message("logits or loss", samples),
        )
    if _BROKEN_GRADIENT in worst:
        return StepResult(
            metrics={},
            stepped=False,
            refused=True,
            reason="NaN or inf in a gradient although the loss is finite; the step was not taken and the "
            "weights are untouched. Lower optimizer.lr or look for overflow in the model.",
        )
    return None


def gradients_are_finite(model: Model) -> bool:
    """Reads Megatron's flat gradient buffers, or a chunk's own gradients where it is not in Megatron's data
    parallelism: one norm each, one number back from the device.
    """
    gradients = []
    for chunk in chunks_of(model):
        if isinstance(chunk, DistributedDataParallel):
            # Megatron's list of flat buffers, in the place of torch's method of that name.
            buffers = (*chunk.buffers, *chunk.expert_parallel_buffers)  # pyright: ignore[reportGeneralTypeIssues]
            gradients += [buffer.grad_data for buffer in buffers]
        else:
            gradients += [parameter.grad for parameter in chunk.parameters() if parameter.grad is not None]
    norms = [gradient.norm() for gradient in gradients]
    return bool(torch.isfinite(torch.stack(norms)).all()) if norms else True


def broken_message(what: str, samples: Sequence[tuple[int, int]]) -> str:
    """What a user reads about samples given as (data-parallel rank, row)."""
    places: dict[int, list[int]] = {}
    for dp_rank, row in samples:
        places.setdefault(dp_rank, []).append(row)
    named = "; ".join(
        f"sample{'s' if len(rows) > 1 else ''} {', '.join(map(str, rows))} on data-parallel rank {dp_rank}"
        for dp_rank, rows in sorted(places.items())
    )
    return (
        f"NaN or inf in the {what} of {named or 'the step as a whole'}; the step was not taken and the "
        "weights are untouched. Check those samples, lower optimizer.lr, or restart from an earlier "
        "checkpoint."
    )
