"""Run configs: what is refused names the key and the fix; hydra's words become a checked `RunConfig`."""

from __future__ import annotations

import ast
import dataclasses
import itertools
import math
from pathlib import Path

import pytest

from rlcore.cli.compose import compose_run_config, config_folder
from rlcore.config import RunConfig, load_run_config, to_plain
from rlcore.config_parse import ConfigError, all_key_paths
from rlcore.config_rules import check_model_folder, check_tp_divides, check_world

MODEL = {
    "num_layers": 4,
    "hidden_size": 8,
    "num_attention_heads": 4,
    "ffn_hidden_size": 8,
    "max_position_embeddings": 64,
}


def load(**sections) -> RunConfig:
    return load_run_config({"model": MODEL} | sections)


def test_defaults_and_round_trip():
    config = load(sampling={"top_k": 50, "top_p": 0.95}, loss={"ratio_clip_max": 0.28})
    assert config.sampling.spec().truncates and config.loss.ratio_clip_min == 0.2
    assert load_run_config(to_plain(config)) == config
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.seed = 1  # type: ignore[misc]


def test_every_field_is_documented():
    """A docstring stands under each field of each section."""
    folder = Path(__file__).resolve().parents[2].joinpath("rlcore")
    files = ("config.py", "config_rollout.py")
    nodes = [node for file in files for node in ast.parse(folder.joinpath(file).read_text()).body]
    count = 0
    for section in (node for node in nodes if isinstance(node, ast.ClassDef)):
        for field, after in itertools.pairwise([*section.body, ast.Pass()]):
            if isinstance(field, ast.AnnAssign):
                assert isinstance(after, ast.Expr), f"{section.name}.{ast.unparse(field.target)}"
                count += 1
    assert count >= len(all_key_paths(RunConfig))


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        (
            {"loss": {"ratio_clip_mx": 0.28}},
            r"loss.ratio_clip_mx: no such key. Did you mean loss.ratio_clip_max",
        ),
        ({"train": {"lr": 1e-3}}, r"train.lr: no such key.*lives at optimizer.lr"),
        ({"nproc": "4"}, r"nproc='4': expected int"),
        ({"nproc": True}, r"nproc=True: expected int"),
        ({"train": {"steps": 2.5}}, r"train.steps=2.5: expected int"),
        ({"loss": {"kl_type": "k4"}}, r"loss.kl_type='k4': expected one of 'k1', 'k2', 'k3', 'abs', 'mse'"),
        ({"loss": 3}, r"loss=3: expected a section"),
        ({"task": {"args": [1]}}, r"task.args=\[1\]: expected a mapping"),
        ({"sampling": {"top_p": 0.0}}, r"sampling.top_p=0.0"),
        ({"sampling": {"top_p": 1.2}}, r"sampling.top_p=1.2"),
        ({"sampling": {"top_p": math.nan}}, r"sampling.top_p=nan"),
        ({"sampling": {"top_k": -2}}, r"sampling.top_k=-2"),
        ({"sampling": {"temperature": 0.0}}, r"sampling.temperature=0.0 is greedy"),
        ({"sampling": {"min_p": 1.5}}, r"sampling.min_p=1.5"),
        ({"parallel": {"tp": 3}}, r"parallel.tp=3 does not divide model.num_attention_heads=4.*\[1, 2, 4\]"),
        ({"parallel": {"pp": 3}}, r"model.num_layers=4 is not a multiple of parallel.pp=3"),
        ({"parallel": {"vpp": 2}}, r"parallel.vpp=2 .*need parallel.pp > 1"),
        ({"parallel": {"pp": 2, "vpp": 0}}, r"parallel.vpp=0: expected a count"),
        (
            {"parallel": {"pp": 2, "vpp": 2}, "model": {**MODEL, "num_layers": 6}},
            r"model.num_layers=6 is not a multiple of parallel.pp=2 x parallel.vpp=2 = 4",
        ),
        ({"parallel": {"sequence_parallel": True}}, r"parallel.sequence_parallel=true needs parallel.tp"),
        ({"parallel": {"tp": 0}}, r"parallel.tp=0"),
        ({"model": {"hf_path": "x", "fused_head": True, "num_layers": 2}}, r"model.num_layers is set"),
        ({"model": {**MODEL, "hf_path": "x"}}, r"model.num_layers is set, but model.hf_path=x"),
        ({"model": {}}, r"model.num_layers is not set and there is no model.hf_path"),
        ({"model": {**MODEL, "num_layers": 0}}, r"model.num_layers=0"),
        (
            {"rollout": {"samples_per_prompt": 1}},
            r"rollout.samples_per_prompt=1 makes every advantage 0.*advantage.estimator=grpo",
        ),
        (
            {"rollout": {"samples_per_prompt": 1}, "advantage": {"estimator": "rloo"}},
            r"rollout.samples_per_prompt=1 makes every advantage 0.*advantage.estimator=rloo",
        ),
        (
            {
                "rollout": {"samples_per_prompt": 1, "prompts_per_step": 1},
                "advantage": {"estimator": "reinforce_pp"},
            },
            r"advantage.estimator=reinforce_pp.*one response a step",
        ),
        ({"advantage": {"estimator": "gae"}}, r"advantage.estimator='gae': expected one of 'grpo', 'rloo'"),
        (
            {"advantage": {"estimator": "rloo", "normalize_std": True}},
            r"advantage.normalize_std=true does nothing.*never divides by standard deviation",
        ),
        (
            {"advantage": {"estimator": "reinforce_pp", "normalize_std": False}},
            r"advantage.normalize_std=false does nothing.*the whole step's standard deviation",
        ),
        (
            {"advantage": {"estimator": "rloo", "leave_one_out": True}},
            r"advantage.leave_one_out=true does nothing.*always leaves the sample out",
        ),
        (
            {"advantage": {"estimator": "reinforce_pp", "leave_one_out": True}},
            r"advantage.leave_one_out=true does nothing.*has no group baseline",
        ),
        (
            {"rollout": {"samples_per_prompt": 2}, "advantage": {"leave_one_out": True}},
            r"advantage.leave_one_out=true.*rollout.samples_per_prompt=2 leaves one",
        ),
        (
            {
                "rollout": {"samples_per_prompt": 1},
                "advantage": {"estimator": "reinforce_pp", "drop_equal_groups": True},
            },
            r"advantage.drop_equal_groups=true drops every group",
        ),
        ({"rollout": {"max_new_tokens": 0}}, r"rollout.max_new_tokens=0"),
        (
            {"rollout": {"max_new_tokens": 64}},
            r"rollout.max_new_tokens=64 leaves no room.*model.max_position_embeddings=64",
        ),
        (
            {"rollout": {"max_new_tokens": 40}, "train": {"token_budget": 40}},
            r"train.token_budget=40 does not hold a sequence of rollout.max_new_tokens=40 and its prompt.*41",
        ),
        ({"model": {**MODEL, "num_query_groups": 0}}, r"model.num_query_groups=0: expected a count"),
        ({"model": {**MODEL, "num_query_groups": -2}}, r"model.num_query_groups=-2: expected a count"),
        ({"model": {**MODEL, "num_query_groups": 3}}, r"model.num_query_groups=3"),
        ({"model": {**MODEL, "vocab_size": 0}}, r"model.vocab_size=0: expected a count"),
        ({"model": {**MODEL, "hidden_size": 12}}, r"model.hidden_size=12.*a multiple of 8"),
        ({"model": {**MODEL, "hidden_size": 10}}, r"model.hidden_size=10.*a multiple of 8"),
        (
            {"model": {**MODEL, "rms_norm_eps": -1.0}},
            r"model.rms_norm_eps=-1.0: expected a finite number > 0",
        ),
        ({"model": {**MODEL, "rope_theta": 0.0}}, r"model.rope_theta=0.0: expected a finite number > 0"),
        ({"optimizer": {"adam_beta1": 1.5}}, r"optimizer.adam_beta1=1.5: expected a number in \[0, 1\)"),
        ({"optimizer": {"adam_beta2": 1.0}}, r"optimizer.adam_beta2=1.0: expected a number in \[0, 1\)"),
        ({"optimizer": {"adam_beta2": math.nan}}, r"optimizer.adam_beta2=nan"),
        ({"optimizer": {"adam_eps": -1.0}}, r"optimizer.adam_eps=-1.0: expected a finite number > 0"),
        ({"optimizer": {"adam_eps": 0.0}}, r"optimizer.adam_eps=0.0"),
        ({"seed": -1}, r"seed=-1: expected an integer in \[0, 2\^32\)"),
        ({"seed": 2**32}, r"seed=4294967296"),
        ({"parallel": {"timeout_s": 0.0}}, r"parallel.timeout_s=0.0: expected seconds"),
        ({"parallel": {"timeout_s": 1e18}}, r"parallel.timeout_s=1e\+18"),
        ({"task": {"reward_timeout_s": math.nan}}, r"task.reward_timeout_s=nan: expected seconds"),
        ({"task": {"reward_workers": -1}}, r"task.reward_workers=-1: expected a finite number >= 0"),
        ({"nproc": 0}, r"nproc=0: expected a count"),
        ({"rollout": {"prompts_per_step": 0}}, r"rollout.prompts_per_step=0"),
        ({"train": {"minibatch_size": 7}}, r"train.minibatch_size=7 does not divide the 128 sequences"),
        ({"loss": {"ratio_clip_min": 1.0}}, r"loss.ratio_clip_min=1.0: it is an epsilon"),
        ({"loss": {"kl_coef": -1.0}}, r"loss.kl_coef=-1.0"),
        ({"optimizer": {"lr": math.inf}}, r"optimizer.lr=inf"),
        ({"optimizer": {"lr": 1e-3, "min_lr": 1e-2}}, r"optimizer.min_lr=0.01 is above optimizer.lr=0.001"),
    ],
)
def test_refused(sections, message):
    """CASES B05 (d), B50 and the issue's bad inputs: each names the key as typed."""
    with pytest.raises(ConfigError, match=message):
        load(**sections)


@pytest.mark.parametrize(
    ("section", "samples"),
    [
        ({"estimator": "rloo"}, 2),
        ({"estimator": "reinforce_pp"}, 1),
        ({"leave_one_out": True}, 3),
        ({"leave_one_out": True, "normalize_std": False}, 2),
        ({"normalize_std": True, "drop_equal_groups": True, "mask_truncated": True}, 2),
    ],
)
def test_advantage_sections_that_do_something_are_accepted(section, samples):
    """The smallest group each of them can compare."""
    config = load(advantage=section, rollout={"samples_per_prompt": samples})
    assert config.advantage.divides_by_std == (
        section.get("estimator", "grpo") == "grpo" and section.get("normalize_std", True)
    )


@pytest.mark.parametrize("top_k", [0, -1, None, 50, 10**9])
@pytest.mark.parametrize("top_p", [None, 1.0])
def test_off_values_are_accepted(top_k, top_p):
    """CASES B05 (a): values that the engine takes as "off"."""
    spec = load(sampling={"top_k": top_k, "top_p": top_p}).sampling.spec()
    assert spec.truncates == (top_k in (50, 10**9))


@pytest.mark.parametrize(
    ("sections", "world_size", "message"),
    [
        (
            {"parallel": {"tp": 2, "pp": 2}},
            6,
            r"nproc=6 processes do not factor.*= 4. Set nproc to a multiple of 4",
        ),
        ({}, 0, r"nproc=0: expected a count"),
        ({}, -4, r"nproc=-4: expected a count"),
        ({"rollout": {"prompts_per_step": 10}}, 4, r"rollout.prompts_per_step=10 does not divide over 4"),
        ({"train": {"microbatch_size": 48}}, 2, r"train.microbatch_size=48 x 2 data-parallel ranks = 96"),
        ({"train": {"microbatch_size": 8, "minibatch_size": 32}}, 8, r"32 sequences per optimizer step"),
        (
            {"parallel": {"pp": 2, "vpp": 2}, "train": {"microbatch_size": 128}},
            2,
            r"1 microbatches per optimizer step.* of parallel.pp=2, as parallel.vpp=2.*microbatch_size",
        ),
    ],
)
def test_a_world_that_does_not_fit(sections, world_size, message):
    config = load(**sections)
    with pytest.raises(ConfigError, match=message):
        check_world(config, world_size)


def test_a_rank_alone_or_one_that_grades_itself_gives_no_reward_up_for_others():
    check_world(load(parallel={"timeout_s": 30.0}), 1)
    check_world(load(parallel={"timeout_s": 30.0}, task={"reward_workers": 0}), 2)


def test_a_token_budget_leaves_microbatch_size_out():
    """12 sequences over 2 replicas: no multiple of the microbatch size of 8 that plays no part."""
    step = {"rollout": {"prompts_per_step": 6, "samples_per_prompt": 2}}
    check_world(load(**step, train={"token_budget": 64}), 2)
    with pytest.raises(ConfigError, match=r"train.microbatch_size=8 x 2 data-parallel ranks = 16"):
        check_world(load(**step), 2)
    with pytest.raises(ConfigError, match=r"3 sequences per optimizer step .* over 2 data-parallel ranks"):
        check_world(load(**step, train={"token_budget": 64, "minibatch_size": 3}), 2)


def test_a_model_folder_must_be_one(tmp_path):
    """Before the tokenizer library takes the path for a name on its hub."""
    config = load(model={"hf_path": str(tmp_path)})
    with pytest.raises(ConfigError, match=r"model.hf_path=.*expected a folder with a config.json"):
        check_model_folder(config)
    tmp_path.joinpath("config.json").write_text("{}")
    check_model_folder(config)
    check_model_folder(load())


def test_head_counts_of_a_folder():
    """SmolLM2: 9 heads, 3 key/value heads: TP 1 or 3."""
    check_tp_divides(3, 9, 3, source="model")
    with pytest.raises(ConfigError, match=r"parallel.tp=2 does not divide.*\[1, 3\]"):
        check_tp_divides(2, 9, 3, source="model")


@pytest.mark.parametrize("path", sorted(config_folder().glob("*.yaml")), ids=lambda path: path.stem)
def test_shipped_configs_load_and_fit_their_own_nproc(path):
    config = compose_run_config(path.stem)
    check_world(config, config.nproc)
    assert config.run_dir == f"runs/{path.stem}"


def test_overrides_reach_keys_that_the_yaml_does_not_mention():
    words = [
        "loss.kl_coef=0.1",
        "loss.ratio_clip_max=0.28",
        "task.args.length=3",
        "model.rope_theta=5e5",
        "seed=7",
    ]
    config = compose_run_config("demo", words)
    assert (config.loss.kl_coef, config.loss.ratio_clip_max, config.seed) == (0.1, 0.28, 7)
    assert config.task.args["length"] == 3 and config.task.args["letters"] == 12
    assert config.model.rope_theta == 5e5


def test_a_group_is_chosen_by_name():
    config = compose_run_config("smollm2_pp2", ["sampling=plain"])
    assert not config.sampling.spec().truncates and config.nproc == 2


@pytest.mark.parametrize(
    ("name", "words", "message"),
    [
        ("demo", ["train.stepz=3"], r"train.stepz: no such key. Did you mean train.steps"),
        ("demo", ["lr=3"], r"lr: no such key. That key lives at optimizer.lr"),
        ("demo", ["sampling.top_p=1.2"], r"sampling.top_p=1.2"),
        ("demo", ["train.steps"], r"'train.steps': expected key=value"),
        ("demo", ["seed=1,2"], r"'seed=1,2'.*sweep"),
        ("demo", ["~train"], r"'~train': write it as plain key=value"),
        (
            "demo",
            ["sampling=nonsense"],
            r"sampling=nonsense.: no such file of the group sampling. There: plain, topk_topp",
        ),
        ("demo", ["run_dir=${nowhere}"], r"nowhere"),
        (
            "demoo",
            [],
            r"--config-name demoo: no such file.*demo_losses, demo_moe, grpo_smollm2_vllm, .*smollm2_tp3",
        ),
    ],
)
def test_words_that_hydra_or_we_refuse(name, words, message):
    """One line of ours, naming what was typed; never hydra's own exception."""
    with pytest.raises(ConfigError, match=message) as caught:
        compose_run_config(name, words)
    assert "\n" not in str(caught.value)


def test_a_folder_of_your_own_may_use_our_groups(tmp_path):
    text = "defaults:\n  - model: tiny\n  - sampling: plain\n  - _self_\nrun_dir: runs/mine\nseed: 5\n"
    tmp_path.joinpath("mine.yaml").write_text(text)
    config = compose_run_config("mine", ["sampling=topk_topp"], str(tmp_path))
    assert (config.seed, config.model.num_layers, config.sampling.top_k) == (5, 2, 50)
    with pytest.raises(ConfigError, match="no such folder"):
        compose_run_config("mine", [], str(tmp_path / "nowhere"))
