"""Every block of code of every page is run, parsed, or marked with what it needs that a test has not.

A block of Python runs as it stands, after the ones before it on its page, in a folder of its own and with a tiny model
in the place of those that it names. Commands that train or draw for long are read by their own parsers, so that a flag
or a value that does not exist is an error; the others run. Three marks, each a line before a block, say more:

    <!-- run by tests/project/test_pages.py -->    another test runs the block with what the page says is there
    <!-- needs a GPU -->                           or the network, SLURM, ...: Python is compiled, and of the commands
                                                   those of fastgrpo are still parsed
    <!-- file my_rewards.py -->                    the block is also written to this file, for the commands below it
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
from collections import namedtuple

import pytest
import tiny
import yaml
from accelerate.commands.launch import launch_command_parser
from paths import ROOT
from torch.distributed.run import get_args_parser

from fastgrpo import GRPOConfig, GRPOTrainer, train
from fastgrpo.__main__ import COMMANDS
from fastgrpo.__main__ import main as overview
from fastgrpo.config import recipe

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]
# Pages all of whose Python another test runs, with what their text says is there already.
BY_OTHERS = {
    "README.md": "tests/project/test_readme.py",
    "docs/integrations.md": "tests/project/test_integrations_page.py",
    "docs/loss.md": "tests/project/test_pages.py",
    "docs/rollouts.md": "tests/project/test_pages.py",
    "docs/training.md": "tests/project/test_pages.py",
}
FENCE = re.compile(
    r"(?ms)(?:^ *<!-- (?P<mark>(?:run by|needs|file:?) [^\n]+?) -->\n\s*)?^(?P<indent> {0,8})(?P<fence>```+)"
    r"(?P<language>\w*)[^\n]*\n(?P<text>.*?)^ *(?P=fence) *$"
)
Block = namedtuple("Block", "line language text mark")
MODELS = r"\b(MODEL|(Qwen|HuggingFaceTB)/[\w.-]+)"
LONG = {"train", "sft", "distill", "evaluate"}  # they train, or draw from models that are not here: parsed
COMMAND = re.compile(r"(?m)^ *(\$|(python|pip|make|torchrun|from|import)\b)")  # what a reader would give or run
# Programs that run as they stand, in the page's folder.
SHELL = {"cat", "echo", "export", "grep", "head", "ls", "mkdir", "tail", "true", "wc"}


def blocks(page):
    """The blocks of a page, with the marks before them."""
    text = page.read_text()
    for found in FENCE.finditer(text):
        lines = (line.removeprefix(found["indent"]) for line in found["text"].splitlines(keepends=True))
        yield Block(text.count("\n", 0, found.start("language")) + 1, found["language"], "".join(lines), found["mark"])


def commands(text):
    """The commands of a shell script: each as it stands, and its words without comments and settings before it."""
    lines = iter(text.replace("\\\n", " ").splitlines())
    for line in lines:
        words = shlex.split(line.replace("$'\\n'", "'\n'"), comments=True)
        if here := re.search(r"<<\W?(\w+)", line):
            line = "\n".join([line, *iter(lambda: next(lines), here[1]), here[1]])
        while words and re.match(r"[A-Za-z_]\w*=", words[0]):
            words.pop(0)
        if words:
            yield line, words


class Parsed(BaseException):
    """A command has read its arguments. Commands report what is an Exception as mistakes."""


class Runner:
    """Gives the blocks of one page what they need.

    Args:
        folder: The page's own folder, which is the current one.
        model: The folder of a tiny model.
        patch: pytest's monkeypatch.
        run: The folder of a run, which stands for those that a page names and has not made.
    """

    def __init__(self, folder, model, patch, run=None):
        self.folder, self.model, self.patch, self.run = folder, model, patch, run
        self.names = {"__name__": "page"}

    def python(self, block):
        """Run a block with a tiny model and few, short steps."""
        text = re.sub(f'"{MODELS}"', f'"{self.model}"', block.text)
        text = re.sub(r"max_completion_length=\d+,? ?", "", text)
        text = re.sub(r"max_steps=\d+", "max_steps=2, max_completion_length=8", text)
        exec(compile(text, f"block of line {block.line}", "exec"), self.names)

    def bash(self, block):
        """Run or parse every command of a block."""
        for line, words in commands(block.text):
            try:
                parts = [[]]
                for word in words:
                    parts = [*parts, []] if word in ("&&", "||", "|", ";") else [*parts[:-1], [*parts[-1], word]]
                alone = all(part[0] in SHELL for part in parts)
                for part in parts[:1] if alone else parts:
                    self.command(line if alone else shlex.join(part), part, block.mark)
            except SystemExit as stop:
                assert not stop.code, f"line {block.line}: refused: {line}"
            except ValueError as error:
                raise AssertionError(f"line {block.line}: {line}\n{error}") from error

    def command(self, line, words, mark):
        """Run or parse one command."""
        program, *rest = words
        program = re.sub(r"^(.*/)?python3?$", "python", program)
        if program in ("torchrun", "accelerate", "srun") and "-m" in rest:
            self.launched(words)
        elif program == "python" and rest[0] == "-m":
            self.module(rest[1], rest[2:], parse=bool(mark and mark.startswith("needs")))
        elif program == "python" and (self.folder / rest[0]).is_file():
            runpy.run_path(rest[0], run_name="__main__")
        elif program == "python" and (ROOT / rest[0]).is_file():
            tests = [path.read_text() for path in (ROOT / "tests" / "integrations").glob("test_example_*.py")]
            assert any(rest[0].rpartition("/")[2] in text for text in tests), f"no test runs {rest[0]}"
        elif program == "make":
            targets = re.findall(r"^([\w -]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
            assert rest[0] in " ".join(targets).split(), f"there is no target {rest[0]}"
        elif program == "pip" and (extras := re.search(r"(?:^| )(?:\.|fastgrpo)\[([\w,]+)\]$", " ".join(rest))):
            known = re.findall(r'^        "(\w+)": \[', (ROOT / "setup.py").read_text(), re.MULTILINE)
            assert set(extras[1].split(",")) <= set(known), f"setup.py has no such extras: {extras[1]}"
        elif program in SHELL and not (mark and mark.startswith("needs")):
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
        """Make the folders of runs, and the models in them, that a command names and that no block has made."""
        for name, inner in re.findall(r"\b(runs/[\w-]+)(/[\w-]+)?(?![\w.-])", " ".join(words)):
            if not (self.folder / name).exists():
                shutil.copytree(self.run, self.folder / name)
            if inner and not (self.folder / (name + inner)).exists():
                shutil.copytree(self.model, self.folder / (name + inner))

    def launched(self, words):
        """Read the flags of the launcher, and the command that it starts."""
        words = words[next(i for i, word in enumerate(words) if word in ("torchrun", "accelerate")) :]
        if words[0] == "torchrun":
            launch = get_args_parser().parse_args(words[1:])
        else:
            launch = launch_command_parser().parse_args(words[2:])
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
        command = name.removeprefix("fastgrpo.")
        module = importlib.import_module(name)
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
            argv = [re.sub(MODELS, str(self.model), word) for word in argv]
            found = module.main(argv)
            assert found in (0, 1) if command == "check" else found == 0, f"{name} ended with {found}"

    def parse(self, module, argv):
        """Let a command read its arguments with its own parser, and stop there."""
        name = "parse" if hasattr(module, "parse") else "parse_flags"
        read = getattr(module, name)

        def read_alone(*args, **knobs):
            raise Parsed(read(*args, **knobs))

        self.patch.setattr(module, name, read_alone)
        try:
            with pytest.raises(Parsed):
                assert module.main(argv) == 0, "the arguments are refused; see stderr"
        finally:
            self.patch.setattr(module, name, read)

    def json(self, block):
        """Read a block as one value, or as a value a line."""
        try:
            json.loads(block.text)
        except ValueError:
            assert [json.loads(line) for line in block.text.splitlines()]

    def yaml(self, block):
        """Read a block as settings."""
        assert yaml.safe_load(block.text)

    def text(self, block):
        """Nothing is run that is only shown."""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A tiny model that talks."""
    return tiny.save(tmp_path_factory.mktemp("model"), chat=True)


@pytest.fixture(scope="module")
def run(tmp_path_factory, model):
    """The folder of a run of two steps."""
    args = GRPOConfig(
        output_dir=str(tmp_path_factory.mktemp("run") / "run"), max_steps=2, num_generations=2, logging_steps=1,
        max_completion_length=4, prompts_per_step=1,
    )  # fmt: skip
    rows = [{"prompt": "What is a prime? "}]
    trainer = GRPOTrainer(str(model), lambda completions, **_: list(map(len, map(str, completions))), args, rows)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fastgrpo.run.curves.draw_curves", lambda *_: None)
        trainer.train()
    return args.output_dir


@pytest.fixture
def runner(tmp_path, monkeypatch, model, run):
    """What runs the blocks of a page, in a folder with the files that pages name."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    rewards = {block.language: block.text for block in reversed([*blocks(ROOT / "docs" / "rewards.md")])}
    found = Runner(tmp_path, model, monkeypatch, run)
    found.write("my_rewards.py", rewards["python"])
    found.write("sums.jsonl", rewards["json"])
    before = {*sys.modules}
    yield found
    for name in {*sys.modules} - before:  # a module of a page has a name that other tests' modules may have
        if str(getattr(sys.modules[name], "__file__", None)).startswith(str(tmp_path)):
            del sys.modules[name]


def treat(page, runner):
    """Give every block of a page its fate."""
    elsewhere = BY_OTHERS.get(str(page.relative_to(ROOT)) if page.is_relative_to(ROOT) else "")
    for block in blocks(page):
        where = f"{page.name}, line {block.line}"
        known = block.language in ("python", "bash", "json", "yaml", "text") or not COMMAND.search(block.text)
        assert known, f"{where}: name the language of the block, python, bash, json, yaml or text, for it to be tested"
        if block.mark and block.mark.startswith("file"):
            runner.write(block.mark.split()[1], block.text)
        by = elsewhere if block.language == "python" else None
        if block.mark and block.mark.startswith("run by "):
            by = block.mark.removeprefix("run by ")
        if by is not None:
            test = ROOT / by
            assert test.is_file() and page.name in test.read_text(), f"{where}: {by} does not run it"
        elif block.mark and block.mark.startswith("needs") and block.language == "python":
            assert ast.parse(block.text).body, where
        else:
            getattr(runner, block.language, runner.text)(block)


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_every_block_runs(page, runner):
    treat(page, runner)


@pytest.mark.parametrize(
    "text, mistake",
    [
        ("```python\nnothing\n```\n", "name 'nothing' is not defined"),
        ("```bash\npython -m fastgrpo.train --lerning_rate 1\n```\n", "lerning_rate"),
        ("```bash\npython -m fastgrpo.train --beta -1\n```\n", "beta"),
        ("```bash\npython -m fastgrpo.evaluate MODEL --taks gsm8k\n```\n", "refused"),
        ("```bash\npython -m fastgrpo.gone\n```\n", "No module named 'fastgrpo.gone'"),
        ("```bash\ntorchrun --nproc_per_gpu 8 -m fastgrpo.train\n```\n", "refused"),
        ("```bash\nmake gone\n```\n", "there is no target gone"),
        ("```bash\npip install -e '.[gone]'\n```\n", "setup.py has no such extras"),
        ("```bash\nvllm serve MODEL\n```\n", "no test runs `vllm serve MODEL`: mark its block"),
        ("<!-- needs a GPU -->\n```bash\npython -m fastgrpo.train --gone 1\n```\n", "gone"),
        ("<!-- run by tests/project/test_gone.py -->\n```bash\nvllm serve MODEL\n```\n", "does not run it"),
        ('```json\n{"prompt": 1,}\n```\n', "Expecting"),
        ("```\nmake test\n```\n", "name the language of the block"),
    ],
)
def test_a_block_without_a_fate_is_named(text, mistake, tmp_path, monkeypatch, model):
    page = tmp_path / "page.md"
    page.write_text(f"# Page\n\n{text}")
    with pytest.raises((Exception, SystemExit), match=re.escape(mistake)):
        treat(page, Runner(tmp_path, model, monkeypatch))


def test_a_page_makes_its_own_files(runner, capfd):
    page = runner.folder / "page.md"
    page.write_text(
        "<!-- file own_reward.py -->\n```python\ndef short(completions, **_):\n"
        "    return [-float(len(text)) for text in completions]\n```\n"
        "```bash\ncat > own.jsonl <<'END'\n" + '{"prompt": "a", "completion": ["b", "cc"]}\n' + "END\n"
        ".venv/bin/python -m fastgrpo.check --reward own_reward:short --dataset own.jsonl\n"
        "head -n 1 runs/own/metrics.jsonl | grep reward\n```\n"
    )
    treat(page, runner)
    told = capfd.readouterr().out
    assert "short, best (-1): 'b'" in told, told
    assert '"step": 1' in told


def test_marks_excuse_what_cannot_run(tmp_path, monkeypatch, model):
    page = tmp_path / "page.md"
    page.write_text(
        "<!-- needs a GPU and vLLM -->\n```bash\nvllm serve MODEL  # a comment\n```\n\n"
        "<!-- run by tests/project/test_code_blocks.py -->\n\n```python\nnothing\n```\n"
        "- a list\n  ```python\n  x = 1\n  ```\n\n````text\n```python\nnothing\n```\n````\n"
    )
    runner = Runner(tmp_path, model, monkeypatch)
    page = page.rename(tmp_path / "test_code_blocks")  # a name that the named test has in it
    treat(page, runner)
    assert runner.names["x"] == 1
