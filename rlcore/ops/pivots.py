"""The bracket around a row's threshold, and where the next pivots inside it go."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from rlcore.ops.rows import pick_rows, write_rows

# Width in nats of a bracket that has no lower end yet: exp(-32) is nothing beside the row's largest entry.
OPEN_WIDTH = 32.0


@dataclass(frozen=True, kw_only=True)
class Bracket:
    """`low_u < threshold < high_u`, both exclusive, with the mass and count of the entries on and above each
    end.
    """

    low_u: torch.Tensor
    """Everything above it reaches the goal, or is all there is."""
    high_u: torch.Tensor
    """From it upwards the goal is not reached."""
    low_u2: torch.Tensor
    """`[u, 2]` float64: mass and count of entries > low."""
    high_u2: torch.Tensor
    """`[u, 2]` float64: mass and count of entries >= high."""

    def num_inside(self) -> torch.Tensor:
        """`[u]` float64: how many entries lie between the ends."""
        return self.low_u2[:, 1] - self.high_u2[:, 1]

    def rows(self, index_a: torch.Tensor) -> Bracket:
        """Some of the rows, in ascending order."""
        if index_a.shape[0] == self.low_u.shape[0]:
            return self
        return pick_rows(self, index_a)

    def with_rows(self, index_a: torch.Tensor, part: Bracket) -> Bracket:
        """This bracket with some rows, in ascending order, taken from `part`."""
        if index_a.shape[0] == self.low_u.shape[0]:
            return part
        return write_rows(self, index_a, part)


def tighten(
    bracket: Bracket,
    pivot_up: torch.Tensor,
    sums_up2: torch.Tensor,
    goal_u: torch.Tensor,
    column: int,
    enough_u: torch.Tensor | None = None,
) -> Bracket:
    """The bracket with its ends moved to the pivots; a row that holds `enough_u` values or fewer stays."""
    moves_u = torch.ones_like(goal_u, dtype=torch.bool)
    if enough_u is not None:
        moves_u = bracket.num_inside() > enough_u
    for pivot_u, sums_u2 in zip(pivot_up.unbind(1), sums_up2.unbind(1), strict=True):
        reached_u = sums_u2[:, column] >= goal_u
        below_u = just_below(pivot_u)
        raises_u = moves_u & reached_u & (below_u > bracket.low_u)
        lowers_u = moves_u & ~reached_u & (pivot_u < bracket.high_u)
        bracket = Bracket(
            low_u=torch.where(raises_u, below_u, bracket.low_u),
            high_u=torch.where(lowers_u, pivot_u, bracket.high_u),
            low_u2=torch.where(raises_u[:, None], sums_u2, bracket.low_u2),
            high_u2=torch.where(lowers_u[:, None], sums_u2, bracket.high_u2),
        )
    return bracket


def spread(bracket: Bracket) -> torch.Tensor:
    """`[u]`: two standard deviations of where the goal is, as a part of the bracket, were its values drawn
    from a flat density.
    """
    return bracket.num_inside().clamp(min=1.0).rsqrt().to(bracket.high_u.dtype)


def place_pivots(
    bracket: Bracket,
    goal_u: torch.Tensor,
    column: int,
    spread_u: torch.Tensor | None,
    clamp: bool = True,
) -> torch.Tensor:
    """`[u, 3]` inside the bracket: its quarters, or where a straight line meets the goal and `spread_u` of
    the width to both sides.
    """
    low_u = torch.where(torch.isneginf(bracket.low_u), bracket.high_u - OPEN_WIDTH, bracket.low_u)
    width_u = bracket.high_u - low_u
    if spread_u is None:
        steps = torch.tensor([0.25, 0.5, 0.75], dtype=width_u.dtype, device=width_u.device)
        parts_up = steps.expand(width_u.shape[0], 3)
    else:
        missing_u = goal_u - bracket.high_u2[:, column]
        part_u = missing_u / (bracket.low_u2[:, column] - bracket.high_u2[:, column])
        part_u = torch.nan_to_num(part_u, nan=0.5).clamp(0.0, 1.0).to(width_u.dtype)
        parts_up = torch.stack([part_u - spread_u, part_u, part_u + spread_u], dim=1)
    pivot_up = bracket.high_u[:, None] - parts_up * width_u[:, None]
    return clamp_inside(pivot_up, bracket) if clamp else pivot_up


def clamp_inside(pivot_up: torch.Tensor, bracket: Bracket) -> torch.Tensor:
    """The pivots, moved between the bracket's ends."""
    highest_u, lowest_u = just_below(bracket.high_u), torch.nextafter(bracket.low_u, bracket.high_u)
    return torch.minimum(torch.maximum(pivot_up, lowest_u[:, None]), highest_u[:, None])


def just_below(value_u: torch.Tensor) -> torch.Tensor:
    """The next float down: `z > just below v` is `z >= v`."""
    return torch.nextafter(value_u, torch.full_like(value_u, -math.inf))
