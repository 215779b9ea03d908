"""`rlcore train` against a real vLLM server, one step ahead: fresh weights, versions, a server that dies."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request

import pytest

from rlcore.rollout.vllm_engine import RECEIVER
from tests.e2e.commands import ROOT, free_port, outside_of_ranks
from tests.vllm.test_train_command import records_of, said_by, start_ranks, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


def answers(url):
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=2.0) as answer:
            return answer.status == 200
    except (urllib.error.URLError, OSError):
        return False


@pytest.fixture
def server(tmp_path):
    """A server on a policy of the demo's shape with other weights; yields its process and URL."""
    pytest.importorskip("vllm")
    words = [
        "--config-name",
        "demo",
        f"run_dir={tmp_path / 'first'}",
        "train.steps=1",
        "train.save_final=true",
    ]
    command = [sys.executable, "-m", "rlcore.cli", "train", *words, "seed=7"]
    subprocess.run(command, cwd=ROOT, env=outside_of_ranks(), check=True, capture_output=True)
    port = free_port()
    environment = {**outside_of_ranks(), "VLLM_SERVER_DEV_MODE": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
    environment |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--port", str(port)]
    command += ["--model", str(tmp_path / "first" / "policy" / "step_1"), "--skip-tokenizer-init"]
    command += [
        "--enable-scale-out",
        "--logprobs-mode",
        "processed_logprobs",
        "--worker-extension-cls",
        RECEIVER,
    ]
    command += [
        "--enforce-eager",
        "--dtype",
        "float32",
        "--generation-config",
        "vllm",
        "--max-logprobs",
        "32",
    ]
    with (tmp_path / "server.txt").open("w") as output:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=output, stderr=output, start_new_session=True
        )
    url = f"http://127.0.0.1:{port}"
    try:
        wait_until(lambda: answers(url) or process.poll() is not None, 120.0, "the server does not start")
        assert process.poll() is None, (tmp_path / "server.txt").read_text()[-3000:]
        yield process, url
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def test_one_step_ahead_of_the_trainer_until_the_server_dies(server, tmp_path):
    process, url = server
    words = ("train.steps=100000", f"rollout.vllm.urls=[{url}]", "rollout.one_step_off=true")
    ranks = start_ranks(tmp_path, *words, "importance.correction=tis", "importance.cap=2")
    try:
        alive = lambda: all(rank.poll() is None for rank in ranks)  # noqa: E731
        wait_until(lambda: len(records_of(tmp_path)) >= 5 or not alive(), 150.0, said_by(tmp_path))
        assert alive(), said_by(tmp_path)
        os.killpg(process.pid, signal.SIGKILL)
        took = wait_until(lambda: not any(rank.poll() is None for rank in ranks), 60.0, "a rank still runs")
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert took < 30.0
    said = said_by(tmp_path)
    assert "does not answer" in said or "did not answer" in said
    records = records_of(tmp_path)
    assert [record["rollout/staleness"] for record in records[:5]] == [0, 1, 1, 1, 1]
    # The server began with other weights: it got these before it drew the first step.
    assert records[0]["mismatch/abs_max"] < 1e-4
    for record in records[1:5]:
        # One update apart, and no more: the weights between are the engine's.
        assert 1e-6 < record["mismatch/abs_mean"] < 1.0
        assert record["importance/weight"] == pytest.approx(1, abs=0.2)
        assert record["rollout/staleness"] == 1
