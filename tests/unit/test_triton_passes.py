"""The Triton backend without a GPU: when it is chosen, that its kernels compile for one, and what they
compute.
"""

import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from rlcore.ops import triton_kernels, triton_passes
from rlcore.ops.logprob import vocab_parallel_logprob
from rlcore.ops.passes import COMPILE_FROM_ELEMENTS, select_passes
from rlcore.sampling import SamplingSpec

ROOT = Path(__file__).resolve().parents[2]
needs_triton = pytest.mark.skipif(
    not triton_passes.is_installed(), reason="Triton has no build for this system"
)

# Kernel -> its constants besides the tile's.
KERNELS = {
    "block_maxima": {},
    "exp_sums": {"ENTROPY": True},
    "sums_above": {"ENTROPY": True},
    "pivot_sums": {"NUM_PIVOTS": 3},
    "gradient": {"ENTROPY": True},
}


@needs_triton
def test_the_kernels_in_the_interpreter():
    """A process of its own: the interpreter has to be chosen before anything imports Triton."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "tests/unit/triton_interpreted.py", "-p", "no:cacheprovider"],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed and int(passed[1]) >= 19 and "skipped" not in done.stdout, done.stdout


@needs_triton
@pytest.mark.parametrize("name", KERNELS)
def test_the_kernels_compile_for_a_gpu(name, tmp_path, monkeypatch):
    """For compute capability 9.0, which needs no GPU: divisions are IEEE divisions, loads 16 bytes wide."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    assert not triton_kernels.load_kernels(), "this test needs TRITON_INTERPRET unset"
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    kernel = getattr(triton_kernels, name)
    constants = {**KERNELS[name], "TILE_BLOCKS": triton_passes.TILE_BLOCKS, "BLOCK": triton_passes.BLOCK}
    out = {"gradient": "*bf16", "block_maxima": "*fp32"}.get(name, "*fp64")
    pointers = {"logits_ptr": "*bf16", "row_ptr": "*i64", "out_ptr": out}
    signature = {
        argument: "constexpr"
        if argument in constants
        else pointers.get(argument, "*fp32" if argument.endswith("_ptr") else "i32")
        for argument in kernel.arg_names
    }
    # What the launcher finds out of V=151,936 over two ranks: both the row stride and the width divide by 16.
    aligned = [a for a, kind in signature.items() if kind[0] == "*" or a in ("row_stride", "width")]
    source = ASTSource(
        kernel,
        signature,
        {(kernel.arg_names.index(key),): value for key, value in constants.items()},
        {(kernel.arg_names.index(key),): [["tt.divisibility", 16]] for key in aligned},
    )
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})
    ptx = compiled.asm["ptx"]
    num_approximate = 1 if name == "gradient" else 0  # 1 / temperature, which nothing is compared with
    assert "div.rn.f32" in ptx
    assert len(re.findall(r"div\.(full|approx)", ptx)) == num_approximate
    assert len(re.findall(r"ld\.global\.v4\.b32", ptx)) == 4


# --- choosing it ------------------------------------------------------------------------------------


def on_a_gpu(num_elements):
    """What `select_passes` looks at."""
    return SimpleNamespace(is_cuda=True, device="cuda:0", numel=lambda: num_elements)


@needs_triton
def test_auto_takes_triton_on_a_gpu_and_never_on_the_cpu():
    assert select_passes("auto", on_a_gpu(1)).name == "triton"
    assert select_passes("triton", on_a_gpu(1)).name == "triton"
    assert select_passes("torch", on_a_gpu(1)).name == "torch"
    assert select_passes("auto", torch.zeros(1, 4)).name == "torch"
    assert select_passes("auto", torch.empty(1, COMPILE_FROM_ELEMENTS, device="meta")).name == "compile"


@needs_triton
def test_cpu_logits_are_refused_and_the_message_says_what_runs():
    with pytest.raises(
        ValueError, match=r"needs logits on a GPU, these are on cpu.*'auto', 'torch', 'compile'"
    ):
        vocab_parallel_logprob(torch.zeros(1, 4), torch.zeros(1).long(), SamplingSpec(), backend="triton")


def test_without_triton_auto_does_not_need_it_and_asking_for_it_is_an_error(monkeypatch):
    monkeypatch.setattr(triton_passes, "is_installed", lambda: False)
    assert select_passes("auto", on_a_gpu(1)).name == "torch"
    assert select_passes("auto", on_a_gpu(COMPILE_FROM_ELEMENTS)).name == "compile"
    with pytest.raises(ValueError, match=r"not installed here.*'auto', 'torch', 'compile'"):
        select_passes("triton", on_a_gpu(1))
