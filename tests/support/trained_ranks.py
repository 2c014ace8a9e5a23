"""What two ranks do in tests/whole/test_resume_ranks.py; their arguments are a folder, and for a killed run its moment.

FOLDER                          runs that crash and go on, and runs that do not
FOLDER RUN MODE RANKS MOMENT    one run, in which the named ranks kill themselves: as they begin an exchange of this
                                name, or the exchange of this number
"""

import os
import random
import shutil
import signal
import sys
from functools import partial
from pathlib import Path

import ranks as support
from resumed import Crash, crash, make_trainer

from fastgrpo.ranks import join
from fastgrpo.ranks.notes import Notes

STEPS = {
    "max_steps": 6,
    "save_steps": 2,
    "logging_steps": 1,
    "eval_steps": 3,
    "sync_ref_model": True,
    "ref_model_sync_steps": 2,
}


KILLS = 10


def share_of_a(completions, **_):
    """A reward that draws from no generator, which K ranks would have K of."""
    return [text.count("a") / max(len(text), 1) for text in completions]


def crashing(trainer_state, completions, **_):
    if trainer_state.global_step == 4 and len(completions) > 2:
        raise Crash
    return share_of_a(completions)


crashing.__name__ = "share_of_a"


def train(top, name, mode, **more):
    return make_trainer(top, name, parallel=mode, **{**STEPS, **more}).train()


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


def killed(top, run, mode, which, moment):
    """Go on with a run, but end some of its ranks by SIGKILL as they begin an exchange: one of a name, or a number."""
    enter, begun, there = Notes.enter, [], top / run
    print(
        f"begins with {sorted(path.name for path in there.glob('*checkpoint-*')) if there.exists() else []}", flush=True
    )

    def entered(notes, what):
        begun.append(what)
        if notes.rank in which and moment in (len(begun), what):
            os.kill(os.getpid(), signal.SIGKILL)
        enter(notes, what)

    Notes.enter = entered
    go_on(top, run, mode)


def cases(top, size):
    """What two ranks do, in this order."""
    runs = {mode: partial(same_ranks, top, mode) for mode in ("ddp", "fsdp2")}
    if size == "small":
        runs["from-ddp"] = partial(go_on, top, "from-ddp", "fsdp2")
        runs["from-fsdp2"] = partial(go_on, top, "from-fsdp2", "ddp")
        runs["two-to-one"] = partial(crashed, top, "two-to-one", "fsdp2", crashing)
        kills = [((1,), "the shards of checkpoint-4"), ((0, 1), "the digests of checkpoint-4"), ((), None)]
        return runs | {f"kill-{i}": partial(killed, top, "killed", "fsdp2", *kill) for i, kill in enumerate(kills)}
    rng = random.Random(0)
    for mode in ("ddp", "fsdp2"):
        for kill in range(KILLS):
            which = (0, 1) if kill % 2 else (rng.randrange(2),)
            runs[f"{mode}-kill-{kill}"] = partial(killed, top, f"killed-{mode}", mode, which, rng.randrange(1, 60))
        runs[f"{mode}-end"] = partial(killed, top, f"killed-{mode}", mode, (), None)
    return runs


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    support.fork(cases(folder / "runs", (folder / "size").read_text()), folder, count=2, at_once=1)
