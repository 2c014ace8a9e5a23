"""The flags of a sweep, and the grid of runs that they describe.

    --sweep num_generations=2,4,8 --sweep learning_rate=1e-4,4e-4 --sweep_seeds 0,1,2

is a run for each of the six combinations and each of the three seeds: 18 runs. A sweep is no setting of a run, so it
has no field in `GRPOConfig` and no line in a YAML file.
"""

import hashlib
import itertools
import re
from dataclasses import dataclass
from typing import Any, get_origin

from fastgrpo.config.fields import bare, check_name, hints
from fastgrpo.config.recipe import parse, take_flag, take_flags
from fastgrpo.config.settings import GRPOConfig

FLAGS = ("--sweep", "--sweep_seeds", "--sweep_jobs")
LONGEST_NAME = 120  # characters of what was swept in the name of a folder
OWN = {  # settings that a sweep gives to each of its runs itself -> the remedy
    "seed": "use --sweep_seeds 0,1,2",
    "output_dir": "--output_dir names the folder of the whole sweep",
    "overwrite_output_dir": "delete the folder of the sweep, or choose another output_dir",
    "resume_from_checkpoint": "a sweep goes on where it stopped by itself: give the same command again",
}


@dataclass(frozen=True)
class Sweep:
    """What the flags of a sweep ask for.

    Attributes:
        grid: The values of each setting that is swept, as they were written.
        seeds: The seeds of each combination, as they were written; empty for the seed of the other flags alone.
        jobs: How many runs there are at a time.
    """

    grid: dict[str, list[str]]
    seeds: list[str]
    jobs: int


@dataclass(frozen=True)
class SweepRun:
    """One run of a sweep.

    Attributes:
        setting: What was swept, such as num_generations=4,beta=0.1; empty in a sweep over seeds alone.
        argv: The arguments of the run, without its folder.
        config: The settings of the run. Its output_dir is the folder of the whole sweep.
    """

    setting: str
    argv: tuple[str, ...]
    config: GRPOConfig

    @property
    def name(self) -> str:
        """The name of the run's folder: what was swept, with the seed. Where it is cut, a digest tells it apart."""
        name = re.sub(r"[^\w.,=+-]+", "-", self.setting, flags=re.ASCII)[:LONGEST_NAME]
        if name != self.setting:
            name += "-" + hashlib.sha256(self.setting.encode()).hexdigest()[:8]
        return ",".join(filter(None, (name, f"seed={self.config.seed}")))


def take_sweep(argv: list[str]) -> tuple[list[str], Sweep | None]:
    """Take the flags of a sweep out of the arguments of training."""
    rest, grids = take_flags(argv, "--sweep")
    rest, seeds = take_flags(rest, "--sweep_seeds")
    rest, jobs = take_flags(rest, "--sweep_jobs")
    if not (grids or seeds):
        if jobs:
            raise ValueError("--sweep_jobs has an effect only with --sweep or --sweep_seeds; leave it out")
        return argv, None
    for flag, values in (("--sweep_seeds", seeds), ("--sweep_jobs", jobs)):
        if len(values) > 1:
            raise ValueError(f"{flag} is given twice; give it once")
    grid = {}
    for text in grids:
        name, equals, values = text.partition("=")
        if not equals:
            raise ValueError(f"--sweep takes NAME=VALUE,VALUE, as in --sweep num_generations=2,4,8, got {text!r}")
        check_name(name, GRPOConfig, "--sweep", ValueError)
        if name in OWN:
            raise ValueError(f"--sweep cannot vary {name}: {OWN[name]}")
        if name in grid:
            raise ValueError(f"--sweep {name} is given twice; put all values into one, as in --sweep {name}=1,2")
        grid[name] = _values(f"--sweep {name}", values)
    for name in (*grid, *(["seed"] if seeds else [])):
        if any(word.partition("=")[0] == f"--{name}" for word in rest):
            raise ValueError(f"--{name} is given besides its values in the sweep; leave it out")
    count = jobs[0] if jobs else "1"
    if not re.fullmatch(r"[1-9][0-9]{0,3}", count):
        raise ValueError(f"--sweep_jobs must be a whole number from 1 to 9999, got {count!r}")
    return rest, Sweep(grid, _values("--sweep_seeds", seeds[0]) if seeds else [], int(count))


def _values(flag, text):
    """Split the values of a flag at the commas."""
    values = [value.strip() for value in text.split(",")]
    if not all(values):
        raise ValueError(f"{flag} has an empty value in {text!r}; separate values by single commas")
    return values


def runs_of(argv: list[str], sweep: Sweep) -> list[SweepRun]:
    """Make the runs of a sweep: every combination of the settings, with every seed. All are parsed and checked here."""
    runs, (shared, _) = [], take_flag(argv, "--output_dir")
    kinds = hints(GRPOConfig)
    for values in itertools.product(*sweep.grid.values()):
        chosen = dict(zip(sweep.grid, values, strict=True))
        varied = [word for name, value in chosen.items() for word in (f"--{name}", *_words(value, kinds[name]))]
        setting = ",".join(f"{name}={value}" for name, value in chosen.items())
        for seed in sweep.seeds or [None]:
            own = (*varied, *(() if seed is None else ("--seed", seed)))
            try:
                config = parse([*argv, *own])
                for name in ("overwrite_output_dir", "resume_from_checkpoint"):
                    if getattr(config, name):
                        raise ValueError(f"{name} is not for sweeps: {OWN[name]}")
            except ValueError as error:
                raise ValueError(f"the run with {' '.join(own)}: {error}") from None
            runs.append(SweepRun(setting, (*shared, *own), config))
    for i, run in enumerate(runs):
        for other in runs[:i]:
            if run.config == other.config:
                raise ValueError(
                    f"the sweep has the run {run.name} twice"
                    + ("" if run.name == other.name else f", once as {other.name}")
                    + "; leave one of them out"
                )
    return runs


def _words(value: str, kind: Any) -> list[str]:
    """Return the arguments that a value becomes: several for a setting that is a list."""
    return value.split() if get_origin(bare(kind)) is list else [value]
