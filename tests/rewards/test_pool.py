"""A pool of processes gives what the functions give here, and nothing that they do ends or stops the run."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pool_rewards
import psutil
import pytest
import tiny
from paths import ROOT
from samples import answer, drawn

from fastgrpo.data.records import Prompt, TrainerState
from fastgrpo.rewards.call import Judging, Rewards
from fastgrpo.rewards.guard import Failure
from fastgrpo.rewards.pool import Given, Pool, _Worker

NEVER = 600.0  # seconds: a limit that no function here reaches


def completions(*texts):
    """One completion a text; the row of each has its number as the column `answer`."""
    return [answer(Prompt([1], "the prompt", {"answer": i}), [1, 2], text) for i, text in enumerate(texts)]


def judge(functions, texts, on_error="raise", timeout=NEVER, workers=2, seed=0):
    with Rewards(functions, on_error=on_error, timeout=timeout, workers=workers, seed=seed) as rewards:
        return rewards(completions(*texts), TrainerState(3, 9, 0.5, 16), allow_none=True)


def rewards_of(judged, name):
    return [c.rewards[name] for c in judged.completions]


def awaited(condition):
    """Wait until a condition holds; a test that waits for ever is stopped by its runner."""
    end = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < end, "what is waited for did not come within two minutes"
        time.sleep(0.02)


def is_gone(pid):
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_a_pool_gives_what_functions_give_here():
    texts = [f"text {'x' * i}" for i in range(7)]
    here = Rewards(pool_rewards.length)(completions(*texts), TrainerState(3, 9, 0.5, 16))
    there = judge([pool_rewards.length], texts)
    assert rewards_of(there, "length") == rewards_of(here, "length")
    assert [c.extras for c in there.completions] == [c.extras for c in here.completions]
    assert [c.extras["letters"] for c in there.completions] == [len(text) for text in texts]
    assert there.logged == {"calls": [1.0] * 7}  # one completion a call
    assert there.errors == there.timeouts == {}


@pytest.mark.parametrize(
    "text, problem",
    [
        ("raise", r"raised KeyError: 'no such thing' \(.*pool_rewards.py:\d+\); the row has the columns answer"),
        ("exit", r"raised SystemExit: 3 \(.*pool_rewards.py:\d+\)"),
        ("many", "returned 2 rewards for 1 completions"),
        ("nan", "returned nan for completion 0, not a finite number"),
        ("word", "returned '1', not a list but of type str"),
        ("local", "raised (AttributeError|PicklingError): its result cannot leave its process"),
    ],
)
def test_a_failure_is_that_of_one_completion_and_names_it(text, problem):
    with pytest.raises(ValueError, match=rf"reward function 'verdicts' {problem}[\s\S]*completion '{text}'"):
        judge([pool_rewards.verdicts], ["fine", text])
    judged = judge([pool_rewards.verdicts], ["fine", text, "none", "fine"], on_error="skip")
    assert str(rewards_of(judged, "verdicts")) == "[1.0, nan, nan, 1.0]"
    assert judged.errors == {"verdicts": 1}


def test_what_cannot_be_logged_is_a_failure():
    with pytest.raises(ValueError, match=r"'logs_badly' raised ValueError: log_metric\('reward', \.\.\.\): a run logs"):
        judge([pool_rewards.logs_badly], ["fine"])


def test_a_completion_that_takes_too_long_is_given_up_with_all_that_it_started(tmp_path):
    texts = ["fine", f"hang {tmp_path / 'child'}", "fine"]
    judged = judge([pool_rewards.endless, pool_rewards.verdicts], texts, timeout=10.0)
    assert str(rewards_of(judged, "endless")) == "[1.0, nan, 1.0]"
    assert rewards_of(judged, "verdicts") == [1.0] * 3
    assert judged.timeouts == {"endless": 1}
    assert judged.errors == {}
    awaited(lambda: is_gone(int((tmp_path / "child").read_text())))


def test_a_batch_that_takes_too_long_ends_no_run(tmp_path):
    with Rewards(pool_rewards.endless, timeout=2.0, workers=1) as rewards:
        judged = rewards(completions(f"hang {tmp_path / 'child'}"))  # which would refuse that nothing has a reward
    assert judged.timeouts == {"endless": 1} and not rewards.warned


def test_a_worker_that_dies_is_replaced(tmp_path):
    judged = judge([pool_rewards.deadly], ["fine", f"die once {tmp_path / 'died'}", "fine"])
    assert rewards_of(judged, "deadly") == [1.0] * 3
    with pytest.raises(ValueError, match=r"'deadly' raised the process that ran it died \(signal 9\)"):
        judge([pool_rewards.deadly], ["fine", "die"])
    judged = judge([pool_rewards.deadly], ["fine", "die", "fine"], on_error="skip")
    assert str(rewards_of(judged, "deadly")) == "[1.0, nan, 1.0]"


def test_workers_may_be_killed_at_any_moment():
    pool = Pool({"noise": pool_rewards.noise, "process": pool_rewards.process}, 3)
    given = [Given({"completions": ["x"]}, (), 1)]
    results = [pool.submit("process", given, i, None)[0] for i in range(300)]
    for i in range(40):
        pid = int(results[i * 7].result()[0][0])
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    outcomes = [result.result() for result in results]
    pool.close()
    # A job survives the death of one worker, and few can have met two.
    assert sum(isinstance(outcome, Failure) for outcome in outcomes) <= 40
    assert sum(not isinstance(outcome, Failure) for outcome in outcomes) >= 260


def test_async_calls_run_together_and_each_has_its_limit():
    judged = judge([pool_rewards.meeting], ["a", "late", "b", "c"], timeout=10.0)
    assert str(rewards_of(judged, "meeting")) == "[2.0, nan, 2.0, 2.0]"
    assert judged.timeouts == {"meeting": 1}
    judged = judge([pool_rewards.own_timeout], ["a"], on_error="skip")
    assert judged.errors == {"own_timeout": 1} and not judged.timeouts  # the function's own limit is its own error


def test_an_async_call_that_blocks_or_kills_its_process_costs_no_other_one():
    judged = judge([pool_rewards.blocks], ["a", "block", "b"], timeout=10.0)
    assert str(rewards_of(judged, "blocks")) == "[1.0, nan, 1.0]"
    assert judged.timeouts == {"blocks": 1}
    judged = judge([pool_rewards.blocks], ["a", "kill", "b"], on_error="skip")
    assert str(rewards_of(judged, "blocks")) == "[1.0, nan, 1.0]"
    assert judged.errors == {"blocks": 1}


def test_a_pool_whose_jobs_wait_for_a_function_that_hangs_can_be_closed(tmp_path):
    pool = Pool({"endless": pool_rewards.endless}, 1)
    # More than a pipe holds: a process that is busy reads nothing.
    given = [Given({"completions": [f"hang {tmp_path / 'pid'}"], "column": ["x" * 1_000_000]}, (), 1)]
    results = [pool.submit("endless", given, 0, None)[0] for _ in range(3)]
    awaited((tmp_path / "pid").exists)
    closing = threading.Thread(target=pool.close, daemon=True)
    closing.start()
    closing.join(60)
    assert not closing.is_alive() and all(result.cancelled() for result in results)


def test_what_a_function_starts_in_another_session_ends_with_it(tmp_path):
    judged = judge([pool_rewards.endless_elsewhere], [str(tmp_path / "child")], timeout=10.0)
    assert judged.timeouts == {"endless_elsewhere": 1}
    awaited(lambda: is_gone(int((tmp_path / "child").read_text())))


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize(("owner", "name"), [(_Worker, "spawn"), (os, "pidfd_open")])  # nothing, or half, is started
def test_a_pool_that_cannot_start_a_process_says_so(owner, name, monkeypatch):
    with Rewards(pool_rewards.process, workers=1) as rewards:
        monkeypatch.setattr(owner, name, lambda _: os.open("/nowhere", os.O_RDONLY))
        with pytest.raises(RuntimeError, match="the processes that judge completions failed: FileNotFoundError"):
            rewards(completions("a"))


def test_results_depend_neither_on_the_number_of_workers_nor_on_the_order_of_finishing():
    functions = [pool_rewards.noise, pool_rewards.noise_of_a_group]
    texts = [str(i) for i in range(12)]
    one, three, other = (judge(functions, texts, workers=n, seed=s) for n, s in ((1, 5), (3, 5), (3, 6)))
    assert [c.rewards for c in one.completions] == [c.rewards for c in three.completions]
    assert len({*rewards_of(one, "noise")}) == 12
    assert rewards_of(one, "noise") != rewards_of(other, "noise")
    assert all(12 <= reward < 13 for reward in rewards_of(one, "noise_of_a_group"))  # all of them in one call


def test_groups_are_judged_as_they_come():
    prompts = [Prompt([1], "p", {"answer": i}) for i in range(3)]
    groups = {i: [drawn([70 + i, 71]), drawn([80])] for i in range(3)}

    def judged(order, workers):
        with Rewards([pool_rewards.noise, pool_rewards.noise_of_a_group], workers=workers, seed=1) as rewards:
            judging = Judging(rewards, prompts, tiny.tokenizer())
            for i in order:
                judging.add(i, groups[i])
            return [(c.columns, c.rewards) for c in judging.result().completions]

    first = judged([0, 1, 2], 1)
    assert first == judged([2, 0, 1], 3)
    assert [columns["answer"] for columns, _ in first] == [0, 0, 1, 1, 2, 2]
    assert all(2 <= rewards["noise_of_a_group"] < 3 for _, rewards in first)


def test_functions_that_cannot_be_sent_are_named():
    def closure(**_):
        return []

    with pytest.raises(
        ValueError, match=r"reward function 'closure' cannot be sent to another process .* by a def at the"
    ):
        Rewards([pool_rewards.length, closure], workers=1)
    with pytest.raises(ValueError, match="'<lambda>' cannot be sent"):
        Rewards(lambda **_: [], timeout=1.0)
    with pytest.raises(ValueError, match="reward_timeout needs processes that can be killed"):
        Rewards(pool_rewards.length, timeout=1.0, workers=0)
    assert rewards_of(judge([pool_rewards.Judge(4.0)], ["a"]), "Judge") == [4.0]  # an instance is sent whole


def test_what_brings_its_own_model_stays_in_this_process():
    class Own:
        pooled = False
        closed = False

        def __call__(self, completions, **_):
            return [float(os.getpid())] * len(completions)

        def close(self):
            self.closed = True

    own = Own()
    judged = judge([own, pool_rewards.process], ["a", "b"])
    assert rewards_of(judged, "Own") == [os.getpid()] * 2
    assert os.getpid() not in rewards_of(judged, "process")
    assert own.closed


def test_math_verify_has_its_alarm():
    judged = judge([pool_rewards.checked], [r"$\frac{2}{4}$", "$3$"])
    assert rewards_of(judged, "checked") == [1.0, 0.0]


def test_processes_end_with_the_pool_and_begin_again_with_the_next_call():
    rewards = Rewards(pool_rewards.process, workers=2)
    first = {int(c.rewards["process"]) for c in rewards(completions(*"abcdef")).completions}
    rewards.close()
    assert all(is_gone(pid) for pid in first)
    again = {int(c.rewards["process"]) for c in rewards(completions(*"ab")).completions}
    rewards.close()
    assert not first & again and all(is_gone(pid) for pid in again)


SCRIPT = """
import os, sys
from pathlib import Path
sys.path[:0] = {paths!r}
import torch
from fastgrpo.data.records import Prompt
from samples import answer
from fastgrpo.rewards.call import Rewards

def own(completions, **_):
    Path(f"judged-{{os.getpid()}}").touch()
    while completions[0] == "hang":
        pass
    return [5.0]

def main(text):
    completion = answer(Prompt([1], "p"), [1], text)
    with Rewards(own, workers=1) as rewards:
        print(rewards([completion]).completions[0].rewards, flush=True)

{start}main(sys.argv[1])
"""


def script(folder, start):
    folder.joinpath("script.py").write_text(
        SCRIPT.format(paths=[str(ROOT), str(ROOT / "tests" / "support")], start=start)
    )
    return [sys.executable, "script.py"]


def test_a_function_of_the_script_itself_is_found(tmp_path):
    command = script(tmp_path, 'if __name__ == "__main__": ')
    done = subprocess.run([*command, "x"], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout == "{'own': 5.0}\n", done.stderr


def test_a_script_that_starts_at_import_is_told_how_to_begin(tmp_path):
    done = subprocess.run([*script(tmp_path, ""), "x"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 1
    assert "cannot import the reward functions: RuntimeError: this process judges completions" in done.stderr
    assert 'under `if __name__ == "__main__":`' in done.stderr


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_no_process_outlives_the_trainer(tmp_path, how):
    command = script(tmp_path, 'if __name__ == "__main__": ')
    with subprocess.Popen([*command, "hang"], cwd=tmp_path) as trainer:
        awaited(lambda: list(tmp_path.glob("judged-*")))
        (worker,) = tmp_path.glob("judged-*")
        guards = [child.pid for child in psutil.Process(trainer.pid).children()]
        trainer.send_signal(how)
    pid = int(Path(worker).name.removeprefix("judged-"))
    awaited(lambda: is_gone(pid) and all(map(is_gone, guards)))


def test_a_killed_guard_is_replaced():
    pool = Pool({"process": pool_rewards.process}, 1)
    given = [Given({"completions": ["x"]}, (), 1)]
    first = pool.submit("process", given, 0, None)[0].result()[0][0]
    (worker,) = pool.workers
    guard = worker.guard.pid
    os.kill(guard, signal.SIGKILL)
    os.kill(int(first), signal.SIGKILL)
    second = pool.submit("process", given, 0, None)[0].result()[0][0]
    assert second != first and worker.guard.pid != guard
    pool.close()
    assert is_gone(int(second)) and is_gone(guard)
