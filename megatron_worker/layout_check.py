"""A layout against one process: the same weights and batch, and how far scores, loss, gradients and metrics
are apart.

What it cannot find: a fault that one process has too. One process is compared with a float64 reference by the
tests, not here.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar
from unittest import mock

import torch

from megatron_worker.check_problem import CheckLayout, plain_batch, scored_batch, single_process
from megatron_worker.chunks import num_stages, parameters_of, stage_of, unwrap
from megatron_worker.hf_bridge import export_hf_tensors
from megatron_worker.loss_scale import TOLERANCE as SCALE_TOLERANCE
from megatron_worker.loss_scale import measure_loss_scale
from megatron_worker.parameter_layouts import local_layer_name, stage_layouts
from megatron_worker.worker import MegatronWorker
from rlcore.batch import ScoredTokens, StepResult, TrainBatch
from rlcore.collectives import all_gather
from rlcore.config import RunConfig
from rlcore.groups import ParallelGroups
from rlcore.quantiles import RELATIVE_ERROR

LOGPROB_TOLERANCE = 2e-5
"""Absolute, of float32 logprobs and log masses of a tiny model."""
METRIC_TOLERANCE = 1e-5
"""Relative to a metric's size, or to 1 where it is smaller; the loss too."""
QUANTILE_TOLERANCE = 2 * RELATIVE_ERROR
"""A sketch's buckets are a step apart, and a value near an edge may fall on either side of it."""
GRADIENT_TOLERANCE = 1e-3
"""Relative to the parameter's largest entry: attention's gradients are tiny, and an absolute bound would let
an error of a tenth pass."""
GRADIENT_FLOOR = 1e-6
"""Added to that entry: rounding of gradients that are all but 0 is no mismatch."""


@dataclass(frozen=True, kw_only=True)
class Difference:
    """One line of the table."""

    quantity: str
    """What was compared."""
    largest: float
    """The largest difference on any rank; inf for a NaN or something absent."""
    tolerance: float
    """What rounding explains."""
    note: str = ""
    """Where it is."""

    @property
    def ok(self) -> bool:
        """Is it rounding?"""
        return self.largest <= self.tolerance


@dataclass(frozen=True, kw_only=True)
class Reference:
    """The problem and what one process makes of it: whole, on the CPU."""

    plain: TrainBatch
    """The batch that is scored."""
    trained: TrainBatch
    """The batch of the train step: with old logprobs near the scores."""
    scores: ScoredTokens
    step: StepResult
    gradients: Mapping[str, torch.Tensor]
    """By Hugging Face name, before the optimizer's step."""
    reference_logprob_sl: torch.Tensor | None = None
    """What the frozen reference policy says of `plain`; None where the run keeps none."""


def check_on_rank(config: RunConfig, layout: CheckLayout) -> list[Difference]:
    """The whole check on one rank of a run that has not joined its peers yet; the same list on every rank.

    `config`: `check_problem.tiny_config` of the layout. Every rank computes the reference by itself first.
    `ValueError` when the layout cannot be built or takes another number of ranks than there are.
    """
    with _outside_the_run():
        reference = measure_reference(config, layout)
    return compare_layout(config, reference)


def measure_reference(config: RunConfig, layout: CheckLayout) -> Reference:
    """One process's answer. For a process in a world of one."""
    plain = plain_batch(config, layout)
    worker = MegatronWorker(single_process(config))
    try:
        scores = _on_cpu(worker.logprobs(_on_device(plain, worker.device)))
        frozen = frozen_logprobs(worker, plain)
        trained = scored_batch(plain, scores, config.seed)
        step = worker.train_step(_on_device(trained, worker.device))
        if not step.stepped:
            raise ValueError(f"one process takes no step, so there is nothing to compare: {step.reason}")
        return Reference(
            plain=plain,
            trained=trained,
            scores=scores,
            step=step,
            gradients=whole_gradients(worker),
            reference_logprob_sl=frozen,
        )
    finally:
        worker.close()


def compare_layout(config: RunConfig, reference: Reference) -> list[Difference]:
    """The layout's differences from the reference, the largest of all ranks; the same list on every rank.
    Collective over the world.
    """
    worker = MegatronWorker(config)
    try:
        groups = worker.groups
        factors = measure_loss_scale(worker.scale_probe())
        rows = share_rows(reference.plain, groups)
        plain = reference.plain.rows(rows)
        scores = _on_cpu(worker.logprobs(_on_device(plain, worker.device)))
        frozen = frozen_logprobs(worker, plain)
        step = worker.train_step(_on_device(reference.trained.rows(rows), worker.device))
        gradients = whole_gradients(worker)
        own = [
            Difference(
                quantity="loss scale",
                largest=max(abs(factor - 1.0) for factor in factors),
                tolerance=SCALE_TOLERANCE,
                note="a toy gradient / closed form - 1",
            ),
            *score_differences(scores, reference, rows),
            *frozen_differences(frozen, reference, rows),
            *step_differences(step, reference.step),
            *gradient_differences(gradients, reference.gradients),
            copy_difference(worker, reference.gradients),
        ]
        return largest_of_ranks(own, groups, worker.device)
    finally:
        worker.close()


def whole_gradients(worker: MegatronWorker) -> dict[str, torch.Tensor]:
    """Gradients by Hugging Face name, whole, on every rank's CPU. Collective over the replica.

    The bridge reads parameters, so each holds its gradient for a moment.
    """
    parameters = list(parameters_of(worker.chunks))
    values = [parameter.data.clone() for parameter in parameters]
    for parameter in parameters:
        parameter.data.copy_(parameter.main_grad)  # pyright: ignore[reportAttributeAccessIssue]
    exported = export_hf_tensors(worker.chunks, worker.arch, worker.groups)
    gradients = {name: tensor.clone() for name, tensor in exported}
    for parameter, value in zip(parameters, values, strict=True):
        parameter.data.copy_(value)
    return gradients


def frozen_logprobs(worker: MegatronWorker, batch: TrainBatch) -> torch.Tensor | None:
    """`[S, L]` unfiltered logprobs of the reference policy, on the CPU; None where the run keeps none."""
    if worker.reference is None:
        return None
    return worker.reference_logprobs(_on_device(batch, worker.device)).cpu()


def score_differences(ours: ScoredTokens, reference: Reference, rows: slice) -> list[Difference]:
    """Scores of this data-parallel rank's rows, wherever something was predicted."""
    expected = _rows(reference.scores, rows)
    scored_sl = _predicted(reference.plain, rows)
    both_sl = scored_sl & ours.keep_sl & expected.keep_sl
    num_differing = int((scored_sl & (ours.keep_sl != expected.keep_sl)).sum())
    differences = [
        _difference("logprob", ours.logprob_sl, expected.logprob_sl, both_sl),
        Difference(quantity="keep", largest=float(num_differing), tolerance=0.0, note="tokens that differ"),
        _difference("log mass", ours.log_mass_sl, expected.log_mass_sl, scored_sl),
    ]
    if expected.unfiltered_logprob_sl is not None:
        assert ours.unfiltered_logprob_sl is not None
        fields = (ours.unfiltered_logprob_sl, expected.unfiltered_logprob_sl)
        differences.append(_difference("unfiltered logprob", *fields, scored_sl))
    return differences


def frozen_differences(ours_sl: torch.Tensor | None, reference: Reference, rows: slice) -> list[Difference]:
    """The reference policy's scores, where the run keeps one."""
    if ours_sl is None or reference.reference_logprob_sl is None:
        return []
    expected_sl = reference.reference_logprob_sl[rows]
    return [_difference("reference logprob", ours_sl, expected_sl, _predicted(reference.plain, rows))]


def step_differences(ours: StepResult, expected: StepResult) -> list[Difference]:
    """Whether the step was taken, the loss, and the other metrics in one line that names the worst."""
    taken = Difference(
        quantity="step taken",
        largest=0.0 if ours.stepped else torch.inf,
        tolerance=0.0,
        note=ours.reason,
    )
    gaps = {}
    for name in sorted({*ours.metrics, *expected.metrics}):
        if name not in ours.metrics or name not in expected.metrics:
            gaps[name] = torch.inf
            continue
        value = expected.metrics[name]
        tolerance = QUANTILE_TOLERANCE if "quantile" in name else METRIC_TOLERANCE
        # In units of what is allowed, so that one line can hold quantiles and sums.
        gaps[name] = abs(ours.metrics[name] - value) / (tolerance * max(1.0, abs(value)))
    loss = gaps.pop("loss/total")
    worst = max(gaps, key=lambda name: _as_distance(gaps[name]))
    num_off = sum(not gap <= 1.0 for gap in gaps.values())
    note = f"{num_off} of {len(gaps)} differ, most {worst}" if num_off else f"{len(gaps)}, most {worst}"
    return [
        taken,
        Difference(quantity="loss", largest=loss * METRIC_TOLERANCE, tolerance=METRIC_TOLERANCE),
        Difference(
            quantity="metrics",
            largest=gaps[worst] * METRIC_TOLERANCE,
            tolerance=METRIC_TOLERANCE,
            note=note,
        ),
    ]


def gradient_differences(
    ours: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]
) -> list[Difference]:
    """One line a kind of parameter, the worst of its layers and experts. Relative to each parameter's largest
    entry.
    """
    worst: dict[str, tuple[float, str]] = {}
    for name, value in expected.items():
        kind = re.sub(r"\.(layers|experts)\.\d+\.", r".\1.*.", name)
        largest = float(value.abs().max()) + GRADIENT_FLOOR
        gap = torch.inf if name not in ours else float((ours[name] - value).abs().max()) / largest
        worst[kind] = max(worst.get(kind, (-1.0, "")), (_as_distance(gap), name))
    return [
        Difference(
            quantity=f"gradient {kind.removeprefix('model.')}",
            largest=gap,
            tolerance=GRADIENT_TOLERANCE,
            note=name.removeprefix("model.") if gap > GRADIENT_TOLERANCE else "",
        )
        for kind, (gap, name) in worst.items()
    ]


def copy_difference(worker: MegatronWorker, expected: Mapping[str, torch.Tensor]) -> Difference:
    """Every gradient that this rank holds, in one line: of a weight that several ranks hold (norms on each TP
    rank, a tied head's on the last stage) the lines above read one copy, and copies that get other gradients
    drift apart. Padding rows of the vocabulary get none. Relative to the whole parameter's largest entry.
    """
    groups, worst, where = worker.groups, -1.0, ""
    total = num_stages(len(worker.chunks), groups)
    for index, chunk in enumerate(worker.chunks):
        stage = stage_of(index, groups)
        layouts = stage_layouts(worker.arch, total, stage, groups.ep_size, groups.ep_rank)
        for name, parameter in unwrap(chunk).named_parameters():
            layout = layouts[local_layer_name(name)]
            value = layout.shard(
                lambda hf_name, axis, start, stop: expected[hf_name].narrow(axis, start, stop - start),
                groups.tp_rank,
                groups.tp_size,
            )
            ours = parameter.main_grad.cpu()  # pyright: ignore[reportAttributeAccessIssue]
            largest = max(float(expected[hf_name].abs().max()) for hf_name in layout.hf_shapes())
            gap = _as_distance(float((ours - value).abs().max()) / (largest + GRADIENT_FLOOR))
            if gap > worst:
                worst, where = gap, f"stage {stage}: {name}"
    return Difference(
        quantity="gradient, every rank's own copy",
        largest=worst,
        tolerance=GRADIENT_TOLERANCE,
        note=where if worst > GRADIENT_TOLERANCE else "",
    )


def largest_of_ranks(
    own: Sequence[Difference], groups: ParallelGroups, device: torch.device
) -> list[Difference]:
    """Each quantity's largest difference over the world; where another rank's is larger, the note says which.

    One all-gather of a float64 a quantity; the list has the same quantities on every rank.
    """
    values = torch.tensor([_as_distance(line.largest) for line in own], dtype=torch.float64, device=device)
    largest, rank = all_gather(values, groups.world).max(dim=0)
    merged = []
    for line, value, value_here, where in zip(
        own, largest.tolist(), values.tolist(), rank.tolist(), strict=True
    ):
        note = line.note if value_here == value or value <= line.tolerance else f"rank {where}"
        merged.append(dataclasses.replace(line, largest=value, note=note))
    return merged


def share_rows(batch: TrainBatch, groups: ParallelGroups) -> slice:
    """This data-parallel rank's rows of the whole batch."""
    count = batch.num_sequences // groups.dp_size
    return slice(groups.dp_rank * count, (groups.dp_rank + 1) * count)


def _predicted(batch: TrainBatch, rows: slice) -> torch.Tensor:
    """`[s, L]` bool: tokens of these rows that something predicts."""
    position_l = torch.arange(batch.ids_sl.shape[1])
    return (position_l >= 1) & (position_l < batch.length_s[rows, None])


def _difference(
    quantity: str, ours_sl: torch.Tensor, expected_sl: torch.Tensor, where_sl: torch.Tensor
) -> Difference:
    gap_sl = torch.where(where_sl, ours_sl - expected_sl, 0.0).abs()
    return Difference(
        quantity=quantity, largest=_as_distance(float(gap_sl.max())), tolerance=LOGPROB_TOLERANCE
    )


def _as_distance(gap: float) -> float:
    """A NaN is as far off as anything can be."""
    return gap if gap == gap else torch.inf


Tokens = TypeVar("Tokens", TrainBatch, ScoredTokens)


def _rows(scores: ScoredTokens, rows: slice) -> ScoredTokens:
    return _map(scores, lambda tensor: tensor[rows])


def _on_cpu(value: Tokens) -> Tokens:
    return _map(value, lambda tensor: tensor.cpu())


def _on_device(value: Tokens, device: torch.device) -> Tokens:
    return _map(value, lambda tensor: tensor.to(device))


def _map(value: Tokens, change: Callable[[torch.Tensor], torch.Tensor]) -> Tokens:
    """The same with `change` applied to every tensor; kept ids stay on the host."""
    fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    changed: dict[str, Any] = {
        name: change(item) if isinstance(item, torch.Tensor) else item for name, item in fields.items()
    }
    return type(value)(**changed)


@contextmanager
def _outside_the_run() -> Iterator[None]:
    """torchrun's names are out of sight: a worker built here is a world of one."""
    hidden = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    with mock.patch.dict(os.environ):
        for name in hidden:
            os.environ.pop(name, None)
        yield
