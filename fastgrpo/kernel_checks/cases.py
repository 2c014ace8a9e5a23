"""The table of what `python -m fastgrpo.doctor --check` checks: each kernel, with what makes its trial.

A trial is made once at the size where values are compared, and once at the size where time is taken.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch

from fastgrpo.kernel_checks.losses import fused_loss, logits_loss, logprob, token_losses
from fastgrpo.kernel_checks.places import Place, Trial
from fastgrpo.kernel_checks.rollouts import decode, draws
from fastgrpo.kernels import launch
from fastgrpo.loss.checks import HAS_TRITON


class Case(NamedTuple):
    """A line of the table.

    Attributes:
        name: What is checked.
        make: Makes the trial at a place, or returns None where there is none of that size.
        dtype: Dtype of the operands on a GPU; the other modes have fp32.
        modes: Where it runs.
    """

    name: str
    make: Callable[[Place], Trial | None]
    dtype: torch.dtype = torch.bfloat16
    modes: tuple[str, ...] = ("gpu", "interpreter")


EVERYWHERE = ("gpu", "cpu", "interpreter")
EVERYTHING = {"bias": True, "softcap": 5.0, "temperature": "row"}
CASES = (
    Case("linear_grpo_loss", fused_loss, modes=EVERYWHERE),
    Case("linear_grpo_loss, chunks", partial(fused_loss, chunks=2)),
    Case("linear_grpo_loss, bias, soft-cap", partial(fused_loss, **EVERYTHING), modes=EVERYWHERE),
    Case("linear_grpo_loss, entropy bonus", partial(fused_loss, bonus=True)),
    Case("linear_grpo_loss, recomputed", partial(fused_loss, bonus=True, softcap=5.0)),
    Case("linear_grpo_loss, sharded", partial(fused_loss, sharded=True)),
    Case("linear_logprob, entropy", logprob, modes=EVERYWHERE),
    Case("linear_logprob, bias, soft-cap", partial(logprob, **EVERYTHING)),
    Case("linear_logprob, unlikely targets", partial(logprob, entropy=False, flagged=True)),
    Case("logits_grpo_loss", logits_loss, modes=EVERYWHERE),
    Case("logits_grpo_loss, in place", partial(logits_loss, inplace=True)),
    Case("policy_loss", token_losses, torch.float32, EVERYWHERE),
    Case("group_decode, width 64", partial(decode, heads_of=(14, 2), depth=64)),
    Case("group_decode, width 128", partial(decode, heads_of=(28, 4), depth=128), modes=("gpu",)),
    Case("group_decode, width 256", partial(decode, heads_of=(8, 1), depth=256), modes=("gpu",)),
    Case("sample", draws, torch.float32),
    Case("sample, greedy", partial(draws, temperature=0), torch.float32, ("gpu",)),
    Case("sample, top-k", partial(draws, top_k=20), torch.float32),
    Case("sample, top-p, min-p", partial(draws, top_p=0.9, min_p=0.01), torch.float32),
)


def modes_here() -> tuple[str, ...]:
    """Return where the cases run on this machine: on the GPU, or else on the CPU and in Triton's interpreter."""
    if HAS_TRITON and torch.cuda.is_available() and launch.runs_on(torch.device("cuda", 0)):
        return ("gpu",)
    return ("cpu", "interpreter") if HAS_TRITON else ("cpu",)
