"""A Megatron-core job as you may have it: next-token cross-entropy, with a model, data and loop of its own.

    torchrun --nproc-per-node 4 examples/plug_into_megatron/plain_training.py --tp 2 --steps 2

`rl_training.py` beside it is this file, become an RL trainer. Runs on a CPU too.
"""

import argparse
import os
from functools import partial

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.transformer_config import TransformerConfig
from rollouts import rollouts

from megatron_worker.cpu_backend import cpu_backend
from megatron_worker.guest import GuestWorker
from rlcore.batch_import import from_nemo_rl

VOCAB_SIZE, LENGTH, MICRO_BATCH, NUM_MICROBATCHES = 64, 16, 2, 2


def model_provider(tp, pp):
    """This rank's stage."""
    config = TransformerConfig(
        num_layers=2,
        hidden_size=32,
        ffn_hidden_size=64,
        num_attention_heads=4,
        num_query_groups=2,
        normalization="RMSNorm",
        add_bias_linear=False,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        pipeline_dtype=torch.float32,
        use_cpu_initialization=not torch.cuda.is_available(),
        gradient_accumulation_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
    )
    config.finalize_model_grads_func = finalize_model_grads
    return GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_layer_local_spec(normalization="RMSNorm"),
        vocab_size=VOCAB_SIZE,
        max_sequence_length=LENGTH,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        position_embedding_type="rope",
    ).to(torch.cuda.current_device())


def token_batches(dp_rank, seed):
    """Endless synthetic sequences `[b, L]`, others on each data-parallel rank: each id follows the last."""
    generator = torch.Generator().manual_seed(1000 * seed + dp_rank)
    while True:
        start = torch.randint(0, VOCAB_SIZE, (MICRO_BATCH, 1), generator=generator)
        yield ((start + torch.arange(LENGTH)) % VOCAB_SIZE).to(torch.cuda.current_device())


def forward_step(data_iterator, model):
    """Cross-entropy of one microbatch."""
    ids = next(data_iterator)
    positions = torch.arange(LENGTH, device=ids.device).expand_as(ids)
    return model(ids, positions, None, labels=ids.roll(-1, dims=1)), partial(loss_func, ids)


def loss_func(ids, loss_per_token):
    """The mean over all tokens but the last, which predicts nothing."""
    loss = loss_per_token[:, :-1].mean()
    return loss, {"loss": float(loss.detach())}


def validation_loss(model, batches):
    """Cross-entropy of held-out sequences on this rank's replica; NaN on stages without logits."""
    with torch.no_grad():
        reports = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=batches,
            num_microbatches=NUM_MICROBATCHES,
            seq_length=LENGTH,
            micro_batch_size=MICRO_BATCH,
            model=[model],
            forward_only=True,
        )
    return mean_loss(reports)


def mean_loss(reports):
    """Of the microbatches; NaN on stages without logits."""
    return sum(report["loss"] for report in reports) / len(reports) if reports else float("nan")


def train(stage, steps):
    """The loop."""
    data_parallel = DistributedDataParallelConfig(grad_reduce_in_fp32=True)
    model = DistributedDataParallel(stage.config, data_parallel, stage)
    optimizer = get_megatron_optimizer(OptimizerConfig(optimizer="adam", lr=1e-2), [model])
    dp_rank = parallel_state.get_data_parallel_rank()
    batches, held_out = rollouts(8, LENGTH, VOCAB_SIZE, dp_rank), token_batches(dp_rank, seed=1)
    config = {"sampling": {"top_p": 0.9}, "train": {"microbatch_size": MICRO_BATCH}}
    worker = GuestWorker(model, config, VOCAB_SIZE)
    for step in range(steps):
        model.zero_grad_buffer()
        optimizer.zero_grad()
        prepared = worker.prepare(worker.with_old_logprobs(from_nemo_rl(next(batches))))
        reports = get_forward_backward_func()(
            **prepared.schedule(),
            model=[model],
            forward_only=False,
        )
        loss = worker.finish(prepared, reports)["loss/total"]
        _, grad_norm, _ = optimizer.step()
        print(f"rank {dist.get_rank()} step {step} loss {loss:.4f} grad_norm {grad_norm:.4f}", flush=True)
    print(f"rank {dist.get_rank()} validation {validation_loss(model, held_out):.4f}", flush=True)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--pp", type=int, default=1)
    parser.add_argument("--steps", type=int, default=2)
    arguments = parser.parse_args()
    with cpu_backend() as device_type:
        if device_type == "cuda":
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("nccl" if device_type == "cuda" else "gloo")
        parallel_state.initialize_model_parallel(arguments.tp, arguments.pp)
        model_parallel_cuda_manual_seed(1)
        train(model_provider(arguments.tp, arguments.pp), arguments.steps)
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
