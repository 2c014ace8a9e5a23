"""Runs that are stopped and go on: a reward that draws from every generator, and what two runs must share."""

import functools
import json
import random
import re
from unittest.mock import Mock

import numpy
import runs
import tiny
import torch

from fastgrpo.data.sources import Curriculum, Level, ShuffledRows
from fastgrpo.run.checkpoint import SHARDS, checkpoints
from fastgrpo.run.snapshot import tensors_in


def noisy(completions, log_metric, **columns):
    """A learnable reward that draws from every global generator."""
    log_metric("drawn", random.gauss(0, 1) + numpy.random.rand() + torch.rand(()).item())
    return [text.count("a") / max(len(text), 1) + 0.1 * random.random() for text in completions]


def curriculum():
    rows = [{"prompt": text} for text in ("ab", "c", "hello ", "1+1=", "?")]
    short = Level("short", ShuffledRows(rows[:2], seed=1), until_accuracy=float("-inf"))  # for 3 steps
    return Curriculum([short, Level("all", ShuffledRows(rows, seed=1))])


def make_trainer(tmp_path, name, reward=noisy, seed=0, **settings):
    """A run of 8 steps; `seed` stands for whatever else the process did with the global generators."""
    defaults = {
        "output_dir": str(tmp_path / str(name)), "max_steps": 8, "learning_rate": 3e-3, "lr_scheduler_type": "cosine",
        "warmup_steps": 3, "beta": 0.05, "num_iterations": 2, "logging_steps": 3, "eval_steps": 4, "save_steps": 2,
        "dtype": "float32", "model": str(tmp_path / "model"),
    }  # fmt: skip
    if not (tmp_path / "model").exists():
        tiny.save(tmp_path / "model")
    random.seed(seed), numpy.random.seed(seed), torch.manual_seed(seed)
    rows = [{"prompt": text} for text in ("x", "yz")]
    return runs.make_trainer(tmp_path, reward, curriculum(), rows, **{**defaults, **settings})


def acting(step, act):
    """`noisy`, which first calls `act` in one step; 0 is the evaluation before the first."""

    @functools.wraps(noisy)
    def acts(trainer_state, completions, **arguments):
        evaluation = len(completions) == 2
        if (step, evaluation) in ((0, trainer_state.global_step == 0), (trainer_state.global_step + 1, False)):
            act()
        return noisy(completions=completions, **arguments)

    return acts


CLOCK = ("tokens/s", "rollout/tokens/s", "rollout/share", "sampler/idle_s", "mfu")  # and time/..., eval/time, step_time


def untimed(run):
    """metrics.jsonl without what a clock says."""
    return [
        {k: v for k, v in row.items() if "time" not in k and "latency" not in k and k not in CLOCK}
        for row in runs.lines(run)
    ]


WEIGHTS = {"model.safetensors", "adapter_model.safetensors"}


def assert_same_run(run, whole):
    """All that two runs left behind, times aside, is the same."""
    assert untimed(run) == untimed(whole)
    samples = [(folder / "samples.jsonl").read_bytes() for folder in (run, whole)]
    mine, theirs = (re.sub(rb'"latency_s": [^}]*', b"", text) for text in samples)
    assert mine == theirs
    (_, mine), (_, theirs) = checkpoints(run).popitem(), checkpoints(whole).popitem()
    assert mine.name == theirs.name
    for name in ("model.safetensors", "adapter_model.safetensors", "reference.pt", "../merged/model.safetensors"):
        one, other = ((folder / name).read_bytes() if (folder / name).exists() else None for folder in (mine, theirs))
        assert one == other, name
    if (mine / SHARDS).exists():
        assert_same_shards(mine / SHARDS, theirs / SHARDS)
    files = {path.name for path in mine.iterdir()}
    assert files == {path.name for path in theirs.iterdir()} and len(files & WEIGHTS) == 1
    summaries = [json.loads((folder / "summary.json").read_text()) for folder in (run, whole)]
    assert all(summary.pop(name) > 0 for summary in summaries for name in ("wall_seconds", "peak_memory_gib"))
    assert summaries[0] == summaries[1]


def assert_same_shards(mine, theirs):
    """What several ranks wrote is the same: masters, moments, a reference's weights, the schedule, all generators."""
    assert any(name.startswith("optimizer.exp_avg_sq.") for name in tensors_in(mine))
    own = [[path for path in folder.iterdir() if path.name != ".metadata"] for folder in (mine, theirs)]
    files, others = ({path.name: path.read_bytes() for path in paths} for paths in own)
    assert files.keys() == others.keys() > {"values.pt", "rng-0.pt", "rng-1.pt"}
    different = [name for name in files if files[name] != others[name]]
    assert not different, different


class Crash(KeyboardInterrupt):
    """The end of a run at once. All else that a reward function raises counts as its failure."""


def crash(step):
    """`noisy`, which fails in one step: everything since the last save is lost."""
    return acting(step, Mock(side_effect=Crash))
