"""A run whose reward function fails, hangs, dies and logs rubbish."""

import pool_rewards
import psutil
import pytest
from runs import lines, make_trainer
from transformers import TrainerCallback

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
        tmp_path, pool_rewards.faulty, max_steps=8, prompts_per_step=3, callbacks=[killer],
        reward_errors="skip", reward_timeout=0.5, reward_workers=2,
    )  # fmt: skip
    trainer.train()
    found = lines(tmp_path / "run")
    assert not {*psutil.Process().children(recursive=True)} - before
    assert killer.killed == 2 and found[-1]["step"] == 8
    for kind in ("errors", "timeouts"):
        assert sum(line.get(f"rewards/faulty/{kind}", 0) for line in found) > 0, kind
