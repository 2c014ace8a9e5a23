"""Every objective against the reference in fp64, by all three losses."""

import ast
from dataclasses import replace

import pytest
import torch
from objective_cases import CASES, EVERY, SAMPLER_CASES
from oracle import assert_close, padded_case, run, set_chunk, truth
from paths import ROOT

from fastgrpo import Objective, grpo_loss, linear_grpo_loss, logits_grpo_loss
from fastgrpo.kernels import reference

EXACT = 1e-12
ITEMS = 37  # tokens of the whole step


def batch(name, old=True):
    case = padded_case(per_token_temperature=True, old=old)
    return case if name in SAMPLER_CASES else replace(case, sampler_logps=None)


@pytest.mark.parametrize("old", [True, False], ids=["old", "first-update"])
@pytest.mark.parametrize("name", EVERY)
def test_equals_the_reference(monkeypatch, name, old):
    case, knobs = batch(name, old), EVERY[name]
    loss, logps, _, gradients = truth(case, num_items_in_batch=ITEMS, **knobs)
    poisoned = case.poisoned()
    for chunk in (None, 9, 3):  # one chunk; chunks that end with sequences; sequences longer than a chunk
        set_chunk(monkeypatch, chunk)
        out, own = run(poisoned, linear_grpo_loss, num_items_in_batch=ITEMS, **knobs)
        assert_close(out.loss.detach(), loss, EXACT)
        assert_close(own, gradients, EXACT)
        expected = torch.zeros_like(out.logps).masked_scatter(case.mask, logps)
        assert_close(out.logps, expected.masked_fill(~out.active, 0), EXACT)
        metrics = truth(case, rows=out.active.flatten().nonzero()[:, 0], num_items_in_batch=ITEMS, **knobs)[2]
        for metric, value in metrics.items():  # the reference's shares of clipped tokens are fp32 means
            assert_close(out.metrics[metric], value, 1e-6 if "clip_ratio" in metric else EXACT)


@pytest.mark.parametrize("name", EVERY)
def test_the_losses_of_logits_and_of_log_probs_equal_that_of_the_head(monkeypatch, name):
    case, knobs = batch(name), {**EVERY[name], "num_items_in_batch": ITEMS}
    head = case.head()
    logits = head["hidden"] @ head["weight"].T + head["bias"]
    logps = reference.logits_logprob(logits.flatten(0, 1), case.targets.flatten(),
                                     temperature=case.temperature.flatten()).view(case.targets.shape)  # fmt: skip
    expected = linear_grpo_loss(**head, **case.rest(), **knobs)
    gradients = torch.autograd.grad(expected.loss, list(head.values()))
    ways = [("logits", None), ("logits in place", None), ("logits", 4)]
    ways += [] if knobs.get("entropy_coef") else [("log-probs", None)]
    for loss, chunk in ways:
        set_chunk(monkeypatch, chunk)
        if loss == "log-probs":
            rest = {name: x for name, x in case.rest().items() if name not in ("targets", "temperature")}
            out = grpo_loss(logps, old_logps=rest.pop("old_logps"), **rest, **knobs)
        else:
            out = logits_grpo_loss(logits * 1, **case.rest(), inplace="in place" in loss, **knobs)
        assert_close(out.loss.detach(), expected.loss.detach(), EXACT)
        assert torch.equal(out.active, expected.active) and out.metrics.keys() == expected.metrics.keys()
        for metric, value in expected.metrics.items():
            torch.testing.assert_close(out.metrics[metric].double(), value.double(), rtol=1e-10, atol=1e-14)
        own = torch.autograd.grad(out.loss, list(head.values()), retain_graph=True)
        for actual, gradient in zip(own, gradients, strict=True):
            assert_close(actual, gradient, EXACT)


@pytest.mark.parametrize("name", ["gspo", "vespo", "luspo-k3", "dapo-sequence_truncate", "vespo-token_mask"])
def test_tokens_without_advantage_or_weight_still_move_their_sequence(name):
    case, knobs = batch(name), EVERY[name]
    case = replace(case, advantages=case.advantages[:, None] * (torch.arange(7) % 3 > 0))
    loss, _, _, gradients = truth(case, **knobs)
    out, own = run(case, linear_grpo_loss, **knobs)
    assert_close(out.loss.detach(), loss, EXACT)
    assert_close(own, gradients, EXACT)
    if not knobs.get("beta"):  # without a KL a weight of 0 and an advantage of 0 are the same
        weights = Objective(**knobs).token_weights(case.mask.flatten(), case.starts(), dtype=torch.float64)
        weights = weights.view(case.mask.shape) * (case.advantages != 0)
        assert_close(run(case, linear_grpo_loss, token_weights=weights, **knobs)[0].loss.detach(), loss, EXACT)


def test_objective_by_record_and_by_name():
    case = padded_case(sampler=False)
    by_name, by_record = (run(case, linear_grpo_loss, **knobs)[0].loss for knobs in
                          (CASES["gspo-k3"], {"objective": Objective(**CASES["gspo-k3"])}))  # fmt: skip
    assert by_name == by_record
    with pytest.raises(ValueError, match="beta are fields of objective"):
        run(case, linear_grpo_loss, objective=Objective(), beta=0.1)
    with pytest.raises(TypeError, match="epsilon_hihg"):
        run(case, linear_grpo_loss, epsilon_hihg=0.1)


def test_the_reference_imports_nothing_of_what_it_checks():
    tree = ast.walk(ast.parse((ROOT / "kernels" / "reference.py").read_text()))
    imports = [node for node in tree if isinstance(node, ast.Import | ast.ImportFrom)]
    assert {getattr(node, "module", node.names[0].name) for node in imports} == {"math", "typing", "torch"}
