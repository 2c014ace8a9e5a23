"""The specification itself, against numbers by hand; its parts against its wholes."""

import ast
import math

import oracle
import pytest
import torch
from paths import ROOT

from fastgrpo.kernels import reference


def test_the_reference_imports_nothing_of_what_it_checks():
    tree = ast.walk(ast.parse((ROOT / "kernels" / "reference.py").read_text()))
    imports = [node for node in tree if isinstance(node, ast.Import | ast.ImportFrom)]
    assert {getattr(node, "module", node.names[0].name) for node in imports} == {"math", "typing", "torch"}


def test_log_probs_and_entropy_by_hand():
    logps, entropy = reference.linear_logprob(*oracle.hand_case(), return_entropy=True)
    assert logps.tolist() == pytest.approx([-math.log(2), -math.log(5)])
    expected = [0.5 * math.log(2) + 0.5 * math.log(4), 0.4 * math.log(5) + 0.6 * math.log(5 / 3)]
    assert entropy.tolist() == pytest.approx(expected)


def test_softcap_by_hand():
    """Two logits, 0 and 3: the cap 2 makes 0 and 2 tanh(1.5) of them."""
    logps = reference.linear_logprob(
        torch.ones(1, 1), torch.tensor([[0.0], [3.0]]), torch.tensor([0]), logit_softcap=2.0
    )
    assert logps.item() == pytest.approx(-math.log(1 + math.exp(2 * math.tanh(1.5))))
