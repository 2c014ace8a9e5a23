"""What the commands share: flags, and mistakes told in a line or two with exit code 2."""

import dataclasses
import errno
import importlib
import io
import json
import logging
import re
import shutil
import subprocess

import pytest
import tiny
import torch
from transformers import AutoTokenizer
from transformers.utils import logging as advice

from fastgrpo import train
from fastgrpo.config import command
from fastgrpo.config.fields import settings_class
from fastgrpo.config.recipe import parse
from fastgrpo.config.settings import Settings, SFTConfig, TrainConfig


def raising(error):
    def fail(argv):
        raise error

    return fail


@pytest.mark.parametrize(
    "argv, match",
    [
        (["--learning_rat", "1"], "learning_rate"),
        (["--learning-rat=1"], r"--learning-rat=1; did you mean --learning_rate\?$"),
        (
            ["--learning_rat", "1", "--qqq", "--bta", "2", "--learning_rat", "3"],
            r"; did you mean --learning_rate for --learning_rat\?; did you mean --beta for --bta\?$",
        ),
        (["--qqq", "1", "--www", "2"], "; see python -m fastgrpo.train --help$"),
        (["--num_generations", "1"], "num_generations must be at least 2, got 1"),
        (["--beta", "much"], "beta"),
    ],
)
def test_a_bad_flag_is_refused_with_a_hint(argv, match):
    with pytest.raises(ValueError, match=match) as error:
        parse(argv)
    assert "\n" not in str(error.value)


@settings_class
class Toy(Settings):
    name: str
    """Name of the toy."""
    count: int = 1
    """How many there are."""


def test_a_setting_that_must_be_given_is_positional():
    options = {"prog": "toy", "description": "Toys."}
    assert command.parse_flags(Toy, ["ball", "-n", "3"], aliases={"-n": "--count"}, **options) == Toy(
        name="ball", count=3
    )
    with pytest.raises(ValueError, match=r"^an argument is missing: Name of the toy.; see toy --help$"):
        command.parse_flags(Toy, [], **options)
    with pytest.raises(ValueError, match="did you mean --count"):
        command.parse_flags(Toy, ["ball", "--cont", "3"], **options)


def test_help_shows_range_choices_and_condition(capsys):
    with pytest.raises(SystemExit):
        parse(["--help-all"])
    told = " ".join(capsys.readouterr().out.split())
    for text in (
        "--num_generations Number of completions of each prompt: the group size G. It must be at least 2. (def",
        "the inner width of their two factors. It must be at least 1. It has an effect only where use_peft is True.",
        "It must be one of k1, k2, k3, abs, full. It has an effect only where beta is above 0. (default: k3)",
        "--config FILE",
    ):
        assert text in told


@pytest.mark.parametrize("record", [TrainConfig, SFTConfig])
def test_help_fits_on_two_screens(record, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    with pytest.raises(SystemExit):
        parse(["--help"], record)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 100 and max(map(len, lines)) <= 100
    assert set(command.FIRST.split()) <= {f.name for r in (TrainConfig, SFTConfig) for f in dataclasses.fields(r)}
    with pytest.raises(SystemExit):
        parse(["--help-all"], record)
    told = capsys.readouterr().out
    assert all(f"--{field.name} " in told.replace("\n", " ") for field in dataclasses.fields(record))


def test_a_boolean_without_a_value_is_true():
    assert parse(["--quiet"]).quiet and parse(["--quiet", "--beta", "0"]).quiet and not parse([]).quiet
    assert not parse(["--quiet", "False"]).quiet and not parse(["--quiet=False"]).quiet
    assert not parse(["--quiet", "--quiet", "False"]).quiet  # the last one counts, as a sweep relies on
    with pytest.raises(ValueError, match=r"quiet.*True.*False"):
        parse(["--quiet", "maybe"])


COMPLETED = """
COMP_WORDS=(fastgrpo-train --num_gen)
COMP_CWORD=1
_tyro_fastgrpo_train
printf '%s\\n' "${COMPREPLY[@]}"
complete -p fastgrpo-train
"""


@pytest.mark.skipif(shutil.which("bash") is None, reason="the script is for bash")
def test_bash_completes_flags_by_what_is_printed(capsys, tmp_path):
    """The script is tyro's, for the one word that a shell function of docs/commands.md is called."""
    with pytest.raises(SystemExit) as stop:
        parse(["--tyro-print-completion", "bash"])
    assert not stop.value.code
    script = capsys.readouterr().out
    assert "--num_generations" in script and "--quiet" in script and "python -m" not in script
    (tmp_path / "script").write_text(script + COMPLETED)
    told = subprocess.run(["bash", str(tmp_path / "script")], capture_output=True, text=True, check=True).stdout
    offered, registered = told.rsplit("\n", 2)[:2]
    assert offered.splitlines() == ["--num_generations"] and registered.endswith("fastgrpo-train")


@pytest.mark.parametrize(
    "name, flag",
    [
        ("sft", "--train_file"), ("distill", "--max_per_prompt"), ("chat", "--raw"),
        ("evaluate", "--eval_num_generations"), ("check", "--max_samples"), ("doctor", "--num_generations"),
        ("report", "--help"),
    ],
)  # fmt: skip
def test_every_command_prints_a_script_for_completion(name, flag, capsys):
    """The block of docs/commands.md gives these scripts to the shell, as the test above does."""
    module = importlib.import_module(f"fastgrpo.{name}")
    with pytest.raises(SystemExit) as stop:
        module.main(["--tyro-print-completion", "bash"])
    assert not stop.value.code
    assert (
        flag in (script := capsys.readouterr().out) and f"complete -F _tyro_fastgrpo_{name} fastgrpo-{name}" in script
    )


def test_debug_shows_the_traceback(capsys):
    assert train.main(["--task", "gsm8k", "--debug"]) == 2
    told = capsys.readouterr().err
    assert "Traceback" in told and told.strip().splitlines()[-1].startswith("error: task gsm8k needs")


def test_a_bug_keeps_its_traceback():
    with pytest.raises(RuntimeError, match="a bug"):
        command.run_command(raising(RuntimeError("a bug")), [])


def test_an_error_of_a_library_says_where_it_was_raised(capsys):
    assert command.run_command(lambda argv: json.loads("{"), []) == 2
    first, second = capsys.readouterr().err.strip().splitlines()
    assert first.startswith("error: Expecting property name")
    assert re.search(r"decoder.py:\d+; --debug shows the traceback", second)


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_a_terminal_without_utf8_reads_the_same(encoding, monkeypatch, capfd):
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(io.BytesIO(), encoding=encoding))
    for argv, told in (
        (["--learning_rat", "1"], "Unrecognized options: --learning_rat, 1; did you mean --learning_rate?"),
        (["--lora_r", "0"], "lora_r must be at least 1, got 0"),
    ):
        assert train.main(argv) == 2
        assert capfd.readouterr().err.strip() == f"error: {told}"


@pytest.mark.parametrize(
    "error, told",
    [
        (ModuleNotFoundError("No module named 'yaml'", name="yaml"), r"pip install 'fastgrpo\[train\]'"),
        (
            ModuleNotFoundError("No module named 'peft.x'", name="peft.x"),
            "the package peft.x is not .*: pip install peft$",
        ),
        (OSError(errno.ENOSPC, "No space left on device", "/x"), "the disk is full, writing /x failed"),
        (
            NotADirectoryError(errno.ENOTDIR, "", "/x/y"),
            "^a part of the path /x/y is a file and no folder; name another",
        ),
        (IsADirectoryError(errno.EISDIR, "", "/x"), "^the path /x is a folder, where a file is needed; name another"),
        (FileExistsError(errno.EEXIST, "", "/x"), "^the path /x exists already and is in the way; name another path$"),
        (OSError(errno.ENAMETOOLONG, "", "/x"), "^the path /x has a name that is too long for the file system; choose"),
        (KeyError("a bug"), None),
        (MemoryError(), "^this machine has not enough memory\n  lower max_tokens_per_microbatch"),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), "^this machine has not enough memory\n"),
        (RuntimeError("can't allocate memory: you tried to allocate 4096 bytes."), "memory for another 4,096 bytes\n"),
        (torch.OutOfMemoryError("CUDA out of memory. Tried"), "^CUDA out of memory\n.*; where free .*expandable_seg"),
        (RuntimeError("a bug"), None),
    ],
)
def test_what_a_person_reads_of_an_exception(error, told):
    text = command.explain(error)
    assert text is None if told is None else re.search(told, text)


def test_sigint_is_no_mistake():
    assert command.run_command(raising(KeyboardInterrupt()), []) == 130


@pytest.mark.parametrize("lacking, several", [(None, True), ("RANK", False), ("MASTER_ADDR", False)])
def test_some_variables_of_a_launcher_are_no_launcher(monkeypatch, lacking, several):
    """Batch systems and shells may leave a WORLD_SIZE behind."""
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value) if name != lacking else monkeypatch.delenv(name, raising=False)
    assert command.several_processes() is several
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert not command.several_processes()


def test_advice_that_nobody_can_act_on_is_silent(tmp_path, monkeypatch):
    tiny.save(tmp_path)
    before, bars = advice.get_verbosity(), advice.is_progress_bar_enabled()
    try:
        advice.set_verbosity_warning()
        command.quiet_libraries()
        assert advice.get_verbosity() == logging.ERROR and not advice.is_progress_bar_enabled()
        AutoTokenizer.from_pretrained(tmp_path).decode([5])
        advice.set_verbosity_warning()
        monkeypatch.setenv("TRANSFORMERS_VERBOSITY", "warning")
        command.quiet_libraries()
        assert advice.get_verbosity() == logging.WARNING
    finally:
        advice.set_verbosity(before)
        if bars:
            advice.enable_progress_bar()
