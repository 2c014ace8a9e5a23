"""A script: two ranks with other completions take steps of TRL's trainer and of ours, under DDP over gloo."""

import sys
from pathlib import Path

import torch
import trl
from ranks import fork
from trl_pairs import assert_same_gradients, assert_same_training, gradients, make_inputs, pair, trainer

from fastgrpo.integrations.trl import FusedGRPOTrainer

CASES = {
    "dapo": {"loss_type": "dapo", "top_entropy_quantile": 0.5},
    "grpo": {"loss_type": "grpo", "importance_sampling_level": "sequence", "beta": 0.3},
    "vespo": {"loss_type": "vespo", "off_policy_mask_threshold": 0.05, "entropy_coef": 0.1},
}


def wrap(one):
    """Let a trainer compute its losses under DDP."""
    wrapped, loss = one.accelerator.prepare(one.model), one.compute_loss
    assert isinstance(wrapped, torch.nn.parallel.DistributedDataParallel)
    one.compute_loss = lambda model, batch: loss(wrapped, batch)


def compare(path, folder):
    """Both trainers have equal gradients and metrics, after all ranks have shared theirs."""
    for name, settings in CASES.items():
        both = pair(path, folder / name, **settings)
        inputs = make_inputs(both.theirs, seed=both.theirs.accelerator.process_index)
        inputs["num_items_in_batch"] = both.theirs.accelerator.gather(inputs["num_items_in_batch"]).sum()
        wrap(both.theirs)
        wrap(both.ours)
        assert_same_gradients(both, inputs)
        assert_same_training(both, inputs)
        print("same", name, flush=True)


def notice(path, folder):
    """TRL's code has another loss on rank 1 alone, and the trainers of both ranks stop."""
    one = trainer(FusedGRPOTrainer, path, folder)
    wrap(one)
    inputs = make_inputs(one, seed=one.accelerator.process_index)
    theirs, more = trl.GRPOTrainer._compute_loss, 0.5 * one.accelerator.process_index
    trl.GRPOTrainer._compute_loss = lambda *args: theirs(*args) + more
    try:
        gradients(one, inputs)
    except RuntimeError as error:
        print("noticed:", error, flush=True)


if __name__ == "__main__":
    output, model = map(Path, sys.argv[1:])
    cases = {"ranks": lambda: compare(model, output / "runs"), "formula": lambda: notice(model, output / "other")}
    fork(cases, output, 2, at_once=1)
