"""Every block of code of every page runs, is parsed, or is marked with what it needs that a test has not.

A block of Python runs as it stands, after the blocks before it on its page, with the values of `given` and with a tiny
model in place of those it names. Commands that train or draw for long are read by their own parsers; the others run.
A line before a block may mark it:

    <!-- run by tests/run/test_x.py -->    another test runs it
    <!-- needs a GPU -->                   or the network, SLURM, ...: Python is compiled, and of the commands those of
                                           fastgrpo are parsed
    <!-- file my_rewards.py -->            it is also written to this file, for the commands below it
"""

import ast
import importlib
import importlib.util
import json
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import types
from collections import namedtuple

import pytest
import tiny
import torch
import yaml
from accelerate.commands.launch import launch_command_parser
from paths import ROOT
from runs import make_trainer
from torch.distributed.run import get_args_parser
from transformers import Qwen2ForCausalLM

import fastgrpo
from fastgrpo import train
from fastgrpo.__main__ import COMMANDS
from fastgrpo.__main__ import main as overview
from fastgrpo.config import recipe

PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "benchmarks/README.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]
FENCE = re.compile(
    r"(?ms)(?:^ *<!-- (?P<mark>(?:run by|needs|file:?) [^\n]+?) -->\n\s*)?^(?P<indent> {0,8})(?P<fence>```+)"
    r"(?P<language>\w*)[^\n]*\n(?P<text>.*?)^ *(?P=fence) *$"
)
Block = namedtuple("Block", "line language text mark")
MODELS = r"\b(MODEL|(Qwen|HuggingFaceTB)/[\w.-]+)"
LONG = {"train", "sft", "distill", "evaluate"}  # they train, or draw from models that are not here: parsed
COMMAND = re.compile(r"(?m)^ *(\$|(python|pip|make|torchrun|from|import)\b)")  # what a reader would give or run
SHELL = {"cat", "echo", "export", "grep", "head", "ls", "mkdir", "tail", "true", "wc"}  # they run in the page's folder


def blocks(page):
    text = page.read_text()
    for found in FENCE.finditer(text):
        lines = (line.removeprefix(found["indent"]) for line in found["text"].splitlines(keepends=True))
        yield Block(text.count("\n", 0, found.start("language")) + 1, found["language"], "".join(lines), found["mark"])


def commands(text):
    """The commands of a shell script: each as it stands, and its words without comments and variables before it."""
    lines = iter(text.replace("\\\n", " ").splitlines())
    for line in lines:
        words = shlex.split(line.replace("$'\\n'", "'\n'"), comments=True)
        if here := re.search(r"<<\W?(\w+)", line):
            line = "\n".join([line, *iter(lambda: next(lines), here[1]), here[1]])
        while words and re.match(r"[A-Za-z_]\w*=", words[0]):
            words.pop(0)
        if words:
            yield line, words


def given():
    mask = torch.ones(3, 6)
    mask[0, 4:] = mask[2, :2] = 0
    model, reference = (Qwen2ForCausalLM(tiny.config(hidden_size=size)).float() for size in (32, 48))
    size = model.config.vocab_size
    return {
        "__name__": "page", "torch": torch, "fastgrpo": fastgrpo, "model": model, "reference": reference,
        "input_ids": torch.randint(size, (3, 7)), "targets": torch.randint(11, (3, 6)), "mask": mask,
        "completion_mask": mask, "old_logps": -4 - torch.rand(3, 6), "ref_logps": -4 - torch.rand(3, 6),
        "advantages": torch.randn(3), "hidden": torch.randn(3, 6, 8, requires_grad=True),
        "lm_head": torch.nn.Linear(8, 11, bias=False), "packed_hidden": torch.randn(21, 32, requires_grad=True),
        "packed_ids": torch.randint(size, (21,)), "packed_mask": torch.ones(21),
        "packed_old_logps": -4 - torch.rand(21), "cu_seqlens": torch.arange(4) * 7,
        "trainer": types.SimpleNamespace(train=lambda: None),
    }  # fmt: skip


class Parsed(BaseException):
    """A command has read its arguments. Commands report what is an Exception as mistakes."""


class Runner:
    """Runs the blocks of one page in its folder, with a tiny model and a run in place of those that it names."""

    def __init__(self, folder, model, patch, run):
        self.folder, self.model, self.patch, self.run, self.names = folder, model, patch, run, given()

    def python(self, block):
        text = re.sub(f'"{MODELS}"', f'"{self.model}"', block.text)
        text = re.sub(r"max_completion_length=\d+,? ?", "", text)
        text = re.sub(r"max_steps=\d+", "max_steps=2, max_completion_length=8", text)
        text = re.sub(r"max_tokens=\d+", "max_tokens=4", text)
        self.make_runs(re.findall(r'"(runs/[^"]*-\d+)"', text))
        exec(compile(text, f"block of line {block.line}", "exec"), self.names)

    def bash(self, block):
        for line, words in commands(block.text):
            try:
                parts = [[]]
                for word in words:
                    parts = [*parts, []] if word in ("&&", "||", "|", ";") else [*parts[:-1], [*parts[-1], word]]
                alone = all(part[0] in SHELL for part in parts)
                for part in parts[:1] if alone else parts:
                    self.command(line if alone else shlex.join(part), part, block.mark or "")
            except (SystemExit, ValueError) as error:
                if not isinstance(error, SystemExit) or error.code:
                    raise AssertionError(f"line {block.line}: refused: {line}\n{error}") from error

    def command(self, line, words, mark):
        program, *rest = words
        program = re.sub(r"^(.*/)?python3?$", "python", program)
        needs = mark.startswith("needs")
        if program in ("torchrun", "accelerate", "srun") and "-m" in rest:
            self.launched(words)
        elif program == "python" and rest[0] == "-m" and not rest[1].startswith("vllm."):
            self.module(rest[1], rest[2:], parse=needs)
        elif program == "python" and (self.folder / rest[0]).is_file():
            runpy.run_path(rest[0], run_name="__main__")
        elif program == "python" and (ROOT / rest[0]).is_file():
            tests = [path.read_text() for path in (ROOT / "tests" / "integrations").glob("test_*.py")]
            assert any(rest[0].rpartition("/")[2] in text for text in tests), f"no test runs {rest[0]}"
        elif program == "make":
            targets = re.findall(r"^([\w ./-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
            assert rest[0] in " ".join(targets).split(), f"there is no target {rest[0]}"
        elif program == "pip" and (extras := re.search(r"(?:^| )(?:\.|fastgrpo)\[([\w,]+)\]$", " ".join(rest))):
            known = re.findall(r'^        "(\w+)": \[', (ROOT / "setup.py").read_text(), re.MULTILINE)
            assert set(extras[1].split(",")) <= set(known), f"setup.py has no such extras: {extras[1]}"
        elif program in SHELL and not needs:
            self.make_runs(words)
            subprocess.run(["bash", "-euo", "pipefail", "-c", line], cwd=self.folder, check=True)
        else:
            assert mark, f"no test runs `{shlex.join(words)}`: mark its block, as in <!-- needs the network -->"

    def write(self, name, text):
        """Write a file that commands name. A module of this name that another page had is forgotten."""
        (self.folder / name).write_text(text)
        self.patch.delitem(sys.modules, name.removesuffix(".py"), raising=False)
        importlib.invalidate_caches()

    def make_runs(self, words):
        """Make the folders of runs, and the models in them, that are named and that no block has made."""
        for name, inner in re.findall(r"\b(runs/[\w-]+)(/[\w-]+)?(?![\w.-])", " ".join(words)):
            if not (self.folder / name).exists():
                shutil.copytree(self.run, self.folder / name)
            if inner and not (self.folder / (name + inner)).exists():
                shutil.copytree(self.model, self.folder / (name + inner))

    def launched(self, words):
        words = words[next(i for i, word in enumerate(words) if word in ("torchrun", "accelerate")) :]
        torchrun = words[0] == "torchrun"
        launch = (get_args_parser() if torchrun else launch_command_parser()).parse_args(words[2 - torchrun :])
        assert launch.module
        self.module(launch.training_script, launch.training_script_args, parse=True)

    def module(self, name, argv, parse=False):
        """Run `python -m NAME`, or parse its arguments where it works for long or several processes share it."""
        if name == "fastgrpo":
            assert overview(argv) == 0
            return
        if not name.startswith("fastgrpo."):
            assert importlib.util.find_spec(name), f"there is no module {name}"
            return
        command, module = name.removeprefix("fastgrpo."), importlib.import_module(name)
        if command not in COMMANDS:
            assert hasattr(module, "main") or "__main__" in module.__loader__.get_source(name), f"{name} is no command"
        elif command == "train":
            argv = [word.replace("fastgrpo/recipes", str(recipe.RECIPES)) for word in argv]
            assert train.take_sweep(argv) or train.parse(argv)
        elif command == "doctor" and (parse or "--check" in argv):  # the kernels' checks have tests of their own
            train.parse(["--model_name_or_path" if word == "--model" else word for word in argv if word != "--check"])
        elif command in LONG or parse:
            self.parse(module, argv)
        else:
            self.make_runs(argv)
            argv += ["--max_tokens", "4"] if command == "chat" else []
            found = module.main([re.sub(MODELS, str(self.model), word) for word in argv])
            assert found in (0, 1) if command == "check" else found == 0, f"{name} ended with {found}"

    def parse(self, module, argv):
        name = next(name for name in ("parse", "parse_for_rows", "parse_flags") if hasattr(module, name))
        read = getattr(module, name)

        def read_alone(*args, **knobs):
            raise Parsed(read(*args, **knobs))

        self.patch.setattr(module, name, read_alone)
        with pytest.raises(Parsed):
            assert module.main(argv) == 0, "the arguments are refused; see stderr"
        self.patch.setattr(module, name, read)

    def json(self, block):
        try:
            json.loads(block.text)
        except ValueError:
            assert [json.loads(line) for line in block.text.splitlines()]

    def yaml(self, block):
        assert yaml.safe_load(block.text)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny.save(tmp_path_factory.mktemp("model"), chat=True)


@pytest.fixture(scope="module")
def run(tmp_path_factory, model):
    few = {"max_steps": 2, "num_generations": 2, "max_completion_length": 4, "prompts_per_step": 1}
    rows, reward = [{"prompt": "What is a prime? "}], lambda completions, **_: list(map(len, map(str, completions)))
    trainer = make_trainer(tmp_path_factory.mktemp("run"), reward, rows, model=str(model), **few)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fastgrpo.run.curves.draw_curves", lambda *_: None)
        trainer.train()
    return trainer.args.output_dir


@pytest.fixture
def runner(tmp_path, monkeypatch, model, run, without_curves):
    """What runs the blocks of a page, in a folder with the files that pages name, and modules that stand for verl's."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("fastgrpo.integrations.trl.patch", lambda trainer: trainer)
    for name in ("verl", "verl.utils", "verl.utils.kernel", "verl.utils.kernel.linear_cross_entropy"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    rewards = {block.language: block.text for block in reversed([*blocks(ROOT / "docs" / "rewards.md")])}
    found = Runner(tmp_path, model, monkeypatch, run)
    found.write("my_rewards.py", rewards["python"])
    found.write("sums.jsonl", rewards["json"])
    before = {*sys.modules}
    yield found
    for name in {*sys.modules} - before:  # a module of a page has a name that other tests' modules may have
        if str(getattr(sys.modules[name], "__file__", None)).startswith(str(tmp_path)):
            del sys.modules[name]


@pytest.mark.parametrize("page", [page for page in PAGES if any(blocks(page))], ids=lambda path: path.name)
def test_every_block_runs(page, runner):
    for block in blocks(page):
        where, mark = f"{page.name}, line {block.line}", block.mark or ""
        known = block.language in ("python", "bash", "json", "yaml", "text") or not COMMAND.search(block.text)
        assert known, f"{where}: name the language of the block, python, bash, json, yaml or text, for it to be tested"
        if mark.startswith("file"):
            runner.write(mark.split()[1], block.text)
        if mark.startswith("run by "):
            test = ROOT / mark.removeprefix("run by ")
            assert test.is_file() and page.name in test.read_text(), f"{where}: {test.name} does not run it"
        elif mark.startswith("needs") and block.language == "python":
            assert ast.parse(block.text).body, where
        else:
            getattr(runner, block.language, lambda shown: None)(block)
