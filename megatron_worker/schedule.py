"""Forward and backward over the pipeline: Megatron's schedules, and one forward by hand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

from megatron_worker.chunks import num_stages, stage_of
from rlcore.batch import Microbatch
from rlcore.collectives import name_failure
from rlcore.groups import ParallelGroups


def run_schedule(
    chunks: Sequence[Any],
    forward_step: Callable,
    data: Sequence[Any],
    shape: tuple[int, int],
    *,
    forward_only: bool = False,
    collect: bool = False,
) -> list:
    """Megatron's schedule over the inputs: interleaved where there are several chunks, which read the inputs
    each for itself.

    `shape`: rows and tokens of an input (of the first one, where the model's config has variable lengths).
    Returns what the loss function returned beside the loss, or all of it with `collect`, in the inputs'
    order, on the last stage; nothing elsewhere. The interleaved schedule raises unless it gets a
    multiple of PP inputs.
    """
    kind = "forward" if forward_only else "forward-backward"
    with name_failure(f"Megatron's {kind} schedule of {len(data)} microbatches", None):
        return get_forward_backward_func()(
            **schedule_arguments(forward_step, data, shape, len(chunks)),
            model=list(chunks),
            forward_only=forward_only,
            collect_non_loss_data=collect,
        )


def schedule_arguments(
    forward_step: Callable, data: Sequence[Any], shape: tuple[int, int], num_chunks: int
) -> dict[str, Any]:
    """What a schedule reads of a step, by Megatron's names: each chunk has an iterator of its own."""
    rows, length = shape
    return {
        "forward_step_func": forward_step,
        "data_iterator": [iter(data) for _ in range(num_chunks)],
        "num_microbatches": len(data),
        "seq_length": length,
        "micro_batch_size": rows,
    }


def shape_of(microbatches: Sequence[Microbatch]) -> tuple[int, int]:
    """Rows and tokens of the first microbatch, as the schedules want them."""
    rows, length = microbatches[0].input_ids_bl.shape
    return rows, length


def forward_once(
    stages: Sequence[Any],
    run: Callable[[Any], torch.Tensor],
    shape: tuple[int, int, int],
    groups: ParallelGroups,
) -> torch.Tensor | None:
    """One input through every stage in order, without a schedule: the interleaved one takes no single input.

    `stages`: this rank's bare chunks. `run(stage)` returns a stage's output; all but the first find theirs as
    Megatron's input tensor, `[l, b, D]` of `shape` (read where lengths are not variable). Returns the last
    stage's output; None on other ranks. Each stage waits for the one before.
    """
    pipe = None if groups.pp is None else P2PCommunicator(groups.pp, stages[0].config)
    last = num_stages(len(stages), groups) - 1
    output = None
    for index, stage in enumerate(stages):
        number = stage_of(index, groups)
        received = None
        if pipe is not None:
            with name_failure(f"stage {number}'s wait for hidden states", groups.pp):
                received = pipe.recv_forward(shape, is_first_stage=number == 0)
        stage.set_input_tensor(received)
        output = run(stage)
        if pipe is not None:
            with name_failure(f"stage {number}'s send of hidden states", groups.pp):
                pipe.send_forward(output, is_last_stage=number == last)
    return output if groups.is_last_stage else None
