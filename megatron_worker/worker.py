"""THE WORKER: the policy on this rank. Megatron-core does the model, the schedule, data parallelism and the
optimizer.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from megatron.core.distributed import finalize_model_grads
from megatron.core.models.gpt import GPTModel

from megatron_worker.architecture import architecture_from_config, architecture_from_hf
from megatron_worker.batch_checks import check_kept_ids, check_same_batch, check_scores, check_trains
from megatron_worker.chunks import let_go
from megatron_worker.cpu_backend import cpu_backend
from megatron_worker.decoding import MegatronDecoder
from megatron_worker.forward_step import (
    LossContract,
    OutputHead,
    divides_by_exact_count,
    make_loss_func,
    make_scoring_step,
    make_train_step,
)
from megatron_worker.groups import destroy_parallel, initialize_parallel
from megatron_worker.hf_bridge import export_hf_tensors, initialize_from_seed, load_hf_weights, save_hf
from megatron_worker.loss_scale import ScaleProbe, check_loss_scale, tiny_microbatches
from megatron_worker.microbatch_loss import LossReport, neutral_metrics
from megatron_worker.microbatches import common_count, join_scores, split_batch
from megatron_worker.model_setup import build_chunks, wrap_ddp
from megatron_worker.optimizer_setup import build_optimizer
from megatron_worker.packed_microbatches import pack_batch, unpack_scores
from megatron_worker.prepared_step import PreparedStep
from megatron_worker.schedule import run_schedule, shape_of
from megatron_worker.step_safety import broken_message, refuse_broken_step
from rlcore.batch import Microbatch, ScoredTokens, StepResult, TrainBatch
from rlcore.collectives import name_failure, raise_together
from rlcore.config import RunConfig
from rlcore.layout.balancing import check_fits
from rlcore.layout.pp_broadcast import broadcast_from_last_stage, score_fields
from rlcore.metrics import Metric, add_metrics, neutral_like, reduce_metrics
from rlcore.ops.logprob import TokenLogprobs
from rlcore.sampling import SamplingSpec
from rlcore.step_weights import StepWeights, empty_step_metrics, weigh_step


class MegatronWorker:
    """`PolicyWorker` on Megatron-core. Every method is collective: all ranks of the run call it in the same
    order.
    """

    def __init__(self, config: RunConfig, task_vocab_size: int | None = None) -> None:
        """Joins the process groups and builds this rank's chunks of the model.

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
        self.num_positions = self.arch.max_position_embeddings
        self.head = OutputHead(
            groups=self.groups,
            vocab_size=self.arch.vocab_size,
            fused=config.model.fused_head,
            fused_tokens=config.model.fused_head_tokens,
            support=config.sampling.support,
        )
        self.contract = LossContract(per_token=divides_by_exact_count(config.loss))
        chunks = self._new_chunks()
        self.reference = None
        if config.loss.kl_coef > 0:
            self.reference = [chunk.eval().requires_grad_(False) for chunk in self._new_chunks()]
        self.chunks: list[Any] = [wrap_ddp(chunk, config.parallel) for chunk in chunks]
        steps = config.train.steps * config.train.epochs
        steps *= config.sequences_per_step // (config.train.minibatch_size or config.sequences_per_step)
        self.optimizer, self.scheduler = build_optimizer(self.chunks, config.optimizer, steps)
        self.chunks[0].config.finalize_model_grads_func = finalize_model_grads
        self.chunks[0].config.grad_scale_func = self.optimizer.scale_loss
        self._open.callback(let_go, self.chunks)
        self.decoder = MegatronDecoder(self.chunks, self.arch, config.parallel, self.groups)
        if config.train.check_loss_scale:
            check_loss_scale(self.scale_probe())

    @property
    def model(self) -> Any:
        """The only chunk of a layout without virtual stages."""
        (chunk,) = self.chunks
        return chunk

    def _new_chunks(self) -> list[GPTModel]:
        """This rank's chunks with the run's initial weights."""
        config = self.config
        per_token, packs = divides_by_exact_count(config.loss), config.train.token_budget is not None
        chunks = build_chunks(self.arch, config.parallel, config.model.dtype, self.groups, per_token, packs)
        if config.model.hf_path:
            load_hf_weights(chunks, self.arch, config.model.hf_path, self.groups)
        else:
            initialize_from_seed(chunks, self.arch, config.seed, self.groups)
        return chunks

    def scale_probe(self) -> ScaleProbe:
        """The loss-scale self-test of this run: its own chunks, loss contract and number of microbatches."""
        data = tiny_microbatches(self.config, self.groups, self.device)

        def loss_return(loss: torch.Tensor, num_tokens: torch.Tensor) -> tuple:
            return self.contract.scaled(loss, num_tokens, {}, len(data), self.groups)

        return ScaleProbe(
            model=self.chunks,
            groups=self.groups,
            data=data,
            shape=shape_of(data),
            run_stage=self.head.run,
            loss_return=loss_return,
        )

    def logprobs(self, batch: TrainBatch) -> ScoredTokens:
        """Scores the batch under the current weights and the truncated distribution. See `PolicyWorker`."""
        loss = self.config.loss
        unfiltered = loss.kl_coef > 0 and loss.kl_in == "reward"
        fields = self._score(batch, self.chunks, self.spec, unfiltered)
        logprob_sl = fields["logprob"]
        # Without truncation nothing else travels: no mass is cut, and only a banned id has no logprob.
        keep_sl = fields.get("keep", ~torch.isneginf(logprob_sl))
        return ScoredTokens(
            logprob_sl=logprob_sl,
            keep_sl=keep_sl,
            log_mass_sl=fields.get("log_mass", torch.zeros_like(logprob_sl)),
            unfiltered_logprob_sl=fields.get("unfiltered_logprob", logprob_sl) if unfiltered else None,
        )

    def reference_logprobs(self, batch: TrainBatch) -> torch.Tensor:
        """`[S, L]` unfiltered logprobs of the frozen reference policy. `ValueError` when the run has none."""
        if self.reference is None:
            raise ValueError("this run keeps no reference policy: set loss.kl_coef above 0.")
        return self._score(batch, self.reference, self.spec.unfiltered())["logprob"]

    @torch.no_grad()
    def _score(
        self, batch: TrainBatch, chunks: Sequence[Any], spec: SamplingSpec, unfiltered: bool = False
    ) -> dict[str, torch.Tensor]:
        """The fields of `score_fields`, token-aligned `[S, L]`, on every stage."""
        fields = score_fields(truncates=spec.truncates, unfiltered=unfiltered)
        self._check_batch_together(batch)
        # What was kept of the sampler's distribution says nothing of one that is not truncated.
        replays = self.head.support == "replay" and spec.truncates
        microbatches = self._split(self._with_kept_ids(batch, replays))
        step = make_scoring_step(spec, self.head)
        parts: list[TokenLogprobs] = run_schedule(
            chunks, step, microbatches, shape_of(microbatches), forward_only=True, collect=True
        )
        values, error = None, None
        if self.groups.is_last_stage:
            error = self._broken_scores(microbatches, parts)
            values = {field.name: self._join(microbatches, parts, batch, field.name) for field in fields}
        # Every rank waits here for every last stage, before anybody acts on the scores.
        raise_together(error, self.groups.world, self.device)
        return broadcast_from_last_stage(fields, values, tuple(batch.ids_sl.shape), self.groups, self.device)

    def train_step(self, batch: TrainBatch) -> StepResult:
        """One optimizer step over the batch of every data-parallel rank.

        A step without a single token that counts is reported and moves nothing. A step with NaN or inf in
        logits, loss or gradients is refused on all ranks together (`StepResult.refused`), weights and
        optimizer untouched. `ValueError` on all ranks for a batch that the model or the loss cannot take.
        """
        batch = self._with_old(batch)
        prepared = self.prepare(batch)
        if prepared.is_empty:
            return StepResult(
                metrics=reduce_metrics(
                    empty_step_metrics(batch, prepared.weights), self.groups.dp, self.device
                ),
                stepped=False,
                reason="no token of the whole step counts: nothing to train on",
            )
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
            chunk.train()
        self.optimizer.zero_grad()
        microbatches = prepared.microbatches
        reports: list[LossReport] = run_schedule(
            self.chunks, prepared.forward_step, microbatches, shape_of(microbatches)
        )
        refusal = self.refusal(reports)
        if refusal is not None:
            return refusal
        metrics = self.metrics(prepared, reports)
        if metrics["tokens/trained"] == 0 and not prepared.has_kl_term:
            # Only the current pass knows this: momentum and weight decay must not move weights for nothing.
            return StepResult(
                metrics=metrics,
                stepped=False,
                reason="the current policy's support and the importance filter leave no token of the step",
            )
        with name_failure("Megatron's optimizer step", None):
            success, grad_norm, _ = self.optimizer.step()  # pyright: ignore[reportGeneralTypeIssues]
        if not success:
            return StepResult(metrics=metrics, stepped=False, reason="Megatron's optimizer skipped the step")
        learning_rate = self.optimizer.param_groups[0]["lr"]
        if self.scheduler is not None:
            self.scheduler.step(increment=1)
        metrics |= {"optimizer/grad_norm": float(grad_norm or 0.0), "optimizer/lr": float(learning_rate)}
        return StepResult(metrics=metrics, stepped=True)

    def prepare(self, batch: TrainBatch) -> PreparedStep:
        """One optimizer step over the batch, for a schedule and an optimizer of your own.

        `ValueError` on all ranks for a batch that the model or the loss cannot take. Collective.
        """
        loss = self.config.loss
        batch = self._with_old(batch)
        self._check_batch_together(batch, trains=True)
        weights = weigh_step(batch, loss, self.config.importance, self.spec.truncates, self.groups.dp)
        with_ids = self._with_kept_ids(batch, self.config.sampling.reads_kept_ids)
        microbatches = self._split(with_ids, weights)
        loss_func = make_loss_func(loss, self.spec, self.head, len(microbatches), self.contract)
        return PreparedStep(
            forward_step=make_train_step(loss_func, self.head),
            loss_func=loss_func,
            microbatches=microbatches,
            weights=weights,
            has_kl_term=loss.kl_coef > 0 and loss.kl_in == "loss",
            num_chunks=len(self.chunks),
        )

    def _with_old(self, batch: TrainBatch) -> TrainBatch:
        """The batch with the old logprobs that the config names, where no pass has to compute them."""
        return batch.with_sampler_as_old() if self.config.loss.old_logprobs == "sampler" else batch

    def refusal(self, reports: Sequence[LossReport]) -> StepResult | None:
        """Why the optimizer must not step: NaN or inf anywhere; else None. The same on every rank.

        `reports`: what the schedule returned on this rank. Collective: call it after the backward.
        """
        return refuse_broken_step(reports, self.chunks, self.groups, self.device)

    def metrics(self, prepared: PreparedStep, reports: Sequence[LossReport]) -> dict[str, float]:
        """The step's metrics over all ranks, from what the schedule returned on each. Collective."""
        return reduce_metrics(self._own_metrics(reports, prepared.weights), self.groups.world, self.device)

    def finish(self, prepared: PreparedStep, reports: Sequence[LossReport]) -> dict[str, float]:
        """`metrics`, for a loop of your own: call it between the backward and your optimizer. Collective.

        `ValueError` on every rank where there is a `refusal`: the optimizer must not step then.
        """
        refusal = self.refusal(reports)
        if refusal is not None:
            raise ValueError(refusal.reason)
        return self.metrics(prepared, reports)

    def export_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(Hugging Face name, whole tensor on the host) of every weight. See `PolicyWorker`."""
        return export_hf_tensors(self.chunks, self.arch, self.groups)

    def save(self, path: str) -> None:
        """Writes the policy as a Hugging Face folder."""
        save_hf(self.chunks, self.arch, path, self.groups, source=self.config.model.hf_path)

    def close(self) -> None:
        """Leaves the process groups and the CPU backend. The worker cannot be used afterwards."""
        self._open.close()

    def _check_batch_together(self, batch: TrainBatch, trains: bool = False) -> None:
        """A batch that one rank cannot take raises on all of them. `trains`: or that the loss cannot."""
        error, budget = None, self.config.train.token_budget
        try:
            if trains:
                check_trains(batch, self.config.loss)
            check_scores(batch, self.num_positions, self.head.vocab_size)
            check_kept_ids(batch, self.head.support, self.head.vocab_size)
            if budget is not None:
                sizes = {"cp_size": self.groups.cp_size, "tp_size": self.config.parallel.sp_size}
                check_fits(batch.length_s.cpu(), budget, **sizes)
        except ValueError as cause:
            error = cause
        raise_together(error, self.groups.world, self.device)
        error = None
        try:
            check_same_batch(batch, self.groups, self.device, self.config.sampling.reads_kept_ids)
        except ValueError as cause:
            error = cause
        raise_together(error, self.groups.world, self.device)

    def _with_kept_ids(self, batch: TrainBatch, read: bool) -> TrainBatch:
        """The batch with the sampler's kept ids where they are read: on the last stage, when `read`."""
        if read and self.groups.is_last_stage:
            return batch
        return dataclasses.replace(batch, sampling_mask=None)

    def _split(self, batch: TrainBatch, weights: StepWeights | None = None) -> list[Microbatch]:
        """The microbatches of a checked batch. Collective over DP with packing or shared experts."""
        train, parallel = self.config.train, self.config.parallel
        count_multiple = parallel.microbatch_multiple
        how = (parallel.sp_size, weights, self.spec.penalises, count_multiple)
        if train.token_budget is None:
            count = common_count(batch, train.microbatch_size, self.groups, count_multiple)
            return split_batch(batch, train.microbatch_size, *how, least_count=count)
        return pack_batch(batch, train.token_budget, self.groups, *how)

    def _join(
        self,
        microbatches: Sequence[Microbatch],
        parts: Sequence[TokenLogprobs],
        batch: TrainBatch,
        name: str,
    ) -> torch.Tensor:
        """One field of the scores, token-aligned `[S, L]`. Collective over CP."""
        parts_t = [getattr(part, f"{name}_t") for part in parts]
        fill = name == "keep"
        if microbatches[0].packed is not None:
            return unpack_scores(microbatches, parts_t, batch, fill, self.groups.cp)
        return join_scores(parts_t, batch, microbatches[0].input_ids_bl.shape[1], fill)

    def _own_metrics(self, reports: Sequence[LossReport], weights: StepWeights) -> dict[str, Metric]:
        """This rank's share of the step's metrics: one TP rank of the last stage speaks for its replica."""
        neutral = neutral_metrics(self.config.loss, self.device, audits=self.head.support == "audit")
        neutral |= {name: neutral_like(metric) for name, metric in weights.metrics.items()}
        if not self.groups.is_last_stage or self.groups.tp_rank != 0:
            return neutral
        # Every context-parallel rank has tokens of its own; what is known of whole sequences is said once.
        own = weights.metrics if self.groups.cp_rank == 0 else {}
        return add_metrics([neutral, own, *(report.metrics for report in reports)])

    def _broken_scores(
        self, microbatches: Sequence[Microbatch], parts: Sequence[TokenLogprobs]
    ) -> ValueError | None:
        """The error for a scored response token whose row of logits was broken."""
        for microbatch, part in zip(microbatches, parts, strict=True):
            broken_t = (
                torch.isnan(part.unfiltered_logprob_t) & microbatch.token_mask_t & microbatch.sample_mask_t
            )
            if bool(broken_t.any()):
                row = int(microbatch.sample_index_t[broken_t][0])
                return ValueError(broken_message("logits", [(self.groups.dp_rank, row)]))
        return None
