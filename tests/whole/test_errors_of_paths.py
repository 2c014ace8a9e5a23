"""Paths that cannot be: below a file, or with a name that is too long. Every command tells it in a line."""

import pytest
from mistakes import Case, check, flags

from fastgrpo import chat, distill, evaluate, report, sft, train

COMMANDS = {"distill": distill, "evaluate": evaluate, "chat": chat, "report": report, "sft": sft, "train": train}
LONG = "x" * 300
TOO_LONG = "too long"
REWARDS = (
    "--task",
    "dataset",
    "--reward_funcs",
    "own_rewards:share",
    "--device",
    "cpu",
    "--max_completion_length",
    "2",
)


def draws(output):
    return lambda c: [str(c.model), "--dataset_name", str(c.rows), *REWARDS, "--output", output.format(c)]


def learns(**paths):
    kept = {"reward_funcs": None, "prompts_per_step": None, "num_generations": None}
    return lambda case: case.argv(**kept, **{name: path.format(case) for name, path in paths.items()})


CASES = {
    # name, which begins with the command: (command line, what its message must say)
    "distill: output below a file": (draws("{0.rows}/x"), "a part of the path .*train.jsonl/x is a file and no folder"),
    "distill: long output": (draws(LONG), f"the path x+ has a name that is {TOO_LONG} for the file system; choose"),
    "evaluate: output below a file": (draws("{0.rows}/x"), "train.jsonl/x is a file and no folder; name another path"),
    "evaluate: long output": (draws(LONG), TOO_LONG),
    "sft: rows below a file": (learns(train_file="{0.rows}/x"), "train.jsonl/x"),
    "sft: long rows": (learns(train_file=f"{LONG}.jsonl"), TOO_LONG),
    "sft: long data set": (learns(dataset_name=f"{LONG}.jsonl"), TOO_LONG),
    "train: long recipe": (lambda c: ["--config", LONG], TOO_LONG),
    "train: recipe below a file": (lambda c: ["--config", f"{c.rows}/x"], "cannot be read: .*train.jsonl/x; --config"),
    "train: empty recipe": (lambda c: ["--config", ""], "--config got an empty name; name a YAML file, or a recipe"),
    "train: empty task": (lambda c: ["--task", ""], "task must be one of .*, got ''"),
    "train: long model": (flags(model_name_or_path=LONG), r"cannot be loaded \(name a folder or a hub id\)"),
    "train: long folder": (flags(output_dir=LONG), "output_dir .*/x+ cannot be written: File name too long; choose"),
    "train: folder below a file": (flags(output_dir=f"{__file__}/x"), "cannot be written: Not a directory; choose"),
    "train: long data set": (flags(dataset_name=f"{LONG}.jsonl"), TOO_LONG),
    "chat: long model": (lambda c: [f"{LONG}.gguf"], f"the path x+.gguf has a name that is {TOO_LONG}"),
    "report: long folder": (lambda c: [LONG], TOO_LONG),
    "report: folder below a file": (lambda c: [f"{c.rows}/x"], "is not the folder of a run"),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_mistake_is_told_in_a_line_or_two(name, tmp_path, saved, monkeypatch, capfd):
    build, message = CASES[name]
    case = Case(tmp_path, saved, monkeypatch)
    case.write('{"prompt": "ab", "completion": "cd"}')
    monkeypatch.chdir(tmp_path)
    check(COMMANDS[name.partition(":")[0]].main, build(case), message, capfd)
