"""Shared code of the commands: flags, user errors of one or two lines with exit code 2, and streams."""

import contextlib
import errno
import io
import json
import re
import shutil
import subprocess
from unittest.mock import Mock

import pytest
import torch

from fastgrpo import distill, train
from fastgrpo.config import command
from fastgrpo.config.command import new_file, run_command
from fastgrpo.config.recipe import parse


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
@pytest.mark.parametrize("argv, named", [
    (["--learning-rat=1"], "did you mean --learning_rate"),
    (["--learning_rat", "1", "--qqq", "--bta", "2"], "--learning_rate for --learning_rat.*--beta for --bta"),
    (["--qqq", "1", "--www", "2"], "--help"),
    (["--group-size", "8", "--kl_coef", "0"], "--num_generations for --group-size.*--beta for --kl_coef"),
    (["-G", "8"], "did you mean --num_generations"),
    (["--quiet", "maybe"], "quiet.*True.*False"),
])  # fmt: skip
def test_a_wrong_flag_is_one_line_and_exit_code_2(argv, named, encoding, monkeypatch, capfd):
    """tyro draws a box, by other characters where the terminal has no UTF-8."""
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(io.BytesIO(), encoding=encoding))
    assert train.main(argv) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("error: ") and re.search(named, line)


def test_a_boolean_without_a_value_is_true():
    assert parse(["--quiet"]).quiet and parse(["--quiet", "--beta", "0"]).quiet and not parse([]).quiet
    assert not parse(["--quiet", "False"]).quiet and not parse(["--quiet=false"]).quiet
    assert distill.parse(["--quiet", "M"]).quiet  # before a model
    assert parse(["--gradient_checkpointing"]).gradient_checkpointing is True
    assert parse(["--use_liger_kernel", "0"]).use_liger_kernel is False
    assert parse(["--trust-remote-code", "--beta", "0"]).trust_remote_code
    assert parse(["--quiet", "yes"]).quiet and not parse(["--quiet", "0", "--beta", "1"]).quiet
    assert not parse(["--quiet", "--quiet", "False"]).quiet  # the last one counts, as a sweep relies on


def test_distillation_takes_the_length_that_the_task_recommends():
    config = distill.parse(["MODEL"])
    assert (config.model, config.task, config.max_completion_length) == ("MODEL", "arithmetic", 28)
    assert distill.parse(["MODEL", "--task", "gsm8k"]).max_completion_length == 512
    for argv in (["M", "--max_per_promt", "3"], ["M", "--temperature", "0"], ["M", "--max_repetition", "2"]):
        with pytest.raises(ValueError, match=argv[1].strip("-")):
            distill.parse(argv)


COMPLETED = """
COMP_WORDS=(fastgrpo-train --num_gen)
COMP_CWORD=1
_tyro_fastgrpo_train
printf '%s\\n' "${COMPREPLY[@]}"
complete -p fastgrpo-train
"""


@pytest.mark.skipif(shutil.which("bash") is None, reason="the script is for bash")
def test_bash_completes_flags(capsys, tmp_path):  # docs/commands.md shows how
    with pytest.raises(SystemExit):
        train.main(["--tyro-print-completion", "bash"])
    (tmp_path / "script").write_text(capsys.readouterr().out + COMPLETED)
    told = subprocess.run(["bash", str(tmp_path / "script")], capture_output=True, text=True, check=True).stdout
    offered, registered = told.rsplit("\n", 2)[:2]
    assert offered.splitlines() == ["--num_generations"] and registered.endswith("fastgrpo-train")


def test_library_errors_show_where_they_were_raised(capsys):
    assert run_command(lambda argv: json.loads("{"), []) == 2
    first, second = capsys.readouterr().err.strip().splitlines()
    assert first.startswith("error: ") and re.search(r"decoder.py:\d+; --debug", second)
    assert run_command(lambda argv: json.loads("{"), ["--debug"]) == 2
    assert "Traceback" in capsys.readouterr().err


def test_a_bug_keeps_its_traceback_and_an_interrupt_is_not_an_error():
    for error in (RuntimeError("a bug"), KeyError("a bug"), BrokenPipeError()):  # a pipe that is not the output
        with pytest.raises(type(error)):
            run_command(Mock(side_effect=error), [])
    assert run_command(Mock(side_effect=KeyboardInterrupt), []) == 130


@pytest.mark.parametrize("error, named", [
    (ModuleNotFoundError(name="yaml"), r"pip install 'fastgrpo\[train\]'"),
    (ModuleNotFoundError(name="peft.x"), "pip install peft$"), (OSError(errno.ENOSPC, "", "/x"), "full.* /x "),
    (NotADirectoryError(errno.ENOTDIR, "", "/x/y"), "/x/y is a file"), (MemoryError(), "max_tokens_per_microbatch"),
    (OSError(errno.EFBIG, "", "/x"), "/x .*ulimit -f"), (ConnectionError("no answer of a server"), "^no answer of a"),
    (OSError(errno.ENOMEM, "Cannot allocate memory"), "max_tokens_per_microbatch"),
    (RuntimeError("can't allocate memory: you tried to allocate 4096 bytes."), "4,096 bytes\n"),
    (torch.OutOfMemoryError("CUDA out of memory. Tried"), "^CUDA out of memory\n.*expandable_segments"),
])  # fmt: skip
def test_errors_of_a_users_machine_are_explained(error, named):
    assert re.search(named, command.explain(error))


@pytest.mark.parametrize("lacking, several", [(None, True), ("RANK", False), ("MASTER_ADDR", False)])
def test_needs_all_launcher_variables_for_several_processes(monkeypatch, lacking, several):
    """Batch systems and shells may leave a WORLD_SIZE behind."""
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value) if name != lacking else monkeypatch.delenv(name, raising=False)
    assert command.several_processes() is several
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert not command.several_processes()


def test_a_whole_file_gets_its_name_at_the_end(tmp_path):
    path = tmp_path / "out.jsonl"
    for fails in (True, False):
        with contextlib.suppress(ZeroDivisionError), new_file(str(path), whole=True) as file:
            file.write("row\n")
            assert not path.exists()
            1 / (not fails)
        assert list(tmp_path.iterdir()) == [path] * (not fails)
    assert path.read_text() == "row\n"
