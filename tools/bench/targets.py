"""The targets, as a table, and whether a row meets them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from rlcore.ops.pointwise import COMPILE_FROM_TOKENS
from tools.bench.options import BenchOptions

Row = dict[str, Any]


@dataclass(frozen=True)
class Target:
    """A bound on one number of a row."""

    key: str
    sign: str
    """`>=` or `<=`."""
    bound: float

    def judge(self, row: Row) -> dict[str, Any]:
        """The bound, the value and whether it is met."""
        value = row[self.key]
        met = value >= self.bound if self.sign == ">=" else value <= self.bound
        return {"key": self.key, "target": f"{self.sign} {self.bound:g}", "value": value, "met": bool(met)}


# Two cores, TP 2 on gloo, V = 151,936, 256 tokens, float32.
OP_TARGETS = {
    "k50_p95": (Target("vs_resharding_sort", ">=", 50), Target("vs_floor", "<=", 2)),
    "p95_peaked": (Target("vs_resharding_sort", ">=", 40), Target("vs_floor", "<=", 2.5)),
    "p95_flat": (Target("vs_resharding_sort", ">=", 20), Target("vs_floor", "<=", 5)),
    "k50": (Target("vs_resharding_sort", ">=", 6), Target("vs_floor", "<=", 2)),
}
# For any V and TP, in bytes a token and rank; and nothing in backward.
TRAFFIC_TARGETS = (Target("comm_bytes_per_token", "<=", 16 * 1024), Target("comm_calls_backward", "<=", 0))
# Of the logits shard, where the shard is large enough that fixed-size temporaries are nothing beside it.
MEMORY_TARGET = Target("extra_memory_ratio", "<=", 0.10)
FUSED_TIME_TARGET = Target("vs_matmul_op", "<=", 1.3)
# Peak memory of twice the tokens over that of the tokens: the O(t) outputs may grow, logits may not.
FUSED_MEMORY_TARGET = Target("peak_growth", "<=", 1.05)
# Value and gradient of a loss over its floor, from the size on at which losses are compiled.
LOSS_TARGET = Target("vs_floor", "<=", 2)
# What our code adds to Megatron's forward and backward, at the size of a real model.
ADDED_TIME_TARGET = Target("adds", "<=", 0.10)
# Real tokens a second over those of padded rows that are half padding.
PACKED_TARGET = Target("vs_padded", ">=", 1.7)


def judge(row: Row, options: BenchOptions) -> list[dict[str, Any]]:
    """What the row is held to, and whether it is met."""
    return [target.judge(row) for target in _targets(row, options)]


def _targets(row: Row, options: BenchOptions) -> list[Target]:
    stated_size = (
        options.tokens == 256
        and options.vocab == 151_936
        and options.tp == 2
        and options.dtype == torch.float32
        and options.device == "cpu"
    )
    targets: list[Target] = []
    if options.case == "op" and stated_size:
        targets += OP_TARGETS[row["name"]]
    if options.case in ("op", "real", "scaling"):
        targets += TRAFFIC_TARGETS
    if options.case in ("op", "real") and stated_size:
        targets.append(MEMORY_TARGET)
    if options.case == "fused" and row["name"] != "matmul_op":
        targets += [FUSED_TIME_TARGET, FUSED_MEMORY_TARGET]
    if options.case == "loss" and options.tokens >= COMPILE_FROM_TOKENS:
        targets.append(LOSS_TARGET)
    if row["name"].startswith("smollm2"):
        targets.append(ADDED_TIME_TARGET)
    if row["name"] == "smollm2_packed":
        targets.append(PACKED_TARGET)
    return targets
