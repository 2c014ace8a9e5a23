"""Runs that are stopped and go on: a reward that draws from every generator, and what two runs must share."""

import functools
import hashlib
import json
import os
import random

import numpy
import tiny
import torch

from fastgrpo import GRPOConfig, GRPOTrainer
from fastgrpo.data.sources import Curriculum, Level, ShuffledRows
from fastgrpo.run.checkpoint import MANIFEST, SHARDS, checkpoints
from fastgrpo.run.snapshot import _Reader, read_tensors


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
        "output_dir": str(tmp_path / str(name)), "max_steps": 8, "prompts_per_step": 4, "num_generations": 4,
        "max_completion_length": 6, "learning_rate": 3e-3, "lr_scheduler_type": "cosine", "warmup_steps": 3,
        "beta": 0.05, "num_iterations": 2, "logging_steps": 3, "eval_steps": 4, "save_steps": 2, "device": "cpu",
        "dtype": "float32", "gradient_checkpointing": False,
    }  # fmt: skip
    model, rows = tmp_path / "model", [{"prompt": text} for text in ("x", "yz")]
    if not model.exists():
        tiny.save(model)
    random.seed(seed), numpy.random.seed(seed), torch.manual_seed(seed)
    return GRPOTrainer(str(model), reward, GRPOConfig(**{**defaults, **settings}), curriculum(), rows)


def acting(step, act, reward=noisy):
    """The reward, which first calls `act` in one step; 0 is the evaluation before the first."""

    @functools.wraps(noisy)
    def acts(trainer_state, completions, **arguments):
        evaluation = len(completions) == 2
        if (step, evaluation) in ((0, trainer_state.global_step == 0), (trainer_state.global_step + 1, False)):
            act()
        return reward(completions=completions, **arguments)

    return acts


def signalled(step, number, reward=noisy):
    """The reward, which sends a signal to its own process during one step."""
    return acting(step, lambda: os.kill(os.getpid(), number), reward)


def lines(run, name="metrics.jsonl"):
    return [json.loads(line) for line in (run / name).read_text().splitlines()]


CLOCK = ("tokens/s", "rollout/tokens/s", "rollout/share", "mfu")  # with time/..., eval/time and step_time


def untimed(run):
    """metrics.jsonl without what a clock says."""
    return [{k: v for k, v in row.items() if "time" not in k and k not in CLOCK} for row in lines(run)]


WEIGHTS = {"model.safetensors", "adapter_model.safetensors"}


def assert_same_run(run, whole):
    """All that two runs left behind, times aside, is the same."""
    assert untimed(run) == untimed(whole)
    assert (run / "samples.jsonl").read_bytes() == (whole / "samples.jsonl").read_bytes()
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
    states = []
    for path in (mine, theirs):
        listed = _Reader(path).read_metadata().state_dict_metadata
        tensors = {name: torch.empty(entry.size, dtype=entry.properties.dtype) for name, entry in listed.items()}
        read_tensors(path, tensors)
        files = {file.name: torch.load(file, weights_only=True) for file in path.glob("*.pt")}
        states.append(tensors | files)
    assert states[0].keys() == states[1].keys() > {"values.pt", "rng-0.pt", "rng-1.pt"}
    assert any(name.startswith("optimizer.exp_avg_sq.") for name in states[0])
    different = [name for name, value in states[0].items() if not same(value, states[1][name])]
    assert not different, different


def same(mine, theirs):
    """Whether two values, which may hold tensors, are the same to the last bit."""
    if isinstance(mine, torch.Tensor):
        return mine.dtype == theirs.dtype and torch.equal(mine, theirs)
    if isinstance(mine, dict):
        return mine.keys() == theirs.keys() and all(same(value, theirs[name]) for name, value in mine.items())
    if isinstance(mine, (list, tuple)):
        return len(mine) == len(theirs) and all(map(same, mine, theirs))
    return mine == theirs


ADAPTERS = {"use_peft": True, "lora_r": 4, "lora_target_modules": "all-linear"}
MOVING = {"sync_ref_model": True, "ref_model_sync_steps": 2}


class Crash(KeyboardInterrupt):
    """The end of a run at once. All else that a reward function raises counts as its failure."""


def crash(step):
    """The reward, which fails in one step: everything since the last save is lost."""

    def fail():
        raise Crash

    return acting(step, fail)


def write_manifest(path):
    """List the files of a checkpoint folder anew, as they are now."""
    files = [file for file in sorted(path.rglob("*")) if file.is_file() and file.name != MANIFEST]
    found = {str(file.relative_to(path)): file.read_bytes() for file in files}
    entries = {name: {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()} for name, data in found.items()}
    (path / MANIFEST).write_text(json.dumps({"files": entries}))
