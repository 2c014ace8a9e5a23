"""Checkpoints of several ranks: any number of ranks reads them to the last bit, and what fails on one fails on all.

As a script, this file forks four ranks, which write, read and fail; the tests read what each printed, line by line.
"""

import functools
import json
import os
import pickle
import re
import resource
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from ranks import LIMIT, fork, forked
from safetensors.torch import load_file
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.device_mesh import DeviceMesh
from toy_parts import about, addresses, differences, draws, make_parts, settings, snapshot_of, trained_parts
from transformers import set_seed

from fastgrpo.ranks import RankLost, Ranks, apart, join, together
from fastgrpo.run import checkpoint, snapshot
from fastgrpo.run import folder as run_folder
from fastgrpo.run.checkpoint import MANIFEST, Checkpointer, checkpoints, verify, write_checkpoint
from fastgrpo.run.log import open_log
from fastgrpo.run.snapshot import read_tensors, restore, tensors_in, write_tensors

# By the writer; the fp32 model has tied embeddings.
DTYPES = {"one": torch.bfloat16, "ddp-2": torch.float32, "fsdp2-2": torch.bfloat16}
NAMES = {"one": "one process", "ddp-2": "2 processes with ddp", "fsdp2-2": "2 processes with fsdp2"}
READERS = {"fsdp2-2": tuple(NAMES), "ddp-2": ("fsdp2-2",), "fsdp2-4": ("fsdp2-2",)}  # the writers that each reads


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shards")
    top = folder / "runs"
    parts = make_parts(torch.bfloat16)
    set_seed(100)
    with open_log(settings(top / "one")) as log:
        write_checkpoint(log.folder, 3, snapshot_of(parts, torch.bfloat16).write)
    codes, said = forked(__file__, folder)("all")
    assert codes == [0, 0, 0, -9], "\n".join(said)
    return top, [[json.loads(line) for line in text.splitlines() if line.startswith("{")] for text in said]


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


def write(folder, dtype, ranks, mesh):
    parts = make_parts(dtype, mesh, ranks)
    set_seed(100 + ranks.rank)
    log = open_log(settings(folder), None, ranks)
    with log:
        taken = snapshot_of(parts, dtype, ranks)
        for weight in (*parts["optimizer"].masters, *parts["policy"].module.parameters()):
            weight.data.zero_()  # training goes on
        assert write_checkpoint(log.folder, 3, taken.write, ranks) == folder / "checkpoint-3"


def read(folder, path, dtype, ranks, mesh):
    said, parts = [], make_parts(dtype, mesh, ranks, seed=1, trained=False)
    before = addresses(parts)
    restore(parts, path, about(dtype), said.append, ranks)
    drawn = draws()
    tell(
        read=str(path.relative_to(folder)), by=f"{'ddp' if mesh is None else 'fsdp2'}-{ranks.size}",
        different=differences(parts, trained_parts(dtype)), moved=addresses(parts) != before, said=said, drawn=drawn,
    )  # fmt: skip


def go_on_or_not(folder, ranks, mesh):
    """After a save and a later line of the log, rank 2 refuses to resume, cannot resume, and then resumes."""
    dtype, unreadable = torch.float32, Mock(side_effect=OSError(5, "Input/output error"))
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
    dtype, parts = torch.float32, make_parts(torch.float32, mesh, ranks)
    log = open_log(settings(folder), None, ranks)
    with log:
        checkpointer = Checkpointer(log.config, log, ranks)
        save = functools.partial(checkpointer.save, take=lambda: snapshot_of(parts, dtype, checkpointer.ranks))
        save(1)
        checkpointer.wait()
        seen, run_folder.SEEN_AFTER = checkpoint.see, 1
        if ranks.rank == 2:  # as if it were on a machine with a disk of its own
            checkpoint.see = lambda path: seen(path / "elsewhere")
        save(2)
        try:
            checkpointer.wait()
        except ValueError as error:
            tell(unseen=str(error))
        checkpoint.see = seen
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


def all_ranks(top):
    """Four ranks, the first two of which are also a run of their own, write, read and fail."""
    four = join("cpu", 60)
    two = Ranks(four.rank, 2, dist.new_group([0, 1], backend="gloo"))
    runs = {4: (four, DeviceMesh("cpu", list(range(4)))), 2: (two, DeviceMesh("cpu", [0, 1]))}
    parts_of_work(four)
    if four.rank < 2:
        write(top / "ddp-2", DTYPES["ddp-2"], two, None)
        write(top / "fsdp2-2", DTYPES["fsdp2-2"], *runs[2])
    four.any(False, "all checkpoints")
    for reader, writers in READERS.items():
        mode, count = reader.split("-")
        ranks, mesh = runs[int(count)]
        for writer in writers if four.rank < ranks.size else ():
            path = top / writer / "checkpoint-3"
            read(top, path, DTYPES[writer], ranks, mesh if mode == "fsdp2" else None)
    four.any(False, "all readings")
    go_on_or_not(top / "refusing", *runs[4])
    fail(top / "failing", *runs[4])


def test_a_failure_on_one_rank_fails_all_ranks(ranks):
    for rank, lines in enumerate(ranks[1]):
        (parts,) = [line["parts"] for line in lines if "parts" in line]
        first = f"ValueError: rank 1: no, from {'ValueError' if rank == 1 else 'NoneType'}"
        lost = f"RankLost: rank {rank} stops after a part: rank 1 failed: KeyError: 'no'; rank 3 failed: KeyError: 'no'"
        mistake = "KeyError: 'no'" if rank in (1, 3) else lost
        assert parts == [first, mistake, "ValueError: no, from ValueError", [0, 1, 2, 3]]


def test_any_number_of_ranks_reads_what_any_other_wrote(ranks):
    found = {}
    for rank, line in [(rank, line) for rank, lines in enumerate(ranks[1]) for line in lines if "read" in line]:
        found[rank, line["by"], line["read"].removesuffix("/checkpoint-3")] = line
    assert found.keys() == {
        (rank, reader, writer) for reader, writers in READERS.items() for writer in writers
        for rank in range(int(reader[-1]))
    }  # fmt: skip
    for (rank, reader, writer), line in found.items():
        assert line["different"] == [] and not line["moved"], (rank, reader, writer)
        warning = f"warning: checkpoint-3 was written by {NAMES[writer]}, and continues with "
        assert [said.startswith(warning) for said in line["said"]] == [True] * (reader != writer)
        set_seed(100 + rank if rank < (1 if writer == "one" else 2) else 5 + rank)
        assert tuple(line["drawn"]) == draws(), (rank, writer)


@pytest.mark.parametrize("writer", NAMES)
def test_one_process_reads_what_any_number_of_ranks_wrote(ranks, writer):
    dtype, said = DTYPES[writer], []
    path, parts = ranks[0] / writer / "checkpoint-3", make_parts(dtype, seed=1, trained=False)
    before = addresses(parts)
    restore(parts, path, about(dtype), said.append)
    drawn = draws()
    assert differences(parts, trained_parts(dtype)) == [] and addresses(parts) == before
    assert [line.partition(",")[0] for line in said] == (
        [] if writer == "one" else [f"warning: checkpoint-3 was written by {NAMES[writer]}"]
    )
    set_seed(100)
    assert drawn == draws()


@pytest.mark.parametrize("writer", NAMES)
def test_the_export_is_the_same_and_every_file_is_listed(ranks, writer):
    path, dtype = ranks[0] / writer / "checkpoint-3", DTYPES[writer]
    verify(path, of_run=True)
    weights, whole = load_file(path / "model.safetensors"), trained_parts(dtype)["policy"].state_dict()
    missing = {"lm_head.weight"} if writer == "ddp-2" else set()  # it is tied
    assert weights.keys() == whole.keys() - missing and all(torch.equal(weights[name], whole[name]) for name in weights)
    there = {str(file.relative_to(path)) for file in path.rglob("*") if file.is_file()}
    assert set(json.loads((path / MANIFEST).read_text())["files"]) == there - {MANIFEST}
    own = {f"shards/{name}" for rank in (0, 1) for name in (f"rng-{rank}.pt", f"__{rank}_0.distcp")}
    state = json.loads((path / "trainer_state.json").read_text())
    assert writer == "one" or (own <= there and (state["parallel"], state["ranks"]) == (writer.partition("-")[0], 2))


NAMING = b"ctorch.distributed.checkpoint.metadata\n%s\n."


@pytest.mark.parametrize("content, why", [
    (b"cbuiltins\nprint\n(S'this was called'\ntR.", "it names builtins.print, which a list of tensors never contains"),
    (NAMING % b"dataclass", r"it names torch\.\S*\.dataclass"),  # which runs the names of fields as source
    (NAMING % b"BytesStorageMetadata", r"it names torch\.\S*\.BytesStorageMetadata"),
    (pickle.dumps(Metadata({"weights": StorageMeta()})), "weights is not a tensor"),
])  # fmt: skip
def test_rejects_a_forged_list_of_tensors(tmp_path, content, why, capsys):
    (tmp_path / ".metadata").write_bytes(content)
    with pytest.raises(ValueError, match=rf"\.metadata cannot be read: .*{why}"):
        tensors_in(tmp_path)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    "refused, why",
    [("model", "rank 2: the weights at model_name_or_path"), ("shards", r"rank 2: \[Errno 5"), (None, None)],
)
def test_the_log_is_truncated_only_if_every_rank_resumes(ranks, refused, why):
    for lines in ranks[1]:
        (line,) = [line for line in lines if line.get("refused", "") == refused]
        assert (line["error"] is None) if why is None else re.search(why, line["error"])
        assert line["steps"] == ([1] if why is None else [1, 2])


@pytest.mark.parametrize("case, told", [
    ("unseen", "checkpoint-2 could not be written.*rank 2: "),
    ("full", r"checkpoint-3 could not be written.*rank 1: \[Errno 27\].*checkpoint-1 is the newest good one"),
])  # fmt: skip
def test_a_rank_that_cannot_write_fails_the_save_on_all(ranks, case, told):
    said = [line for lines in ranks[1] for line in lines if case in line]
    assert len(said) == 4 and len({line[case] for line in said[1:]}) == 1
    for line in said:
        assert re.search(told, line[case], re.DOTALL) and len(re.findall(r"rank \d: ", line[case])) == 1
    assert said[0].get("left", ["checkpoint-1"]) == ["checkpoint-1"]  # rank 0 has removed the rest


def test_a_kill_during_a_save_keeps_earlier_checkpoints(ranks):
    said = [line for lines in ranks[1] for line in lines if "lost" in line]
    assert len(said) == 3  # the fourth was killed
    for line in said:
        assert "the shards of checkpoint-4" in line["lost"] and line["good"] == [1]
    verify(ranks[0] / "failing" / "checkpoint-1", of_run=True)


if __name__ == "__main__":
    body = functools.partial(all_ranks, Path(sys.argv[1]) / "runs")
    fork({"all": body}, sys.argv[1], count=4, limit=5 * LIMIT)
