"""python -m fastgrpo.stages: a supervised start, GRPO, and distillation into a fresh model, by one command.

    sft        a model learns demonstrations                           DIR/sft
    train      GRPO goes on from its last checkpoint                   DIR/train
    distill    the trained policy writes, and what is good is kept     DIR/distilled.jsonl
    distilled  the model that sft began with learns from these rows    DIR/distilled

Each stage is a process of its own: its command line is printed, and can be given by hand. A stage that was stopped goes
on from its last checkpoint when the command is given again, and a stage that is done is passed over.
"""

import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from fastgrpo.config.command import parse_flags, run_command
from fastgrpo.config.fields import documented, setting
from fastgrpo.config.settings import Settings
from fastgrpo.config.stages import STAGES, read_stages, to_flags
from fastgrpo.run.checkpoint import checkpoints
from fastgrpo.run.comparison import draw_stages, stage_table
from fastgrpo.run.signals import StopSignals

POLL_SECONDS = 0.1


@documented
@dataclass(frozen=True)
class StagesConfig(Settings):
    """The settings of the command."""

    config: str = setting("three-stages", "YAML file with a section for each stage, or the name of a shipped one.")
    output_dir: str = setting("runs/stages", "Folder in which the stages have their runs.")


def run_stages(argv: list[str]) -> None:
    """Run the stages that are not done yet, and print one table of the three models.

    Args:
        argv: The arguments.

    Raises:
        ValueError: A flag is not allowed, the file of --config cannot be used, or a stage failed.
    """
    config = parse_flags(StagesConfig, argv, prog="python -m fastgrpo.stages", description=__doc__)
    stages, root = read_stages(config.config), Path(config.output_dir)
    rows, first = root / "distilled.jsonl", stages["sft"].get("model_name_or_path")
    _train("sft", stages, root)
    _train("train", stages, root, model_name_or_path=_last(root / "sft"))
    if not rows.exists():
        part = rows.with_suffix(".part")  # it gets its name when it is whole
        part.unlink(missing_ok=True)
        _run("distill", [str(_last(root / "train")), *to_flags(stages["distill"] | {"output": part})])
        os.replace(part, rows)
    _train("distilled", stages, root, train_file=rows, **({} if first is None else {"model_name_or_path": first}))
    runs = {name: root / name for name in ("sft", "train", "distilled")}
    print("\n" + stage_table(runs))
    print(f"\n  {draw_stages(runs, root / 'stages.png')}")


def _train(name, stages, root, **more):
    """Run a training stage unless it is done, from its last checkpoint where there is one."""
    run = root / name
    if not (run / "summary.json").exists():
        _run(name, to_flags(stages[name] | more | {"output_dir": run, "resume_from_checkpoint": "auto"}))


def _last(run):
    """Return the last checkpoint of a run."""
    found = checkpoints(run)
    return found[max(found)]


def _run(name, flags):
    """Run a stage in a process of its own, and wait for its end. A signal is passed on, so that the stage saves."""
    command = [sys.executable, "-m", f"fastgrpo.{getattr(STAGES[name], 'command', name)}", *flags]
    print(f"\n{name}: python {' '.join(command[1:])}", flush=True)
    with StopSignals() as stop:
        # In a group of its own, so that Ctrl-C reaches it once, from here, and not from the terminal too.
        process, told = subprocess.Popen(command, process_group=0), False
        try:
            while process.poll() is None:
                if stop and not told:
                    process.send_signal(signal.SIGINT if stop.received == signal.SIGINT else signal.SIGTERM)
                    told = True
                time.sleep(POLL_SECONDS)
        except BaseException:
            process.terminate()  # no stage goes on without the command
            raise
    if stop:
        stop.leave()
    if process.returncode:
        raise ValueError(
            f"the stage {name} ended with exit code {process.returncode}; give the same command again to go on"
        )


def main(argv: list[str] | None = None) -> int:
    """Run the command line.

    Args:
        argv: The arguments; None takes those of the process.

    Returns:
        The exit code: 0; 2 for a mistake that the user can fix, or where a stage failed; 130 after SIGINT.

    Raises:
        SystemExit: With code 143 after SIGTERM, and with 141 where nobody reads the output any more.
    """
    return run_command(run_stages, argv)


if __name__ == "__main__":
    sys.exit(main())
