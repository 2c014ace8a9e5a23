"""Mistakes of a person: the files of a case, how they are spoilt, and what the command must tell."""

import json
import re
import shutil
import subprocess
import sys

from paths import ROOT

REWARDS = """
import math

NUMBER = 3

def share(completions, **columns):
    return [text.count("a") / (len(text) + 1) for text in completions]

def raises(completions, **columns):
    return [columns["answer"][0]]

async def raises_later(completions, **columns):
    raise RuntimeError("the judge is down")

def short(completions, **columns):
    return [0.0]

def opaque(completions, log_extra, **columns):
    log_extra("note", [object()] * len(completions))
    return [0.0] * len(completions)

def text(completions, **columns):
    return ["good"] * len(completions)

def nan(completions, **columns):
    return [math.nan] * len(completions)

def nothing(completions, **columns):
    pass

def none(completions, **columns):
    return [None] * len(completions)

def extra(completions, log_extra, **columns):
    log_extra("note", ["one"])
    return [0.0] * len(completions)
"""


class Case:
    """The files of one case, and a command line that would work if they were not spoilt."""

    def __init__(self, folder, saved, monkeypatch):
        self.folder, self.monkeypatch = folder, monkeypatch
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

    def argv(self, **changes):
        settings = {
            "task": "dataset", "dataset_name": self.rows, "model_name_or_path": self.model, "output_dir": self.run,
            "reward_funcs": "own_rewards:share", "max_steps": 1, "prompts_per_step": 2, "num_generations": 2,
            "max_completion_length": 4, "device": "cpu", **changes,
        }  # fmt: skip
        return [word for name, value in settings.items() if value is not None for word in (f"--{name}", str(value))]

    def patch(self, target, replacement):
        self.monkeypatch.setattr(target, replacement)

    def without(self, package):
        self.monkeypatch.setitem(sys.modules, package, None)


def raising(error):
    def fail(*args, **kwargs):
        raise error

    return fail


def spoilt(make, **changes):
    """A case whose files `make` spoils before the command line is built."""

    def build(case):
        make(case)
        return case.argv(**changes)

    return build


def flags(**changes):
    return lambda case: case.argv(**changes)


def words(text):
    return lambda case: text.split()


def in_use(case):
    code = f"""
import sys
from pathlib import Path
from fastgrpo.run.folder import RunFolder
lock = RunFolder(Path({str(case.run)!r}))
print("held", flush=True)
sys.stdin.read()
"""
    case.run.mkdir()
    # It ends when this process drops its end of the pipe.
    case.other = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT)
    assert case.other.stdout.readline() == b"held\n"


def truncated_weights(case):
    path = case.model / "model.safetensors"
    path.write_bytes(path.read_bytes()[:1000])


def lacking_weights(case):
    from safetensors.torch import load_file, save_file

    path = case.model / "model.safetensors"
    weights = load_file(path)
    del weights["model.norm.weight"]
    save_file(weights, path, metadata={"format": "pt"})


def endless(case):
    case.edit("tokenizer_config.json", eos_token=None)
    case.edit("config.json", eos_token_id=None)
    (case.model / "generation_config.json").unlink()


def one_gpu(case):
    case.patch("torch.cuda.is_available", lambda: True)
    case.patch("torch.cuda.device_count", lambda: 1)


def yaml(text):
    def build(case):
        (case.folder / "mine.yaml").write_text(text)
        return ["--config", str(case.folder / "mine.yaml")]

    return build


def check(main, argv, message, capfd):
    """The command must exit with code 2, and tell the message in a line or two without a traceback."""
    capfd.readouterr()
    assert main(argv) == 2
    told = capfd.readouterr().err
    assert "Traceback" not in told
    lines = told[told.index("error: ") :].strip().splitlines()
    assert 1 <= len(lines) <= 2, told
    assert re.search(message, " ".join(lines)), told
