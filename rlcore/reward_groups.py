"""The rewards of a step, one row per advantage group, ascending: what group statistics are read from.

Sorted rows make every statistic independent of where a sample stands in the batch, to the last bit, and put a
group's median where its deviations can be taken from it: rewards that are equal then deviate by exactly 0.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

MAX_REWARD = 1e37
"""Largest reward in magnitude: its square does not overflow float64, nor a difference of two float32."""


@dataclass(frozen=True, kw_only=True)
class RewardGroups:
    """`G` groups of at most `N` samples. Slot n of a group is its n-th smallest reward."""

    reward_gn: torch.Tensor
    """`[G, N]` float64, ascending; 0 in empty slots (masked there)."""
    filled_gn: torch.Tensor
    """`[G, N]` bool: does the slot hold a sample?"""
    size_g1: torch.Tensor
    """`[G, 1]` float64: samples that count, at least 1."""
    rows_k: torch.Tensor
    """`[K]` int64: rows of the batch that count, in slot order."""
    group_k: torch.Tensor
    """`[K]` int64: the group of `rows_k`."""
    num_samples: int
    """S: rows of the batch, those that do not count included."""

    @property
    def deviation_gn(self) -> torch.Tensor:
        """`[G, N]` float64: reward minus the group's lower median, which is a reward; 0 in empty slots."""
        middle_g1 = ((self.size_g1 - 1) / 2).long()
        return torch.where(self.filled_gn, self.reward_gn - self.reward_gn.gather(1, middle_g1), 0.0)

    @property
    def equal_g(self) -> torch.Tensor:
        """`[G]` bool: are all rewards of the group the same number? A group of one is."""
        return (self.deviation_gn == 0).all(dim=1)

    def to_samples(self, value_gn: torch.Tensor) -> torch.Tensor:
        """`[S]`: each sample's entry of `[G, N]`; 0 or False for samples that do not count."""
        out_s = torch.zeros(self.num_samples, dtype=value_gn.dtype, device=value_gn.device)
        # A boolean index runs row by row: the order of `rows_k`.
        out_s[self.rows_k] = value_gn[self.filled_gn]
        return out_s


def group_rewards(
    reward_s: torch.Tensor, group_id_s: torch.Tensor, counts_s: torch.Tensor | None = None
) -> RewardGroups:
    """The groups of a batch, told apart by id, never by position.

    Shapes: `reward_s [S]` floating, `group_id_s [S]` integer, `counts_s [S]` bool: which samples are part of
    their group; None: all. Rewards of the others may be NaN or inf. Collectives: none, a group lies on one
    rank. Reads sizes back from the device. Raises `ValueError` as `check_rewards` does.
    """
    counts_s = torch.ones_like(group_id_s, dtype=torch.bool) if counts_s is None else counts_s
    check_rewards(reward_s, group_id_s, counts_s)
    rows_k = counts_s.nonzero()[:, 0]
    rows_k = rows_k[reward_s[rows_k].argsort(stable=True)]
    rows_k = rows_k[group_id_s[rows_k].argsort(stable=True)]
    _, group_k, size_g = torch.unique_consecutive(group_id_s[rows_k], return_inverse=True, return_counts=True)
    slot_k = torch.arange(rows_k.numel(), device=rows_k.device) - (size_g.cumsum(0) - size_g)[group_k]
    # One slot at least: statistics still run where no sample counts and there are no groups.
    num_slots = max(1, int(size_g.max()) if size_g.numel() else 0)
    reward_gn = torch.zeros((size_g.numel(), num_slots), dtype=torch.float64, device=reward_s.device)
    reward_gn[group_k, slot_k] = reward_s[rows_k].to(torch.float64)
    slot_n = torch.arange(num_slots, device=rows_k.device)
    return RewardGroups(
        reward_gn=reward_gn,
        filled_gn=slot_n < size_g[:, None],
        size_g1=size_g[:, None].to(torch.float64),
        rows_k=rows_k,
        group_k=group_k,
        num_samples=reward_s.numel(),
    )


def check_rewards(reward_s: torch.Tensor, group_id_s: torch.Tensor, counts_s: torch.Tensor) -> None:
    """Every reward that counts is a usable number and has a group id, or `ValueError` naming the sample."""
    if reward_s.ndim != 1 or reward_s.shape != group_id_s.shape or reward_s.shape != counts_s.shape:
        raise ValueError(
            f"rewards have shape {tuple(reward_s.shape)}, group ids {tuple(group_id_s.shape)} and the sample "
            f"mask {tuple(counts_s.shape)}: expected one of each per sample."
        )
    if counts_s.dtype != torch.bool:
        raise ValueError(f"the sample mask is {counts_s.dtype}; expected torch.bool.")
    if reward_s.numel() == 0:
        raise ValueError(
            "no sample in the batch: a step needs at least one response. Raise rollout.prompts_per_step."
        )
    # NaN compares False, so it is bad too.
    bad = (counts_s & ~(reward_s.to(torch.float64).abs() <= MAX_REWARD)).nonzero()
    if bad.numel():
        row = int(bad[0])
        raise ValueError(
            f"the reward of sample {row} (group {int(group_id_s[row])}) is {float(reward_s[row])}: a reward "
            f"function must return a finite number of at most {MAX_REWARD:g} in magnitude. Fix the task's "
            "reward, or return 0.0 for a response that cannot be graded."
        )
