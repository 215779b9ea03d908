"""The policy's weights in a running engine: all of them to the bit, or the old ones and an error."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from rlcore.batch import Prompt
from rlcore.rollout.completions import join_rollout
from rlcore.sampling import SamplingSpec
from rlcore.weight_sync.sender import FolderSender, WeightSyncError, check_serving
from tests.rank_pool import run_ranks
from tests.vllm.tiny_engine import run_config, write_folder
from tools.agreement import batch_of, score

# No truncation: what one model draws is in the support of another.
SPEC = SamplingSpec(temperature=0.9)
# Longer than the engine's cache blocks, so that a second request finds most of the prompt in the cache.
PROMPTS = [
    Prompt(ids=[2 + (7 * index + 3 * place) % 190 for place in range(100)], group_id=index)
    for index in range(2)
]
TOLERANCE = 1e-4


def draw(running):
    """The same requests each time, seeds included; one at a time, since a batch changes last bits."""
    completions = []
    for prompt in PROMPTS:
        request = running.expected.request(prompt, 1, 5 + prompt.group_id)
        completions += running.engine.generate([dataclasses.replace(request, sampling=SPEC.to_vllm())])
    return completions


def on_rank(rank, world_size, config, rollout=None):
    """What the worker exports, on rank 0; or its scores of the rollout."""
    from megatron_worker.worker import MegatronWorker

    worker = MegatronWorker(config)
    try:
        if rollout is not None:
            return score(worker, batch_of(rollout), SPEC)
        weights = {name: tensor.clone() for name, tensor in worker.export_weights()}
        return weights if rank == 0 else None
    finally:
        worker.close()


def exported(folder):
    """The weights of a folder by name, through a Megatron policy of two TP ranks."""
    return run_ranks(on_rank, 2, run_config(folder, parallel={"tp": 2, "backend": "cpu"}))[0]


def send(weights, version, engine, sender=None, parent="/dev/shm"):
    """One update; the sender."""
    sender = (
        FolderSender(str(parent), None, torch.device("cpu"), bucket_bytes=50_000)
        if sender is None
        else sender
    )
    sender.write(lambda: iter(list(weights.items())), version, engine)
    sender.deliver(engine, version)
    return sender


def gap(running, folder, completions):
    """Largest difference between the sampler's logprobs and the trainer's with the weights of `folder`."""
    rollout = join_rollout(PROMPTS, completions, version=0, kept=False)
    scored = run_ranks(on_rank, 1, run_config(folder), rollout)[0]
    return float((scored.logprob_sl - rollout.sampler_logprob_sl)[rollout.token_mask_sl].abs().max())


class WithoutReset:
    """The engine as it would be if nobody reset its prefix cache."""

    def __init__(self, engine):
        self.rpc = engine.rpc

    def reset_prefix_cache(self):
        """Nothing."""


@pytest.mark.parametrize("model", ["untied", "tied"])
def test_weights_arrive_to_the_bit_and_nothing_old_is_left(model, request, tmp_path):
    """B48: head, embedding and cached prefixes are the new weights' after an update, and the old ones' after
    the next.
    """
    running = request.getfixturevalue(model)
    other = str(tmp_path / "other")
    write_folder(other, tied=model == "tied", seed=1)
    first, second = exported(running.folder), exported(other)
    assert ("lm_head.weight" in first) == (model == "untied")
    before = draw(running)
    sender = send(second, 1, running.engine, parent=tmp_path)
    after = draw(running)
    assert after != before
    assert gap(running, other, after) < TOLERANCE < 0.1 < gap(running, running.folder, after)
    check_serving(running.engine, sender.run, 1)
    # The planted fault: without the reset, the prompts' states are those of the weights before.
    send(first, 2, WithoutReset(running.engine), sender)
    assert gap(running, running.folder, draw(running)) > 100 * TOLERANCE
    send(first, 3, running.engine, sender)
    # Ids and logprobs, to the bit.
    assert draw(running) == before
    assert not list(tmp_path.glob("rlcore_weights_*/*"))
    sender.close()
    assert not list(tmp_path.glob("rlcore_weights_*"))


def unknown(weights, folder):
    weights["model.layers.0.mlp.extra.weight"] = torch.zeros(3)


def missing(weights, folder):
    del weights["model.layers.1.self_attn.q_proj.weight"]


def other_shape(weights, folder):
    name = "model.embed_tokens.weight"
    weights[name] = weights[name][:-1].clone()


def whole_numbers(weights, folder):
    weights["model.norm.weight"] = weights["model.norm.weight"].long()


def no_fault(weights, folder):
    pass


class Meddled:
    """The engine, with something done to the folder just before it looks."""

    def __init__(self, engine, method, meddle):
        self._engine, self._method, self._meddle = engine, method, meddle
        self.reset_prefix_cache = engine.reset_prefix_cache

    def rpc(self, method, **kwargs):
        if method == self._method:
            self._meddle(Path(kwargs["folder"]))
        return self._engine.rpc(method, **kwargs)


def flip_a_byte(folder):
    file = sorted(folder.glob("*.safetensors"))[1]
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


def lose_a_bucket(folder):
    sorted(folder.glob("*.safetensors"))[1].unlink()


def untouched(folder):
    pass


@pytest.mark.parametrize(
    ("fault", "meddle", "message"),
    [
        (unknown, untouched, r"tensors that match no parameter .*: model.layers.0.mlp.extra.weight"),
        (missing, untouched, r"would receive nothing: model.layers.1.self_attn.q_proj.weight"),
        (other_shape, untouched, r"model.embed_tokens.weight was sent as \[202, 128\], .* has \[203, 128\]"),
        (whole_numbers, untouched, r"model.norm.weight is int64"),
        (no_fault, flip_a_byte, r"does not have the checksum"),
        (no_fault, lose_a_bucket, r"bucket_00001.safetensors"),
    ],
)
def test_an_update_that_does_not_fit_changes_nothing(untied, tmp_path, fault, meddle, message):
    weights = exported(untied.folder)
    sender = send(weights, 1, untied.engine, parent=tmp_path)
    before = draw(untied)
    wrong = {name: tensor * 1.5 for name, tensor in weights.items()}
    fault(wrong, tmp_path)
    with pytest.raises(WeightSyncError, match=message) as raised:
        send(wrong, 2, Meddled(untied.engine, "check_weights", meddle), sender)
    assert "It serves version 1." in str(raised.value)
    untied.engine.reset_prefix_cache()
    assert draw(untied) == before
    check_serving(untied.engine, sender.run, 1)
    with pytest.raises(WeightSyncError, match=r"version 1 is not newer than version 1"):
        send(weights, 1, untied.engine, sender)
    sender.close()


@pytest.mark.slow
def test_an_update_that_fails_half_way_leaves_an_engine_that_says_so(own_engine, tmp_path):
    """A mixture of two versions is never drawn from, nor mended by the next update."""
    weights = exported(own_engine.folder)
    sender = send(weights, 1, own_engine.engine, parent=tmp_path)
    with pytest.raises(WeightSyncError, match=r"did not load the weights.*nothing that may be drawn from"):
        send(weights, 2, Meddled(own_engine.engine, "load_weights_of", lose_a_bucket), sender)
    with pytest.raises(WeightSyncError, match=r"no longer serves"):
        check_serving(own_engine.engine, sender.run, 1)
    with pytest.raises(WeightSyncError, match=r"an earlier update failed half-way.*Restart the engine"):
        send(weights, 3, own_engine.engine, sender)
    sender.close()
