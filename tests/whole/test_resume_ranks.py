"""Runs of several ranks that end early, by an error or by SIGKILL, and go on: on the same ranks to the last bit.

As a script it forks two ranks; the arguments are a folder, the folder of the runs, and one of SIZES.
"""

import os
import random
import shutil
import signal
import sys
import threading
from collections import Counter
from functools import partial
from pathlib import Path

import pytest
import tiny
import torch
from ranks import LIMIT, fork, forked
from resumed import Crash, assert_same_run, crash, make_trainer, untimed
from safetensors.torch import load_file

from fastgrpo.ranks import Ranks, join

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("without_curves")]
STEPS = {
    "max_steps": 6, "save_steps": 2, "logging_steps": 1, "eval_steps": 3, "sync_ref_model": True,
    "ref_model_sync_steps": 2,
}  # fmt: skip
MODES = ("ddp", "fsdp2")
KILLS = 10
DOINGS = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree"}  # as Python names them to hooks
CASE = 2 * LIMIT  # seconds that one case may take, some runs on a busy machine


def train(top, name, mode, **more):
    make_trainer(top, name, parallel=mode, **{**STEPS, **more}).train()


def crashed(top, name, mode, reward):
    try:
        train(top, name, mode, reward=reward)
    except Crash:
        return
    raise AssertionError("it did not crash")


def go_on(top, name, mode, **more):
    train(top, name, mode, seed=1, resume_from_checkpoint="auto", **more)


def same_ranks(top, mode):
    """A run that nothing ends early; and one that crashes, of which there is a copy, and goes on."""
    train(top, f"{mode}-whole", mode)
    crashed(top, mode, mode, crash(5))
    if join("cpu").lead:
        shutil.copytree(top / mode, top / f"from-{mode}")
    go_on(top, mode, mode)


def killed(top, run, mode, which, kind, moment):
    """Go on with a run, but end some of its ranks by SIGKILL as they begin an exchange or do something to a file."""
    there, lock, begun = top / run, threading.Lock(), Counter()
    mine = int(os.environ["RANK"]) in which

    def reached(of_kind):
        with lock:
            begun[of_kind] += 1
            if mine and kind == of_kind and begun[of_kind] >= moment:
                os.kill(os.getpid(), signal.SIGKILL)

    waiting, fsync = Ranks.waiting, os.fsync

    def entered(ranks, what):
        if ranks.size > 1:
            reached("exchange")
        return waiting(ranks, what)

    def synced(descriptor):
        reached("file")
        fsync(descriptor)

    def audited(event, arguments):
        if event in DOINGS and isinstance(arguments[0], (str, Path)) and there in Path(arguments[0]).parents:
            reached("file")

    if which:
        Ranks.waiting, os.fsync = entered, synced
        sys.addaudithook(audited)
    go_on(top, run, mode)


def small(top):
    runs = {mode: partial(same_ranks, top, mode) for mode in MODES}
    runs["from-ddp"] = partial(go_on, top, "from-ddp", "fsdp2")
    return runs | {"from-fsdp2": partial(go_on, top, "from-fsdp2", "ddp")}


def kills(top):
    """Runs of either kind, each of which is killed at numbers of exchanges and of doings with files, in turns."""
    rng, runs = random.Random(0), {}
    for mode in MODES:
        runs[f"{mode}-whole"] = partial(train, top, f"{mode}-whole", mode)
        for kill in range(KILLS):
            kind, most = (("file", 200), ("exchange", 60))[kill % 2]
            which = (0, 1) if kill % 4 < 2 else (rng.randrange(2) if kind == "exchange" else 0,)
            how = mode, which, kind, rng.randrange(1, most)
            runs[f"{mode}-kill-{kill}"] = partial(killed, top, f"killed-{mode}", *how)
        runs[f"{mode}-end"] = partial(killed, top, f"killed-{mode}", mode, (), None, None)
    return runs


SIZES = {"small": small, "kills": kills}


def started(folder, size):
    """Let ranks run all cases of a size: the folder of their runs, and a function of the end of a case."""
    top = folder / "runs"
    if not top.exists():
        tiny.save(top / "model")
    (folder / size).mkdir()
    return top, forked(__file__, folder / size, top, size, limit=CASE * (1 + len(SIZES[size](top))))


def assert_close(run, whole):
    """The last steps of two runs, and where they came to, are the same within rounding."""
    rows = [[row for row in untimed(folder) if row["step"] > 4] for folder in (run, whole)]
    assert len(rows[0]) >= 2
    for mine, theirs in zip(*rows, strict=True):
        for name, value in theirs.items():
            if not name.startswith("rollout/live"):  # how many sequences a rank draws at once, of those dealt to it
                assert mine[name] == pytest.approx(value, rel=1e-3, abs=1e-5), name
    weights = [load_file(folder / "checkpoint-6" / "model.safetensors") for folder in (run, whole)]
    for name, value in weights[1].items():
        torch.testing.assert_close(weights[0][name], value, rtol=0, atol=3e-5, msg=lambda text, n=name: f"{n}: {text}")


def test_resumes_bit_for_bit_in_the_same_mode_and_within_rounding_in_another(tmp_path):
    top, ended = started(tmp_path, "small")
    for case in ("ddp", "fsdp2", "from-ddp", "from-fsdp2"):
        codes, said = ended(case)
        assert codes == [0, 0], "\n".join(said)
    for mode, other in (("ddp", "fsdp2"), ("fsdp2", "ddp")):
        assert_same_run(top / mode, top / f"{mode}-whole")
        told = f"checkpoint-4 was written by 2 processes with {mode}, and continues with 2 processes with {other}: "
        assert [text.count(told) for text in ended(f"from-{mode}")[1]] == [1, 0]
        assert_close(top / f"from-{mode}", top / f"{mode}-whole")


@pytest.mark.parametrize("mode", MODES)
def test_kills_at_random_moments_change_nothing(many, mode):
    """A kill may hit no rank, where the run ends before; the first one hits, since the whole run is ahead of it."""
    top, ended = many
    codes = [ended(f"{mode}-kill-{kill}")[0] for kill in range(KILLS)]
    assert -9 in codes[0] and all(-9 in of_kill or of_kill == [0, 0] for of_kill in codes), codes
    assert not any(None in of_kill for of_kill in codes), codes
    assert ended(f"{mode}-end")[0] == [0, 0], ended(f"{mode}-end")[1]
    assert_same_run(top / f"killed-{mode}", top / f"{mode}-whole")


@pytest.fixture(scope="module")
def many(tmp_path_factory):
    return started(tmp_path_factory.mktemp("killed"), "kills")


if __name__ == "__main__":
    folder, top, size = sys.argv[1:]
    fork(SIZES[size](Path(top)), folder, count=2, at_once=1, limit=CASE)
