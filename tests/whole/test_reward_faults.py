"""Runs whose reward functions fail, hang, die, log rubbish or spoil what they get."""

import json
import os

import pool_rewards
import psutil
import pytest
import torch
from runs import lines, make_trainer
from transformers import TrainerCallback

from fastgrpo.rewards.guard import modes_kept

pytestmark = pytest.mark.usefixtures("without_curves")


def workers():
    """The processes that judge: the run's guard, which runs no worker, is not one."""
    found = []
    for process in psutil.Process().children(recursive=True):
        try:
            found += [process] * ("pool._serve" in " ".join(process.cmdline()))
        except psutil.NoSuchProcess:
            continue
    return found


class Killer(TrainerCallback):
    """Kills two workers, at steps when one is running: a fault of a reward may have ended them."""

    killed = 0

    def on_step_end(self, args, state, control, **_):
        if state.global_step >= 3 * (self.killed + 1) and self.killed < 2 and (found := workers()):
            found[0].kill()
            self.killed += 1


def test_a_run_with_faults_completes_and_leaves_no_process(tmp_path):
    before, killer = {*psutil.Process().children(recursive=True)}, Killer()
    trainer = make_trainer(
        tmp_path, pool_rewards.faulty, max_steps=12, prompts_per_step=3, callbacks=[killer],
        reward_errors="skip", reward_timeout=0.5, reward_workers=2,
    )  # fmt: skip
    trainer.train()
    found = lines(tmp_path / "run")
    assert not {*psutil.Process().children(recursive=True)} - before
    assert killer.killed == 2 and found[-1]["step"] == 12
    for kind in ("errors", "timeouts"):
        assert sum(line.get(f"rewards/faulty/{kind}", 0) for line in found) > 0, kind


held = []  # torch would leave inference mode where the guard of the mode is lost


def vandal(prompts, completions, completion_ids, trainer_state, tests, **_):
    """Rewards as `polite` gives them, from a function that spoils all that it can reach."""
    rewards = polite(completions)
    os.chdir("/")
    torch.set_grad_enabled(False)
    held.append(torch.inference_mode())
    held[-1].__enter__()
    torch.set_default_dtype(torch.float64)
    torch.set_default_device("meta")
    for i, prompt in enumerate(prompts):
        prompt.append({"role": "user", "content": "more"})
        completions[i][0]["content"] = "other"
        completion_ids[i][0] = 7
        completion_ids[i].pop()
        tests[i].append(3)
    completions.clear()
    trainer_state.num_tokens += 100
    return rewards


def polite(completions, **_):
    return [sum(map(ord, completion[0]["content"])) % 7 for completion in completions]


@pytest.fixture
def modes():
    with modes_kept():  # if a run lets a mode pass, the tests after this one must not suffer
        yield


@pytest.mark.usefixtures("modes")
def test_a_run_is_the_same_with_a_function_that_spoils_all_that_it_gets(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = [{"prompt": [{"role": "user", "content": text}], "tests": [1, 2]} for text in ("ab", "cd", "ef")]
    before, folder, written = json.dumps(rows), os.getcwd(), []
    for function in (polite, vandal):
        function.__name__ = "reward"
        path = tmp_path / function.__code__.co_name
        make_trainer(path, function, rows, rows[:1], chat=True, eval_steps=1).train()
        run = path / "run"
        metrics = lines(run)
        times = {name for line in metrics for name in line if "time" in name or "/s" in name or name == "rollout/share"}
        metrics = [{name: value for name, value in line.items() if name not in times} for line in metrics]
        weights = (run / "checkpoint-2" / "model.safetensors").read_bytes()
        written.append((metrics, lines(run, "samples.jsonl"), weights))
    assert written[0] == written[1]
    assert any(line.get("grad_norm", 0) > 0 for line in written[0][0])
    assert json.dumps(rows) == before and os.getcwd() == folder
    assert torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
    assert torch.get_default_dtype() == torch.float32 and torch.get_default_device() == torch.device("cpu")
