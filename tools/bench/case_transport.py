"""Scores of the last stage to every stage: one buffer, against pickled objects and a bare broadcast."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from rlcore.collectives import Group, broadcast_, record_collectives
from rlcore.groups import ParallelGroups
from rlcore.layout.pp_broadcast import broadcast_from_last_stage, score_fields
from tools.bench.measure import Method, time_alternately
from tools.bench.options import BenchOptions
from tools.bench.ranks import CheckFailed, run_ranks

Row = dict[str, Any]
STAGES = 2


def run_transport(options: BenchOptions) -> list[Row]:
    """A pipeline of two stages, one process each."""
    return run_ranks(transport_rank, STAGES, options.device, options)[0]


def transport_rank(group: Group, options: BenchOptions) -> list[Row]:
    """The row of one stage."""
    generator = torch.Generator().manual_seed(0)
    keep_t = torch.rand(options.tokens, generator=generator) > 0.1
    logprob_t = torch.where(keep_t, -torch.rand(options.tokens, generator=generator), -torch.inf)
    scores = {
        "logprob": logprob_t,
        "keep": keep_t,
        "log_mass": -torch.rand(options.tokens, generator=generator),
    }
    scores = {name: value.to(options.device) for name, value in scores.items()}
    groups = ParallelGroups(pp=group)
    own = scores if groups.is_last_stage else None
    fields = score_fields(truncates=True)

    def ours() -> dict[str, torch.Tensor]:
        return broadcast_from_last_stage(fields, own, (options.tokens,), groups, options.device)

    def pickled() -> dict[str, torch.Tensor]:
        boxed = [own]
        dist.broadcast_object_list(boxed, src=STAGES - 1, group=group)
        assert boxed[0] is not None
        return boxed[0]

    with record_collectives() as calls:
        received = ours()
    for other in (received, pickled()):
        if any(not torch.equal(other[name], value) for name, value in scores.items()):
            raise CheckFailed("transport: what arrives is not what the last stage sent")
    num_bytes = sum(call.num_bytes for call in calls)
    buffer = torch.zeros(num_bytes, dtype=torch.uint8, device=options.device)
    methods = {
        "ours": _only_forward(ours),
        "pickled": _only_forward(pickled),
        "floor": _only_forward(lambda: broadcast_(buffer, STAGES - 1, group)),
    }
    times = time_alternately(methods, {}, options.repeats, group, options.device)
    median = times["ours"].median
    return [
        {
            "name": "pp_broadcast",
            "fwd_bwd_s": median,
            "ours_quartiles_s": times["ours"].spread,
            "vs_pickled": times["pickled"].median / median,
            "vs_floor": median / times["floor"].median,
            "comm_bytes_per_token": num_bytes / options.tokens,
            "comm_calls_forward": len(calls),
            "total_bytes": num_bytes,
        }
    ]


def _only_forward(call: Any) -> Method:
    return Method(forward=call, backward=lambda result: ())
