"""Faults of the model's share of a rank that `rlcore check` must find: weights on the wrong stage or expert,
gradients of some parameters scaled or not summed. `planted_faults.FAULTS` lists them.
"""

from __future__ import annotations

from unittest import mock

VPP = 2
"""Virtual stages of the layouts that have any."""


def _with_model(change):
    """`change(name, parameter, groups)` for every parameter before data parallelism wraps the stage."""
    from megatron_worker import worker

    wrap = worker.wrap_ddp

    def planted(model, parallel):
        from megatron_worker.groups import parallel_groups

        groups = parallel_groups()
        for name, parameter in model.named_parameters():
            change(name, parameter, groups)
        return wrap(model, parallel)

    return mock.patch.object(worker, "wrap_ddp", planted)


def gradient_of_one_tp_rank_scaled():
    """An MLP shard of TP rank 1 gets half of its gradient."""
    return _with_model(
        lambda name, parameter, groups: (
            parameter.register_hook(lambda grad: grad * 0.5)
            if "linear_fc1" in name and groups.tp_rank == 1
            else None
        )
    )


def norms_not_summed_over_tp():
    """Under sequence parallelism a norm's gradient stays that of one rank's tokens."""
    return _with_model(
        lambda name, parameter, groups: (
            setattr(parameter, "sequence_parallel", False) if "norm" in name else None
        )
    )


def expert_gradients_scaled_by_ep():
    """As if the average over data x context parallel were one over the ranks that hold the same experts."""
    return _with_model(
        lambda name, parameter, groups: (
            parameter.register_hook(lambda grad: grad * groups.ep_size) if ".local_experts." in name else None
        )
    )


def experts_reduced_like_dense_weights():
    """Megatron's mark of experts is missing: gradients of different experts are added up."""
    return _with_model(
        lambda name, parameter, groups: (
            setattr(parameter, "allreduce", True) if ".local_experts." in name else None
        )
    )


def experts_of_every_rank_counted_from_0():
    """Each EP rank loads the first experts of a layer."""
    from megatron_worker import hf_bridge

    fill, layouts = hf_bridge._fill, hf_bridge.stage_layouts

    def planted(model, arch, groups, read):
        with mock.patch.object(hf_bridge, "stage_layouts", lambda *args: layouts(*args[:4], ep_rank=0)):
            fill(model, arch, groups, read)

    return mock.patch.object(hf_bridge, "_fill", planted)


def layers_of_a_rank_in_a_row():
    """Weights go to a rank's virtual stages as if a rank held layers that follow each other."""
    from megatron_worker import hf_bridge

    def planted(index, groups):
        return groups.pp_rank * VPP + index

    return mock.patch.object(hf_bridge, "stage_of", planted)


def chunks_counted_as_microbatches():
    """The loss is scaled up by what the schedule runs: microbatches times virtual stages."""
    from megatron_worker import forward_step

    right = forward_step.cancel_megatron_scaling

    def planted(loss, num_microbatches, *args):
        return right(loss, num_microbatches * VPP, *args)

    return mock.patch.object(forward_step, "cancel_megatron_scaling", planted)


def gradient_of_later_chunks_scaled():
    """Every virtual stage but a rank's first gets half of its gradient."""
    from megatron_worker import worker

    wrap = worker.wrap_ddp

    def planted(model, parallel):
        for parameter in model.parameters():
            if model.vp_stage:
                parameter.register_hook(lambda grad: grad * 0.5)
        return wrap(model, parallel)

    return mock.patch.object(worker, "wrap_ddp", planted)


def tied_embedding_not_summed():
    """The first and the last stage keep their own gradient of the weight that they share."""
    import sys

    from megatron.core.distributed import finalize_model_grads as _function

    module = sys.modules[_function.__module__]
    return mock.patch.object(module, "_allreduce_word_embedding_grads", lambda *args: None)


def _after_finalisation(change):
    """`change(name, parameter, groups)` for every parameter once its gradient is whole."""
    from megatron_worker import worker
    from megatron_worker.groups import parallel_groups

    right = worker.finalize_model_grads

    def planted(model, *args, **named):
        right(model, *args, **named)
        for chunk in model:
            for name, parameter in chunk.named_parameters():
                change(name, parameter, parallel_groups())

    return mock.patch.object(worker, "finalize_model_grads", planted)


def last_norm_of_tp_rank_1_scaled():
    """TP rank 1 gets half of the last norm's gradient: the copies drift apart. Rank 0's is right."""
    return _after_finalisation(
        lambda name, parameter, groups: (
            parameter.main_grad.mul_(0.5) if "final_layernorm" in name and groups.tp_rank == 1 else None
        )
    )


def tied_head_of_the_last_stage_scaled():
    """The last stage gets half of the gradient of its tied copy of the embedding; the first's is right."""
    return _after_finalisation(
        lambda name, parameter, groups: parameter.main_grad.mul_(0.5) if "output_layer" in name else None
    )


def tp_shards_counted_as_copies():
    """Megatron's mark of what TP cuts is missing: the gradient norm leaves the other ranks' shards out."""
    return _with_model(
        lambda name, parameter, groups: (
            setattr(parameter, "tensor_model_parallel", False)
            if hasattr(parameter, "tensor_model_parallel")
            else None
        )
    )


def reference_of_other_weights():
    """The last stage's share of the frozen reference is not the run's initial policy."""
    from megatron_worker.worker import MegatronWorker

    right, num_built = MegatronWorker._new_chunks, [0]

    def planted(self):
        chunks = right(self)
        num_built[0] += 1
        if num_built[0] == 2 and self.groups.is_last_stage:
            for parameter in chunks[-1].parameters():
                parameter.data.mul_(1.5)
        return chunks

    return mock.patch.object(MegatronWorker, "_new_chunks", planted)
