"""What ranks do in tests/whole/test_resume_ranks.py; the arguments are a folder, that of the runs, and a size.

killed         a run whose two ranks are killed inside of saves
small          runs that crash and go on, and runs that do not, on two ranks
kills          runs whose two ranks are killed again and again
crashed-COUNT  runs that crash on so many ranks, and on-COUNT those that go on on so many
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

import ranks as support
from resumed import Crash, crash, make_trainer

from fastgrpo.ranks import Ranks, join

STEPS = {
    "max_steps": 6, "save_steps": 2, "logging_steps": 1, "eval_steps": 3, "sync_ref_model": True,
    "ref_model_sync_steps": 2,
}  # fmt: skip
KILLS = 10
CHANGES = ((1, 2), (1, 4), (2, 1), (2, 4), (4, 2))  # numbers of processes that begin a run, and that go on
DOINGS = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree"}  # as Python names them to hooks
CASE = 2 * support.LIMIT  # seconds that one case may take, some runs on a busy machine


def share_of_a(completions, **_):
    """A reward that draws from no generator, which K ranks would have K of."""
    return [text.count("a") / max(len(text), 1) for text in completions]


def crashing(trainer_state, completions, **_):
    if trainer_state.global_step == 4 and len(completions) > 2:
        raise Crash
    return share_of_a(completions)


crashing.__name__ = "share_of_a"


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


def killed(top, run, mode, which, kind, moment, **more):
    """Go on with a run, but end some of its ranks by SIGKILL at a moment, whichever thread comes to it.

    `kind` is "exchange", as a rank begins one, or "file", as it does something to the files of the run. `moment` is its
    name, or its number, which is passed where the run ends before.
    """
    there, lock, begun = top / run, threading.Lock(), Counter()
    found = sorted(path.name for path in there.glob("*checkpoint-*")) if there.exists() else []
    print(f"begins with {found}", flush=True)
    mine = int(os.environ["RANK"]) in which

    def reached(of_kind, what):
        with lock:
            begun[of_kind] += 1
            now = moment == what if isinstance(moment, str) else begun[of_kind] >= moment
            if mine and kind == of_kind and now:
                os.kill(os.getpid(), signal.SIGKILL)

    waiting, fsync = Ranks.waiting, os.fsync

    def entered(ranks, what):
        if ranks.size > 1:
            reached("exchange", " in ".join(reversed([*ranks._inside, what])))
        return waiting(ranks, what)

    def synced(descriptor):
        reached("file", "os.fsync")
        fsync(descriptor)

    def audited(event, arguments):
        if event in DOINGS and isinstance(arguments[0], (str, Path)) and there in Path(arguments[0]).parents:
            reached("file", f"{event} {Path(arguments[0]).name}")

    if which:
        Ranks.waiting, os.fsync = entered, synced
        sys.addaudithook(audited)
    go_on(top, run, mode, **more)


def kills_in_saves(top):
    kills = [
        ((1,), "exchange", "the shards of checkpoint-4"),
        ((0,), "file", "os.rename .tmp-checkpoint-4"),
        ((), None, None),
    ]
    whole = {"fsdp2-whole": partial(train, top, "fsdp2-whole", "fsdp2", max_steps=4)}
    killed_at = partial(killed, top, "killed", "fsdp2", max_steps=4)
    return whole | {f"kill-{i}": partial(killed_at, *kill) for i, kill in enumerate(kills)}


def small(top):
    runs = {mode: partial(same_ranks, top, mode) for mode in ("ddp", "fsdp2")}
    runs["from-ddp"] = partial(go_on, top, "from-ddp", "fsdp2")
    return runs | {"from-fsdp2": partial(go_on, top, "from-fsdp2", "ddp")}


def kills(top):
    """Runs of either kind, each of which is killed at numbers of exchanges and of doings with files, in turns."""
    rng, runs = random.Random(0), {}
    for mode in ("ddp", "fsdp2"):
        runs[f"{mode}-whole"] = partial(train, top, f"{mode}-whole", mode)
        for kill in range(KILLS):
            kind, most = (("file", 200), ("exchange", 60))[kill % 2]
            which = (0, 1) if kill % 4 < 2 else (rng.randrange(2) if kind == "exchange" else 0,)
            runs[f"{mode}-kill-{kill}"] = partial(
                killed, top, f"killed-{mode}", mode, which, kind, rng.randrange(1, most)
            )
        runs[f"{mode}-end"] = partial(killed, top, f"killed-{mode}", mode, (), None, None)
    return runs


def changed(top, size):
    """The runs that crash on a number of ranks, or that go on on one."""
    what, _, count = size.partition("-")
    runs = [(f"{before}-{after}-{mode}", mode, before, after) for before, after in CHANGES for mode in ("ddp", "fsdp2")]
    if what == "crashed":
        return {name: partial(crashed, top, name, mode, crashing) for name, mode, n, _ in runs if n == int(count)}
    return {name: partial(go_on, top, name, mode, reward=share_of_a) for name, mode, _, n in runs if n == int(count)}


def cases(top, size):
    """What the ranks do, by the name of the case, in this order."""
    made = {"killed": kills_in_saves, "small": small, "kills": kills}
    return made[size](top) if size in made else changed(top, size)


if __name__ == "__main__":
    folder, top, size = sys.argv[1:]
    count = int(size.partition("-")[2] or 2)
    support.fork(cases(Path(top), size), folder, count=count, at_once=1, limit=CASE)
