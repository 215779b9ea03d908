"""THE WORKER: the policy on this rank. Megatron-core does the model, the schedule, data parallelism and the
optimizer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from megatron.core.distributed import finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.pipeline_parallel import get_forward_backward_func

from megatron_worker.architecture import architecture_from_config, architecture_from_hf
from megatron_worker.cpu_backend import cpu_backend
from megatron_worker.decoding import MegatronDecoder
from megatron_worker.forward_step import (
    Denominators,
    LossReport,
    OutputHead,
    make_scoring_step,
    make_train_step,
    neutral_metrics,
)
from megatron_worker.groups import destroy_parallel, initialize_parallel
from megatron_worker.hf_bridge import initialize_from_seed, load_hf_weights, save_hf
from megatron_worker.microbatches import join_scores, split_batch
from megatron_worker.model_setup import build_model, wrap_ddp
from megatron_worker.optimizer_setup import build_optimizer
from rlcore.batch import Microbatch, ScoredTokens, StepResult, TrainBatch
from rlcore.collectives import all_reduce_, raise_together
from rlcore.config import RunConfig
from rlcore.layout.pp_broadcast import broadcast_from_last_stage, score_fields
from rlcore.masks import kl_mask, retained_mask
from rlcore.metrics import Metric, add_metrics, reduce_metrics
from rlcore.ops.logprob import TokenLogprobs
from rlcore.sampling import SamplingSpec


class MegatronWorker:
    """`PolicyWorker` on Megatron-core. Every method is collective: all ranks of the run call it in the same
    order.
    """

    def __init__(self, config: RunConfig, task_vocab_size: int | None = None) -> None:
        """Joins the process groups and builds this rank's stage.

        `task_vocab_size` is the vocabulary of a from-scratch model whose config leaves it open. Raises
        `ValueError` on every rank for a layout or model that cannot be built.
        """
        self.config = config
        self.spec = config.sampling.spec()
        self._open = ExitStack()
        try:
            self._set_up(task_vocab_size)
        except BaseException:
            self._open.close()
            raise

    def _set_up(self, task_vocab_size: int | None) -> None:
        config = self.config
        device_type = self._open.enter_context(cpu_backend(config.parallel.backend))
        self.device = torch.device(device_type)
        # A job that had torch.distributed before keeps it when this worker closes.
        starts_distributed = not torch.distributed.is_initialized()
        self.groups = initialize_parallel(config.parallel, device_type, config.seed)
        self._open.callback(destroy_parallel, torch_distributed=starts_distributed)
        hf_path = config.model.hf_path
        self.arch = (
            architecture_from_hf(hf_path)
            if hf_path
            else architecture_from_config(config.model, task_vocab_size or 0)
        )
        self.head = OutputHead(
            groups=self.groups,
            vocab_size=self.arch.vocab_size,
            fused=config.model.fused_head,
            fused_tokens=config.model.fused_head_tokens,
        )
        stage = self._new_stage()
        self.reference = None
        if config.loss.kl_coef > 0:
            self.reference = self._new_stage().eval().requires_grad_(False)
        self.model = wrap_ddp(stage, config.parallel)
        steps = config.train.steps * config.train.epochs
        steps *= config.sequences_per_step // (config.train.minibatch_size or config.sequences_per_step)
        self.optimizer, self.scheduler = build_optimizer([self.model], config.optimizer, steps)
        self.model.config.finalize_model_grads_func = finalize_model_grads
        self.model.config.grad_scale_func = self.optimizer.scale_loss
        self.decoder = MegatronDecoder(self.model, self.arch, config.parallel, self.groups)

    def _new_stage(self) -> GPTModel:
        """This rank's stage with the run's initial weights."""
        config = self.config
        model = build_model(self.arch, config.parallel, config.model.dtype, self.groups)
        if config.model.hf_path:
            load_hf_weights(model, self.arch, config.model.hf_path, self.groups)
        else:
            initialize_from_seed(model, self.arch, config.seed, self.groups)
        return model

    def logprobs(self, batch: TrainBatch) -> ScoredTokens:
        """Scores the batch under the current weights and the truncated distribution. See `PolicyWorker`."""
        fields = self._score(batch, self.model, self.spec)
        logprob_sl = fields["logprob"]
        # Without truncation nothing else travels: no mass is cut, and only a banned id has no logprob.
        keep_sl = fields.get("keep", ~torch.isneginf(logprob_sl))
        return ScoredTokens(
            logprob_sl=logprob_sl,
            keep_sl=keep_sl,
            log_mass_sl=fields.get("log_mass", torch.zeros_like(logprob_sl)),
        )

    def reference_logprobs(self, batch: TrainBatch) -> torch.Tensor:
        """`[S, L]` unfiltered logprobs of the frozen reference policy. `ValueError` when the run has none."""
        if self.reference is None:
            raise ValueError("this run keeps no reference policy: set loss.kl_coef above 0.")
        return self._score(batch, self.reference, self.spec.unfiltered())["logprob"]

    @torch.no_grad()
    def _score(
        self, batch: TrainBatch, model: torch.nn.Module, spec: SamplingSpec
    ) -> dict[str, torch.Tensor]:
        """The fields of `score_fields(spec)`, token-aligned `[S, L]`, on every stage."""
        microbatches = self._split(batch)
        step = make_scoring_step(spec, self.head)
        parts: list[TokenLogprobs] = self._run_schedule(
            model, step, microbatches, forward_only=True, collect=True
        )
        values, error = None, None
        if self.groups.is_last_stage:
            length = microbatches[0].input_ids_bl.shape[1]
            error = self._broken_scores(microbatches, parts)
            values = {
                field.name: join_scores(
                    [getattr(part, f"{field.name}_t") for part in parts], batch, length, field.name == "keep"
                )
                for field in score_fields(truncates=spec.truncates)
            }
        # Every rank waits here for every last stage, before anybody acts on the scores.
        raise_together(error, self.groups.world, self.device)
        fields = score_fields(truncates=spec.truncates)
        return broadcast_from_last_stage(fields, values, tuple(batch.ids_sl.shape), self.groups, self.device)

    def train_step(self, batch: TrainBatch) -> StepResult:
        """One optimizer step over the batch of every data-parallel rank.

        A step without a single token that counts is reported and moves nothing. A NaN or inf in logits, loss
        or gradients raises `ValueError` on all ranks; weights and optimizer are then untouched.
        """
        microbatches = self._split(batch)
        if self.config.loss.actor_denominator == "retained" and batch.keep_old_sl is None:
            # The same on every rank: whether the old pass ran is decided by the loop, not by the data.
            raise ValueError(
                "loss.actor_denominator=retained counts keep_old, and the batch has none: score the batch "
                "with "
                "logprobs() first, or set loss.actor_denominator=valid."
            )
        denominators = self._denominators(batch)
        if not self._has_tokens(denominators):
            return StepResult(
                metrics={}, stepped=False, reason="no token of the whole step counts: nothing to train on"
            )
        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()
        step = make_train_step(self.config.loss, self.spec, self.head, denominators, len(microbatches))
        self.model.train()
        reports: list[LossReport] = self._run_schedule(self.model, step, microbatches)
        self._refuse_broken_step(reports)
        metrics = reduce_metrics(self._own_metrics(reports), self.groups.world, self.device)
        if metrics["tokens/trained"] == 0 and self.config.loss.kl_coef == 0:
            # Only the current pass knows this: momentum and weight decay must not move weights for nothing.
            return StepResult(
                metrics=metrics,
                stepped=False,
                reason="the current policy's support holds no token of the step",
            )
        success, grad_norm, _ = self.optimizer.step()  # pyright: ignore[reportGeneralTypeIssues]
        if not success:
            return StepResult(metrics=metrics, stepped=False, reason="Megatron's optimizer skipped the step")
        learning_rate = self.optimizer.param_groups[0]["lr"]
        self.scheduler.step(increment=1)
        metrics |= {"optimizer/grad_norm": float(grad_norm or 0.0), "optimizer/lr": float(learning_rate)}
        return StepResult(metrics=metrics, stepped=True)

    def save(self, path: str) -> None:
        """Writes the policy as a Hugging Face folder."""
        save_hf(self.model, self.arch, path, self.groups, source=self.config.model.hf_path)

    def close(self) -> None:
        """Leaves the process groups and the CPU backend. The worker cannot be used afterwards."""
        self._open.close()

    def _split(self, batch: TrainBatch) -> list[Microbatch]:
        """The batch's microbatches; a batch that cannot be split raises on all ranks."""
        microbatches, error = [], None
        try:
            self._check_batch(batch)
            multiple = self.config.parallel.tp if self.config.parallel.sequence_parallel else 1
            microbatches = split_batch(batch, self.config.train.microbatch_size, multiple)
        except ValueError as cause:
            error = cause
        raise_together(error, self.groups.world, self.device)
        return microbatches

    def _check_batch(self, batch: TrainBatch) -> None:
        """What the model cannot take, by name."""
        longest, positions = batch.ids_sl.shape[1], self.arch.max_position_embeddings
        if longest > positions:
            raise ValueError(
                f"a batch of sequences padded to {longest} tokens, and the model has {positions} positions. "
                "Lower "
                "rollout.max_new_tokens, use shorter prompts, or raise model.max_position_embeddings."
            )
        bad_sl = (batch.ids_sl < 0) | (batch.ids_sl >= self.arch.vocab_size)
        if bool(bad_sl.any()):
            row, column = bad_sl.nonzero()[0].tolist()
            raise ValueError(
                f"id {int(batch.ids_sl[row, column])} of sample {row} at position {column} is outside the "
                "model's "
                f"vocabulary [0, {self.arch.vocab_size}). Use the tokenizer that belongs to the model."
            )

    def _run_schedule(
        self,
        model: torch.nn.Module,
        step: Callable,
        microbatches: Sequence[Microbatch],
        *,
        forward_only: bool = False,
        collect: bool = False,
    ) -> list:
        """Megatron's schedule over the microbatches; what the loss function returned, on the last stage."""
        rows, length = microbatches[0].input_ids_bl.shape
        return get_forward_backward_func()(
            forward_step_func=step,
            data_iterator=iter(microbatches),
            model=[model],
            num_microbatches=len(microbatches),
            seq_length=length,
            micro_batch_size=rows,
            forward_only=forward_only,
            collect_non_loss_data=collect,
        )

    def _denominators(self, batch: TrainBatch) -> Denominators:
        """Global token counts: one all-reduce of two numbers, on every stage."""
        sample_mask_sl = batch.sample_mask_s[:, None].expand_as(batch.token_mask_sl)
        valid = kl_mask(batch.token_mask_sl, sample_mask_sl).sum()
        retained = retained_mask(batch.token_mask_sl, sample_mask_sl, batch.keep_old_sl).sum()
        counts = torch.stack([retained, valid]).to(device=self.device, dtype=torch.float64)
        retained, valid = all_reduce_(counts, "sum", self.groups.dp).float()
        actor = retained if self.config.loss.actor_denominator == "retained" else valid
        return Denominators(actor=actor, retained=retained, kl=valid)

    def _has_tokens(self, denominators: Denominators) -> bool:
        """Is there anything to train on, over the whole step?"""
        return bool(denominators.retained > 0) or (self.config.loss.kl_coef > 0 and bool(denominators.kl > 0))

    def _own_metrics(self, reports: Sequence[LossReport]) -> dict[str, Metric]:
        """This rank's share of the step's metrics: one TP rank of the last stage speaks for its replica."""
        neutral = neutral_metrics(self.config.loss, self.device)
        if not self.groups.is_last_stage or self.groups.tp_rank != 0:
            return neutral
        return add_metrics([neutral, *(report.metrics for report in reports)])

    def _broken_scores(
        self, microbatches: Sequence[Microbatch], parts: Sequence[TokenLogprobs]
    ) -> ValueError | None:
        """The error for a scored response token whose row of logits was broken."""
        for microbatch, part in zip(microbatches, parts, strict=True):
            broken_t = (
                torch.isnan(part.unfiltered_logprob_t) & microbatch.token_mask_t & microbatch.sample_mask_t
            )
            if bool(broken_t.any()):
                return _broken_error(
                    "logits", int(microbatch.sample_index_t[broken_t][0]), self.groups.dp_rank
                )
        return None

    def _refuse_broken_step(self, reports: Sequence[LossReport]) -> None:
        """Raises on all ranks when any saw NaN or inf in logits, loss or gradients; before the optimizer
        moves.
        """
        samples = [int(report.broken_sample) for report in reports] if self.groups.is_last_stage else []
        broken = [sample for sample in samples if sample >= 0]
        error = _broken_error("logits or loss", broken[0], self.groups.dp_rank) if broken else None
        # The loss first: its message names the sample, and a broken loss breaks every stage's gradients too.
        raise_together(error, self.groups.world, self.device)
        if not self._gradients_are_finite():
            error = ValueError(
                "NaN or inf in a gradient although the loss is finite; the step was not taken and the "
                "weights are "
                "untouched. Lower optimizer.lr or look for overflow in the model."
            )
        raise_together(error, self.groups.world, self.device)

    def _gradients_are_finite(self) -> bool:
        """Reads Megatron's flat gradient buffers: one norm each, one number back from the device."""
        model: Any = self.model
        norms = [buffer.grad_data.norm() for buffer in (*model.buffers, *model.expert_parallel_buffers)]
        return bool(torch.isfinite(torch.stack(norms)).all()) if norms else True


def _broken_error(what: str, sample: int, dp_rank: int) -> ValueError:
    return ValueError(
        f"NaN or inf in the {what} of sample {sample} on data-parallel rank {dp_rank}; the step was not "
        "taken and the "
        "weights are untouched. Check that sample, lower optimizer.lr, or restart from an earlier checkpoint."
    )
