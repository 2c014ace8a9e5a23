"""What each of four ranks does in tests/run/test_shards.py; its argument is a folder.

The first two of them are also a run of their own, and all four have a process group that holds them. Line by line, a
rank prints what it found; the test reads that.
"""

import json
import os
import resource
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from toy_parts import about, addresses, differences, draws, make_parts, settings
from transformers import set_seed

from fastgrpo.ranks import RankLost, Ranks, join
from fastgrpo.run import snapshot
from fastgrpo.run.checkpoint import checkpoints, write_checkpoint
from fastgrpo.run.checkpointer import Checkpointer
from fastgrpo.run.followed import open_log
from fastgrpo.run.host_copies import HostCopies
from fastgrpo.run.snapshot import Snapshot, restore

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def tell(**what):
    print(json.dumps(what), flush=True)


def save(parts, checkpointer, dtype, step):
    ranks = checkpointer.ranks
    checkpointer.save(step, lambda: Snapshot(parts, TOKENIZER, about(dtype), HostCopies(), ranks))


def write(folder, name, ranks, mesh):
    dtype = DTYPES[name]
    parts = make_parts(dtype, mesh)
    set_seed(100 + ranks.rank)
    log = open_log(settings(folder), None, ranks)
    with log:
        taken = Snapshot(parts, TOKENIZER, about(dtype), HostCopies(), ranks)
        for weights in (parts["optimizer"].masters, parts["policy"].module.parameters()):
            for weight in weights:
                weight.data.zero_()  # training goes on
        assert write_checkpoint(log.folder, 3, taken.write, ranks) == folder / "checkpoint-3"


def read(folder, path, name, ranks, mesh):
    dtype, said = DTYPES[name], []
    parts = make_parts(dtype, mesh, seed=1, trained=False)
    before = addresses(parts)
    restore(parts, path, about(dtype), said.append, ranks)
    drawn = draws()
    tell(
        read=str(path.relative_to(folder)), by=f"{'ddp' if mesh is None else 'fsdp2'}-{ranks.size}",
        different=differences(parts, make_parts(dtype)), moved=addresses(parts) != before, said=said, drawn=drawn,
    )  # fmt: skip


def limited(function):
    """Let the disk of this rank be full while it writes its shard."""

    def call(*arguments):
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, before[1]))
        try:
            function(*arguments)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)

    return call


def killed(function):
    def call(*arguments):
        os.kill(os.getpid(), signal.SIGKILL)

    return call


def fail(folder, ranks, mesh):
    """A full disk on rank 1 while rank 0 has a good checkpoint already; then a rank is killed inside of a save."""
    dtype = DTYPES["fp32"]
    parts = make_parts(dtype, mesh)
    log = open_log(settings(folder), None, ranks)
    written = snapshot.write_tensors
    with log:
        checkpointer = Checkpointer(log.config, log, ranks)
        save(parts, checkpointer, dtype, 1)
        checkpointer.wait()
        snapshot.write_tensors = limited(written) if ranks.rank == 1 else written
        save(parts, checkpointer, dtype, 2)
        while True:  # the steps go on until the ranks have agreed that it failed
            try:
                checkpointer.check()
            except ValueError as error:
                tell(full=str(error), left=sorted(path.name for path in log.dir.iterdir() if "checkpoint" in path.name))
                break
        snapshot.write_tensors = killed(written) if ranks.rank == 3 else written
        save(parts, checkpointer, dtype, 3)
        try:
            checkpointer.wait()
        except RankLost as error:
            tell(lost=str(error), good=sorted(checkpoints(log.dir)))


if __name__ == "__main__":
    from tiny import tokenizer

    TOKENIZER, top, four = tokenizer(), Path(sys.argv[1]), join("cpu", 60)
    group = dist.new_group([0, 1], backend="gloo")
    two = Ranks(four.rank, 2, four.local_rank, group)
    runs = {4: (four, DeviceMesh("cpu", list(range(4)))), 2: (two, DeviceMesh("cpu", [0, 1]))}
    taking_part = [(count, *run) for count, run in runs.items() if four.rank < count]
    for name in DTYPES:
        for count, ranks, mesh in taking_part:
            write(top / f"{name}-ddp-{count}", name, ranks, None)
            write(top / f"{name}-fsdp2-{count}", name, ranks, mesh)
        four.any(False, "all checkpoints")
        for _, ranks, mesh in taking_part:
            for path in sorted(top.glob(f"{name}-*/checkpoint-3")):
                read(top, path, name, ranks, None)
                read(top, path, name, ranks, mesh)
    four.any(False, "all readings")
    fail(top / "failing", *runs[4])
    os._exit(0)  # the process group that has lost a rank cannot be left in order
