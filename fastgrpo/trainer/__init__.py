"""The trainers: the loop that all of them share, GRPO, and supervised training."""

import os

# On Linux, torch then asks for huge pages for its large CPU tensors. A step allocates its activations anew, and with
# pages of 4 KiB the kernel spent a tenth of a step of SmolLM2-135M on making them (docs/troubleshooting.md). torch
# reads this at its first allocation, so it is set before the trainers are loaded.
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")

from fastgrpo.trainer.grpo import GRPOTrainer
from fastgrpo.trainer.supervised import SFTTrainer

__all__ = ["GRPOTrainer", "SFTTrainer"]
