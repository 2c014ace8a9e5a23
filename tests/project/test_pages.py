"""The page about the loss: its Python runs, before and after agree, and so do padded and packed."""

import re

import pytest
import tiny
import torch
from paths import ROOT
from transformers import Qwen2ForCausalLM

import fastgrpo

PAGE = (ROOT / "docs" / "loss.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
S, LENGTH = 3, 7


@pytest.fixture
def names():
    """What the blocks expect to be there."""
    model = Qwen2ForCausalLM(tiny.config()).float()
    mask = torch.ones(S, LENGTH - 1)
    mask[0, 4:] = mask[2, :2] = 0
    return {
        "torch": torch,
        "fastgrpo": fastgrpo,
        "model": model,
        "input_ids": torch.randint(model.config.vocab_size, (S, LENGTH)),
        "mask": mask,
        "old_logps": -4 - torch.rand(S, LENGTH - 1),
        "advantages": torch.randn(S),
    }


def run(block, names):
    """Gradients of every parameter after the block."""
    names["model"].zero_grad()
    exec(block, names)
    return {name: p.grad.clone() for name, p in names["model"].named_parameters()}


def test_five_lines_replace_head_and_loss(names):
    before, after, _ = BLOCKS
    assert before.strip().count("\n") == after.strip().count("\n") == 4
    expected = run(before, names)
    torch.testing.assert_close(run(after, names), expected)
    torch.testing.assert_close(names["out"].loss, names["loss"])
    assert names["out"].loss != 0


def test_packed_equals_padded(names):
    _, after, packed = BLOCKS
    expected = run(after, names)
    padded = names["out"]
    hidden = names["model"].model(names["input_ids"]).last_hidden_state
    at_the_end = torch.zeros(S, 1)
    names |= {
        "packed_hidden": hidden.flatten(0, 1),
        "packed_ids": names["input_ids"].flatten(),
        "packed_mask": torch.cat([names["mask"], at_the_end], 1).flatten(),
        "packed_old_logps": torch.cat([names["old_logps"], at_the_end], 1).flatten(),
        "cu_seqlens": torch.arange(S + 1) * LENGTH,
    }
    torch.testing.assert_close(run(packed, names), expected)
    torch.testing.assert_close(names["out"].loss, padded.loss)
    torch.testing.assert_close(names["out"].logps.view(S, LENGTH)[:, :-1], padded.logps)


def test_links_exist():
    for target in re.findall(r"\]\((?!http)([^)]+)\)", PAGE):
        assert (ROOT / "docs" / target).exists(), target
