"""The README: it is short, its Python runs, and it leads to what a reader looks for."""

import re

import tiny
import torch
from paths import ROOT

from fastgrpo.run.metrics import METRICS

README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def test_it_is_short():
    assert len(README.split()) <= 750  # as `wc -w` counts, code and tables included


def test_the_loss_alone():
    """Ten lines of code, which give gradients and metrics."""
    assert sum(bool(line.strip()) for line in BLOCKS[1].splitlines()) <= 10
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
    exec(BLOCKS[1], names)
    assert names["hidden"].grad.abs().sum() > 0 and names["lm_head"].weight.grad.abs().sum() > 0
    assert names["out"].metrics["kl"] > 0


def test_the_trainer_in_python(tmp_path, monkeypatch, without_curves):
    monkeypatch.chdir(tmp_path)
    block = BLOCKS[0]
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


def test_it_leads_to_formula_kernel_test_benchmark_and_reward():
    """Each row of the table "Where to find" links to files that hold what it says."""
    table = README.split("## Where to find")[1].split("\n\n")[1]
    rows = {row.split("|")[1].strip(): re.findall(r"\]\(([^)]+)\)", row) for row in table.splitlines()}
    held = {
        "the formula of the loss": ("fastgrpo/loss/losses.py", "loss = sum_n w_n"),
        "its kernels": ("kernels/logits.py", "@triton.jit"),
        "its specification in plain PyTorch": ("kernels/reference.py", "def policy_loss("),
        "its tests": ("tests/loss", None),
        "its benchmarks": ("benchmarks/bench_loss.py", "linear_grpo_loss"),
        "how to add": ("CONTRIBUTING.md#a-reward", "## A reward"),
    }
    for what, (target, text) in held.items():
        assert target in rows[what], what
        if text is None:
            assert list((ROOT / target).glob("test_*.py"))
        else:
            assert text in (ROOT / target.partition("#")[0]).read_text(), target


def test_the_metrics_table_has_a_meaning_for_each():
    assert all(meaning and len(name) > 1 for name, meaning in METRICS.items())
