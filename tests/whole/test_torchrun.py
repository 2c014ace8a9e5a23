"""Whole runs under torchrun and accelerate: they go on after a loss, stop by a signal, and run on many machines.

This file is also the script of the ranks. The run `killed` loses rank 1 once; the run `long` does not end by itself.
"""

import os
import signal
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import pytest
import tiny
import torch.distributed as dist
from processes import awaited
from ranks import start, started
from resumed import assert_same_run
from runs import make_trainer, share_of_a

from fastgrpo.run.checkpoint import checkpoints

pytestmark = pytest.mark.slow
SCRIPT = Path(__file__).resolve()


def main(folder, name):
    def reward(completions, trainer_state, **_):
        step, rank = trainer_state.global_step + 1, os.environ["RANK"]
        if name == "killed" and step == 3 and rank == "1" and not (folder / "once").exists():
            while not (folder / name / "checkpoint-1").exists():  # a thread writes it
                time.sleep(0.05)
            (folder / "once").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return share_of_a(completions)

    settings = {
        "output_dir": str(folder / name), "max_steps": 10**6 if name == "long" else 4, "learning_rate": 1e-2,
        "beta": 0.05, "save_steps": 1, "dtype": "float32", "resume_from_checkpoint": "auto", "ddp_timeout": 50,
    }  # fmt: skip
    if (folder / name / "summary.json").exists():
        return  # as after a restart
    trainer = make_trainer(folder, reward, model=str(folder / "model"), **settings)
    try:
        trainer.train()
    except (SystemExit, KeyboardInterrupt) as stop:
        (folder / f"left-{trainer.ranks.rank}").write_text(repr(stop))
        raise


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny.save(tmp_path_factory.mktemp("ranks") / "model").parent


@pytest.fixture(scope="module")
def restarted(folder):
    """A run that nothing stopped, and one that lost a rank and was started again by torchrun."""
    with start([SCRIPT, folder, "whole", "killed"], launcher=("--standalone", "--max_restarts", "3")) as job:
        assert job.wait() == 0, job.told()
        return job.rank(0), job.rank(0, attempt=1), job.told()


def test_torchrun_restarts_and_resumes_a_run_after_a_rank_died(folder, restarted):
    first, second, told = restarted
    lost = "rank 0 stops while it waits for the completions that the ranks drew in step 3: rank 1 died or did not join"
    assert first.splitlines()[-1].startswith(lost), told
    assert f"resuming from {folder / 'killed' / 'checkpoint-'}" in second, told
    assert_same_run(folder / "killed", folder / "whole")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_torchrun_stops_all_ranks_after_the_same_step(tmp_path, folder, number):
    tmp_path.joinpath("model").symlink_to(folder / "model")
    run = tmp_path / "long"
    with start([SCRIPT, tmp_path, "long"]) as job:
        awaited(lambda: job.process.poll() is not None or (run.exists() and checkpoints(run)))
        assert job.process.poll() is None, job.told()
        job.process.send_signal(number)
        assert job.wait() == 1  # torchrun's own code after any signal
        step = max(checkpoints(run))
        assert job.told().count(f"{number.name}: the step is finished, saving") == 1
        assert f"stopped after step {step}; continue with" in job.rank(0) and "stopped" not in job.rank(1)
    left = "SystemExit(143)" if number == signal.SIGTERM else "KeyboardInterrupt()"
    assert [tmp_path.joinpath(f"left-{rank}").read_text() for rank in (0, 1)] == [left, left]


def test_two_agents_run_one_training(folder, restarted):
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    agent = (
        "--nnodes", "2", "--rdzv_backend", "c10d", "--rdzv_endpoint", f"127.0.0.1:{store.port}",
        "--rdzv_conf", "is_host=0", "--rdzv_id", "run", "--local_addr", "127.0.0.1",
    )  # fmt: skip
    with ExitStack() as stack:
        jobs = [stack.enter_context(start([SCRIPT, folder, "two"], count=1, launcher=agent)) for _ in range(2)]
        assert [job.wait() for job in jobs] == [0, 0], "\n".join(job.told() for job in jobs)
    assert_same_run(folder / "two", folder / "whole")


def test_accelerate_starts_a_run_as_torchrun_does(tmp_path, folder, restarted):
    # With --cpu, accelerate starts only one process; the script asks for the CPU itself.
    options = "--multi_gpu --num_processes 2 --num_machines 1 --mixed_precision no --dynamo_backend no"
    launch = [sys.executable, "-m", "accelerate.commands.launch", *options.split(), "--main_process_port", "0"]
    with started([*launch, str(SCRIPT), str(folder), "other"], tmp_path) as job:
        assert job.wait() == 0, job.told()
    assert_same_run(folder / "other", folder / "whole")


if __name__ == "__main__":
    for run in sys.argv[2:]:
        main(Path(sys.argv[1]), run)
