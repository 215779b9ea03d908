"""The CPU backend changes nothing outside its context, and real Megatron training works inside it."""

from __future__ import annotations

import pytest
import torch

from tests.rank_pool import run_ranks

pytestmark = [pytest.mark.megatron, pytest.mark.distributed]


def _patched_attributes():
    from megatron.core.tensor_parallel import mappings
    from megatron.core.tensor_parallel import random as megatron_random
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    names = (
        "current_device",
        "synchronize",
        "manual_seed",
        "get_rng_state",
        "set_rng_state",
        "FloatTensor",
        "IntTensor",
    )
    return [getattr(torch.cuda, name) for name in names] + [
        megatron_random._get_cuda_rng_state,
        megatron_random._set_cuda_rng_state,
        torch.cuda.current_stream,
        torch.cuda.stream,
        token_dispatcher.MoEAlltoAllTokenDispatcher.cuda_dtoh_stream,
        token_dispatcher.maybe_move_tensor_to_cpu,
        mappings._gather_along_first_dim,
        mappings._reduce_scatter_along_first_dim,
        getattr(moe_utils, "te_general_gemm", "absent"),
    ]


def test_everything_is_restored_on_exit_even_after_an_error():
    from megatron_worker.cpu_backend import cpu_backend, cpu_backend_is_active

    before = _patched_attributes()
    with pytest.raises(KeyError), cpu_backend("cpu"):
        assert cpu_backend_is_active()
        assert all(now is not then for now, then in zip(_patched_attributes(), before, strict=True))
        raise KeyError
    assert not cpu_backend_is_active()
    assert all(now is then for now, then in zip(_patched_attributes(), before, strict=True))
    assert torch.zeros(1).type() == "torch.FloatTensor"


def test_cuda_calls_are_answered_on_the_cpu_and_nesting_changes_nothing():
    from megatron_worker.cpu_backend import cpu_backend

    with cpu_backend("cpu"), cpu_backend("cpu"):
        made = [
            torch.ones(2, device="cuda"),
            torch.ones(2, device=torch.device("cuda", 0), pin_memory=True),
            torch.ones(2).cuda(non_blocking=True),
            torch.ones(2).to("cuda:0"),
            torch.ones(2, dtype=torch.float64).to(torch.device("cuda"), torch.float32),
            torch.ones(2, dtype=torch.float64).type("torch.cuda.FloatTensor"),
            torch.cuda.FloatTensor([1.0, 1.0]),
            torch.ones(2, device=torch.cuda.current_device()),
        ]
        for tensor in made:
            assert tensor.device.type == "cpu"
            assert tensor.type() == "torch.cuda.FloatTensor"
            assert tensor.tolist() == [1.0, 1.0]
        assert torch.ones(2, dtype=torch.bfloat16).type() == "torch.cuda.BFloat16Tensor"
        torch.cuda.manual_seed(5)
        state = torch.cuda.get_rng_state()
        first = torch.rand(3, device="cuda")
        torch.cuda.set_rng_state(state)
        assert torch.equal(first, torch.rand(3, device="cuda"))


def uneven_on_rank(rank, world_size, lengths):
    """What Megatron's pair of collectives makes of shares of these lengths, and of their gradients."""
    import torch.distributed as dist
    from megatron.core.tensor_parallel.mappings import (
        gather_from_sequence_parallel_region,
        reduce_scatter_to_sequence_parallel_region,
    )

    from megatron_worker.cpu_backend import cpu_backend

    start = sum(lengths[:rank])
    own = (
        10.0 * torch.arange(start, start + lengths[rank]).double()[:, None] + torch.arange(3)
    ).requires_grad_()
    with cpu_backend("cpu"):
        whole = gather_from_sequence_parallel_region(own, group=dist.group.WORLD, output_split_sizes=lengths)
        # Each rank's rows weigh something else: the gradient of a share is the sum of what all ranks say.
        back = reduce_scatter_to_sequence_parallel_region(
            whole * (rank + 1), group=dist.group.WORLD, input_split_sizes=lengths
        )
        (back * (rank + 1)).sum().backward()
    return own.detach(), whole.detach(), back.detach(), own.grad


@pytest.mark.parametrize("lengths", [[3, 1], [0, 2], [2, 0, 1, 4]])
def test_shares_of_uneven_lengths(lengths):
    """gloo sends equally much: some ranks have no token for an expert at all."""
    total, results = sum(range(1, len(lengths) + 1)), run_ranks(uneven_on_rank, len(lengths), lengths)
    expected = 10.0 * torch.arange(sum(lengths)).double()[:, None] + torch.arange(3)
    for rank, (own, whole, back, gradient) in enumerate(results):
        assert torch.equal(whole, expected)
        assert torch.equal(back, own * total)
        # The rank's rows came back times 1 + 2 + ..., and its own loss weighs them.
        assert torch.equal(gradient, torch.full_like(own, total * (rank + 1)))


def test_a_cuda_machine_is_left_alone(monkeypatch):
    from megatron_worker.cpu_backend import cpu_backend

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    before = _patched_attributes()
    for backend in ("auto", "cuda"):
        with cpu_backend(backend) as device_type:
            assert device_type == "cuda"
            assert all(now is then for now, then in zip(_patched_attributes(), before, strict=True))
            assert torch.zeros(1).type() == "torch.FloatTensor"


def test_cuda_backend_without_a_device_is_refused(monkeypatch):
    from megatron_worker.cpu_backend import resolve_device_type

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="backend='cpu'"):
        resolve_device_type("cuda")


def _refused_world(rank, world_size, tp, pp):
    from megatron_worker.cpu_backend import cpu_backend
    from megatron_worker.groups import initialize_parallel
    from rlcore.config import ParallelConfig

    with cpu_backend("cpu"), pytest.raises(ValueError) as caught:
        initialize_parallel(ParallelConfig(tp=tp, pp=pp), "cpu")
    return str(caught.value)


def test_a_world_that_does_not_factor_is_refused_on_every_rank():
    for message in run_ranks(_refused_world, 2, 3, 1):
        assert "2 processes do not factor" in message
        assert "parallel.tp=3" in message


TINY = {
    "num_layers": 4,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "ffn_hidden_size": 48,
    "max_position_embeddings": 32,
}


def _train(rank, world_size, parallel_values, model_values, steps):
    """Three Adam steps of a toy loss through Megatron's schedule; the last stage returns the losses."""
    from functools import partial

    from megatron.core.distributed import finalize_model_grads
    from megatron.core.pipeline_parallel import get_forward_backward_func

    from megatron_worker.architecture import architecture_from_config
    from megatron_worker.cpu_backend import cpu_backend
    from megatron_worker.groups import destroy_parallel, initialize_parallel
    from megatron_worker.hf_bridge import initialize_from_seed
    from megatron_worker.model_setup import build_chunks, wrap_ddp
    from megatron_worker.optimizer_setup import build_optimizer
    from rlcore.collectives import all_gather
    from rlcore.config import ModelConfig, OptimizerConfig, ParallelConfig

    vocab_size, rows, length = 21, 4, 8
    parallel = ParallelConfig(**parallel_values)
    with cpu_backend("cpu") as device_type:
        groups = initialize_parallel(parallel, device_type)
        arch = architecture_from_config(ModelConfig(**TINY, **model_values), vocab_size)
        (model,) = build_chunks(arch, parallel, "float32", groups)
        initialize_from_seed(model, arch, 7, groups)
        chunk = wrap_ddp(model, parallel)
        model.config.finalize_model_grads_func = finalize_model_grads
        optimizer, scheduler = build_optimizer([chunk], OptimizerConfig(lr=0.01, weight_decay=0.1), steps)
        ids = torch.randint(0, vocab_size, (rows, length), generator=torch.Generator().manual_seed(3))
        ids = ids.chunk(groups.dp_size)[groups.dp_rank]
        position = torch.arange(length).expand_as(ids)

        def loss_of(logits, target):
            full = torch.cat(list(_gather_with_grad(logits, groups)), dim=-1)[..., :vocab_size]
            loss = torch.nn.functional.cross_entropy(full[:, :-1].flatten(0, 1), target[:, 1:].flatten())
            return loss, loss.detach()

        def forward_step(data, stage):
            return stage(ids, position, None), partial(loss_of, target=ids)

        losses = []
        for _ in range(steps):
            chunk.zero_grad_buffer()
            optimizer.zero_grad()
            seen = get_forward_backward_func()(
                forward_step_func=forward_step,
                data_iterator=None,
                model=[chunk],
                num_microbatches=1,
                seq_length=length,
                micro_batch_size=ids.shape[0],
                forward_only=False,
            )
            ok, grad_norm, _ = optimizer.step()
            scheduler.step(1)
            assert ok
            if groups.is_last_stage:
                loss = all_gather(seen[0], groups.dp).mean().item()
                losses.append((loss, float(grad_norm)))
        destroy_parallel()
    return losses


class _Gather(torch.autograd.Function):
    """All-gathers TP shards; the gradient of a shard is this rank's slice of the (equal) full gradients."""

    @staticmethod
    def forward(ctx, shard, groups):
        from rlcore.collectives import all_gather

        ctx.tp_rank = groups.tp_rank
        return all_gather(shard, groups.tp)

    @staticmethod
    def backward(ctx, grad):
        return grad[ctx.tp_rank], None


def _gather_with_grad(logits, groups):
    return _Gather.apply(logits, groups).unbind(0)


VARIANTS = {
    "llama_tied": {"tie_word_embeddings": True},
    "qwen2_untied": {"tie_word_embeddings": False, "qkv_bias": True},
}
LAYOUTS = [
    (2, {"tp": 2}),  # vocabulary of 21 rows padded to 22
    (2, {"pp": 2}),  # a tied head lives on both stages
    (2, {"distributed_optimizer": True}),  # data parallel only
    (4, {"tp": 2, "pp": 2}),
    (4, {"tp": 2, "sequence_parallel": True, "distributed_optimizer": True}),
]


@pytest.mark.parametrize("variant", VARIANTS)
def test_training_does_not_depend_on_the_layout(variant):
    steps = 3
    alone = run_ranks(_train, 1, {}, VARIANTS[variant], steps)[0]
    assert alone[-1][0] < alone[0][0] - 0.1
    for world_size, parallel in LAYOUTS:
        for losses in run_ranks(_train, world_size, parallel, VARIANTS[variant], steps):
            if losses:
                torch.testing.assert_close(torch.tensor(losses), torch.tensor(alone), rtol=2e-5, atol=2e-5)
