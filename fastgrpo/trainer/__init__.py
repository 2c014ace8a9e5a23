"""The trainers: the loop that all of them share, GRPO, and supervised training."""

from fastgrpo.trainer.grpo import GRPOTrainer
from fastgrpo.trainer.supervised import SFTTrainer

__all__ = ["GRPOTrainer", "SFTTrainer"]
