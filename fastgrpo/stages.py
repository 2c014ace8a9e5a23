"""python -m fastgrpo.stages: a supervised start, GRPO, and distillation into a fresh model, by one command.

    sft        a model learns demonstrations                           DIR/sft
    train      GRPO goes on from its last checkpoint                   DIR/train
    distill    the trained policy writes, and what is good is kept     DIR/distilled.jsonl
    distilled  the model that sft began with learns from these rows    DIR/distilled

Each stage is a process of its own: its command line is printed, and can be given by hand. Given again with the same
--output_dir, the command passes over stages that are done, and goes on with the one that was stopped from its last
checkpoint.
"""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass

from fastgrpo.config.command import parse_flags, run_command
from fastgrpo.config.fields import documented, setting
from fastgrpo.config.sections import OutputConfig
from fastgrpo.config.settings import Settings
from fastgrpo.config.stages import STAGES, read_stages, to_flags
from fastgrpo.ranks import refuse_ranks
from fastgrpo.run.checkpoint import checkpoints
from fastgrpo.run.comparison import draw_stages, stage_table
from fastgrpo.run.folder import STAGES_SETTINGS as SETTINGS
from fastgrpo.run.folder import claim_output_dir, contents, made_in
from fastgrpo.run.signals import StopSignals
from fastgrpo.run.terminal import Terminal
from fastgrpo.tasks import find_task

POLL_SECONDS = 0.1


@documented
@dataclass(frozen=True)
class StagesConfig(OutputConfig, Settings):
    """The settings of the command."""

    config: str = setting("three-stages", "YAML file with a section for each stage, or the name of a shipped one.")
    output_dir: str | None = setting(
        None, "Folder in which the stages have their runs. None makes a new numbered folder runs/stages-N."
    )


def run_stages(argv: list[str]) -> None:
    """Run the stages that are not done yet, and print one table of the three models."""
    config = parse_flags(StagesConfig, argv, prog="python -m fastgrpo.stages", description=__doc__)
    refuse_ranks("a run of stages")
    stages, terminal = read_stages(config.config), Terminal(quiet=config.quiet)
    for settings in stages.values():
        find_task(settings.get("task", "arithmetic"))
    folder = claim_output_dir(config.output_dir, "stages", resume=True)
    try:
        _note_settings(folder, stages)
        terminal.say(f"folder {folder.path}")
        if config.quiet:
            stages = {name: settings | {"quiet": True} for name, settings in stages.items()}
        root, first = folder.path, stages["sft"].get("model_name_or_path")
        _train("sft", stages, root, terminal, dict)
        _train("train", stages, root, terminal, lambda: {"model_name_or_path": _last(root / "sft")})
        rows = _distill(folder, stages["distill"], terminal)
        base = {} if first is None else {"model_name_or_path": first}
        _train("distilled", stages, root, terminal, lambda: {"train_file": rows} | base)
        runs = {name: root / name for name in ("sft", "train", "distilled")}
        terminal.columns(stage_table(runs))
        terminal.last(f"picture {draw_stages(runs, folder.claim('stages.png'))}, folder {root}")
    finally:
        folder.close()


def _note_settings(folder, stages):
    """Note the settings of all stages in the folder, or refuse a folder that has stages with other ones."""
    text, path = json.dumps(stages, indent=2) + "\n", folder.path / SETTINGS
    if SETTINGS in made_in(folder.path) and path.is_file():
        if path.read_text() != text:
            raise ValueError(
                f"{folder.path} holds stages with other settings, which {SETTINGS} has; choose another --output_dir, "
                "or give the file with which they were begun"
            )
        return
    if contents(folder.path):
        raise ValueError(
            f"output_dir {folder.path} is not empty and holds no stages to go on with; choose another folder"
        )
    folder.claim(SETTINGS).write_text(text)


def _train(name, stages, root, terminal, more):
    """Run a training stage unless it is done, from its last checkpoint where there is one.

    `more` returns the settings that follow from the stages before. A stage that is done does not ask for them.
    """
    run = root / name
    if not (run / "summary.json").exists():
        _refuse_later(root, name)
        _run(name, to_flags(stages[name] | more() | {"output_dir": run, "resume_from_checkpoint": "auto"}), terminal)


def _distill(folder, settings, terminal):
    """Draw from the trained policy, unless that is done. The file gets its name when it is whole."""
    rows, part = folder.claim("distilled.jsonl"), folder.claim("distilled.part")
    if not rows.exists():
        _refuse_later(folder.path, "distill")
        part.unlink(missing_ok=True)
        _run("distill", [str(_last(folder.path / "train")), *to_flags(settings | {"output": part})], terminal)
        os.replace(part, rows)
    return rows


def _refuse_later(root, name):
    """Refuse to run a stage where a later one is done, which was made from what this one had made before."""
    results = {stage: root / stage / "summary.json" for stage in STAGES} | {"distill": root / "distilled.jsonl"}
    for later in list(STAGES)[list(STAGES).index(name) + 1 :]:
        if results[later].exists():
            raise ValueError(
                f"the stage {name} is to be run, and {results[later]} was made from an earlier one; delete it, or "
                "choose another --output_dir"
            )


def _last(run):
    """Return the weights that a run ended with: those that its adapters were merged into, or its last checkpoint."""
    found = checkpoints(run)
    if (run / "merged").is_dir():
        return run / "merged"
    if not found:
        raise ValueError(f"{run} is done and has lost its checkpoints; delete this folder, and the stage is run again")
    return found[max(found)]


def _run(name, flags, terminal):
    """Run a stage in a process of its own, and wait for its end. A signal is passed on, so that the stage saves."""
    command = [sys.executable, "-m", f"fastgrpo.{getattr(STAGES[name], 'command', name)}", *flags]
    terminal.say(f"\n{name}: python {' '.join(command[1:])}")
    sys.stdout.flush()  # before what the stage prints
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
            f"the stage {name} ended with exit code {process.returncode}, for the reason above; the same command with "
            "this --output_dir goes on with it"
        )


def main(argv: list[str] | None = None) -> int:
    """Run the command line."""
    return run_command(run_stages, argv)


if __name__ == "__main__":
    sys.exit(main())
