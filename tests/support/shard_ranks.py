"""What the ranks of tests/run/test_shards.py do: they write, read and fail.

Line by line, a rank prints what it found, and the test reads that.
"""

import functools
import json
import os
import resource
import signal
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import Mock

import torch
from toy_parts import about, addresses, differences, draws, make_parts, settings, snapshot_of, trained_parts
from transformers import set_seed

from fastgrpo.ranks import RankLost, apart, together
from fastgrpo.run import checkpoint, snapshot
from fastgrpo.run.checkpoint import Checkpointer, checkpoints, write_checkpoint
from fastgrpo.run.log import open_log
from fastgrpo.run.snapshot import read_tensors, restore, write_tensors

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def tell(**what):
    print(json.dumps(what), flush=True)


def part_of(rank, errors):
    """Fail on some ranks, each with an error of its own; return the number of any other."""
    if rank in errors:
        raise errors[rank]("no")
    return rank


def parts_of_work(ranks):
    """Work that ranks do together in a thread, while the main thread exchanges things too."""
    other = apart(ranks, "test", 60)
    errors = []
    with ThreadPoolExecutor(1) as thread:
        done = thread.submit(lambda: [together(other, lambda: other.rank, "numbers") for _ in range(20)])
        assert [ranks.gather(ranks.rank, "numbers of the main thread") for _ in range(20)] == done.result()
    for failing in ({1: ValueError}, {1: KeyError, 3: KeyError}, dict.fromkeys(range(ranks.size), ValueError), {}):
        try:
            errors.append(together(other, functools.partial(part_of, other.rank, failing), "a part"))
        except Exception as error:
            cause = f", from {type(error.__cause__).__name__}" if isinstance(error, ValueError) else ""
            errors.append(f"{type(error).__name__}: {error}{cause}")
    tell(parts=errors)


def write(folder, name, ranks, mesh):
    dtype = DTYPES[name]
    parts = make_parts(dtype, mesh, ranks)
    set_seed(100 + ranks.rank)
    log = open_log(settings(folder), None, ranks)
    with log:
        taken = snapshot_of(parts, dtype, ranks)
        for weights in (parts["optimizer"].masters, parts["policy"].module.parameters()):
            for weight in weights:
                weight.data.zero_()  # training goes on
        assert write_checkpoint(log.folder, 3, taken.write, ranks) == folder / "checkpoint-3"


def read(folder, path, name, ranks, mesh):
    dtype, said = DTYPES[name], []
    parts = make_parts(dtype, mesh, ranks, seed=1, trained=False)
    before = addresses(parts)
    restore(parts, path, about(dtype), said.append, ranks)
    drawn = draws()
    tell(
        read=str(path.relative_to(folder)), by=f"{'ddp' if mesh is None else 'fsdp2'}-{ranks.size}",
        different=differences(parts, trained_parts(dtype)), moved=addresses(parts) != before, said=said, drawn=drawn,
    )  # fmt: skip


def go_on_or_not(folder, ranks, mesh):
    """After a save and a later line of the log, rank 2 refuses to resume, cannot resume, and then resumes."""
    dtype, unreadable = DTYPES["fp32"], Mock(side_effect=OSError(5, "Input/output error"))
    log = open_log(settings(folder), None, ranks)
    parts = make_parts(dtype, mesh, ranks) | {"log": log}
    with log:
        log.write(1, {"reward": 1.0})
        taken = snapshot_of(parts, dtype, ranks)
        path = write_checkpoint(log.folder, 1, taken.write, ranks)
        log.write(2, {"reward": 1.0})
        for refused in ("model", "shards", None):
            mine, what = about(dtype), refused if ranks.rank == 2 else None
            mine["model_digest"] += "another" if what == "model" else ""
            snapshot.read_tensors = unreadable if what == "shards" else read_tensors
            try:
                restore(parts, path, mine, lambda line: None, ranks)
                error = None
            except ValueError as failure:
                error = str(failure)
            ranks.any(False, "the end of what rank 0 writes")
            lines = (log.dir / "metrics.jsonl").read_text().splitlines()
            ranks.any(False, "what was read")
            tell(refused=refused, error=error, steps=[json.loads(line)["step"] for line in lines])


def limited(*arguments):
    """Write a shard while the disk of this rank is full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, before[1]))
    try:
        write_tensors(*arguments)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def fail(folder, ranks, mesh):
    """After a good save: a rank that does not see the folder, a full disk, a rank that is killed while it writes."""
    dtype = DTYPES["fp32"]
    parts = make_parts(dtype, mesh, ranks)
    log = open_log(settings(folder), None, ranks)
    with log:
        checkpointer = Checkpointer(log.config, log, ranks)
        save = functools.partial(checkpointer.save, take=lambda: snapshot_of(parts, dtype, checkpointer.ranks))
        save(1)
        checkpointer.wait()
        seen = checkpoint._see
        if ranks.rank == 2:  # as if it were on a machine with a disk of its own
            checkpoint._see = lambda path: seen(path / "elsewhere")
        save(2)
        try:
            checkpointer.wait()
        except ValueError as error:
            tell(unseen=str(error))
        checkpoint._see = seen
        snapshot.write_tensors = limited if ranks.rank == 1 else write_tensors
        save(3)
        while True:  # the steps go on until the ranks have agreed that it failed
            try:
                checkpointer.check()
            except ValueError as error:
                tell(full=str(error), left=sorted(path.name for path in log.dir.iterdir() if "checkpoint" in path.name))
                break
        snapshot.write_tensors = (lambda *_: os.kill(os.getpid(), signal.SIGKILL)) if ranks.rank == 3 else write_tensors
        save(4)
        try:
            checkpointer.wait()
        except RankLost as error:
            tell(lost=str(error), good=sorted(checkpoints(log.dir)))
