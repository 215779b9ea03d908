"""Start-up self-test of the loss scale: a toy loss through the job's own schedule against the closed form.

Megatron scales a loss in the schedule, in data parallelism and in gradient finalisation, by factors that
depend on what the loss function returns. Too much or too little of them trains, only worse; so it is an error
before the first step.

The toy: every stage computes its part of the model, multiplies it by 0 and adds the sum of one of its weights
to what it got from the stage before; the last one weighs the result. So each element of that weight has a
gradient known exactly, on every stage, whatever the model computes.

In a Megatron job of your own, before its first step, on every rank:

    def forward_step_part(model, tokens):                     # what your forward step returns first
        return model(tokens, positions, None)

    def loss_part(loss, num_tokens):                          # what your loss function returns
        return LossContract(num_values=3).scaled(loss, num_tokens, {}, num_microbatches, groups)

    check_loss_scale(ScaleProbe(model=ddp_model, groups=parallel_groups(), data=[tokens] * num_microbatches,
        shape=tuple(tokens.shape), run_stage=forward_step_part, loss_return=loss_part))
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

from megatron_worker.chunks import Model, chunks_of, unwrap
from megatron_worker.microbatches import split_batch
from megatron_worker.packed_microbatches import pack_batch
from megatron_worker.schedule import run_schedule
from rlcore.batch import Microbatch, TrainBatch
from rlcore.collectives import all_gather, all_reduce_, group_rank, group_size
from rlcore.config import RunConfig
from rlcore.groups import ParallelGroups
from rlcore.layout.packing import length_multiples

TOLERANCE = 0.01
"""Largest relative error of a right scale: bfloat16 rounds to 2^-8."""


@dataclass(frozen=True, kw_only=True)
class ScaleProbe:
    """What the self-test needs to know of a job, ours or another."""

    model: Model
    """This rank's stage of a `GPTModel` in Megatron's `DistributedDataParallel`, or all its chunks."""
    groups: ParallelGroups
    data: Sequence[Any]
    """One tiny input for each of a step's microbatches, all of one shape."""
    shape: tuple[int, int]
    """Rows and tokens of such an input: the schedule's `micro_batch_size` and `seq_length`."""
    run_stage: Callable[[Any, Any], torch.Tensor]
    """(model, input) to what the job's forward step returns first."""
    loss_return: Callable[[torch.Tensor, torch.Tensor], tuple]
    """What the job's loss function returns for a microbatch's loss, a plain sum over this rank's tokens, and
    its number of tokens (0-dim int64).
    """

    @property
    def chunks(self) -> list[Any]:
        """This rank's chunks."""
        return chunks_of(self.model)

    @property
    def per_token(self) -> bool:
        """Does gradient finalisation divide by the number of tokens of the step?"""
        return bool(self.chunks[0].config.calculate_per_token_loss)


def check_loss_scale(probe: ScaleProbe) -> None:
    """`ValueError` on every rank, naming the factor, unless gradients are those of the loss: the sum over
    microbatches and DP x CP ranks, over the token count of all of them in the per-token regime.

    Collectives: a train step's, without the optimizer's, and one all-gather of a number over the world; for
    experts one all-reduce of a number over the ranks that hold the same ones.
    Mutates: nothing; weights, gradients and random states are what they were.
    """
    factors = measure_loss_scale(probe)
    wrong = [(rank, factor) for rank, factor in enumerate(factors) if abs(factor - 1.0) > TOLERANCE]
    if wrong:
        rank, factor = wrong[0]
        raise ValueError(
            f"gradients are {factor:.4g} times what the loss says ({len(wrong)} of {len(factors)} ranks, the "
            f"first is rank {rank}): {_suspect(factor, probe)} Correct what the loss function returns to "
            "Megatron's schedule (megatron_worker.forward_step.LossContract), or set "
            "train.check_loss_scale=false if the scale is meant."
        )


def measure_loss_scale(probe: ScaleProbe) -> list[float]:
    """Of each rank of the world, the factor furthest from 1 between gradient and closed form; 1 on a rank
    without a reduced gradient of the test's weights. The same on every rank. Collectives: as
    `check_loss_scale`.
    """
    weights = [probe_weights(chunk) for chunk in probe.chunks]
    with _untouched(probe.chunks):
        for chunk in probe.chunks:
            chunk.train()
        run_schedule(probe.chunks, _toy_step(probe, weights), list(enumerate(probe.data)), probe.shape)
        ratio = torch.cat(
            [
                reduced_gradient(chunk, weight).double() / _closed_form(probe, weight)
                for chunk, own in zip(probe.chunks, weights, strict=True)
                for weight in own
            ]
        )
        # A NaN is as far from 1 as a number can be.
        distance = torch.nan_to_num((ratio - 1.0).abs(), nan=torch.inf, posinf=torch.inf)
        own = ratio[distance.argmax()] if ratio.numel() else ratio.new_ones(())
        own = torch.nan_to_num(own, nan=torch.inf, posinf=torch.inf, neginf=-torch.inf)
    return all_gather(own, probe.groups.world).tolist()


def probe_weights(model: Any) -> list[torch.nn.Parameter]:
    """The weights of the test: the first norm of the chunk's layers, and where experts are cut over ranks the
    first weight of one, which is reduced over other ranks. A norm's gradient always passes autograd, where a
    linear layer's may be added to Megatron's buffer behind its back: experts are left out where it is.
    """
    norm = probe_norm(model)
    if model.config.gradient_accumulation_fusion:
        return [norm]
    experts = [parameter for parameter in unwrap(model).parameters() if is_expert_parallel(parameter)]
    return [norm, *experts[:1]]


def is_expert_parallel(parameter: torch.nn.Parameter) -> bool:
    """Is it reduced over the ranks that hold the same experts? Megatron's mark for that."""
    return parameter.requires_grad and not getattr(parameter, "allreduce", True)


def probe_norm(model: Any) -> torch.nn.Parameter:
    """The first norm of the chunk's layers."""
    for name, parameter in unwrap(model).named_parameters():
        is_norm = "norm" in name and "q_layernorm" not in name and "k_layernorm" not in name
        if "layers." in name and is_norm and parameter.dim() == 1 and parameter.requires_grad:
            return parameter
    raise ValueError(
        "the loss-scale self-test found no trained norm weight in this stage's layers. Set "
        "train.check_loss_scale=false for such a model."
    )


def reduced_gradient(model: Any, parameter: torch.nn.Parameter) -> torch.Tensor:
    """The part of a gradient that this rank holds after finalisation, flat: all of it, or under the
    distributed optimizer what of it lies in this rank's slice of the bucket, possibly nothing.
    """
    gradient: torch.Tensor = parameter.main_grad  # pyright: ignore[reportAttributeAccessIssue]
    if not model.ddp_config.use_distributed_optimizer:
        return gradient.reshape(-1)
    for buffer in (*model.buffers, *model.expert_parallel_buffers):
        for bucket in buffer.buckets:
            if parameter not in bucket.params:
                continue
            length = bucket.grad_data.numel() // group_size(buffer.data_parallel_group)
            first = group_rank(buffer.data_parallel_group) * length
            start = gradient.storage_offset() - bucket.grad_data.storage_offset()
            stop = start + gradient.numel()
            # An empty slice where the two do not meet.
            return bucket.grad_data[max(start, first) : max(min(stop, first + length), max(start, first))]
    raise AssertionError("every trained parameter has a bucket")


def tiny_microbatches(config: RunConfig, groups: ParallelGroups, device: torch.device) -> list[Microbatch]:
    """One microbatch where a step of the run has one, else a few, of one sequence of two tokens each: a large
    model's start must not take as long as a step of hundreds.
    """
    train = config.train
    minibatch = train.minibatch_size or config.sequences_per_step
    count = 1
    if train.token_budget is not None or minibatch > train.microbatch_size * groups.dp_size:
        count = telling_count(groups, config.parallel.microbatch_multiple)
    ids_sl = torch.zeros(count, 2, dtype=torch.int64, device=device)
    batch = TrainBatch(
        ids_sl=ids_sl,
        length_s=torch.full((count,), 2, device=device),
        token_mask_sl=ids_sl.bool(),
        sample_mask_s=ids_sl[:, 0].bool(),
        advantage_sl=ids_sl.float(),
        sampler_logprob_sl=ids_sl.float(),
    )
    tp_size, count_multiple = config.parallel.sp_size, config.parallel.microbatch_multiple
    if train.token_budget is None:
        return split_batch(batch, 1, tp_size, count_multiple=count_multiple)
    multiple = length_multiples(groups.cp_size, tp_size)[1]
    budget = -(-2 // multiple) * multiple
    return pack_batch(batch, budget, groups, tp_size, count_multiple=count_multiple)


def telling_count(groups: ParallelGroups, count_multiple: int) -> int:
    """Microbatches of the test: more than one, and not the number of ranks of anything, or a factor left out
    would make up for another one left in.
    """
    sizes = {1, groups.cp_size, groups.dp_size, groups.cp_size * groups.dp_size, groups.ep_size}
    return next(count for count in itertools.count(count_multiple, count_multiple) if count not in sizes)


def _toy_step(probe: ScaleProbe, weights: Sequence[list[torch.nn.Parameter]]) -> Callable:
    """A forward step of the toy loss; each microbatch of each DP x CP rank weighs something else."""
    rank = group_rank(probe.groups.dp_cp)
    weights_of = {id(chunk): own for chunk, own in zip(probe.chunks, weights, strict=True)}

    def loss_of(index: int, output: torch.Tensor) -> tuple:
        value = output.flatten()[0].float() * _weight(rank, index)
        return probe.loss_return(value, torch.tensor(_num_tokens(rank, index), device=output.device))

    def toy_step(data: Iterator[tuple[int, Any]], model: Any) -> tuple[torch.Tensor, Callable]:
        index, item = next(data)
        output = probe.run_stage(model, item)
        carried = torch.stack([weight.sum() for weight in weights_of[id(model)]]).sum()
        bare = cast(Any, unwrap(model))
        if not bare.pre_process:
            # One element, because a sum's gradient would be rounded in the pipeline's dtype on the way back.
            carried = carried + bare.decoder.input_tensor.flatten()[0]
        return output * 0 + carried.to(output.dtype), lambda output: loss_of(index, output)

    return toy_step


def _weight(rank: int, index: int) -> int:
    # The sum over microbatches differs from rank to rank, however many there are: a reduction left out shows.
    return 1 + rank % 5 + index % 3


def _num_tokens(rank: int, index: int) -> int:
    return 1 + rank % 3 + index % 2


def _closed_form(probe: ScaleProbe, weight: torch.nn.Parameter) -> float:
    """The gradient of every element of the weight. Collectives: for an expert's, one all-reduce of a number
    over the ranks that hold the same experts.
    """
    places = [
        (rank, index) for rank in range(group_size(probe.groups.dp_cp)) for index in range(len(probe.data))
    ]
    own_rank, device = group_rank(probe.groups.dp_cp), weight.device
    total = float(sum(_weight(*place) for place in places))
    if is_expert_parallel(weight):
        # Each rank's toy loss holds an expert of its own, whoever its tokens went to.
        own = sum(_weight(own_rank, index) for index in range(len(probe.data)))
        total = float(all_reduce_(torch.tensor(float(own), device=device), "sum", probe.groups.expert_dp))
    if probe.per_token:
        total /= sum(_num_tokens(*place) for place in places)
    if getattr(weight, "sequence_parallel", False):
        # Finalisation adds up what the TP ranks, each with tokens of its own, say of such a weight.
        total *= probe.groups.tp_size
    scale = probe.chunks[0].config.grad_scale_func
    return total if scale is None else total * float(scale(torch.ones(1, device=device)))


def _suspect(factor: float, probe: ScaleProbe) -> str:
    """A guess at the cause from the size of the factor."""
    cp, dp, count = probe.groups.cp_size, probe.groups.dp_size, len(probe.data)
    guesses = [
        (1 / cp, "is Megatron's context-parallel factor cancelled twice, or where it is not applied?"),
        (cp, "is Megatron's context-parallel factor left in?"),
        (1 / count, "is Megatron's division by the number of microbatches left in?"),
        (count, "is a division by the number of microbatches cancelled that Megatron does not do?"),
        (1 / dp, "is Megatron's average over data-parallel ranks left in?"),
        (dp, "is an average over data-parallel ranks cancelled that Megatron does not take?"),
        (1 / (dp * cp), "is Megatron's average over data- and context-parallel ranks left in?"),
        (dp * cp, "is an average over ranks cancelled that Megatron does not take?"),
    ]
    for value, guess in guesses:
        if value != 1 and abs(factor / value - 1) <= TOLERANCE:
            return guess
    return f"there are {count} microbatches, {dp} data-parallel and {cp} context-parallel ranks."


@contextmanager
def _untouched(chunks: Sequence[Any]) -> Iterator[None]:
    """Puts gradient buffers, random states and the modes back."""
    buffers = [buffer for chunk in chunks for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)]
    # At start-up they are zero, and a large model has no room for a copy.
    kept = [buffer.grad_data.clone() if bool(buffer.grad_data.any()) else None for buffer in buffers]
    were_training = [chunk.training for chunk in chunks]
    tracker: Any = get_cuda_rng_tracker()
    states, host = tracker.get_states(), torch.get_rng_state()
    device = torch.cuda.get_rng_state() if torch.cuda.is_available() else None
    for chunk in chunks:
        chunk.zero_grad_buffer()
    try:
        yield
    finally:
        for chunk, was_training in zip(chunks, were_training, strict=True):
            chunk.zero_grad_buffer()
            chunk.train(was_training)
        for buffer, values in zip(buffers, kept, strict=True):
            if values is not None:
                buffer.grad_data.copy_(values)
        torch.set_rng_state(host)
        if device is not None:
            torch.cuda.set_rng_state(device)
        if states:
            tracker.set_states(states)
