"""What is wrong with a GGUF file is told in a line or two that name the file and the remedy."""

import json
import shutil
import sys

import pytest
import tiny
import tiny_gguf
from mistakes import Case, check, flags, spoilt

from fastgrpo import chat, doctor, evaluate, train

pytestmark = pytest.mark.usefixtures("without_curves")


def cut(share):
    """A case whose file lacks its end."""

    def make(case):
        file = case.model / "tiny.gguf"
        file.write_bytes(file.read_bytes()[: int(file.stat().st_size * share)])

    return spoilt(make)


def content(data):
    return spoilt(lambda case: (case.model / "tiny.gguf").write_bytes(data))


def another_architecture(case):
    tiny_gguf.save(case.model / "tiny.gguf", architecture="rwkv6")


def adapters(case):
    folder = case.folder / "adapters"
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": f"{case.model}/tiny.gguf"}))
    tiny.tokenizer().save_pretrained(folder)
    return case.argv(model_name_or_path=folder)


def twice(case):
    shutil.copy(case.model / "tiny.gguf", case.model / "other.gguf")


CASES = {
    # name: (command line, what its message must say)
    "no such file": (flags(model_name_or_path="none.gguf"), "no such GGUF file: none.gguf"),
    "two files": (spoilt(twice), r"model holds 2 GGUF files \(other.gguf, tiny.gguf\); give the path of one of them"),
    "without the package": (
        spoilt(lambda case: case.without("gguf")),
        r"tiny.gguf is a GGUF file, and .* \(gguf is missing\): pip install 'fastgrpo\[gguf\]'",
    ),
    "without accelerate": (spoilt(lambda case: case.without("accelerate")), r"\(accelerate is missing\): pip install"),
    "empty file": (content(b""), "model' cannot be loaded .the files may be damaged or incomplete.: "),
    "another kind of file": (content(b"PK" * 999), "model' cannot be loaded .the files may be damaged.*: .*magic"),
    "cut in its settings": (cut(0.01), "model' cannot be loaded .the files may be damaged or incomplete.: "),
    "cut in its weights": (cut(0.7), "model' cannot be loaded .the files may be damaged or incomplete.: "),
    "another architecture": (
        spoilt(another_architecture), "cannot be loaded .use the model's folder with .safetensors files.*rwkv6 is not",
    ),
    "adapters": (adapters, "adapters of .*/adapters belong to the GGUF file .*tiny.gguf.*use the folder `merged`"),
    "in the folder of the run": (
        lambda case: case.argv(output_dir=case.model), "the model .*model lies inside output_dir",
    ),
}  # fmt: skip


@pytest.fixture(scope="session")
def saved(tmp_path_factory):
    """A folder with a GGUF file alone, in place of the folder of transformers that other tables spoil."""
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    tiny_gguf.save(path, chat=False)
    return path.parent


@pytest.mark.parametrize("name", CASES)
def test_a_mistake_is_told_in_a_line_or_two(name, tmp_path, saved, monkeypatch, capfd):
    build, message = CASES[name]
    case = Case(tmp_path, saved, monkeypatch)
    monkeypatch.chdir(tmp_path)
    check(train.main, build(case), message, capfd)


COMMANDS = {"evaluate": (evaluate, ()), "chat": (chat, ("--prompt", "a")), "doctor": (doctor, ())}


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_tells_that_the_package_is_missing(name, tmp_path, saved, monkeypatch, capfd):
    command, more = COMMANDS[name]
    monkeypatch.setitem(sys.modules, "gguf", None)
    file = saved / "tiny.gguf"
    model = [f"--model={file}"] if name == "doctor" else [str(file)]
    check(command.main, [*model, *more], r"tiny.gguf is a GGUF file.*pip install 'fastgrpo\[gguf\]'", capfd)
