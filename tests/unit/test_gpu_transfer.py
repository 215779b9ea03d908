"""What the GPU ways of a weight update ask of vLLM and of its workers, and in which order. No GPU is used."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from rlcore.weight_sync import gpu_transfer
from rlcore.weight_sync.gpu_transfer import GpuSender, LinkClient, PolicySource
from rlcore.weight_sync.sender import WeightSyncError
from rlcore.weight_sync.wire import Manifest, WeightsState

WEIGHTS = [("a", torch.arange(6.0).view(2, 3)), ("b", torch.ones(4, dtype=torch.bfloat16))]


class Link:
    """Two workers that take every update but those of the version named `refuses`."""

    def __init__(self, refuses=None):
        self.calls, self.refuses, self.state = [], refuses, WeightsState()

    def rpc(self, method, **kwargs):
        self.calls.append(method)
        state = self.state
        if method == "check_weights":
            manifest = Manifest.of(kwargs["manifest"])
            assert [(entry.name, tuple(entry.shape), entry.dtype) for entry in manifest.tensors] == [
                ("a", (2, 3), "float32"),
                ("b", (4,), "bfloat16"),
            ]
            if manifest.version == self.refuses:
                state = dataclasses.replace(state, problem="does not fit")
        if method == "end_weights":
            manifest = Manifest.of(kwargs["manifest"])
            state = self.state = WeightsState(run=manifest.run, version=manifest.version)
        return [dataclasses.asdict(state)] * 2

    def reset_prefix_cache(self):
        self.calls.append("reset")


class Transfer:
    """vLLM's trainer-side engine as far as its order of calls goes."""

    def __init__(self, client, source):
        self.client, self.source, self.sent, self.is_open = client, source, [], True

    def send_weights(self):
        self.client.start_weight_update()
        self.client.update_weights({"names": [name for name, _ in self.source]})
        self.sent.append([tensor.clone() for _, tensor in self.source])
        self.client.finish_weight_update()

    def shutdown(self):
        self.is_open = False


@pytest.fixture
def started(monkeypatch):
    """The engines that `start_transfer` was asked for, with its other arguments."""
    made = []

    def start(backend, rank, client, source, num_workers):
        made.append((backend, rank, num_workers, Transfer(client, source)))
        return made[-1][-1]

    monkeypatch.setattr(gpu_transfer, "start_transfer", start)
    return made


def test_an_update_is_checked_then_sent_then_confirmed(started):
    link, sender = Link(), GpuSender("nccl", None, torch.device("cpu"))
    update = ["check_weights", "begin_weights"]
    sent = ["start_weight_update", "update_weights", "finish_weight_update"]
    for version in (1, 2):
        link.calls.clear()
        sender.write(lambda: iter(WEIGHTS), version, link)
        first = ["weights_state"] if version == 1 else []
        assert link.calls == [*update, *first, *sent]
        link.calls.clear()
        sender.deliver(link, version)
        assert link.calls == ["end_weights", "weights_state", "reset"]
        assert link.state == WeightsState(run=sender.run, version=version)
    ((backend, rank, num_workers, transfer),) = started
    assert (backend, rank, num_workers) == ("nccl", 0, 2)
    for tensors in transfer.sent:
        assert all(torch.equal(tensor, right) for tensor, (_, right) in zip(tensors, WEIGHTS, strict=True))
    sender.close()
    assert not transfer.is_open


def test_a_refused_update_is_not_begun(started):
    link, sender = Link(refuses=1), GpuSender("ipc", None, torch.device("cpu"))
    with pytest.raises(WeightSyncError, match="worker 0 of the engine refused the weights: does not fit"):
        sender.write(lambda: iter(WEIGHTS), 1, link)
    assert link.calls == ["check_weights"] and not started
    sender.close()


def test_the_source_says_before_what_it_yields():
    """vLLM sizes its buffers by the one and fills them by the other."""
    pytest.importorskip("vllm")
    passes = []

    def export():
        passes.append(0)
        return iter(WEIGHTS)

    source = PolicySource(export, torch.device("cpu"))
    for _ in range(2):
        declared = [(meta.name, meta.dtype, meta.shape) for meta in source.metadata()]
        assert declared == [(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in source]
    # One pass for the names, one for each iteration.
    assert len(passes) == 3
    assert source.groups() == [["a", "b"]] and source.held_names() is None


def test_vllm_starts_its_trainer_side_with_our_client_and_source():
    """On a rank that does not send: it joins no process group, so that the engine starts without a GPU."""
    pytest.importorskip("vllm")
    source, client = PolicySource(lambda: iter(WEIGHTS), torch.device("cpu")), LinkClient(None)
    transfer = gpu_transfer.start_transfer("nccl", 1, client, source, 0)
    assert type(transfer).__name__ == "NCCLTrainerWeightTransferEngine"
    assert not transfer.is_sender and transfer.client is client and transfer.source is source
