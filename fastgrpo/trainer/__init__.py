"""The trainers: the loop that all of them share, GRPO, and supervised training."""

import os

# On Linux, torch then asks for huge pages for its large CPU tensors. A step allocates its activations anew, and the
# kernel takes far longer to make them out of pages of 4 KiB. torch reads this at its first allocation, so it is set
# before the trainers are loaded.
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")

from fastgrpo.trainer.grpo import GRPOTrainer
from fastgrpo.trainer.supervised import SFTTrainer

__all__ = ["GRPOTrainer", "SFTTrainer"]
