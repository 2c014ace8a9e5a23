"""Warnings, once each, and updates that are skipped because they are not finite."""

import dataclasses
import json
from itertools import chain
from types import SimpleNamespace

import pytest
import tiny
import torch
from runs import PROMPTS, lines, make_trainer
from updates import rising

from fastgrpo import GRPOConfig
from fastgrpo.run.health import CHECKS, Watch
from fastgrpo.run.metrics import METRICS
from fastgrpo.trainer.optim import MasterAdamW

pytestmark = pytest.mark.usefixtures("without_curves")
NO_CHECKPOINTS = SimpleNamespace(newest=None)
HEALTHY = {
    "loss": 0.01, "reward": 0.5, "frac_informative": 0.5, "grad_norm": 0.5, "skipped_updates": 0,
    "completions/clipped_ratio": 0.1, "completions/min_length": 3, "completions/max_length": 9, "kl": 0.01,
    "ratio/mean": 1.0, "ratio/max": 1.5, "sampler/logp_gap_mean": 1e-3,
}  # fmt: skip
CASES = {
    # check: (metrics that set it off, metrics that do not)
    "zero loss": ({"loss": 0.0}, {"loss": 0.0, "frac_informative": 0.0}),
    "no rewards": ({"reward": None}, {}),
    "reward errors": ({"rewards/f/errors": 2}, {"judge/errors": 2}),
    "reward timeouts": ({"rewards/f/timeouts": 2}, {"judge/timeouts": 2}),
    "solved": ({"frac_informative": 0.0, "accuracy": 1.0}, {"frac_informative": 0.1, "accuracy": 1.0}),
    "no informative group": ({"frac_informative": 0.0}, {"frac_informative": 0.0, "accuracy": 1.0}),
    "refills run out": ({"dynamic_sampling/filled_groups": 1}, {"dynamic_sampling/filled_groups": 0}),
    "truncated": ({"completions/clipped_ratio": 0.6}, {"completions/clipped_ratio": 0.5}),
    "constant length": (
        {"completions/min_length": 9, "frac_informative": 0.0},
        {"completions/min_length": 9, "frac_informative": 0.0, "accuracy": 1.0},
    ),
    "kl": ({"kl": 1.1}, {"kl": None}),
    "ratio": ({"ratio/max": 101.0}, {"ratio/max": 99.0}),
    "log-probs apart": ({"sampler/logp_gap_mean": 0.06}, {"sampler/logp_gap_mean": 0.04}),
    "always clipped": ({"grad_norm": 1.1}, {"grad_norm": 0.9}),
    "skipped": ({"skipped_updates": 1}, {"skipped_updates": 0}),
}


def told(watch, changes, steps):
    values = {name: value for name, value in {**HEALTHY, **changes}.items() if value is not None}
    return [watch.observe(values) for _ in range(steps)]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.name)
def test_each_warning_is_given_once_after_its_steps(check):
    bad, good = CASES[check.name]
    watch = Watch(GRPOConfig(max_grad_norm=1.0), NO_CHECKPOINTS)
    told(watch, bad, check.steps - 1)
    assert check.text not in chain(*told(watch, good, 1)), "a step without it ends the streak"
    assert check.text not in chain(*told(watch, bad, check.steps - 1))
    state, watch = json.loads(json.dumps(watch.state_dict())), Watch(GRPOConfig(max_grad_norm=1.0), NO_CHECKPOINTS)
    watch.load_state_dict(state)  # a resumed run goes on counting
    assert check.text in told(watch, bad, 1)[0]
    assert check.text not in chain(*told(watch, bad, 3 * check.steps))


def test_every_check_has_its_case():
    assert set(CASES) == {check.name for check in CHECKS}
    names = {name for changes, _ in CASES.values() for name in changes}
    assert names - {"rewards/f/errors", "rewards/f/timeouts"} <= set(METRICS)


@pytest.mark.parametrize("settings, changes", [
    ({}, {}),
    ({"max_grad_norm": 0.0}, {"grad_norm": 9.0}),  # no bound, no clipping
    # completions of one token are not cut off
    ({"max_completion_length": 1},
     {"completions/clipped_ratio": 1.0, "completions/min_length": 1, "completions/max_length": 1}),
])  # fmt: skip
def test_a_healthy_run_gets_no_warning(settings, changes):
    assert told(Watch(GRPOConfig(**settings), NO_CHECKPOINTS), changes, 50) == [[]] * 50


def test_ten_skipped_updates_in_a_row_stop_the_run_and_name_the_last_good_checkpoint(tmp_path):
    checkpoints = SimpleNamespace(newest=None)
    watch = Watch(GRPOConfig(), checkpoints)

    def observe(skipped, norm=0.0):
        return watch.observe({**HEALTHY, "skipped_updates": skipped, "grad_norm": norm})

    # A step of which an update moved the weights (a norm above 0) begins the count anew.
    for skipped, norm in ((9, 0.0), (1, 0.5), (2, 0.0), (0, 0.0), (6, 0.0)):
        observe(skipped, norm)
    with pytest.raises(ValueError, match=r"11 updates in a row[^\n]*\n  no checkpoint had been saved"):
        observe(3)
    checkpoints.newest = tmp_path / "checkpoint-10"
    with pytest.raises(ValueError, match=r"13 updates in a row[^\n]*\n  the last good checkpoint is .*checkpoint-10$"):
        observe(2)


@pytest.mark.gpu
def test_skipping_an_update_causes_no_sync():
    model = tiny.model().to("cuda", torch.bfloat16)
    optimizer, norms = MasterAdamW(model, learning_rate=0.1), []
    for loss in torch.tensor([0.5, torch.nan, 0.5], device="cuda"):
        with optimizer.receiving():
            sum(parameter.float().sum() for parameter in model.parameters()).backward()
        torch.cuda.set_sync_debug_mode("error")
        try:
            norms.append(optimizer.step(1.0, loss))
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert torch.stack(norms).isfinite().tolist() == [True, False, True]


def test_warnings_of_an_evaluation_are_kept(tmp_path):
    def broken(completions, **_):
        raise OSError

    settings = {"max_steps": 1, "eval_rows": PROMPTS[:2], "reward_errors": "skip"}
    make_trainer(tmp_path, [rising, broken], **settings).train()
    texts = [(row["step"], row["text"]) for row in lines(tmp_path / "run", "warnings.jsonl")]
    assert [step for step, text in texts if "'broken' failed on 2 of 2 held-out completions" in text] == [0, 1]


def test_the_step_that_ends_a_run_is_logged(tmp_path):
    trainer = make_trainer(tmp_path, rising, PROMPTS[:2], prompts_per_step=2, max_steps=4, loss_type="grpo")
    loss, trainer.watch.skipped = trainer.updates.loss, 9
    trainer.updates.loss = lambda *given: dataclasses.replace(out := loss(*given), loss=out.loss * torch.nan)
    with pytest.raises(ValueError, match="10 updates in a row"):
        trainer.train()
    assert [(row["step"], row["skipped_updates"]) for row in lines(tmp_path / "run")] == [(1, 1)]


def test_a_step_that_is_not_finite_is_skipped_and_counted(tmp_path, capsys):
    trainer = make_trainer(tmp_path, rising, PROMPTS[:2], prompts_per_step=2, max_steps=4, loss_type="grpo")
    loss = trainer.updates.loss

    def spoilt(*arguments):
        out = loss(*arguments)
        bad = trainer.state.global_step + 1 == 2
        return dataclasses.replace(out, loss=out.loss * torch.nan) if bad else out

    trainer.updates.loss = spoilt
    trainer.train()
    rows = lines(tmp_path / "run")
    assert [row["skipped_updates"] for row in rows] == [0, 1, 0, 0]
    assert "loss" not in rows[1] and "grad_norm" not in rows[1] and "reward" in rows[1]
    assert all(row["loss"] == row["loss"] and row["grad_norm"] > 0 for row in (rows[0], rows[2], rows[3]))
    out = capsys.readouterr().out
    assert "step 2: warning: the loss or the gradient was not finite, so the update was skipped" in out
    assert out.count("a loss near 0 is expected on the first update of a rollout") == 1
