"""Runs of several ranks that end early, by an error or by SIGKILL, and go on: on the same ranks to the last bit."""

import random

import pytest
import tiny
import torch
from paths import ROOT
from rank_processes import run_ranks
from resumed import assert_same_run, make_trainer, untimed
from safetensors.torch import load_file
from trained_ranks import STEPS, share_of_a

from fastgrpo.run.checkpoint import checkpoints, verify

SCRIPT = ROOT / "tests" / "support" / "trained_ranks.py"
pytestmark = pytest.mark.usefixtures("without_curves")


def ended(top, *arguments, codes=(0, 0)):
    """What two ranks said that have ended with these exit codes."""
    finished = run_ranks(SCRIPT, 2, top, *arguments)
    said = "\n".join(text for _, text in finished)
    assert [code for code, _ in finished] == list(codes), said
    return said


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    top = tmp_path_factory.mktemp("ranks")
    tiny.save(top / "model")
    return top, ended(top)


@pytest.mark.parametrize("mode", ["ddp", "fsdp2"])
def test_the_same_ranks_go_on_to_the_last_bit(two, mode):
    top, _ = two
    assert_same_run(top / mode, top / f"{mode}-whole")


def assert_close(run, whole, steps=2):
    """The last steps of two runs, and where they came to, are the same within rounding."""
    rows = [[row for row in untimed(folder) if row["step"] > 4] for folder in (run, whole)]
    assert len(rows[0]) >= steps
    for mine, theirs in zip(*rows, strict=True):
        for name, value in theirs.items():
            assert mine[name] == pytest.approx(value, rel=1e-3, abs=1e-5), name
    weights = [load_file(folder / "checkpoint-6" / "model.safetensors") for folder in (run, whole)]
    for name, value in weights[1].items():
        torch.testing.assert_close(weights[0][name], value, rtol=0, atol=3e-5, msg=lambda text, n=name: f"{n}: {text}")


def test_sharded_runs_go_on_whole_and_whole_ones_sharded(two):
    top, said = two
    assert said.count("warning: checkpoint-4 was written by 2 processes with") == 2
    assert_close(top / "from-ddp", top / "ddp-whole")
    assert_close(top / "from-fsdp2", top / "fsdp2-whole")


def test_one_process_goes_on_from_two_and_comes_to_where_it_would_alone(two, tmp_path, capsys):
    top, _ = two
    make_trainer(top, "one-whole", share_of_a, **STEPS).train()
    make_trainer(top, "two-to-one", share_of_a, seed=1, resume_from_checkpoint="auto", **STEPS).train()
    assert "checkpoint-4 was written by 2 processes with fsdp2, and goes on with one process" in capsys.readouterr().out
    assert_close(top / "two-to-one", top / "one-whole")


def test_kills_inside_of_saves_cost_nothing_that_was_saved(two):
    """One rank while both write checkpoint-4; then both before it gets its name; then the run goes on to its end."""
    top, _ = two
    run = top / "killed"
    ended(top, "killed", "fsdp2", "1", "the shards of checkpoint-4", codes=(1, -9))
    assert list(checkpoints(run)) == [2] and list(run.glob(".tmp-*"))
    ended(top, "killed", "fsdp2", "0,1", "the digests of checkpoint-4", codes=(-9, -9))
    verify(run / "checkpoint-2", of_run=True)
    assert list(checkpoints(run)) == [2] and list(run.glob(".tmp-*"))
    ended(top, "killed", "fsdp2", "", "never")
    assert not list(run.glob(".tmp-*"))
    assert_same_run(run, top / "fsdp2-whole")


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["ddp", "fsdp2"])
def test_kills_at_random_moments_change_nothing(two, mode):
    top, rng = two[0], random.Random(0)
    for kill in range(10):
        which = "0,1" if kill % 2 else str(rng.randrange(2))
        codes = [code for code, _ in run_ranks(SCRIPT, 2, top, "random", mode, which, str(rng.randrange(1, 60)))]
        assert [codes[int(rank)] for rank in which.split(",")] == [-9] * len(which.split(","))
        for path in checkpoints(top / "random").values() if (top / "random").exists() else ():
            verify(path, of_run=True)
    ended(top, "random", mode, "", "never")
    assert_same_run(top / "random", top / f"{mode}-whole")
