"""A script: two ranks with other completions take a step of TRL's trainer and of ours, under DDP over gloo."""

import sys
from pathlib import Path

import torch
from ranks import fork
from trl_pairs import assert_same_gradients, assert_same_training, make_inputs, pair

CASES = {
    "dapo": {"loss_type": "dapo", "top_entropy_quantile": 0.5},
    "grpo": {"loss_type": "grpo", "importance_sampling_level": "sequence", "beta": 0.3},
    "vespo": {"loss_type": "vespo", "off_policy_mask_threshold": 0.05, "entropy_coef": 0.1},
}


def compare(path, folder):
    """Both trainers have equal gradients and metrics, after all ranks have shared theirs."""
    for name, settings in CASES.items():
        both = pair(path, folder / name, **settings)
        inputs = make_inputs(both.theirs, seed=both.theirs.accelerator.process_index)
        inputs["num_items_in_batch"] = both.theirs.accelerator.gather(inputs["num_items_in_batch"]).sum()
        for one in (both.theirs, both.ours):
            one.wrapped = one.accelerator.prepare(one.model)
            assert isinstance(one.wrapped, torch.nn.parallel.DistributedDataParallel)
            loss = one.compute_loss
            one.compute_loss = lambda model, batch, one=one, loss=loss: loss(one.wrapped, batch)
        assert_same_gradients(both, inputs)
        assert_same_training(both, inputs)
        print("same", name, flush=True)


if __name__ == "__main__":
    output, model = map(Path, sys.argv[1:])
    fork({"ranks": lambda: compare(model, output / "runs")}, output, 2)
