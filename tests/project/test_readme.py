"""The README: its Python runs, its flags are all there, its files exist."""

import dataclasses
import re

import tiny
import torch
from paths import ROOT

from fastgrpo import train
from fastgrpo.config import recipe
from fastgrpo.config import settings as config
from fastgrpo.run.log import METRICS

README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def test_the_loss_alone():
    torch.manual_seed(0)
    batch, length, width, vocabulary = 3, 5, 8, 11
    names = {
        "hidden": torch.randn(batch, length, width, requires_grad=True),
        "lm_head": torch.nn.Linear(width, vocabulary, bias=False),
        "targets": torch.randint(vocabulary, (batch, length)),
        "advantages": torch.randn(batch),
        "completion_mask": torch.ones(batch, length),
        "old_logps": -torch.rand(batch, length),
        "ref_logps": -torch.rand(batch, length),
    }
    exec(BLOCKS[0], names)
    assert names["hidden"].grad.abs().sum() > 0 and names["lm_head"].weight.grad.abs().sum() > 0
    assert names["out"].metrics["kl"] > 0


def test_the_trainer_in_python(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    block = BLOCKS[1]
    assert sum(bool(line.strip()) for line in block.splitlines()) <= 10
    replacements = {
        "Qwen/Qwen2.5-0.5B": str(tiny.save(tmp_path / "m")),
        "max_steps=100": "max_steps=2",
        "num_generations=8": "num_generations=4, max_completion_length=5",
    }
    for theirs, ours in replacements.items():
        assert theirs in block
        block = block.replace(theirs, ours)
    names = {}
    exec(block, names)
    assert names["summary"]["steps"] == 2
    assert (tmp_path / "runs" / "brevity" / "checkpoint-2" / "model.safetensors").exists()


def test_every_flag_is_listed_and_every_listed_flag_exists():
    fields = {field.name for field in dataclasses.fields(config.GRPOConfig)}
    listed = set(re.findall(r"^\| `--(\w+)` \|", README, re.MULTILINE))
    assert listed == fields


def test_commands_parse():
    commands = re.findall(r"^python -m fastgrpo\.train (--.+)$", README, re.MULTILINE)
    assert len(commands) >= 4
    for command in commands:
        train.parse([word.replace("fastgrpo/recipes", str(recipe.RECIPES)) for word in command.split()])


def test_the_tree_names_files_that_exist():
    tree = README.split("## The tree")[1].split("```")[1]
    folder, seen = "", 0
    for line in tree.strip().splitlines():
        name = line.split()[0]
        if not line.startswith(" "):
            folder = name
            assert (ROOT / name).exists(), name
            continue
        for part in re.split(r", ", re.split(r"\s{2,}", line.strip())[0]):
            assert (ROOT / folder / part).exists(), part
            seen += 1
    assert seen >= 12


def test_pictures_and_links_exist():
    for target in re.findall(r"\]\((?!http)([^)]+)\)", README):
        assert (ROOT / target).exists(), target


def test_the_metrics_table_has_a_meaning_for_each():
    assert all(meaning and len(name) > 1 for name, meaning in METRICS.items())
