"""The rules of the loss and importance sections: one function per rule, named after it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

from rlcore.config_parse import ConfigError

if TYPE_CHECKING:
    from rlcore.config import RunConfig


def check_loss(config: RunConfig) -> None:
    """Every rule of both sections."""
    for rule in LOSS_RULES:
        rule(config)


_WITHOUT_RATIO = ("on_policy", "reinforce")


def check_clip_bounds(config: RunConfig) -> None:
    """Epsilons of a loss that has no ratio do nothing."""
    loss = config.loss
    for name in ("ratio_clip_min", "ratio_clip_max"):
        value = getattr(loss, name)
        if loss.policy in _WITHOUT_RATIO and value != getattr(type(loss), name):
            raise ConfigError(
                f"loss.{name}={value} does nothing under loss.policy={loss.policy}, which has no ratio. "
                "Remove it, or set loss.policy=clip."
            )


def check_on_policy(config: RunConfig) -> None:
    """After the first update the policy is not the one that drew the data."""
    train = config.train
    minibatch = train.minibatch_size or config.sequences_per_step
    if config.loss.policy != "on_policy" or (train.epochs == 1 and minibatch >= config.sequences_per_step):
        return
    key = f"train.epochs={train.epochs}" if train.epochs > 1 else f"train.minibatch_size={minibatch}"
    raise ConfigError(
        f"loss.policy=on_policy has ratio 1 by definition, and {key} makes several updates on one step's "
        "responses: from the second on the policy is another. Set loss.policy=clip, or make one update a "
        "step (train.epochs=1, no train.minibatch_size)."
    )


def check_dual_clip(config: RunConfig) -> None:
    """The dual clip bounds a clipped objective, from above a ratio of 1."""
    c, policy = config.loss.ratio_clip_c, config.loss.policy
    if c is None:
        return
    if not 1.0 < c < math.inf:
        raise ConfigError(
            f"loss.ratio_clip_c={c}: expected more than 1 (3 is usual); a smaller one would bound the loss "
            "of an unchanged policy. Remove it for no dual clip."
        )
    if policy not in ("clip", "gspo"):
        raise ConfigError(
            f"loss.ratio_clip_c={c} does nothing under loss.policy={policy}, which has no clipped objective. "
            "Remove it, or set loss.policy=clip."
        )


def check_sequence_ratio(config: RunConfig) -> None:
    """A ratio per sequence goes with a mean per sequence: a token mean would weigh it by length again."""
    if config.loss.policy == "gspo" and config.loss.aggregation == "token_mean":
        raise ConfigError(
            "loss.policy=gspo has one ratio per sequence, and loss.aggregation=token_mean weighs sequences "
            "by their length. Set loss.aggregation=seq_mean_token_mean, or loss.policy=clip."
        )


def check_fixed_length(config: RunConfig) -> None:
    """The length is set exactly when it is used."""
    length, aggregation = config.loss.fixed_length, config.loss.aggregation
    if (length is None) == (aggregation == "fixed_length"):
        fix = "Remove it" if length is not None else "Set it, for example to rollout.max_new_tokens"
        raise ConfigError(f"loss.fixed_length={length} with loss.aggregation={aggregation}. {fix}.")
    if length is not None and length < 1:
        raise ConfigError(f"loss.fixed_length={length}: expected a number of tokens of at least 1.")


def check_exact_denominator(config: RunConfig) -> None:
    """Megatron divides everything by one count, which only the token mean of the policy term has."""
    loss = config.loss
    if loss.actor_denominator != "retained_exact":
        return
    others = {
        "loss.aggregation": loss.aggregation != "token_mean" and loss.aggregation,
        "loss.kl_coef": loss.kl_in == "loss" and loss.kl_coef,
        "loss.positive_nll_coef": loss.positive_nll_coef,
    }
    for key, value in others.items():
        if value:
            raise ConfigError(
                f"loss.actor_denominator=retained_exact divides the whole gradient by the exact count of "
                f"trained tokens, and {key}={value} has another denominator. Set "
                "loss.actor_denominator=retained, or take the other term out."
            )


def check_skipped_old_pass(config: RunConfig) -> None:
    """Whatever reads an old logprob needs the pass that computes it."""
    loss, importance = config.loss, config.importance
    if loss.old_logprobs != "skip":
        return
    if loss.policy not in _WITHOUT_RATIO:
        raise ConfigError(
            f"loss.old_logprobs=skip leaves loss.policy={loss.policy} without the old logprobs of its ratio. "
            "Set loss.old_logprobs=recompute, or loss.policy=on_policy."
        )
    readers = {
        "importance.correction": importance.correction != "none" and importance.correction,
        "importance.sequence_error_max": importance.sequence_error_max,
        "loss.kl_in": loss.kl_coef > 0 and loss.kl_in == "reward" and "reward",
    }
    for key, value in readers.items():
        if value:
            raise ConfigError(
                f"{key}={value} reads old logprobs, and loss.old_logprobs=skip does not compute them. Set "
                "loss.old_logprobs=recompute."
            )


def check_old_mask(config: RunConfig) -> None:
    """`retained` counts keep_old, which the skipped pass would have said."""
    if config.loss.old_logprobs == "skip" and config.loss.actor_denominator == "retained":
        raise ConfigError(
            "loss.actor_denominator=retained counts the tokens inside the old policy's support, and "
            "loss.old_logprobs=skip does not compute it. Set loss.actor_denominator=valid."
        )


def check_sampler_as_old(config: RunConfig) -> None:
    """Where the sampler's logprobs are the old ones, nothing is left to correct, and there is no other pass
    to read.
    """
    loss, importance = config.loss, config.importance
    if loss.old_logprobs != "sampler":
        return
    readers = {
        "importance.correction": importance.correction != "none" and importance.correction,
        "importance.sequence_error_max": importance.sequence_error_max,
    }
    for key, value in readers.items():
        if value:
            raise ConfigError(
                f"{key}={value} compares the sampler's logprobs with the old policy's, and "
                "loss.old_logprobs=sampler makes them the same numbers: every weight would be 1. Set "
                f"loss.old_logprobs=recompute, or remove {key}."
            )
    if loss.kl_coef > 0 and loss.kl_in == "reward":
        raise ConfigError(
            "loss.kl_in=reward reads the old policy's unfiltered logprobs, and loss.old_logprobs=sampler has "
            "no pass that computes them. Set loss.old_logprobs=recompute, or loss.kl_in=loss."
        )


def check_kl_options(config: RunConfig) -> None:
    """Options of a KL term that is off, or that has no gradient, do nothing."""
    loss = config.loss
    for name in ("kl_type", "kl_gradient", "kl_in"):
        value = getattr(loss, name)
        if loss.kl_coef == 0 and value != getattr(type(loss), name):
            raise ConfigError(
                f"loss.{name}={value} with loss.kl_coef=0 does nothing. Set loss.kl_coef above 0, or remove "
                "it."
            )
    if loss.kl_in == "reward" and loss.kl_gradient != type(loss).kl_gradient:
        raise ConfigError(
            f"loss.kl_gradient={loss.kl_gradient} does nothing under loss.kl_in=reward: a reward has no "
            "gradient. Remove it."
        )


_BOUNDED = ("icepop", "seq_mask_tis")
_CAPPED = ("tis", "sequence", "geometric")


def check_importance_bounds(config: RunConfig) -> None:
    """Both bounds are set exactly where the correction has bounds, and in order."""
    importance = config.importance
    correction, low, high = importance.correction, importance.low, importance.high
    for name, value in (("low", low), ("high", high)):
        if correction in _BOUNDED and value is None:
            raise ConfigError(
                f"importance.correction={correction} needs importance.{name}, a weight: icepop's authors use "
                "0.5 and 5."
            )
        if correction not in _BOUNDED and value is not None:
            raise ConfigError(
                f"importance.{name}={value} does nothing under importance.correction={correction}. Remove "
                f"it, or choose one of {', '.join(_BOUNDED)}."
            )
    if low is not None and high is not None and not 0 <= low <= high < math.inf:
        raise ConfigError(
            f"importance.low={low} and importance.high={high}: expected 0 <= low <= high, as weights."
        )
    if low is not None and importance.cap is not None and importance.cap < low:
        raise ConfigError(
            f"importance.cap={importance.cap} is below importance.low={low}: every weight would be the cap. "
            "Raise the cap."
        )


def check_importance_cap(config: RunConfig) -> None:
    """A cap is set exactly where the correction has one."""
    correction, cap = config.importance.correction, config.importance.cap
    if correction in _CAPPED and cap is None:
        raise ConfigError(
            f"importance.correction={correction} needs importance.cap, the largest weight: 2 is usual."
        )
    if cap is not None and correction not in (*_CAPPED, "seq_mask_tis"):
        raise ConfigError(
            f"importance.cap={cap} does nothing under importance.correction={correction}. Remove it, or "
            f"choose one of {', '.join(_CAPPED)}."
        )
    if cap is not None and not 0 < cap < math.inf:
        raise ConfigError(f"importance.cap={cap}: expected a positive number, the largest weight.")


def check_raw_weights(config: RunConfig) -> None:
    """Weights without a cap are asked for by name, where there is a choice."""
    importance = config.importance
    if importance.raw and importance.correction != "seq_mask_tis":
        raise ConfigError(
            f"importance.raw=true does nothing under importance.correction={importance.correction}. Set it "
            "to false, or set importance.correction=seq_mask_tis."
        )
    if importance.raw and importance.cap is not None:
        raise ConfigError(
            f"importance.raw=true has no cap, and importance.cap={importance.cap} is one. Remove one of them."
        )
    if importance.correction == "seq_mask_tis" and not importance.raw and importance.cap is None:
        raise ConfigError(
            "importance.correction=seq_mask_tis needs importance.cap, the largest token weight of a sequence "
            "that stays: 2 is usual. Set importance.raw=true for weights without a cap."
        )


def check_importance_statistic(config: RunConfig) -> None:
    """Only one correction has the choice."""
    importance = config.importance
    if importance.statistic != "geometric" and importance.correction != "seq_mask_tis":
        raise ConfigError(
            f"importance.statistic={importance.statistic} does nothing under "
            f"importance.correction={importance.correction}. Remove it, or set "
            "importance.correction=sequence for weights by the sum."
        )


def check_on_policy_correction(config: RunConfig) -> None:
    """Data of this very policy needs no correction."""
    correction = config.importance.correction
    if config.loss.policy == "on_policy" and correction != "none":
        raise ConfigError(
            f"loss.policy=on_policy says that the sampler is this very policy, and "
            f"importance.correction={correction} corrects for another one. Set loss.policy=reinforce, or "
            "importance.correction=none."
        )


def check_sequence_error(config: RunConfig) -> None:
    """The mean of exp|difference| is never below 1."""
    bound = config.importance.sequence_error_max
    if bound is not None and not 1.0 <= bound < math.inf:
        raise ConfigError(
            f"importance.sequence_error_max={bound}: it bounds the mean of exp|sampler - old|, which is 1 "
            "for perfect agreement. Set a number above 1, such as 1.1."
        )


LOSS_RULES: tuple[Callable[[RunConfig], None], ...] = (
    check_clip_bounds,
    check_dual_clip,
    check_on_policy,
    check_sequence_ratio,
    check_fixed_length,
    check_exact_denominator,
    check_skipped_old_pass,
    check_old_mask,
    check_sampler_as_old,
    check_kl_options,
    check_importance_bounds,
    check_importance_cap,
    check_raw_weights,
    check_importance_statistic,
    check_on_policy_correction,
    check_sequence_error,
)
