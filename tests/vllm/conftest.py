"""Real engines for the tests: one of an untied and one of a tied tiny model, each started once."""

from __future__ import annotations

import pytest

from tests.vllm.tiny_engine import start, write_folder


def pytest_collection_modifyitems(items):
    """Everything here needs vLLM, and is skipped only where it is not installed."""
    for item in items:
        if "tests/vllm/" in item.path.as_posix():
            item.add_marker(pytest.mark.vllm)


@pytest.fixture(scope="session")
def untied(tmp_path_factory):
    """A running engine on a model with a head of its own."""
    yield from _running(tmp_path_factory, tied=False)


@pytest.fixture(scope="session")
def tied(tmp_path_factory):
    """A running engine on a model whose head is its embedding."""
    yield from _running(tmp_path_factory, tied=True)


@pytest.fixture
def own_engine(tmp_path_factory):
    """A running engine that a test may spoil."""
    yield from _running(tmp_path_factory, tied=False)


def _running(tmp_path_factory, tied):
    pytest.importorskip("vllm")
    folder = str(tmp_path_factory.mktemp("tied" if tied else "untied") / "model")
    write_folder(folder, tied)
    running = start(folder)
    yield running
    running.engine.close()
