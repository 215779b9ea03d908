"""What every test shares: one thread a process (the pool's ranks share the cores with the test process), and
the op's two ways to a support.
"""

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture(params=["candidates", "search"])
def search(request, monkeypatch):
    """Both ways to a support: candidates settle nearly every row here; with two of them nearly every row is
    searched.
    """
    from rlcore.ops import bracket
    from rlcore.ops import filter as support_filter

    if request.param == "search":
        monkeypatch.setattr(support_filter, "MAX_CANDIDATES", 0)
        monkeypatch.setattr(support_filter, "NUCLEUS_CANDIDATES", 2)
        monkeypatch.setattr(bracket, "NUM_LISTED", 3)
        monkeypatch.setattr(bracket, "SAMPLE_FROM_ELEMENTS", 0)
        monkeypatch.setattr(bracket, "SAMPLE_STRIDE", 2)
    return request.param
