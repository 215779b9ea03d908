"""The worker as a guest: around the model, and if you like the optimizer, of a Megatron job of your own."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from datetime import timedelta
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.transformer.dot_product_attention import DotProductAttention

from megatron_worker.chunks import Model, chunks_of, unwrap
from megatron_worker.forward_step import LossContract, OutputHead, divides_by_exact_count
from megatron_worker.groups import parallel_groups
from megatron_worker.prepared_step import PreparedStep
from megatron_worker.worker import MegatronWorker
from rlcore.batch import StepResult, TrainBatch
from rlcore.collectives import group_size
from rlcore.config import ParallelConfig, RunConfig
from rlcore.config_parse import parse_dataclass
from rlcore.config_rules import check_context_parallel, check_fused_head, check_ranges, check_sampling
from rlcore.config_rules_loss import check_loss
from rlcore.groups import ParallelGroups


class GuestWorker(MegatronWorker):
    """`PolicyWorker` around this rank's stage or chunks of an existing job. Methods are collective, as the
    worker's.

    `logprobs`, `prepare`, `metrics` and `refusal` need the model alone; `train_step` the optimizer too;
    `reference_logprobs` the reference. `save` and the embedded sampler stay with the job.
    """

    def __init__(
        self,
        model: Model,
        config: RunConfig | Mapping[str, Any],
        vocab_size: int,
        *,
        optimizer: MegatronOptimizer | None = None,
        scheduler: Any = None,
        reference: Model | None = None,
        contract: LossContract | None = None,
    ) -> None:
        """`model`: a `GPTModel` stage, wrapped or not, with virtual stages the list of this rank's chunks;
        `vocab_size`: its vocabulary without padding rows.

        `config`, or a mapping of its keys: read are loss, importance, sampling, train.microbatch_size and
        train.token_budget, model.fused_head and model.fused_head_tokens, parallel.timeout_s. The layout is
        the job's: `config.parallel` may repeat it and must not contradict it. `scheduler`:
        `step(increment=1)` after each optimizer step. `contract`: None means Megatron's data parallelism and
        what the model's config says of the loss. Changes nothing of the job.

        Raises `ValueError` naming what the job has to change. With CP every rank of the job must build its
        worker, because that makes process groups.
        """
        # Not the base class's: it would build what the job has already.
        self.chunks = chunks_of(model)
        bare = bare_chunks(self.chunks)
        self._open = ExitStack()
        self.optimizer, self.scheduler = optimizer, scheduler
        self.reference = None if reference is None else chunks_of(reference)
        if not isinstance(config, RunConfig):
            config = parse_dataclass(RunConfig, config)
        self.groups = parallel_groups(timedelta(seconds=config.parallel.timeout_s))
        self.device = next(bare[0].parameters()).device
        parallel = job_parallel(config.parallel, bare[0].config, self.groups)
        self.config = dataclasses.replace(config, parallel=parallel)
        check_guest_config(self.config)
        per_token = bool(bare[0].config.calculate_per_token_loss)
        self.contract = LossContract(per_token=per_token) if contract is None else contract
        for chunk in bare:
            check_model(self.config, chunk, vocab_size)
        check_loss_contract(self.config, bare[0].config, self.contract)
        if optimizer is not None:
            for chunk in self.chunks:
                check_optimizer(chunk, optimizer)
        self.spec = config.sampling.spec()
        self.num_positions = bare[0].max_sequence_length
        self.head = OutputHead(
            groups=self.groups,
            vocab_size=vocab_size,
            fused=config.model.fused_head,
            fused_tokens=config.model.fused_head_tokens,
            support=config.sampling.support,
        )

    def with_old_logprobs(self, batch: TrainBatch) -> TrainBatch:
        """The batch with what the current weights say of it: call it before the first update on it.

        With `loss.old_logprobs=sampler` what the sampler said, and no pass.
        """
        if self.config.loss.old_logprobs == "sampler":
            return batch.with_sampler_as_old()
        scores = self.logprobs(batch)
        return dataclasses.replace(
            batch,
            old_logprob_sl=scores.logprob_sl,
            keep_old_sl=scores.keep_sl,
            old_log_mass_sl=scores.log_mass_sl,
            old_unfiltered_logprob_sl=scores.unfiltered_logprob_sl,
        )

    def reference_logprobs(self, batch: TrainBatch) -> torch.Tensor:
        """See `PolicyWorker`. `ValueError` without a reference stage."""
        if self.reference is None:
            raise ValueError(
                "this worker was given no reference policy: pass reference=..., frozen chunks like the "
                "model's, or bring reference logprobs with the batch."
            )
        return super().reference_logprobs(batch)

    def prepare(self, batch: TrainBatch) -> PreparedStep:
        """See `MegatronWorker`. `ValueError` where nobody says what data parallelism does to gradients."""
        check_data_parallelism(self.chunks, self.contract, self.groups)
        return super().prepare(batch)

    def train_step(self, batch: TrainBatch) -> StepResult:
        """See `MegatronWorker`. `ValueError` without an optimizer."""
        if self.optimizer is None:
            raise ValueError(
                "this worker was given no optimizer: pass optimizer=..., or use prepare() with your own."
            )
        return super().train_step(batch)

    def save(self, path: str) -> None:
        """The job saves its own model."""
        raise ValueError(f"the model belongs to your job: save it there, not through the worker ({path}).")


def bare_chunks(chunks: Sequence[Any]) -> list[Any]:
    """The `GPTModel`s inside. `ValueError` unless they are all of this rank's virtual stages, in order."""
    bare: list[Any] = [unwrap(chunk) for chunk in chunks]
    for chunk in bare:
        if not isinstance(chunk, GPTModel):
            raise ValueError(
                f"expected a GPTModel stage, got a {type(chunk).__name__}. The parts for other models are in "
                "megatron_worker/forward_step.py."
            )
    model_config = bare[0].config
    expected = model_config.virtual_pipeline_model_parallel_size or 1
    given = [chunk.vp_stage or 0 for chunk in bare]
    if given != list(range(expected)):
        raise ValueError(
            f"virtual_pipeline_model_parallel_size={model_config.virtual_pipeline_model_parallel_size}, but "
            f"the chunks given have vp_stage {given}. Pass the list of all of this rank's chunks, in order."
        )
    in_turn = model_config.microbatch_group_size_per_vp_stage
    if expected > 1 and in_turn != model_config.pipeline_model_parallel_size:
        raise ValueError(
            f"microbatch_group_size_per_vp_stage={in_turn}: the worker cuts a batch into multiples of the "
            f"pipeline size, {model_config.pipeline_model_parallel_size}. Leave it out of your "
            "TransformerConfig."
        )
    return bare


def check_guest_config(config: RunConfig) -> None:
    """The rules of what a guest reads: model, rollouts, rewards and optimizer are the job's."""
    check_ranges(config)
    check_sampling(config)
    check_fused_head(config)
    check_context_parallel(config)
    check_loss(config)


def job_parallel(given: ParallelConfig, model_config: Any, groups: ParallelGroups) -> ParallelConfig:
    """The job's layout. `ValueError` where `given` says something else that is not a default."""
    found = {
        "tp": groups.tp_size,
        "pp": groups.pp_size,
        "vpp": model_config.virtual_pipeline_model_parallel_size or 1,
        "cp": groups.cp_size,
        "ep": groups.ep_size,
        "sequence_parallel": bool(model_config.sequence_parallel),
    }
    default = ParallelConfig()
    for name, value in found.items():
        told = getattr(given, name)
        if told not in (value, getattr(default, name)):
            raise ValueError(
                f"parallel.{name}={told}, but this Megatron job runs with {value}. Leave parallel.{name} "
                "out: the job's layout is used."
            )
    return dataclasses.replace(given, **found)


def check_model(config: RunConfig, bare: Any, vocab_size: int) -> None:
    """What the worker needs of the stage."""
    model_config = bare.config
    dropout = {name: getattr(model_config, name) for name in ("hidden_dropout", "attention_dropout")}
    for name, rate in dropout.items():
        if rate:
            raise ValueError(
                f"{name}={rate}: old and current logprobs would differ by chance. Set {name}=0.0 in your "
                "TransformerConfig."
            )
    if not 1 <= vocab_size <= bare.vocab_size:
        raise ValueError(
            f"vocab_size={vocab_size}: the model has {bare.vocab_size} rows, padding included. Pass the "
            "number of ids that the tokenizer has, at most that many."
        )
    if config.parallel.tp > 1 and not bare.parallel_output:
        raise ValueError(
            "the model gathers its logits over TP: build GPTModel with parallel_output=True, each rank's "
            "columns are what is scored."
        )
    if config.train.token_budget is None:
        return
    if config.parallel.pp > 1 and not model_config.variable_seq_lengths:
        raise ValueError(
            "train.token_budget packs rows of different lengths, and the pipeline stages do not tell each "
            "other the shapes: set variable_seq_lengths=True in your TransformerConfig."
        )
    if any(isinstance(module, DotProductAttention) for module in bare.modules()):
        raise ValueError(
            "train.token_budget packs rows, which Megatron's DotProductAttention refuses: use "
            "megatron_worker.attention.CausalAttention or Transformer Engine's as core attention, or leave "
            "train.token_budget out."
        )


def check_loss_contract(config: RunConfig, model_config: Any, contract: LossContract) -> None:
    """The loss and the job mean the same scaling."""
    if contract.per_token != bool(model_config.calculate_per_token_loss):
        raise ValueError(
            f"contract.per_token={contract.per_token}, but the model's "
            f"calculate_per_token_loss={model_config.calculate_per_token_loss}. Make them the same, or leave "
            "the contract out."
        )
    if not divides_by_exact_count(config.loss):
        return
    if not contract.per_token:
        raise ValueError(
            "loss.actor_denominator=retained_exact divides gradients after the last forward: set "
            "calculate_per_token_loss=True in your TransformerConfig, or choose retained or valid."
        )
    check_finalizes(model_config)


def check_data_parallelism(chunks: Sequence[Any], contract: LossContract, groups: ParallelGroups) -> None:
    """Megatron's data parallelism is known; of another one the job says whether it averages. A guess would
    train, with gradients too large or too small by the number of ranks.
    """
    num_ranks = group_size(groups.dp_cp)
    is_megatrons = all(isinstance(chunk, DistributedDataParallel) for chunk in chunks)
    if num_ranks == 1 or is_megatrons or contract.averages is not None:
        return
    raise ValueError(
        f"the model is not in Megatron's DistributedDataParallel, and there are {num_ranks} data- x "
        "context-parallel ranks. Pass the wrapped model, or contract=LossContract(averages=True) if your job "
        "averages gradients over these ranks, averages=False if it sums them."
    )


def check_finalizes(model_config: Any) -> None:
    """Someone reduces the gradients at the end of the schedule."""
    if model_config.finalize_model_grads_func is None:
        raise ValueError(
            "nothing reduces the gradients: set finalize_model_grads_func of the model's config to "
            "megatron.core.distributed.finalize_model_grads."
        )


def check_optimizer(model: torch.nn.Module, optimizer: Any) -> None:
    """What `train_step` needs: Megatron's data parallelism and optimizer, and no float16 loss scaling."""
    if not (isinstance(model, DistributedDataParallel) and isinstance(optimizer, MegatronOptimizer)):
        raise ValueError(
            "train_step() drives Megatron's DistributedDataParallel and optimizer, not "
            f"{type(model).__name__} and {type(optimizer).__name__}. Leave optimizer out, and use prepare() "
            "with your own."
        )
    if model.config.fp16:
        raise ValueError(
            "float16 loss scaling raises infinite gradients on purpose, which train_step() refuses. Use "
            "bfloat16 or float32, or prepare() with your own optimizer."
        )
    check_finalizes(model.config)
