"""A sweep: one run after another, for each combination of settings and each seed, with one table and one picture.

    --sweep num_generations=2,4,8 --sweep learning_rate=1e-4,4e-4 --sweep_seeds 0,1,2

makes 18 runs, each in its own process and folder, with its output in a .log of the same name. sweep.csv has a line per
finished run, and sweep.png shows their curves. Finished runs are kept, and stopped ones resume.
"""

import contextlib
import csv
import ctypes
import hashlib
import itertools
import json
import re
import signal
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, fields
from pathlib import Path
from typing import NamedTuple

from fastgrpo.config.fields import check_name
from fastgrpo.config.recipe import parse, take_flags
from fastgrpo.config.settings import TrainConfig
from fastgrpo.run.curves import WINDOW, moving_average, read_metrics
from fastgrpo.run.folder import SWEEP_TABLE, claim_output_dir, contents, made_in
from fastgrpo.run.signals import StopSignals
from fastgrpo.run.terminal import Terminal

FLAGS = ("--sweep", "--sweep_seeds")
LIBC = ctypes.CDLL(None)
COMMAND = (sys.executable, "-m", "fastgrpo.train")
OWN = ("output_dir", "overwrite_output_dir", "resume_from_checkpoint")  # a sweep sets these for its runs
AGAIN = "to continue it, repeat the command with --output_dir"
FIGURES = ("accuracy_before", "accuracy_after", "reward", "steps", "num_tokens", "wall_seconds")


class SweepRun(NamedTuple):
    """One run: its swept settings without the seed, the name of its folder, its arguments and its settings."""

    setting: str
    name: str
    argv: list[str]
    config: TrainConfig


def take_sweep(argv: list[str]) -> list[SweepRun] | None:
    """Parse the flags of a sweep, and validate the settings of all runs. Returns None without these flags."""
    rest, given = take_flags(argv, "--sweep")
    rest, seeds = take_flags(rest, "--sweep_seeds")
    grid, runs = {}, []
    for text in [*given, *(f"seed={text}" for text in seeds)]:
        name, equals, values = text.partition("=")
        if not equals or name in grid:
            raise ValueError(f"--sweep takes each NAME=VALUE,VALUE once, as in --sweep beta=0,0.1, got {text!r}")
        check_name(name, TrainConfig, "--sweep", ValueError)
        grid[name] = list(dict.fromkeys(values.split(",")))
    for name in (*grid, *OWN[1:]) if grid else ():
        if name in grid.keys() & OWN or any(word.partition("=")[0] == f"--{name}" for word in rest):
            raise ValueError(f"{name} is set by the sweep itself; leave it out")
    for values in itertools.product(*grid.values()) if grid else ():
        parts = [f"{name}={value}" for name, value in zip(grid, values, strict=True)]
        title = ",".join(parts)
        own = [word for name, value in zip(grid, values, strict=True) for word in (f"--{name}", *value.split())]
        name = re.sub(r"[^\w.,=+-]+", "-", title, flags=re.ASCII)[:120]
        name += "" if name == title else "-" + hashlib.sha256(title.encode()).hexdigest()[:8]
        config = parse([*rest, *own])
        if all(config != run.config for run in runs):  # 0 and 0.0 are one run
            setting = ",".join(part for part, swept in zip(parts, grid, strict=True) if swept != "seed")
            runs.append(SweepRun(setting, name, [*rest, *own], config))
    return runs or None


def run_sweep(runs: list[SweepRun]) -> None:
    """Make the unfinished runs, and write the table and the picture."""
    config, path, failed = runs[0].config, Path(runs[0].config.output_dir or ""), []
    if config.output_dir and path.is_dir() and contents(path) and SWEEP_TABLE not in made_in(path):
        raise ValueError(f"output_dir {path} is not empty and holds no sweep to continue; choose another folder")
    terminal = Terminal(bars=not config.disable_tqdm, quiet=config.quiet)
    with contextlib.closing(claim_output_dir(config.output_dir, f"sweep-{config.task}", resume=True)) as folder:
        folder.claim(SWEEP_TABLE)
        waiting = [run for run in runs if figures_of(run, folder.path) is None]
        terminal.say(f"sweep folder {folder.path}: {len(runs)} runs, {len(runs) - len(waiting)} of them done already")
        terminal.progress(len(runs), "sweep", done=len(runs) - len(waiting))
        with StopSignals() as stop:
            for run in waiting:
                if not stop and (problem := _make(run, folder, stop)):
                    terminal.last(problem)
                    failed.append(run.name)
                if stop:
                    break
                terminal.advance()
        terminal.close_bar()
        _report(runs, folder, terminal)
    if stop:
        terminal.last(f"the sweep was stopped; {AGAIN} {folder.path}")
        stop.leave()
    if failed:
        raise ValueError(f"{len(failed)} of {len(runs)} runs failed: {', '.join(failed)}; {AGAIN} {folder.path}")


def _make(run, folder, stop):
    """Make one run, and return its error, if any.

    It has its own process group, so it does not get Ctrl-C. It gets SIGTERM, and saves, when the sweep dies.
    """
    path = folder.path / run.name
    own = {"output_dir": path, "resume_from_checkpoint": "auto", "overwrite_output_dir": False, "quiet": False}
    command = [*COMMAND, *run.argv, *(str(word) for name, value in own.items() for word in (f"--{name}", value))]
    with open(folder.claim(f"{run.name}.log"), "ab") as log:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, process_group=0, preexec_fn=_end_with_sweep
        )
    try:
        while process.poll() is None and not stop:
            time.sleep(0.05)
    finally:
        process.terminate()  # the run saves and ends
    if process.wait() == 0 or stop:
        return None
    last = (folder.path / f"{run.name}.log").read_text(errors="replace").rstrip().splitlines()[-3:]
    return "\n  ".join([f"{run.name}: failed with exit code {process.returncode}; the end of {path}.log:", *last])


def _end_with_sweep():
    LIBC.prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG


def figures_of(run: SweepRun, folder: Path) -> dict[str, float | None] | None:
    """Read the figures of a run. Returns None unless it has finished with these settings."""
    settings, summary = folder / run.name / "config.json", folder / run.name / "summary.json"
    try:  # config.json is written at each start and resume, summary.json at the end
        before, figures = json.loads(settings.read_text()), json.loads(summary.read_text())
        now = json.loads(json.dumps(asdict(run.config)))  # tuples are lists there
        rewards = read_metrics(folder / run.name, lambda _: None).get("reward", ([], []))[1][-WINDOW:]
        figures["reward"] = round(statistics.mean(rewards), 4) if rewards else None
        default = {field.name: field.default for field in fields(run.config)}  # for settings newer than config.json
        named = now.keys() - {*OWN, "quiet", "disable_tqdm"}
        done = all(before.get(name, default[name]) in (now[name], getattr(run.config, name)) for name in named)
        done = done and summary.stat().st_mtime_ns >= settings.stat().st_mtime_ns
        return {name: figures[name] for name in FIGURES} if done else None
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return None


def _report(runs, folder, terminal):
    """Write and print sweep.csv, and plot mean and standard deviation over the seeds of each setting."""
    from matplotlib.figure import Figure

    done = [(run, figures) for run in runs if (figures := figures_of(run, folder.path))]
    lines = [["setting", "seed", *FIGURES], *([r.setting, r.config.seed, *figures.values()] for r, figures in done)]
    with open(folder.path / SWEEP_TABLE, "w", newline="") as file:
        csv.writer(file).writerows(lines)
    terminal.columns([["" if cell is None else str(cell) for cell in line] for line in lines])
    groups = {run.setting: [folder.path / r.name for r, _ in done if r.setting == run.setting] for run, _ in done}
    figure = Figure(figsize=(12, 5), layout="constrained")
    for axis, (metric, window) in zip(figure.subplots(1, 2), (("reward", WINDOW), ("eval/accuracy", 1)), strict=True):
        for setting, paths in groups.items():
            series = [read_metrics(path, terminal.say).get(metric, ([], [])) for path in paths]
            curves = [dict(zip(steps, moving_average(values, window), strict=True)) for steps, values in series]
            steps = sorted(set.intersection(*map(set, curves)))  # steps of all runs of the setting
            means = [statistics.mean(curve[step] for curve in curves) for step in steps]
            several = len(paths) > 1  # one run has no deviation
            widths = [statistics.stdev(curve[step] for curve in curves) for step in steps] if several else None
            label = f"{setting} ({len(paths)} runs)" if several else setting
            axis.errorbar(steps, means, widths, fmt="o-" if len(steps) == 1 else "-", label=label, elinewidth=0.5)
        average = f", moving average over {window} logged steps" if window > 1 else ""
        axis.set(title=metric, xlabel="step", ylabel=f"mean over seeds{average}")
        axis.legend(*axis.get_legend_handles_labels(), fontsize="small")
    figure.savefig(folder.claim("sweep.png"), dpi=100)
    terminal.last(f"table {folder.path / SWEEP_TABLE}, picture {folder.path / 'sweep.png'}")
