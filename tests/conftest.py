"""One thread a process: the pool's ranks share the cores with the test process."""

import torch

torch.set_num_threads(1)
