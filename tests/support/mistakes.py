"""Mistakes of a person: the files of a case, and what a command must do with them."""

import json
import re
import shutil
import sys
from unittest.mock import Mock

REWARDS = """
def share(completions, **columns):
    return [text.count("a") / (len(text) + 1) for text in completions]
"""


class Case:
    """The files of one case, and a command line that would work if they were not spoilt."""

    def __init__(self, folder, saved, monkeypatch):
        self.folder, self.monkeypatch, self.patch = folder, monkeypatch, monkeypatch.setattr
        self.model, self.rows, self.run = folder / "model", folder / "train.jsonl", folder / "run"
        shutil.copytree(saved, self.model)
        self.write('{"prompt": "ab"}', '{"prompt": "cd"}')
        (folder / "own_rewards.py").write_text(REWARDS)
        monkeypatch.syspath_prepend(str(folder))
        monkeypatch.delitem(sys.modules, "own_rewards", raising=False)

    def write(self, *lines):
        self.rows.write_text("\n".join(lines) + "\n")

    def edit(self, file, **changes):
        settings = json.loads((self.model / file).read_text())
        (self.model / file).write_text(json.dumps({**settings, **changes}))

    def fail(self, name, error):
        self.patch(name, Mock(side_effect=error))

    def argv(self, **changes):
        settings = {
            "task": "dataset", "dataset_name": self.rows, "model_name_or_path": self.model, "output_dir": self.run,
            "reward_funcs": "own_rewards:share", "max_steps": 1, "prompts_per_step": 2, "num_generations": 2,
            "max_completion_length": 4, "device": "cpu", **changes,
        }  # fmt: skip
        return [word for name, value in settings.items() if value is not None for word in (f"--{name}", str(value))]


def check(main, argv, message, capfd):
    """The command must exit with code 2, and print one or two lines that match `message`, without a traceback."""
    capfd.readouterr()
    assert main(argv) == 2
    told = capfd.readouterr().err
    assert "Traceback" not in told
    lines = told[told.index("error: ") :].strip().splitlines()
    assert 1 <= len(lines) <= 2, told
    assert re.search(message, " ".join(lines)), told
