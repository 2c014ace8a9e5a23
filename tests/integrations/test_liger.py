"""Our LigerFusedLinearGRPOLoss: Liger's signature, the truth everywhere, and Liger's numbers where they are right."""

import importlib
import inspect
import os
import subprocess
import sys

import pytest
import torch
from paths import ROOT

from benchmarks import liger_cases
from benchmarks.liger_cases import CASES, CLOSE, FULL, RAGGED, TEMPERATURE, batch, gap, is_right, run_class, truth
from fastgrpo.integrations.liger import LigerFusedLinearGRPOLoss


@pytest.fixture(scope="module")
def liger():
    return importlib.import_module("liger_kernel.chunked_loss.grpo_loss")


def parameters(function):
    return [(name, p.kind, p.default) for name, p in inspect.signature(function).parameters.items()]


def test_the_signature_is_liger_s(liger):
    theirs = liger.LigerFusedLinearGRPOLoss
    for name in ("__init__", "forward"):
        assert parameters(getattr(LigerFusedLinearGRPOLoss, name)) == parameters(getattr(theirs, name))
    settings = {name: default for name, _, default in parameters(LigerFusedLinearGRPOLoss.__init__) if name != "self"}
    assert {name: getattr(LigerFusedLinearGRPOLoss(), name) for name in settings} == settings


@pytest.mark.parametrize("name", CASES)
def test_every_loss_is_the_truth(name):
    knobs, options = CASES[name]
    p = batch(**options)
    assert gap(run_class(LigerFusedLinearGRPOLoss, p, knobs), truth(p, knobs)) <= CLOSE


@pytest.mark.parametrize(
    ("name", "lengths"),
    [
        pytest.param(name, lengths, id=f"{name}-{'full' if lengths is FULL else 'ragged'}")
        for name in CASES
        for lengths in (FULL, RAGGED)
        if is_right(name, lengths)
    ],
)
def test_every_loss_is_liger_s_where_that_is_right(name, lengths, liger):
    knobs, options = CASES[name]
    p = batch(lengths, **options)
    theirs = run_class(liger.LigerFusedLinearGRPOLoss, p, knobs)
    assert gap(run_class(LigerFusedLinearGRPOLoss, p, knobs), theirs) <= CLOSE


def test_the_sign_of_an_advantage_shows(liger):
    """A test of the tests above: they tell a wrong loss from a right one."""
    p, knobs = batch(), CASES["dapo-corrected"][0]
    theirs = run_class(liger.LigerFusedLinearGRPOLoss, p, knobs)
    p.advantages = -p.advantages
    assert gap(run_class(LigerFusedLinearGRPOLoss, p, knobs), theirs) > 0.1


@pytest.mark.parametrize("loss_type", ["dapo", "cispo", "vespo", "grpo"])
def test_tokens_of_the_step(loss_type, liger):
    p, knobs = batch(), {"loss_type": loss_type, "epsilon_high": 1.5}
    ours = run_class(LigerFusedLinearGRPOLoss, p, knobs, num_items=37)
    assert gap(ours, truth(p, knobs, num_items=37)) <= CLOSE
    assert gap(ours, run_class(liger.LigerFusedLinearGRPOLoss, p, knobs, num_items=torch.tensor(37))) <= CLOSE


@pytest.mark.parametrize("use_ref_model", [True, False])
def test_the_reference_by_its_states(use_ref_model, liger):
    p, noise = batch(), torch.Generator().manual_seed(1)
    states = {
        "ref_input": p.hidden + 0.3 * torch.randn(p.hidden.shape, generator=noise),
        "ref_weight": p.weight + 0.1 * torch.randn(p.weight.shape, generator=noise),
        "ref_bias": p.bias + 0.1 * torch.randn(p.bias.shape, generator=noise),
    }
    results = []
    for module in (liger.LigerFusedLinearGRPOLoss, LigerFusedLinearGRPOLoss):
        hidden = p.hidden.clone().requires_grad_()
        loss_of = module(compiled=False, temperature=TEMPERATURE, use_ref_model=use_ref_model, beta=0.2)
        loss, metrics = loss_of(hidden, p.weight, p.ids, p.mask, p.advantages, p.bias, **states)
        loss.backward()
        results.append((loss.detach(), metrics, {"hidden": hidden.grad}))
    assert gap(*results) <= CLOSE and (results[1][1][0] > 0) == use_ref_model


def test_log_probs_of_the_reference_go_before_its_states():
    p = batch()
    given = {"ref_per_token_logps": p.ref_logps, "ref_input": p.hidden, "ref_weight": p.weight}
    with pytest.warns(UserWarning, match="Using ref_per_token_logps"):
        both = run_class(LigerFusedLinearGRPOLoss, p, {"beta": 0.2}, **given)
    assert gap(both, run_class(LigerFusedLinearGRPOLoss, p, {"beta": 0.2})) == 0
    with pytest.raises(ValueError, match="need ref_per_token_logps, or ref_input and ref_weight"):
        run_class(LigerFusedLinearGRPOLoss, p, {"beta": 0.2}, ref_input=p.hidden)


def test_the_results_are_of_liger_s_types(liger):
    p = batch()
    for beta, count in ((0.0, 1), (0.2, 2)):
        for module in (liger.LigerFusedLinearGRPOLoss, LigerFusedLinearGRPOLoss):
            loss_of = module(compiled=False, beta=beta)
            loss, metrics = loss_of(p.hidden, p.weight, p.ids, p.mask, p.advantages, ref_per_token_logps=p.ref_logps)
            assert loss.shape == () and loss.dtype == torch.float32
            assert isinstance(metrics, tuple) and len(metrics) == count
            assert all(metric.shape == () and metric.dtype == torch.float32 for metric in metrics)


@pytest.mark.parametrize("name", ["grpo-ratio-k3", "luspo-sequence-plain", "vespo-ratio-of-sequences"])
def test_nothing_of_the_padding_is_read(name):
    knobs, options = CASES[name]
    clean, stray = batch(**options), batch(**options)
    for values in (stray.hidden, stray.old_logps, stray.ref_logps):
        values[~stray.mask] = torch.nan
    stray.ids[~stray.mask] = -100
    if options.get("ratio") == "token":
        stray.ratio[~stray.mask] = 1e9
    assert (
        gap(run_class(LigerFusedLinearGRPOLoss, stray, knobs), run_class(LigerFusedLinearGRPOLoss, clean, knobs)) == 0
    )


def test_what_requires_grad_in_vain_is_taken(liger):
    """Liger gives these no gradient; neither do we."""
    p = batch(ratio="token")
    constants = [x.requires_grad_() for x in (p.advantages, p.old_logps, p.ref_logps, p.ratio)]
    run_class(LigerFusedLinearGRPOLoss, p, {"beta": 0.2})
    assert all(x.grad is None for x in constants)


def test_a_frozen_head_and_half_precision():
    p = batch()
    hidden, weight = p.hidden.bfloat16().requires_grad_(), p.weight.bfloat16()
    loss, _ = LigerFusedLinearGRPOLoss(use_ref_model=False)(hidden, weight, p.ids, p.mask, p.advantages.bfloat16())
    loss.backward()
    assert hidden.grad.dtype == torch.bfloat16 and weight.grad is None and loss.dtype == torch.float32


def test_weights_of_0_leave_nothing_but_the_kl(liger):
    """As masked sequences have them. A token without weight does not count as clipped here."""
    p, knobs = batch(ratio="sequence"), {"beta": 0.3}
    p.ratio[:2] = 0.0
    ours, theirs = (run_class(m, p, knobs) for m in (LigerFusedLinearGRPOLoss, liger.LigerFusedLinearGRPOLoss))
    assert gap((ours[0], ours[1][:1], ours[2]), (theirs[0], theirs[1][:1], theirs[2])) <= CLOSE
    assert ours[1][1] < theirs[1][1]


def test_settings_may_be_set_between_calls():
    p, loss_of = batch(), LigerFusedLinearGRPOLoss(use_ref_model=False)
    args = (p.hidden, p.weight, p.ids, p.mask, p.advantages)
    before, _ = loss_of(*args, old_per_token_logps=p.old_logps)
    loss_of.temperature = TEMPERATURE
    after, _ = loss_of(*args, old_per_token_logps=p.old_logps)
    fresh, _ = LigerFusedLinearGRPOLoss(use_ref_model=False, temperature=TEMPERATURE)(
        *args, old_per_token_logps=p.old_logps
    )
    assert after == fresh != before


def test_a_tolerance_of_the_backward_changes_gradients_alone():
    p, found = batch(), []
    for tolerance in (0.0, 0.9):
        leaf, loss_of = p.hidden.clone().requires_grad_(), LigerFusedLinearGRPOLoss(use_ref_model=False)
        loss_of.backward_tolerance = tolerance
        loss, metrics = loss_of(leaf, p.weight, p.ids, p.mask, p.advantages, old_per_token_logps=p.old_logps)
        found.append((loss, metrics, torch.autograd.grad(loss, leaf)[0]))
    assert found[0][:2] == found[1][:2] and not torch.equal(found[0][2], found[1][2])


@pytest.mark.parametrize(
    ("knobs", "complaint"),
    [
        ({"loss_type": "ppo"}, "loss_type must be one of"),
        ({"loss_type": "dr_grpo"}, "max_completion_length"),
        ({"loss_type": "vespo", "importance_sampling_level": "sequence"}, "importance_sampling_level='token'"),
        ({"loss_type": "cispo", "epsilon_high": 0.0}, "epsilon_high"),
        ({"loss_type": "sapo", "sapo_temperature_pos": 0.0}, "sapo_temperature_pos"),
        ({"delta": 0.0}, "delta"),
    ],
)
def test_what_cannot_be_computed_is_refused_at_construction(knobs, complaint):
    with pytest.raises(ValueError, match=complaint):
        LigerFusedLinearGRPOLoss(**knobs)


def test_delta_is_not_read_where_nothing_is_clipped(liger):
    p = batch()
    for loss_type in ("cispo", "sapo", "vespo"):
        knobs = {"loss_type": loss_type, "epsilon_high": 1.2, "delta": 1.5}
        ours, theirs = (run_class(m, p, knobs) for m in (LigerFusedLinearGRPOLoss, liger.LigerFusedLinearGRPOLoss))
        assert gap(ours, theirs) <= CLOSE


def test_liger_need_not_be_installed():
    code = "import fastgrpo.integrations.liger, sys; print([m for m in sys.modules if m.startswith('liger')])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.strip() == "[]"


def run_cases(*arguments):
    """What the cases print in a process of their own, where Liger's Triton function runs in the interpreter."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "1"}
    command = [sys.executable, liger_cases.__file__, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_page_s_table_of_differences(liger):
    lines = run_cases()
    assert lines.count("\n") == 2 + len(liger_cases.DIFFERENCES)
    assert lines in (ROOT / "docs" / "integrations.md").read_text()


@pytest.mark.slow
def test_the_table_misses_nothing(liger):
    assert run_cases("--search") == f"{2 * len(CASES)} batches, nothing beside the table\n"
