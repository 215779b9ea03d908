"""Importing a module does nothing: no optional package, no patch, no process group, no device."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

PROGRAM = """
import importlib, importlib.abc, pkgutil, sys, threading, warnings

BLOCKED = {"megatron", "vllm", "triton", "ray", "wandb", "transformers", "reasoning_gym", "math_verify",
           "gguf", "accelerate", "transformer_engine", "apex", "mbridge"}

class Blocker(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in BLOCKED:
            raise ModuleNotFoundError(f"{name} is blocked", name=name)

import torch, torch.distributed, numpy, hydra
sys.meta_path.insert(0, Blocker())

def snapshot():
    owners = [torch, torch.Tensor, torch.cuda, torch.distributed, torch.nn.functional, torch.random]
    return {(str(owner), name): id(value) for owner in owners for name, value in vars(owner).items()}

before, threads, rng = snapshot(), threading.active_count(), torch.get_rng_state()
import rlcore
found = pkgutil.walk_packages(rlcore.__path__, "rlcore.")
modules = [module.name for module in found if not module.name.endswith("__main__")]
for name in modules:
    importlib.import_module(name)
after = snapshot()
changed = sorted(key for key, value in before.items() if after.get(key) != value)
assert not changed, changed
assert threading.active_count() == threads
assert torch.equal(rng, torch.get_rng_state())
assert not torch.distributed.is_initialized() and not torch.cuda.is_initialized()
loaded = sorted(BLOCKED & {name.split(".")[0] for name in sys.modules})
assert not loaded, loaded
print(len(modules))
"""


def test_every_module_imports_without_the_extras_and_changes_nothing():
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) >= 20
