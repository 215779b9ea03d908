"""The import rules and sizes hold here, and the tool that says so can fail."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def _load_layers():
    spec = importlib.util.spec_from_file_location("layers", ROOT / "tools" / "layers.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["layers"] = module
    spec.loader.exec_module(module)
    return module


layers = _load_layers()


def test_this_repository(capsys):
    code = layers.main(ROOT)
    assert code == 0, capsys.readouterr().out


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A repository without violations."""
    for place, text in {
        "rlcore/__init__.py": "",
        "rlcore/trainer.py": "import torch\nfrom rlcore.interfaces import Task\n",
        "rlcore/ops/loss.py": "from rlcore import masks\n",
        "rlcore/rollout/vllm_rollout.py": "def engine():\n    import vllm\n",
        "megatron_worker/worker.py": "from megatron.core import x\nfrom rlcore.ops.loss import x\n",
    }.items():
        tmp_path.joinpath(place).parent.mkdir(parents=True, exist_ok=True)
        tmp_path.joinpath(place).write_text(text)
    return tmp_path


def test_a_tree_that_keeps_the_rules(tree, capsys):
    assert layers.main(tree) == 0, capsys.readouterr().out


@pytest.mark.parametrize(
    ("place", "text", "message"),
    [
        (
            "rlcore/trainer.py",
            "from megatron_worker.worker import MegatronWorker\n",
            "may not import megatron_worker",
        ),
        ("rlcore/trainer.py", "def f():\n    from rlcore.cli import main\n", "may not import rlcore.cli"),
        ("rlcore/ops/loss.py", "from rlcore.layout.packing import pack\n", "may not import rlcore.layout"),
        ("rlcore/ops/loss.py", "from ..layout import packing\n", "may not import rlcore.layout"),
        ("rlcore/ops/loss.py", "from rlcore import trainer\n", "may not import rlcore.trainer"),
        ("rlcore/ops/loss.py", "def f():\n    import megatron.core\n", "may not import megatron.core"),
        ("megatron_worker/worker.py", "import rlcore.trainer\n", "may not import rlcore.trainer"),
        ("megatron_worker/hf.py", "import transformers\n", "transformers, which is optional"),
        (
            "rlcore/rollout/tasks.py",
            "try:\n    import vllm\nexcept ImportError:\n    pass\n",
            "vllm, which is optional",
        ),
        ("rlcore/run_log.py", "def f():\n    import wandb\n", "may not import wandb"),
        ("rlcore/stray.py", "from rlcore.batch import Prompt\n", "may not import rlcore.batch"),
        ("rlcore/big.py", "x = 1\n" * 401, "401 lines"),
        ("rlcore/long.py", "def f():\n" + "    x = 1\n" * 60, "f has 61 lines"),
        ("rlcore/wide.py", "def f(a, b, c, d, e, f, g, *, h): ...\n", "f has 8 parameters"),
    ],
)
def test_a_planted_violation_is_found(tree, capsys, place, text, message):
    tree.joinpath(place).write_text(text)
    assert layers.main(tree) == 1
    assert message in capsys.readouterr().out
