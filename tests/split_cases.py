"""Whole steps from a seed, ways of cutting them over ranks and microbatches, and a rank's part of a step."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from megatron_worker.microbatch_loss import microbatch_loss, neutral_metrics
from megatron_worker.microbatches import split_batch
from rlcore.batch import TrainBatch
from rlcore.collectives import Group
from rlcore.config import ImportanceConfig, LossConfig, load_run_config
from rlcore.metrics import add_metrics, neutral_like, reduce_metrics
from rlcore.ops.logprob import TokenLogprobs
from rlcore.step_weights import weigh_step
from tests.loss_oracle import Scores

NAN, INF = math.nan, math.inf
MODEL = {
    "num_layers": 1,
    "hidden_size": 8,
    "num_attention_heads": 4,
    "ffn_hidden_size": 8,
    "max_position_embeddings": 64,
}


@dataclass(frozen=True, kw_only=True)
class Step:
    """A whole step and its objective."""

    batch: TrainBatch
    scores: Scores
    loss: LossConfig
    importance: ImportanceConfig
    truncates: bool


@dataclass(frozen=True, kw_only=True)
class Cut:
    """One way of splitting a step."""

    rows: tuple[tuple[int, ...], ...]
    """Rows of the batch on each data-parallel rank."""
    microbatch_size: int
    length_multiple: int
    trimmed: bool
    """Does each rank pad to its own longest sequence?"""


@dataclass(frozen=True, kw_only=True)
class Part:
    """What one rank contributes. Gradients are token-aligned, of this rank's rows."""

    value: float
    num_trained: int
    gradients: dict[str, torch.Tensor]
    metrics: dict[str, float]
    num_retained: float
    num_valid: float


def objective(loss: dict[str, Any], importance: dict[str, Any]) -> tuple[LossConfig, ImportanceConfig]:
    """Both sections, through the rules."""
    config = load_run_config({"model": MODEL, "loss": loss, "importance": importance})
    return config.loss, config.importance


def cuts_of(num_rows: int, num_ranks: int) -> list[Cut]:
    """Every way that the tests know: order and share of the rows, microbatch size, padding."""
    size = num_rows // num_ranks
    even = [tuple(range(rank * size, (rank + 1) * size)) for rank in range(num_ranks)]
    even[-1] = (*even[-1], *range(size * num_ranks, num_rows))
    # Dealt round and round from the back: other neighbours, and the first rank has the most.
    dealt = [tuple(range(num_rows - 1 - rank, -1, -num_ranks)) for rank in range(num_ranks)]
    return [
        Cut(rows=tuple(rows), microbatch_size=microbatch, length_multiple=multiple, trimmed=trimmed)
        for rows, trimmed in ((even, False), (dealt, True))
        for microbatch in (1, 2, 3, num_rows)
        for multiple in (1, 4)
    ]


class Draws:
    """Random `[S, L]` tensors from one seed."""

    def __init__(self, seed: int, shape: tuple[int, int]) -> None:
        self.generator, self.shape = torch.Generator().manual_seed(seed), shape
        self.junk_sl = torch.tensor([NAN, INF, -INF])[self.whole(0, 3)]

    def whole(self, low: int, high: int) -> torch.Tensor:
        return torch.randint(low, high, self.shape, generator=self.generator)

    def normal(self, scale: float = 1.0) -> torch.Tensor:
        return torch.randn(self.shape, generator=self.generator) * scale

    def chance(self, p: float) -> torch.Tensor:
        return torch.rand(self.shape, generator=self.generator) < p

    def near(self, value_sl: torch.Tensor, scale: float, far: float) -> torch.Tensor:
        """Around `value_sl`, one in 16 far away."""
        return value_sl + self.normal(scale) + torch.where(self.chance(1 / 16), self.normal(far), 0.0)

    def only(self, value_sl: torch.Tensor, mask_sl: torch.Tensor) -> torch.Tensor:
        """NaN and inf outside the mask."""
        return torch.where(mask_sl, value_sl, self.junk_sl)


LENGTH = 14


def draw_step(
    seed: int,
    num_rows: int,
    num_masked: int,
    loss: dict[str, Any],
    importance: dict[str, Any],
    truncates: bool,
) -> Step:
    """A step with every kind of token; the last `num_masked` rows take no part.

    Slots that nothing may read hold NaN, or inf. Lengths are uneven, some rows have no response at all.
    """
    loss_config, importance_config = objective(loss, importance)
    draws = Draws(seed, (num_rows, LENGTH))
    position_sl = torch.arange(LENGTH).expand(num_rows, LENGTH)
    length_s = draws.whole(2, LENGTH + 1)[:, 0]
    length_s[0] = LENGTH
    prompt_s = draws.whole(1, 4)[:, :1]
    token_sl = (position_sl >= prompt_s) & (position_sl < length_s[:, None])
    sample_s = (torch.arange(num_rows) < num_rows - num_masked) & ~draws.chance(0.1)[:, 0]
    asked_sl = token_sl & sample_s[:, None]
    keep_old_sl, keep_sl = (~draws.chance(0.15) | (not truncates) for _ in range(2))
    old_sl = -draws.normal(2.0).abs() - 0.1
    sampler_sl = torch.where(draws.chance(0.08), -INF, draws.near(old_sl, 0.3, 30.0))
    rejects_nan = importance_config.correction in ("icepop", "seq_mask_tis")
    if rejects_nan or importance_config.sequence_error_max is not None:
        sampler_sl = torch.where(draws.chance(0.03), NAN, sampler_sl)
    advantage_sl = draws.normal()[:, :1] + torch.where(draws.chance(0.3), draws.normal(0.5), 0.0)
    unfiltered_sl = old_sl - draws.normal(0.3).abs()
    skipped = loss_config.old_logprobs == "skip"
    batch = TrainBatch(
        ids_sl=draws.whole(0, 9),
        length_s=length_s,
        token_mask_sl=token_sl,
        sample_mask_s=sample_s,
        advantage_sl=draws.only(torch.where(draws.chance(0.1), 0.0, advantage_sl), asked_sl),
        sampler_logprob_sl=draws.only(sampler_sl, asked_sl),
        old_logprob_sl=None if skipped else draws.only(torch.where(keep_old_sl, old_sl, -INF), asked_sl),
        keep_old_sl=None if skipped else keep_old_sl,
        reference_logprob_sl=draws.only(draws.near(unfiltered_sl, 0.5, 12.0), asked_sl),
    )
    scores = Scores(
        logprob_sl=draws.only(torch.where(keep_sl, draws.near(old_sl, 0.4, 20.0), -INF), asked_sl),
        unfiltered_sl=draws.only(unfiltered_sl, asked_sl),
        keep_sl=keep_sl,
        log_mass_sl=draws.only(-draws.normal(0.1).abs(), asked_sl),
        num_kept_sl=draws.whole(1, 9),
        entropy_sl=draws.only(draws.normal().abs(), asked_sl & keep_sl),
        unfiltered_entropy_sl=draws.only(draws.normal().abs(), asked_sl & keep_sl),
    )
    return Step(
        batch=batch, scores=scores, loss=loss_config, importance=importance_config, truncates=truncates
    )


def rows_of(value: Any, rows: tuple[int, ...], length: int) -> Any:
    """A dataclass of `_s` and `_sl` tensors with these rows, cut to a length."""
    chosen = {}
    for field in dataclasses.fields(value):
        tensor = getattr(value, field.name)
        if tensor is not None:
            tensor = tensor[list(rows)]
            tensor = tensor[:, :length] if field.name.endswith("_sl") else tensor
        chosen[field.name] = tensor
    return dataclasses.replace(value, **chosen)


def parts_on_rank(rank: int, world_size: int, step: Step, cuts: list[Cut]) -> list[Part]:
    """This rank's part of the step under each cut."""
    return [_part(step, cut, rank) for cut in cuts]


def _part(step: Step, cut: Cut, rank: int) -> Part:
    rows, length = cut.rows[rank], step.batch.ids_sl.shape[1]
    if cut.trimmed:
        length = max(2, int(step.batch.length_s[list(rows)].max()))
    share = dataclasses.replace(
        step, batch=rows_of(step.batch, rows, length), scores=rows_of(step.scores, rows, length)
    )
    return run_step(share, cut.microbatch_size, cut.length_multiple, dist.group.WORLD)


def run_step(share: Step, microbatch_size: int, length_multiple: int = 1, group: Group = None) -> Part:
    """A rank's share of a step, as the worker runs it, without the model."""
    batch, scores = share.batch, share.scores
    leaves = {
        name: getattr(scores, f"{name}_sl").clone().requires_grad_()
        for name in ("logprob", "unfiltered", "entropy")
    }
    weights = weigh_step(batch, share.loss, share.importance, share.truncates, group)
    microbatches = split_batch(batch, microbatch_size, length_multiple, weights)
    total, reports = torch.zeros(()), []
    for index, microbatch in enumerate(microbatches):
        predicted = _predicted(scores, leaves, index, microbatch.input_ids_bl.shape)
        value, report = microbatch_loss(microbatch, predicted, share.loss)
        assert not bool(report.is_broken) and not bool(report.broken_s.any())
        total = total + value
        reports.append(report)
    gradients = torch.autograd.grad(total, list(leaves.values()), allow_unused=True)
    neutral = neutral_metrics(share.loss, torch.device("cpu"))
    neutral |= {name: neutral_like(metric) for name, metric in weights.metrics.items()}
    metrics = add_metrics([neutral, weights.metrics, *(report.metrics for report in reports)])
    return Part(
        value=float(total.detach()),
        num_trained=sum(int(report.num_trained) for report in reports),
        gradients={
            name: torch.zeros_like(leaf) if grad is None else grad
            for (name, leaf), grad in zip(leaves.items(), gradients, strict=True)
        },
        metrics=reduce_metrics(metrics, group),
        num_retained=float(weights.num_retained),
        num_valid=float(weights.num_valid),
    )


def _predicted(
    scores: Scores, leaves: dict[str, torch.Tensor], index: int, shape: torch.Size
) -> TokenLogprobs:
    """The scores of one microbatch: of the token after each position, NaN or True where there is none."""
    num_rows, length = shape

    def of(value_sl: torch.Tensor, fill: float | bool = NAN) -> torch.Tensor:
        rows_bl = value_sl[index * num_rows : (index + 1) * num_rows]
        out_bl = torch.full((num_rows, length), fill, dtype=value_sl.dtype)
        out_bl[: rows_bl.shape[0], : rows_bl.shape[1] - 1] = rows_bl[:, 1:]
        return out_bl.reshape(-1)

    return TokenLogprobs(
        logprob_t=of(leaves["logprob"]),
        unfiltered_logprob_t=of(leaves["unfiltered"]),
        keep_t=of(scores.keep_sl, True),
        log_mass_t=of(scores.log_mass_sl),
        num_kept_t=of(scores.num_kept_sl, 0),
        entropy_t=of(leaves["entropy"]),
        unfiltered_entropy_t=of(scores.unfiltered_entropy_sl),
    )


def row(num_tokens: int, **fields: Any) -> dict[str, Any]:
    """A sequence of one prompt token and `num_tokens` of a response, for `step_of`; a number is for all of
    them. `x` (logprob), `old`, `sampler`, `unfiltered`, `reference`, `entropy`: 0. `a` (advantage): -1, so
    that a token at ratio 1 has loss 1. `keep`, `keep_old`, `sample`: True.
    """
    defaults = dict.fromkeys(("x", "old", "sampler", "unfiltered", "reference", "entropy"), 0.0)
    values = {**defaults, "a": -1.0, "keep": True, "keep_old": True, "sample": True, **fields}
    return {
        name: value if name == "sample" or isinstance(value, list) else [value] * num_tokens
        for name, value in values.items()
    }


def step_of(
    rows: list[dict[str, Any]], loss: dict[str, Any], importance: dict[str, Any] | None = None
) -> Step:
    """A step from rows, truncation on. NaN where a row has no response token."""
    loss_config, importance_config = objective(loss, importance or {})
    length = 1 + max(len(one["x"]) for one in rows)
    skipped = loss_config.old_logprobs == "skip"

    def of(name: str, fill: float | bool = NAN) -> torch.Tensor:
        padded = [[fill, *one[name], *[fill] * (length - 1 - len(one[name]))] for one in rows]
        return torch.tensor(padded)

    length_s = torch.tensor([1 + len(one["x"]) for one in rows])
    position_l = torch.arange(length)
    batch = TrainBatch(
        ids_sl=torch.zeros(len(rows), length).long(),
        length_s=length_s,
        token_mask_sl=(position_l >= 1) & (position_l < length_s[:, None]),
        sample_mask_s=torch.tensor([one["sample"] for one in rows]),
        advantage_sl=of("a"),
        sampler_logprob_sl=of("sampler"),
        old_logprob_sl=None if skipped else of("old"),
        keep_old_sl=None if skipped else of("keep_old", True),
        reference_logprob_sl=of("reference"),
    )
    scores = Scores(
        logprob_sl=torch.where(of("keep", True), of("x"), -INF),
        unfiltered_sl=of("unfiltered"),
        keep_sl=of("keep", True),
        log_mass_sl=torch.zeros(len(rows), length),
        num_kept_sl=torch.ones(len(rows), length).long(),
        entropy_sl=of("entropy"),
        unfiltered_entropy_sl=of("entropy"),
    )
    return Step(batch=batch, scores=scores, loss=loss_config, importance=importance_config, truncates=True)


def loss_and_gradient(step: Step, microbatch_size: int = 1) -> tuple[float, list[list[float]], Part]:
    """Loss, gradient to the logprobs of each row's response, and all else; divided by the exact count where
    Megatron does so.
    """
    part = run_step(step, microbatch_size)
    exact = step.loss.actor_denominator == "retained_exact"
    divisor = max(1, part.num_trained) if exact else 1
    gradient_sl = part.gradients["logprob"] / divisor
    rows = [
        gradient_s[mask_s].tolist()
        for gradient_s, mask_s in zip(gradient_sl, step.batch.token_mask_sl, strict=True)
    ]
    return part.value / divisor, rows, part
