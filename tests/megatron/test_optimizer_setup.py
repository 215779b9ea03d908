"""Every key of the optimizer section reaches Megatron: its config, its Adam, its schedule."""

from __future__ import annotations

import dataclasses
import math

import pytest

from tests.rank_pool import run_ranks

pytestmark = [pytest.mark.megatron, pytest.mark.distributed]

STEPS = 8
# No two values are equal, and none is a default, so a key that arrives in another's place is seen.
VALUES = {
    "lr": 0.03,
    "min_lr": 0.006,
    "warmup_steps": 3,
    "decay_style": "linear",
    "weight_decay": 0.07,
    "adam_beta1": 0.81,
    "adam_beta2": 0.92,
    "adam_eps": 2e-5,
    "clip_grad": 0.4,
}


def _build(rank, world_size, values, distributed_optimizer):
    """Megatron's config, the parameter groups of the Adam it built, and the learning rate of every step."""
    from megatron_worker.architecture import architecture_from_config
    from megatron_worker.cpu_backend import cpu_backend
    from megatron_worker.groups import destroy_parallel, initialize_parallel
    from megatron_worker.model_setup import build_chunks, wrap_ddp
    from megatron_worker.optimizer_setup import build_optimizer
    from rlcore.config import ModelConfig, OptimizerConfig, ParallelConfig

    parallel = ParallelConfig(distributed_optimizer=distributed_optimizer)
    model = ModelConfig(
        num_layers=1, hidden_size=8, num_attention_heads=2, ffn_hidden_size=8, max_position_embeddings=8
    )
    with cpu_backend("cpu") as device_type:
        groups = initialize_parallel(parallel, device_type)
        (stage,) = build_chunks(architecture_from_config(model, 11), parallel, "float32", groups)
        chunk = wrap_ddp(stage, parallel)
        optimizer, scheduler = build_optimizer([chunk], OptimizerConfig(**values), STEPS)
        groups_of_adam = [
            {"betas": group["betas"], "eps": group["eps"], "weight_decay": group["weight_decay"]}
            for group in optimizer.param_groups
        ]
        rates = []
        for _ in range(STEPS):
            rates.append(optimizer.param_groups[0]["lr"])
            scheduler.step(increment=1)
        config = optimizer.config
        names = ("lr", "min_lr", "weight_decay", "adam_beta1", "adam_beta2", "adam_eps", "clip_grad")
        seen = {name: getattr(config, name) for name in (*names, "use_distributed_optimizer")}
        destroy_parallel()
    return seen, groups_of_adam, rates


@pytest.mark.parametrize("distributed_optimizer", [False, True])
def test_every_key_reaches_megatron(distributed_optimizer):
    """The groups differ in weight decay only: norms and biases have none."""
    seen, groups, _ = run_ranks(_build, 1, VALUES, distributed_optimizer)[0]
    expected = {name: value for name, value in VALUES.items() if name in seen}
    assert seen == expected | {"use_distributed_optimizer": distributed_optimizer}
    assert {group["weight_decay"] for group in groups} == {0.0, 0.07}
    for group in groups:
        assert group["betas"] == (0.81, 0.92) and group["eps"] == 2e-5


def test_no_key_is_left_out():
    from rlcore.config import OptimizerConfig

    fields = {field.name: field.default for field in dataclasses.fields(OptimizerConfig)}
    assert VALUES.keys() == fields.keys()
    assert all(VALUES[name] != default for name, default in fields.items())


def _shape(style, part):
    """Height of the schedule above min_lr, as a part of the peak's, after `part` of the decay."""
    return {"constant": 1.0, "linear": 1.0 - part, "cosine": 0.5 * (1.0 + math.cos(math.pi * part))}[style]


@pytest.mark.parametrize("style", ["constant", "linear", "cosine"])
def test_the_schedule_by_hand(style):
    """3 steps from 0 to the peak, then 5 towards the floor: step 8 would be the first at it."""
    _, _, rates = run_ranks(_build, 1, VALUES | {"decay_style": style}, False)[0]
    peak, floor = 0.03, 0.006
    expected = [peak * step / 3 for step in range(3)]
    expected += [floor + (peak - floor) * _shape(style, (step - 3) / 5) for step in range(3, STEPS)]
    assert rates == pytest.approx(expected, rel=1e-9)
