"""What two ranks do in tests/whole/test_resume_ranks.py; their arguments are a folder, and for a killed run its moment.

FOLDER                          runs that crash and go on, and runs that do not
FOLDER RUN MODE RANKS MOMENT    one run, in which the named ranks kill themselves: as they begin an exchange of this
                                name, or the exchange of this number
"""

import os
import shutil
import signal
import sys
from pathlib import Path

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


def all_runs(top):
    ranks = join("cpu")
    for mode in ("ddp", "fsdp2"):
        train(top, f"{mode}-whole", mode)
        crashed(top, mode, mode, crash(5))
        if ranks.lead:
            shutil.copytree(top / mode, top / f"from-{mode}")
        go_on(top, mode, mode)
    go_on(top, "from-ddp", "fsdp2")
    go_on(top, "from-fsdp2", "ddp")
    crashed(top, "two-to-one", "fsdp2", crashing)


def killed(ranks, moment):
    """End this process by SIGKILL as it begins an exchange: one of this name, or of this number."""
    enter, begun = Notes.enter, []

    def entered(notes, what):
        begun.append(what)
        if str(notes.rank) in ranks.split(",") and (what.startswith(moment) or str(len(begun)) == moment):
            os.kill(os.getpid(), signal.SIGKILL)
        enter(notes, what)

    Notes.enter = entered


if __name__ == "__main__":
    folder, *rest = sys.argv[1:]
    if rest:
        run, parallel, which, when = rest
        killed(which, when)
        go_on(Path(folder), run, parallel)
    else:
        all_runs(Path(folder))
