"""What the Megatron tests share."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.megatron.layout_cases import make_batch, make_config, perturbed, score_on_rank, train_on_rank
from tests.rank_pool import run_ranks

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def smollm2_path():
    """Folder with SmolLM2-135M-Instruct, prepared on first use (a download of about 80 MB)."""
    from tools.fetch_smollm2 import fetch

    return str(fetch(REPOSITORY / "models" / "SmolLM2-135M-Instruct"))


@pytest.fixture(scope="session")
def batch():
    """The layout tests' batch with its old logprobs."""
    plain = make_batch()
    (scores,) = run_ranks(score_on_rank, 1, make_config("tp1", 1), plain)
    return perturbed(plain, scores)


@pytest.fixture(scope="session")
def baseline(batch):
    """Result, gradients and weights of one step on one rank."""
    ((result, gradients, weights),) = run_ranks(train_on_rank, 1, make_config("tp1", 1, kl_coef=0.1), batch)
    return result, gradients, weights
