"""docs/integrations.md: its code blocks are executed as they stand, each with what the page says is there already."""

import re
import sys
import types

import pytest
import tiny
import torch
import transformers
import trl
from paths import ROOT
from trl_pairs import trainer

from fastgrpo.integrations import liger, verl
from fastgrpo.integrations.trl import FusedGRPOTrainer

PAGE = (ROOT / "docs" / "integrations.md").read_text()


def block(section):
    """The Python blocks of a section, in a list."""
    text = PAGE.split(f"\n## {section}\n")[1].split("\n## ")[0]
    return re.findall(r"```python\n(.*?)```", text, re.DOTALL)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return tiny.save(tmp_path_factory.mktemp("model"), chat=True)


def test_the_line_for_trl_gives_its_trainer_with_our_head():
    line, _ = block("TRL")
    names, before = {}, {}
    exec(line, names)
    exec(line.split("# before: ")[1], before)
    assert names["GRPOTrainer"] is FusedGRPOTrainer and issubclass(names["GRPOTrainer"], before["GRPOTrainer"])


def test_a_trainer_of_trl_trains_after_the_patch(path, tmp_path):
    _, patch = block("TRL")
    names = {"trainer": trainer(trl.GRPOTrainer, path, tmp_path, max_steps=1, max_completion_length=4)}
    exec(patch, names)
    assert isinstance(names["trainer"], FusedGRPOTrainer) and names["trainer"].state.global_step == 1


def test_the_imports_of_liger_are_replaced():
    pytest.importorskip("liger_kernel", reason="Liger-Kernel is for Linux")
    (imports,) = block("Liger")
    ours, theirs = {}, {}
    exec(imports, ours)
    exec(re.sub("(?m)^from fastgrpo.*|^# ", "", imports), theirs)
    assert ours.keys() == theirs.keys() >= {"LigerFusedLinearGRPOLoss", "triton_grpo_loss"}
    assert ours["LigerFusedLinearGRPOLoss"] is liger.LigerFusedLinearGRPOLoss
    assert theirs["LigerFusedLinearGRPOLoss"].__module__.startswith("liger_kernel")


def test_the_function_of_verl_is_replaced_in_its_module(monkeypatch):
    """In a module of that name with another function: verl is not installed here."""
    (lines,) = block("verl")
    name = "verl.utils.kernel.linear_cross_entropy"
    parts = name.split(".")
    for end in range(1, len(parts) + 1):
        monkeypatch.setitem(sys.modules, ".".join(parts[:end]), types.ModuleType(parts[end - 1]))
    exec(lines, {})
    assert sys.modules[name].linear_cross_entropy is verl.linear_cross_entropy


def test_a_checkpoint_is_read_by_transformers(path):
    (lines,) = block("Checkpoints elsewhere")
    assert lines.count('"runs/sums/checkpoint-50"') == 2
    names = {}
    exec(lines.replace("runs/sums/checkpoint-50", str(path)), names)
    prompt = names["tokenizer"]("1+1=", return_tensors="pt")
    assert isinstance(names["model"], transformers.Qwen2ForCausalLM)
    assert names["model"].generate(**prompt, max_new_tokens=2).shape[1] > prompt.input_ids.shape[1]
    assert names["model"].dtype == torch.float32


def test_commands_name_programs_that_are_there():
    scripts = set(re.findall(r"^python (docs/\S+)", PAGE, re.MULTILINE))
    assert scripts == {"docs/examples/lightning_grpo.py", "docs/examples/plain_loop.py"}
    assert all((ROOT / script).is_file() for script in scripts)
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"`make ([\w-]+)`", PAGE)) <= targets
