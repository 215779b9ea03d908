"""Handles of the process groups a rank belongs to. Groups are arguments everywhere; nothing reads global
state.
"""

from __future__ import annotations

from dataclasses import dataclass

from rlcore.collectives import Group, group_rank, group_size


@dataclass(frozen=True, kw_only=True)
class ParallelGroups:
    """The groups of this rank; None stands for a group of one."""

    tp: Group = None
    """Tensor parallel: ranks that hold shards of one vocabulary."""
    pp: Group = None
    """Pipeline parallel: ranks that hold the stages of one model replica, first stage first."""
    cp: Group = None
    """Context parallel: ranks that hold chunks of the same sequences."""
    dp: Group = None
    """Data parallel without CP: ranks that hold different samples."""
    dp_cp: Group = None
    """Data x context parallel: the ranks whose token counts and metrics add up."""
    ep: Group = None
    """Expert parallel: ranks that hold different experts of a layer and exchange tokens in every forward.
    They lie inside data x context parallel.
    """
    expert_dp: Group = None
    """Ranks of data x context parallel that hold the same experts."""
    model: Group = None
    """TP x PP (x CP): all ranks of one model replica."""
    world: Group = None
    """Every rank of the run."""

    @property
    def tp_size(self) -> int:
        """Number of vocabulary shards."""
        return group_size(self.tp)

    @property
    def tp_rank(self) -> int:
        """Index of this rank's vocabulary shard."""
        return group_rank(self.tp)

    @property
    def pp_size(self) -> int:
        """Number of pipeline stages."""
        return group_size(self.pp)

    @property
    def pp_rank(self) -> int:
        """Index of this rank's stage."""
        return group_rank(self.pp)

    @property
    def cp_size(self) -> int:
        """Number of context-parallel ranks."""
        return group_size(self.cp)

    @property
    def cp_rank(self) -> int:
        """Index of this rank's chunks of each sequence."""
        return group_rank(self.cp)

    @property
    def dp_size(self) -> int:
        """Number of ranks that hold different samples."""
        return group_size(self.dp)

    @property
    def dp_rank(self) -> int:
        """Index of this rank's share of the samples."""
        return group_rank(self.dp)

    @property
    def ep_size(self) -> int:
        """Number of shares that a layer's experts are cut into."""
        return group_size(self.ep)

    @property
    def ep_rank(self) -> int:
        """Index of this rank's share of the experts."""
        return group_rank(self.ep)

    @property
    def is_last_stage(self) -> bool:
        """Does this rank hold logits?"""
        return self.pp_rank == self.pp_size - 1

    @property
    def is_model_leader(self) -> bool:
        """First rank of its model replica: the one that runs code which must run once per replica
        (rewards).
        """
        return group_rank(self.model) == 0
