"""A script: each of two ranks calls verl's function with its rows of the head, and writes down what it got.

python sharded_head.py FOLDER INPUTS      INPUTS is a file of torch.save, with the arguments and the two gradients
"""

import functools
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from ranks import fork

from fastgrpo.integrations.verl import linear_cross_entropy


def call(folder, inputs):
    """Run forward and backward pass on this rank's shard."""
    dist.init_process_group("gloo")
    rank, given = dist.get_rank(), torch.load(inputs)
    hidden = given["hidden"].requires_grad_()
    shard = given["weight"].split(given["shards"])[rank].clone().requires_grad_()
    head = hidden, shard, given["labels"], given["temperature"]
    logps, entropy = linear_cross_entropy(*head, "none", dist.group.WORLD)
    torch.autograd.backward((logps, entropy), (given["logps_grad"], given["entropy_grad"]))
    total, entropy_again = linear_cross_entropy(*head, "sum", dist.group.WORLD)
    found = {"logps": logps, "entropy": entropy, "total": total, "entropy_again": entropy_again}
    found = {name: value.detach() for name, value in found.items()}
    torch.save(found | {"hidden": hidden.grad, "weight": shard.grad}, folder / f"rank-{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    folder, inputs = Path(sys.argv[1]), sys.argv[2]
    fork({"call": functools.partial(call, folder, inputs)}, folder, count=2)
