"""Runs a sweep: one process for each of its runs, in one folder, with a table and a picture of all of them.

    runs/sweep-arithmetic-1/num_generations=2,seed=0/       the folder of a run, as any other
    runs/sweep-arithmetic-1/num_generations=2,seed=0.log    what this run printed
    runs/sweep-arithmetic-1/sweep.csv, sweep.png            the figures of the runs that are done

A run that is done is not done again, and one that was stopped goes on from its newest checkpoint.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path

from fastgrpo.config.sweep import Sweep, SweepRun
from fastgrpo.config.validation import on_resume
from fastgrpo.run.folder import LOCK, SWEEP_TABLE, RunFolder, claim_output_dir, contents, made_in
from fastgrpo.run.signals import StopSignals
from fastgrpo.run.sweep_report import draw_sweep, figures_of, table_of, write_table
from fastgrpo.run.terminal import Terminal

PICTURE = "sweep.png"
COMMAND = (sys.executable, "-m", "fastgrpo.train")
POLL_SECONDS = 0.2
LAST_LINES = 3  # how much of a failed run's log is shown


def run_sweep(sweep: Sweep, runs: Sequence[SweepRun]) -> None:
    """Make the runs of a sweep that are not done yet, and report all of them."""
    folder, config = _claim(runs[0]), runs[0].config
    terminal = Terminal(bars=not config.disable_tqdm, quiet=config.quiet)
    try:
        waiting = [run for run in runs if not is_done(run, folder.path / run.name)]
        _refuse_running(folder.path / run.name for run in waiting)
        known = len(runs) - len(waiting)
        terminal.say(f"sweep folder {folder.path}: {len(runs)} runs, {known} of them done already")
        with StopSignals() as stop:
            failed = _Processes(folder, sweep.jobs, terminal).make(waiting, len(runs), stop)
            done = [run for run in runs if is_done(run, folder.path / run.name)]
            _report(folder, sweep, done, terminal)
        if stop:
            terminal.last("the sweep was stopped; the same command goes on with it" + _with_folder(runs[0], folder))
            stop.leave()
    finally:
        folder.close()
    if failed:
        again = "mend what their logs tell, and the same command makes them again" + _with_folder(runs[0], folder)
        raise ValueError(f"{len(failed)} of {len(runs)} runs failed: {', '.join(failed)}; {again}")


def _with_folder(run, folder):
    """Say which folder the command has to name, where it has named none."""
    return "" if run.config.output_dir else f", with --output_dir {folder.path}"


def _claim(run):
    """Claim the folder of the sweep. One that is there already must hold a sweep."""
    output_dir = run.config.output_dir
    if output_dir is not None:
        path = Path(output_dir)
        if path.is_dir() and contents(path) and SWEEP_TABLE not in made_in(path):
            raise ValueError(f"output_dir {path} is not empty and holds no sweep to go on with; choose another folder")
    folder = claim_output_dir(output_dir, f"sweep-{run.config.task}", resume=True)
    try:
        folder.claim(SWEEP_TABLE)
    except BaseException:
        folder.close()
        raise
    return folder


def _refuse_running(paths):
    """Refuse folders of runs that are alive. Runs outlive a sweep that was killed by SIGKILL."""
    for path in paths:
        if (path / LOCK).exists():
            RunFolder(path).close()  # this raises where a run holds it


def is_done(run: SweepRun, path: Path) -> bool:
    """Tell whether a run of a sweep has come to its end."""
    try:
        before = json.loads((path / "config.json").read_text())
    except (OSError, ValueError, RecursionError):
        return False
    if not isinstance(before, dict):
        return False
    now, same = json.loads(json.dumps(asdict(run.config))), True  # through JSON, where tuples are lists
    for field in fields(run.config):
        old, new, rule = before.get(field.name, field.default), now[field.name], on_resume(field.name)
        if rule == "same" and old != new:
            raise ValueError(
                f"{path} holds a run with {field.name}={old!r}, now it is {new!r}; choose another output_dir"
            )
        same = same and (rule == "free" or old == new)
    summary, config = path / "summary.json", path / "config.json"
    # A run that goes on writes config.json at its start, and every run writes summary.json at its end.
    return same and figures_of(run, path) is not None and summary.stat().st_mtime_ns >= config.stat().st_mtime_ns


class _Processes:
    """Makes runs, each in a process of its own, some of them at a time."""

    def __init__(self, folder: RunFolder, jobs: int, terminal: Terminal):
        self.folder, self.jobs, self.terminal = folder, jobs, terminal
        self.running = {}  # run -> its process

    def make(self, waiting: list[SweepRun], total: int, stop: StopSignals) -> list[str]:
        """Make the runs, and return the names of those that failed. Once `stop` is true, no other run is started."""
        waiting, failed, asked, shown = list(waiting), [], False, ""
        self.terminal.progress(total, "sweep", done=total - len(waiting))
        try:
            while (waiting and not stop) or self.running:
                while waiting and not stop and len(self.running) < self.jobs:
                    self._start(waiting.pop(0))
                if stop and not asked:
                    self._signal(stop.received)
                    asked = True
                time.sleep(POLL_SECONDS)
                failed += self._ended(asked)
                state = "; ".join(map(self._state, self.running))
                if state != shown:
                    self.terminal.status(state)
                    shown = state
        except BaseException:
            self._signal(signal.SIGTERM)  # no run goes on without its sweep
            raise
        finally:
            self.terminal.close_bar()
        return failed

    def _start(self, run):
        """Start the process of a run. What it prints is appended to its log."""
        path = self.folder.path / run.name
        own = ["--output_dir", str(path), "--resume_from_checkpoint", "auto", "--quiet", "False"]
        command = [*COMMAND, *run.argv, *own]  # a log is read where something went wrong, and has all lines
        threads = max(1, (os.cpu_count() or 1) // self.jobs)
        shared = {"OMP_NUM_THREADS": str(threads)} if self.jobs > 1 else {}
        with open(self.folder.claim(f"{run.name}.log"), "ab") as log:
            # In a group of its own, so that Ctrl-C reaches a run once, from here, and not from the terminal too.
            self.running[run] = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, process_group=0,
                env={**shared, **os.environ},
            )  # fmt: skip

    def _signal(self, number):
        """Ask every running process to save and end. A reader of the output that left is told to runs as SIGTERM."""
        for process in self.running.values():
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGTERM if number == signal.SIGPIPE else number)

    def _ended(self, stopped):
        """Take note of the processes that have ended, and return the names of the runs that failed."""
        failed = []
        for run, process in list(self.running.items()):
            code = process.poll()
            if code is None:
                continue
            del self.running[run]
            path = self.folder.path / run.name
            figures = figures_of(run, path) if code == 0 else None
            if figures is not None:
                self.terminal.advance()
                accuracy = f"accuracy {_shown(figures['accuracy_before'])} -> {_shown(figures['accuracy_after'])}"
                self.terminal.say(
                    f"{run.name}: {accuracy}, reward {_shown(figures['reward'])}, {figures['wall_seconds']} s"
                )
            elif stopped:
                self.terminal.say(f"{run.name}: stopped")
            else:
                failed.append(run.name)
                lines = path.with_name(path.name + ".log").read_text(errors="replace").split("\n")
                last = [line.rpartition("\r")[2] for line in lines if line.strip()][-LAST_LINES:]
                problem = f"failed with exit code {code}" if code else "left no summary.json or metrics.jsonl to read"
                self.terminal.last("\n  ".join([f"{run.name}: {problem}; the end of {path}.log:", *last]))
        return failed

    def _state(self, run):
        """Return the name of a run that goes on, with the last step that it has logged."""
        with contextlib.suppress(OSError, ValueError, KeyError, IndexError):
            text = (self.folder.path / run.name / "metrics.jsonl").read_text()
            return f"{run.name} at step {json.loads(text.splitlines()[-1])['step']}"
        return run.name


def _shown(value):
    return "not measured" if value is None else f"{value:.3f}"


def _report(folder, sweep, done, terminal):
    """Write the table and draw the picture of the runs that are done."""
    if not done:
        return
    figures = [figures_of(run, folder.path / run.name) for run in done]
    write_table(folder.claim(SWEEP_TABLE), [*sweep.grid, "seed"], figures)
    terminal.columns(table_of(figures))
    draw_sweep(folder.claim(PICTURE), [(run.setting, folder.path / run.name) for run in done], terminal.say)
    terminal.last(f"table {folder.path / SWEEP_TABLE}, picture {folder.path / PICTURE}")
