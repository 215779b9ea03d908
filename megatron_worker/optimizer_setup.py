"""Megatron's optimizer and its learning-rate schedule from a run config."""

from __future__ import annotations

from collections.abc import Sequence

from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer, get_megatron_optimizer
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from rlcore.config import OptimizerConfig


def build_optimizer(
    model_chunks: Sequence[DistributedDataParallel], optimizer: OptimizerConfig, total_steps: int
) -> tuple[MegatronOptimizer, OptimizerParamScheduler]:
    """Adam over the stage's chunks, and the schedule; call `scheduler.step(1)` after each optimizer step.

    The optimizer state is sharded over data-parallel ranks when the chunks were wrapped for that.
    `total_steps` counts optimizer steps. Raises `ValueError` when the warm-up is not shorter than the run.
    Collective over all ranks.
    """
    if optimizer.warmup_steps >= total_steps:
        raise ValueError(
            f"optimizer.warmup_steps={optimizer.warmup_steps} is not below the run's {total_steps} optimizer "
            "steps. Lower it, or raise train.steps."
        )
    model_config = model_chunks[0].config
    megatron_config = MegatronOptimizerConfig(
        optimizer="adam",
        lr=optimizer.lr,
        min_lr=optimizer.min_lr,
        weight_decay=optimizer.weight_decay,
        adam_beta1=optimizer.adam_beta1,
        adam_beta2=optimizer.adam_beta2,
        adam_eps=optimizer.adam_eps,
        clip_grad=optimizer.clip_grad,
        bf16=model_config.bf16,
        params_dtype=model_config.params_dtype,
        use_distributed_optimizer=model_chunks[0].ddp_config.use_distributed_optimizer,
    )
    megatron_optimizer = get_megatron_optimizer(
        megatron_config, list(model_chunks), use_gloo_process_groups=False
    )
    scheduler = OptimizerParamScheduler(
        megatron_optimizer,
        init_lr=0.0,
        max_lr=optimizer.lr,
        min_lr=optimizer.min_lr,
        lr_warmup_steps=optimizer.warmup_steps,
        lr_decay_steps=total_steps,
        lr_decay_style=optimizer.decay_style,
        start_wd=optimizer.weight_decay,
        end_wd=optimizer.weight_decay,
        wd_incr_steps=0,
        wd_incr_style="constant",
    )
    return megatron_optimizer, scheduler
