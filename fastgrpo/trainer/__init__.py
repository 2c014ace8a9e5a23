"""The trainers: their common loop, GRPO, and supervised training."""

from fastgrpo.trainer.grpo import GRPOTrainer
from fastgrpo.trainer.supervised import SFTTrainer

__all__ = ["GRPOTrainer", "SFTTrainer"]
