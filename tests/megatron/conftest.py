"""What the Megatron tests share."""

from __future__ import annotations

from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def smollm2_path():
    """Folder with SmolLM2-135M-Instruct, prepared on first use (a download of about 80 MB)."""
    from tools.fetch_smollm2 import fetch

    return str(fetch(REPOSITORY / "models" / "SmolLM2-135M-Instruct"))
