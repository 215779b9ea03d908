"""Both ends of a weight update without an engine: refusals, half-way failures, what is reset."""

from __future__ import annotations

import dataclasses
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

from rlcore.weight_sync import sender as sender_module
from rlcore.weight_sync.sender import FolderSender, WeightSyncError, agree, check_serving, remove_orphans
from rlcore.weight_sync.vllm_receiver import WeightReceiver
from rlcore.weight_sync.wire import Manifest, TensorEntry, WeightsState, checksum_of

ROOT = Path(__file__).resolve().parents[2]
EMBEDDING = "model.embed_tokens.weight"
E = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])


class PackedHead(torch.nn.Module):
    """A head as vLLM's CPU backend makes one: its products come from a copy of the weight."""

    def __init__(self, weight):
        super().__init__()
        self.weight = weight
        self.quant_method = self
        self.process_weights_after_loading(self)

    def process_weights_after_loading(self, layer):
        packed = layer.weight.detach().clone()
        layer.cpu_linear = lambda x, weight, bias: torch.nn.functional.linear(x, packed)

    def forward(self, x):
        return self.cpu_linear(x, self.weight, None)


class Tied(torch.nn.Module):
    """An embedding and, in `head`, the same numbers."""

    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(3, 2)
        self.embed.weight.data.copy_(E)
        self.head = PackedHead(self.embed.weight)

    def load_weights(self, weights):
        loaded = set()
        for name, tensor in weights:
            assert name == EMBEDDING
            self.embed.weight.data.copy_(tensor)
            loaded.add("embed.weight")
        return loaded


class Worker(WeightReceiver):
    """As much of vLLM's worker as the receiver touches."""

    def __init__(self, folder, model, tied):
        config = SimpleNamespace(model=str(folder), hf_config=SimpleNamespace(tie_word_embeddings=tied))
        self.vllm_config = SimpleNamespace(
            model_config=config, parallel_config=SimpleNamespace(data_parallel_size=1)
        )
        self.model_runner = SimpleNamespace(get_model=lambda: model)
        self.model, self.fails = model, False

    def reload_weights(self, weights_iterator):
        if self.fails:
            next(weights_iterator)
            raise RuntimeError("out of memory")
        self.model.load_weights(weights_iterator)


class Link:
    """An engine of those workers."""

    def __init__(self, *workers):
        self.workers, self.resets = workers, 0

    def rpc(self, method, **kwargs):
        return [getattr(worker, method)(**kwargs) for worker in self.workers]

    def reset_prefix_cache(self):
        self.resets += 1


@pytest.fixture
def worker(tmp_path):
    """A worker with a tied head, started from a folder that also stores the head and rotary frequencies."""
    start = tmp_path / "start"
    start.mkdir()
    stored = {EMBEDDING: E, "lm_head.weight": E.clone()}
    save_file(
        stored | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}, str(start / "a.safetensors")
    )
    return Worker(start, Tied(), tied=True)


def make_sender(tmp_path, **kwargs):
    return FolderSender(str(tmp_path), None, torch.device("cpu"), **kwargs)


def send(sender, link, version, weights):
    sender.write(lambda: iter(weights), version, link)
    sender.deliver(link, version)


def logprobs(model):
    """Of the three ids at the state [1, 2]."""
    return torch.log_softmax(model.head(torch.tensor([[1.0, 2.0]])), dim=-1)[0].tolist()


def test_a_tied_head_follows_its_embedding(worker, tmp_path):
    """B48a: by hand, before and after the update."""
    assert logprobs(worker.model)[2] == pytest.approx(-0.407606, abs=1e-6)
    update = E + torch.tensor([[0.5, 0.0], [0.0, -0.5], [0.0, 0.0]])
    link = Link(worker)
    send(make_sender(tmp_path), link, 1, [(EMBEDDING, update)])
    assert logprobs(worker.model) == pytest.approx([-1.806356, -2.306356, -0.306356], abs=1e-6)
    assert link.resets == 1


def test_a_tied_head_that_stays_behind_is_an_error(worker, tmp_path):
    worker.model.head.process_weights_after_loading = lambda layer: None
    with pytest.raises(WeightSyncError, match=r"PackedHead computes with other numbers than its weight's"):
        send(make_sender(tmp_path), Link(worker), 1, [(EMBEDDING, 2 * E)])
    assert worker.weights_state()["broken"]


class Prefix:
    """B48b: a toy engine whose cached state of a prompt is w times its sum."""

    def __init__(self):
        self.w, self.cache = 1.0, {}
        self.state = WeightsState()

    def next_state(self, prompt, token):
        state = self.cache.setdefault(tuple(prompt), self.w * sum(prompt))
        return state + self.w * token

    def rpc(self, method, folder=None):
        if method == "load_weights_of":
            manifest = Manifest.read(Path(folder))
            self.w = 1.5
            self.state = WeightsState(run=manifest.run, version=manifest.version)
        return [dataclasses.asdict(self.state)]

    def reset_prefix_cache(self):
        self.cache.clear()


def test_no_state_of_the_old_weights_is_used_again(tmp_path):
    engine = Prefix()
    assert engine.next_state([2, 3], 4) == 9.0
    send(make_sender(tmp_path), engine, 1, [("w", torch.tensor([1.5]))])
    assert engine.next_state([2, 3], 4) == 13.5


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        (
            [(EMBEDDING, 2 * E), ("w_extra", E)],
            "tensors that match no parameter of the engine's model: w_extra",
        ),
        ([(EMBEDDING, 2 * E), ("lm_head.weight", E)], "match no parameter .*: lm_head.weight"),
        ([], f"would receive nothing: {EMBEDDING}"),
        ([(EMBEDDING, 2 * E[:2])], r"was sent as \[2, 2\], the engine's model has \[3, 2\]"),
        ([(EMBEDDING, E.int())], "is int32: expected floating point numbers"),
        ([(EMBEDDING, E), (EMBEDDING, 2 * E)], "sent twice"),
    ],
)
def test_what_does_not_fit_is_refused_and_nothing_changes(worker, tmp_path, weights, message):
    """B48c, and its relatives."""
    link, sender = Link(worker), make_sender(tmp_path)
    with pytest.raises(WeightSyncError, match=message):
        send(sender, link, 1, weights)
    assert torch.equal(worker.model.embed.weight, E)
    assert worker.weights_state() == dataclasses.asdict(WeightsState()) and link.resets == 0
    assert not list(tmp_path.glob("rlcore_weights_*/version_*"))


def test_a_parameter_that_the_model_left_out_is_an_error(worker, tmp_path):
    """The names fit, and the model's own loader still skips one."""
    worker.model.extra = torch.nn.Linear(2, 2)
    with pytest.raises(WeightSyncError, match=r"received nothing: extra.bias, extra.weight"):
        send(make_sender(tmp_path), Link(worker), 1, [(EMBEDDING, 2 * E)])


def test_half_an_update_is_never_served(worker, tmp_path):
    other = Worker(worker.vllm_config.model_config.model, Tied(), tied=True)
    link, sender = Link(worker, other), make_sender(tmp_path)
    send(sender, link, 1, [(EMBEDDING, 2 * E)])
    other.fails = True
    with pytest.raises(
        WeightSyncError, match=r"worker 1 .*loading version 2 failed: RuntimeError: out of memory"
    ):
        send(sender, link, 2, [(EMBEDDING, 3 * E)])
    assert link.resets == 1
    with pytest.raises(WeightSyncError, match=r"worker 1 of the engine no longer serves"):
        check_serving(link, sender.run, 2)
    with pytest.raises(WeightSyncError, match=r"serves version 2 of this run, expected version 1|worker 1"):
        check_serving(link, sender.run, 1)
    other.fails = False
    with pytest.raises(WeightSyncError, match=r"worker 1 .*failed half-way.*Restart the engine"):
        send(sender, link, 3, [(EMBEDDING, 3 * E)])


def test_an_engine_that_answers_for_one_of_its_replicas_is_refused(worker, tmp_path):
    worker.vllm_config.parallel_config.data_parallel_size = 2
    with pytest.raises(WeightSyncError, match=r"runs 2 data-parallel replicas, .* Start one engine for each"):
        send(make_sender(tmp_path), Link(worker), 1, [(EMBEDDING, 2 * E)])


def test_an_engine_started_on_a_name_is_told_what_to_start_it_on(worker, tmp_path):
    worker.vllm_config.model_config.model = "Qwen/Qwen2.5-0.5B-Instruct"
    with pytest.raises(WeightSyncError, match=r"started on Qwen/Qwen2.5-0.5B-Instruct, which is no folder"):
        send(make_sender(tmp_path), Link(worker), 1, [(EMBEDDING, 2 * E)])


def test_what_the_files_hold_is_what_was_announced(worker, tmp_path):
    """Another shape or dtype under the same name and checksum of the manifest."""
    sender = make_sender(tmp_path)
    sender.write(lambda: iter([(EMBEDDING, 2 * E)]), 1, None)
    (file,) = tmp_path.glob("rlcore_weights_*/version_1/*.safetensors")
    save_file({EMBEDDING: (2 * E).view(2, 3).clone()}, str(file))
    with pytest.raises(WeightSyncError, match=r"float32 \[2, 3\] in .*, not what was announced"):
        sender.deliver(Link(worker), 1)


def test_versions_of_one_run_only_rise(worker, tmp_path):
    link, sender = Link(worker), make_sender(tmp_path)
    send(sender, link, 5, [(EMBEDDING, 2 * E)])
    for version in (4, 5):
        with pytest.raises(WeightSyncError, match=rf"version {version} is not newer than version 5"):
            send(sender, link, version, [(EMBEDDING, 3 * E)])
    assert torch.equal(worker.model.embed.weight, 2 * E)
    # Another run's versions have nothing to do with these.
    later = make_sender(tmp_path)
    with pytest.raises(WeightSyncError, match=r"version 5 of another run, expected version 5 of this one"):
        check_serving(link, later.run, 5)
    send(later, link, 0, [(EMBEDDING, 4 * E)])
    check_serving(link, later.run, 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_buckets_hold_what_fits_and_every_byte_counts(tmp_path, dtype, worker):
    sender = make_sender(tmp_path, bucket_bytes=40)
    tensors = [(f"t{index}", torch.arange(6.0).view(2, 3).to(dtype) + index) for index in range(5)]
    sender.write(lambda: iter(tensors), 3, None)
    (folder,) = tmp_path.glob("rlcore_weights_*/version_3")
    manifest = Manifest.read(folder)
    assert (manifest.run, manifest.version) == (sender.run, 3)
    per_file = 2 if dtype == torch.float32 else 4
    assert [entry.file for entry in manifest.tensors] == [
        f"bucket_{index // per_file:05d}.safetensors" for index in range(5)
    ]
    assert [entry.checksum for entry in manifest.tensors] == [checksum_of(tensor) for _, tensor in tensors]
    changed = tensors[0][1].clone()
    changed[1, 2] = -changed[1, 2]
    swapped = tensors[0][1].flip(0)
    assert len({checksum_of(tensor) for tensor in (tensors[0][1], changed, swapped)}) == 3
    sender.close()
    assert not list(tmp_path.glob("rlcore_weights_*"))


def test_a_folder_without_room_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(sender_module.shutil, "disk_usage", lambda folder: SimpleNamespace(free=23))
    sender = make_sender(tmp_path)
    message = r"version 1 .*24 bytes more are needed.*has 23. Free memory in, or change, rollout.vllm.tran"
    with pytest.raises(ValueError, match=message):
        sender.write(lambda: iter([(EMBEDDING, E)]), 1, None)
    assert not list(tmp_path.glob("rlcore_weights_*/version_*"))
    with pytest.raises(ValueError, match=r"rollout.vllm.transfer_folder=/nowhere"):
        FolderSender("/nowhere", None, torch.device("cpu")).write(lambda: iter([(EMBEDDING, E)]), 1, None)


def test_folders_of_runs_that_were_killed_are_removed(tmp_path):
    host = socket.gethostname()
    names = [
        f"rlcore_weights_{host}_{2**22 + 7}_a",
        f"rlcore_weights_{host}_{os.getpid()}_b",
        "rlcore_weights_other_1_c",
    ]
    for name in names:
        tmp_path.joinpath(name).mkdir()
    remove_orphans(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(names[1:])


def test_an_engine_without_the_receiver_is_told(worker):
    with pytest.raises(WeightSyncError, match=r"no worker of the engine answered"):
        agree([], "refused")
    with pytest.raises(WeightSyncError, match=r"answered None: is it started with the weight receiver"):
        agree([None], "refused")


OWNED = """
import os, subprocess, sys, time
from rlcore.weight_sync.vllm_receiver import end_after
print(os.getpid(), flush=True)
end_after(int(sys.argv[1]), int(sys.argv[2]) or os.getppid())
"""


@pytest.mark.parametrize("has_engine_above", [False, True])
def test_an_engine_ends_with_the_process_that_started_it(has_engine_above):
    """Whoever is above it: the owner itself, or vLLM's engine, which is ended too."""
    owner = subprocess.Popen(["sleep", "60"])
    words = [sys.executable, "-c", OWNED, str(owner.pid), "0" if has_engine_above else str(owner.pid)]
    # A shell that goes on after the worker has ended stands for the engine.
    command = ["bash", "-c", '"$@"; sleep 60', "bash", *words] if has_engine_above else words
    top = subprocess.Popen(
        command, stdout=subprocess.PIPE, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}
    )
    try:
        assert top.stdout is not None
        worker = int(top.stdout.readline())
        time.sleep(0.2)
        assert top.poll() is None and Path(f"/proc/{worker}").exists()
        owner.kill()
        owner.wait()
        assert top.wait(10) == -signal.SIGKILL
        deadline = time.monotonic() + 10
        while Path(f"/proc/{worker}").exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        assert not Path(f"/proc/{worker}").exists()
    finally:
        top.kill()
        owner.kill()
        top.stdout.close()


def test_another_way_of_transfer_is_broken_until_its_end(worker):
    """The GPU ways: `begin_weights`, vLLM's own transfer, `end_weights`."""
    entry = TensorEntry(name=EMBEDDING, shape=(3, 2), dtype="float32")
    manifest = Manifest(run="r", version=1, tensors=(entry,)).plain()
    assert worker.check_weights(manifest=manifest)["problem"] is None
    assert worker.begin_weights()["broken"]
    worker.model.embed.weight.data.copy_(2 * E)
    assert worker.end_weights(manifest) == dataclasses.asdict(WeightsState(run="r", version=1))
    assert torch.equal(worker.model.head(torch.eye(2)).T, 2 * E)
    assert "not newer" in worker.check_weights(manifest=manifest)["problem"]
    assert "KeyError" in worker.check_weights(manifest={"run": "r"})["problem"]
