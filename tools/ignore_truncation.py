"""A training run whose trainer ignores the truncation that its sampler applies, to show what that costs.

`torchrun --nproc-per-node 3 -m tools.ignore_truncation --config-name grpo_smollm2_vllm run_dir=runs/ignored`:
the config's own run in everything else. `mismatch/abs_mean` is then |log S| per token. Not for training:
`rlcore train` refuses such configs.
"""

from __future__ import annotations

import argparse
from typing import Any

from rlcore.cli.compose import compose_run_config
from rlcore.cli.train_command import train_rank
from rlcore.config import RunConfig


def run(config: RunConfig) -> None:
    """One rank of the run."""
    from megatron_worker import worker as module

    class Ignoring(module.MegatronWorker):
        """Scores and trains under the whole distribution at the sampler's temperature and penalties."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.spec = self.spec.unfiltered()

    module.MegatronWorker = Ignoring  # type: ignore[misc]
    train_rank(config)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m tools.ignore_truncation")
    parser.add_argument("--config-name", default="grpo_smollm2_vllm")
    parser.add_argument("words", nargs="*", help="key=value")
    arguments = parser.parse_args()
    run(compose_run_config(arguments.config_name, arguments.words))
