"""The rules of the advantage section: one function per rule, named after it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from rlcore.config_parse import ConfigError

if TYPE_CHECKING:
    from rlcore.config import RunConfig


def check_group_size(config: RunConfig) -> None:
    """A group of one has advantage 0: nothing would ever be learned from comparing within groups."""
    estimator = config.advantage.estimator
    if estimator != "reinforce_pp" and config.rollout.samples_per_prompt < 2:
        raise ConfigError(
            "rollout.samples_per_prompt=1 makes every advantage 0 (a group of one has no baseline) under "
            f"advantage.estimator={estimator}. Set rollout.samples_per_prompt to at least 2, or "
            "advantage.estimator=reinforce_pp."
        )


def check_whitened_batch(config: RunConfig) -> None:
    """Whitening one response leaves nothing: all its tokens carry one reward."""
    if config.advantage.estimator == "reinforce_pp" and config.sequences_per_step < 2:
        raise ConfigError(
            "advantage.estimator=reinforce_pp whitens the rewards of a step, and one response a step makes "
            "every advantage 0. Set rollout.prompts_per_step or rollout.samples_per_prompt to at least 2."
        )


def check_normalize_std(config: RunConfig) -> None:
    """Only GRPO has the choice."""
    estimator, normalize_std = config.advantage.estimator, config.advantage.normalize_std
    if estimator != "grpo" and normalize_std is not None:
        does = "never divides by" if estimator == "rloo" else "always divides by the whole step's"
        raise ConfigError(
            f"advantage.normalize_std={str(normalize_std).lower()} does nothing under "
            f"advantage.estimator={estimator}, which {does} standard deviation. Remove it, or set "
            "advantage.estimator=grpo."
        )


def check_leave_one_out(config: RunConfig) -> None:
    """Only GRPO has the choice."""
    estimator = config.advantage.estimator
    if config.advantage.leave_one_out and estimator != "grpo":
        does = "always leaves the sample out" if estimator == "rloo" else "has no group baseline"
        raise ConfigError(
            f"advantage.leave_one_out=true does nothing under advantage.estimator={estimator}, which {does}. "
            "Set it to false, or set advantage.estimator=grpo."
        )


def check_deviation_of_the_others(config: RunConfig) -> None:
    """One other sample has no standard deviation."""
    advantage, samples = config.advantage, config.rollout.samples_per_prompt
    if advantage.leave_one_out and advantage.divides_by_std and samples < 3:
        raise ConfigError(
            f"advantage.leave_one_out=true divides by the standard deviation of the group's other samples, "
            f"and rollout.samples_per_prompt={samples} leaves one. Set rollout.samples_per_prompt to at "
            "least 3, or advantage.normalize_std=false."
        )


def check_drop_equal_groups(config: RunConfig) -> None:
    """A group of one is equal: every sample would leave."""
    if config.advantage.drop_equal_groups and config.rollout.samples_per_prompt < 2:
        raise ConfigError(
            "advantage.drop_equal_groups=true drops every group of rollout.samples_per_prompt=1: one reward "
            "is equal to itself. Set it to false, or raise rollout.samples_per_prompt."
        )


ADVANTAGE_RULES: tuple[Callable[[RunConfig], None], ...] = (
    check_group_size,
    check_whitened_batch,
    check_normalize_std,
    check_leave_one_out,
    check_deviation_of_the_others,
    check_drop_equal_groups,
)
