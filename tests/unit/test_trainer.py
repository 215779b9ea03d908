"""The loop with a toy policy behind its real Protocols: it learns, logs, refuses bad rewards, shares work."""

from __future__ import annotations

import dataclasses
import json
import math

import pytest
import torch
import torch.distributed as dist

from rlcore.batch import Prompt, Rollout
from rlcore.config import load_run_config
from rlcore.grading import responses, score
from rlcore.groups import ParallelGroups
from rlcore.lint_bias import log_mass_of
from rlcore.rollout.policy_sampler import PolicySampler
from rlcore.rollout.reward import InlineGrader
from rlcore.rollout.tasks import make_task
from rlcore.rollouts import rollout_seed
from rlcore.run_log import RunLog, check_run_folder, read_metrics
from rlcore.samples import numbers, text_of
from rlcore.trainer import train
from tests.rank_pool import run_ranks
from tests.toy_worker import ToyWorker, toy_config


class RecordingLog:
    def __init__(self):
        self.records = []

    def step(self, step, metrics, updates, notes=(), samples=()):
        self.records.append({"step": step, **metrics, **updates[-1].metrics, "updates": len(updates)})
        self.samples = [*getattr(self, "samples", []), *samples]


class NoDisplay:
    def __init__(self):
        self.notes = []

    def step(self, record):
        pass

    def note(self, text):
        self.notes.append(text)


def run(config, log=None, groups=None, task=None):
    """Trains the toy policy; returns its worker and the records of its log."""
    torch.manual_seed(config.seed)
    task = task or make_task(config.task, None, config.seed)
    worker = ToyWorker(config, task.vocab_size, groups)
    engine = PolicySampler(worker, config.sampling.spec(), task.eos_id, config.rollout.max_new_tokens, 16)
    log = log or RecordingLog()
    train(config, worker, engine, task, InlineGrader(task), log)
    return worker, getattr(log, "records", None)


def test_reward_rises_and_the_ratio_starts_at_one():
    """30 steps of the echo task from a uniform policy; trainer and sampler agree under truncation."""
    _, records = run(toy_config(train={"steps": 30, "microbatch_size": 8}))
    rewards = [record["reward/mean"] for record in records]
    assert sum(rewards[-10:]) / 10 > 0.3 > 0.15 > sum(rewards[:5]) / 5
    assert max(record["mismatch/abs_max"] for record in records) < 1e-4
    assert all(record["mismatch/out_of_support"] == 0.0 for record in records)


def test_a_run_is_repeatable_and_its_seed_matters():
    config = {"train": {"steps": 3, "microbatch_size": 8}}
    tables = [run(toy_config(seed=seed, **config))[0].table.detach() for seed in (0, 0, 1)]
    assert torch.equal(tables[0], tables[1])
    assert not torch.equal(tables[0], tables[2])


def test_minibatches_and_epochs_cover_the_rows_in_order():
    config = toy_config(train={"steps": 1, "microbatch_size": 8, "minibatch_size": 16, "epochs": 2})
    worker, records = run(config)
    assert [batch.num_sequences for batch in worker.steps] == [16] * 8 and records[0]["updates"] == 8
    first, second = worker.steps[:4], worker.steps[4:]
    for name in ("ids_sl", "advantage_sl", "old_logprob_sl", "token_mask_sl"):
        whole = torch.cat([getattr(batch, name) for batch in first])
        assert torch.equal(whole, torch.cat([getattr(batch, name) for batch in second])), (
            "epoch 2 sees the same batch"
        )
    assert first[0].reference_logprob_sl is None


def test_samples_are_what_was_trained_on():
    """Text, reward and one number a response token; what lint reads of them."""
    log = RecordingLog()
    train_section = {"steps": 2, "microbatch_size": 8, "log_samples": 3}
    worker, records = run(toy_config(sampling={"top_k": 3}, train=train_section), log)
    assert [sample["step"] for sample in log.samples] == [0] * 3 + [1] * 3
    for row, sample in enumerate(log.samples[3:]):
        batch = worker.steps[1]
        mask_l = batch.token_mask_sl[row]
        assert sample["old_logprobs"] == pytest.approx(batch.old_logprob_sl[row][mask_l].tolist(), abs=1e-6)
        assert sample["sampler_logprobs"] == pytest.approx(sample["old_logprobs"], abs=1e-4)
        assert sample["log_mass"] == pytest.approx(batch.old_log_mass_sl[row][mask_l].tolist(), abs=1e-6)
        assert min(sample["log_mass"]) < -0.1 and sample["version"] == 1
        assert sample["prompt"].endswith("=") and len(sample["old_logprobs"]) >= len(sample["response"])
    lines = [json.dumps(sample) for sample in log.samples]
    assert [log_mass_of(line, "here") for line in lines] == [sample["log_mass"] for sample in log.samples]
    assert records[1]["reward/mean"] != records[0]["reward/mean"]


def test_a_log_does_not_end_a_run():
    class Mute:
        def decode(self, ids):
            raise RuntimeError("no words")

    assert text_of(Mute(), [2, 3]) is None  # type: ignore[arg-type]
    assert numbers(torch.tensor([0.25, -math.inf, math.nan])) == [0.25, None, None]


def test_a_kl_term_asks_for_the_reference():
    worker, _ = run(toy_config(loss={"kl_coef": 0.1}, train={"steps": 1, "microbatch_size": 8}))
    reference_sl = worker.steps[0].reference_logprob_sl
    assert reference_sl is not None and reference_sl[0, 0] == pytest.approx(-math.log(9), abs=1e-6)


def test_the_policy_is_saved_when_due():
    train_section = {"steps": 5, "microbatch_size": 8, "save_every": 2, "save_final": True}
    worker, _ = run(toy_config(run_dir="runs/x", train=train_section))
    assert worker.saved == [f"runs/x/policy/step_{done}" for done in (2, 4, 5)]


def test_advantages_reach_response_tokens_only():
    worker, _ = run(toy_config(train={"steps": 1, "microbatch_size": 8}))
    batch = worker.steps[0]
    assert (batch.advantage_sl[~batch.token_mask_sl] == 0).all()
    per_row = [
        set(row[mask].tolist()) for row, mask in zip(batch.advantage_sl, batch.token_mask_sl, strict=True)
    ]
    assert all(len(values) == 1 for values in per_row) and len(set.union(*per_row)) > 2


def test_responses_drop_the_end_token_only_where_there_is_one():
    rollout = Rollout(
        ids_sl=torch.tensor([[5, 6, 7, 1, 0], [5, 7, 7, 7, 7]]),
        prompt_length_s=torch.tensor([2, 1]),
        length_s=torch.tensor([4, 5]),
        sampler_logprob_sl=torch.zeros(2, 5),
        finished_s=torch.tensor([True, False]),
        group_id_s=torch.tensor([0, 1]),
        version_s=torch.zeros(2, dtype=torch.int64),
    )
    assert list(responses(rollout)) == [[7], [7, 7, 7, 7]]


class AnswerTask:
    """Grades a response with its prompt's answer."""

    def reward(self, prompt, response_ids):
        return prompt.answer


def test_rewards_find_their_prompt_by_row():
    """Also where two prompts carry one id. Rows in another order are the engine's mistake."""
    prompts = [Prompt(ids=[3], group_id=10, answer=1.0), Prompt(ids=[4], group_id=11, answer=2.0)]
    rollout = Rollout(
        ids_sl=torch.tensor([[4, 1], [3, 1]]),
        prompt_length_s=torch.tensor([1, 1]),
        length_s=torch.tensor([2, 2]),
        sampler_logprob_sl=torch.zeros(2, 2),
        finished_s=torch.tensor([True, True]),
        group_id_s=torch.tensor([10, 11]),
        version_s=torch.zeros(2, dtype=torch.int64),
    )

    def rewards(ids, rollout):
        named = [dataclasses.replace(prompt, group_id=id_) for prompt, id_ in zip(prompts, ids, strict=True)]
        grader = InlineGrader(AnswerTask())  # type: ignore[arg-type]
        return score(rollout, named, grader, ParallelGroups()).reward_s.tolist()

    assert rewards([10, 11], rollout) == [1.0, 2.0]
    assert rewards([7, 7], dataclasses.replace(rollout, group_id_s=torch.tensor([7, 7]))) == [1.0, 2.0]
    with pytest.raises(ValueError, match=r"groups \[11, 10\]: expected 1 rows for each of \[10, 11\]"):
        rewards([10, 11], dataclasses.replace(rollout, group_id_s=torch.tensor([11, 10])))


def test_seeds_differ_between_steps_and_ranks():
    seeds = {rollout_seed(seed, step, rank) for seed in range(3) for step in range(20) for rank in range(4)}
    assert len(seeds) == 240 and all(0 <= seed < 2**63 for seed in seeds)


def test_the_run_folder(tmp_path):
    """Config with every default, a JSON line a step, its updates, TensorBoard; no second run unasked."""
    folder = tmp_path / "run"
    config = toy_config(
        run_dir=str(folder), train={"steps": 2, "microbatch_size": 8, "minibatch_size": 32}, seed=3
    )
    with RunLog(config, NoDisplay()) as log:
        run(config, log)
    from omegaconf import OmegaConf

    assert load_run_config(OmegaConf.to_container(OmegaConf.load(folder / "config.yaml"))) == config  # type: ignore
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 1]
    for name in ("reward/mean", "loss/total", "mismatch/abs_max", "time/tokens_per_s", "update/skipped"):
        assert name in lines[0]
    updates = [json.loads(line) for line in (folder / "updates.jsonl").read_text().splitlines()]
    assert [(line["step"], line["update"]) for line in updates] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert list((folder / "tensorboard").glob("events*"))
    with pytest.raises(ValueError, match="--overwrite"):
        check_run_folder(config, overwrite=False)
    check_run_folder(config, overwrite=True)
    assert len(read_metrics(folder)) == 2, "the check leaves an earlier run as it is"
    with RunLog(config, NoDisplay()) as log:
        run(config, log)
    assert len(read_metrics(folder)) == 2


def _train_ranks(rank, world_size, config):
    groups = ParallelGroups(dp=dist.group.WORLD, dp_cp=dist.group.WORLD, world=dist.group.WORLD)
    worker, records = run(config, groups=groups)
    rows = sorted(worker.steps[0].ids_sl[:, 0].tolist())
    return records, worker.table.detach(), len(rows), float(worker.steps[0].token_mask_sl.sum())


@pytest.mark.distributed
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_data_parallel_ranks_share_the_prompts(world_size):
    """Every rank draws its own share; weights and metrics are the same on all; counts add up."""
    config = toy_config(train={"steps": 3, "microbatch_size": 8})
    results = run_ranks(_train_ranks, world_size, config)
    records, table = results[0][:2]
    for other, other_table, num_rows, _ in results:
        assert torch.equal(table, other_table)
        assert num_rows == 64 // world_size
        for mine, theirs in zip(records, other, strict=True):
            assert {k: v for k, v in mine.items() if not k.startswith("time")} == {
                k: v for k, v in theirs.items() if not k.startswith("time")
            }
    assert records[0]["response/length"] * 64 == pytest.approx(sum(result[3] for result in results))


def test_prompts_are_asked_for_as_configured():
    """The loop hands on the number of the config: a task that returns half of it never reaches the policy."""
    config = toy_config(train={"steps": 1, "microbatch_size": 8})
    task = make_task(config.task, None, 0)
    whole = task.prompts
    task.prompts = lambda step, num: whole(step, num // 2)
    with pytest.raises(ValueError, match=r"gave 4 prompts, expected rollout.prompts_per_step=8"):
        run(config, task=task)
    task.prompts = lambda step, num: [dataclasses.replace(prompt, group_id=0) for prompt in whole(step, num)]
    with pytest.raises(ValueError, match=r"8 prompts have group_id=0"):
        run(config, task=task)


@pytest.mark.parametrize("normalize_std", [True, False])
def test_the_advantages_of_a_step_are_those_of_the_config(normalize_std):
    """By hand from the rewards: less the group's mean, over its sample standard deviation where asked for."""
    section = {"advantage": {"normalize_std": normalize_std}, "train": {"steps": 1, "microbatch_size": 8}}
    config = toy_config(**section)
    task = make_task(config.task, None, config.seed)
    worker, _ = run(config, task=task)
    batch, prompts = worker.steps[0], task.prompts(0, 8)
    rows = zip(batch.ids_sl, batch.token_mask_sl, batch.length_s.tolist(), strict=True)
    texts = [row[:length][mask[:length]].tolist() for row, mask, length in rows]
    rewards = [
        task.reward(prompts[i // 8], text[:-1] if text[-1] == task.eos_id else text)
        for i, text in enumerate(texts)
    ]
    reward_gs = torch.tensor(rewards, dtype=torch.float64).view(8, 8)
    expected_gs = reward_gs - reward_gs.mean(dim=1, keepdim=True)
    if normalize_std:
        expected_gs = expected_gs / reward_gs.std(dim=1, keepdim=True)
    got_s = torch.stack(
        [row[mask][0] for row, mask in zip(batch.advantage_sl, batch.token_mask_sl, strict=True)]
    )
    assert reward_gs.std(dim=1).min() > 0
    torch.testing.assert_close(got_s.double(), expected_gs.flatten(), rtol=1e-4, atol=1e-4)
