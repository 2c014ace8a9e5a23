"""A pool of processes gives what the functions give here, and nothing that they do ends or stops the run."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pool_rewards
import psutil
import pytest
import tiny
import torch
from paths import ROOT
from processes import awaited
from samples import answer, drawn

from fastgrpo.data.records import Prompt, TrainerState
from fastgrpo.rewards import pool as pools
from fastgrpo.rewards.call import Judging, Rewards
from fastgrpo.rewards.guard import Failure
from fastgrpo.rewards.pool import Given, Pool


def completions(*texts):
    """One completion a text; the row of each has its number as the column `answer`."""
    return [answer(Prompt([1], "the prompt", {"answer": i}), [1, 2], text) for i, text in enumerate(texts)]


def judge(functions, texts, on_error="skip", timeout=None, workers=2):
    with Rewards(functions, on_error=on_error, timeout=timeout, workers=workers) as rewards:
        return rewards(completions(*texts), TrainerState(3, 9, 0.5, 16))


def rewards_of(judged, name):
    return [c.rewards[name] for c in judged.completions]


def submit(pool, text="x", index=0, **columns):
    """The future of a call of the pool's function with one completion."""
    (name,) = pool.names
    return pool.submit(name, [Given({"completions": [text], **columns}, (), 1)], index, None)[0]


def is_gone(pid):
    return not psutil.pid_exists(int(pid)) or psutil.Process(int(pid)).status() == psutil.STATUS_ZOMBIE


def test_a_pool_gives_what_functions_give_here():
    texts = [f"text {'x' * i}" for i in range(7)]
    here = Rewards(pool_rewards.length)(completions(*texts), TrainerState(3, 9, 0.5, 16))
    there = judge([pool_rewards.length], texts, "raise")
    assert rewards_of(there, "length") == rewards_of(here, "length")
    assert [c.extras for c in there.completions] == [c.extras for c in here.completions]
    assert [c.extras["letters"] for c in there.completions] == [len(text) for text in texts]
    assert there.logged == {"calls": [1.0] * 7}  # one completion a call
    assert there.errors == there.timeouts == {} and pools._listed(torch.ones(2, 1), 2) == [1.0, 1.0]


def test_a_failure_is_that_of_one_completion_and_names_it():
    bad = ["raise", "exit", "many", "nan", "word", "local", "log"]
    judged = judge([pool_rewards.verdicts], ["fine", *bad, "none", "fine"])
    assert str(rewards_of(judged, "verdicts")) == str([1.0, *[float("nan")] * 8, 1.0])
    assert judged.errors == {"verdicts": 7} and not judged.logged
    with Rewards(pool_rewards.verdicts, workers=1) as rewards:
        for text in bad:
            with pytest.raises(ValueError, match=rf"reward function 'verdicts' r(.|\n)*completion '{text}'"):
                rewards(completions("fine", text))


def test_what_takes_too_long_is_given_up_with_all_that_it_started(tmp_path, monkeypatch):
    monkeypatch.setattr(pools, "GRACE", 0.5)
    functions = [getattr(pool_rewards, name) for name in ("endless", "meeting", "blocks", "verdicts", "own_timeout")]
    file = tmp_path / "children"
    for limit in (1.0, 30.0):  # the second where a busy machine was too slow for the first
        judged = judge(functions, ["fine", f"hang {file}", "fine", "fine"], timeout=limit, workers=5)
        if file.exists() and judged.timeouts == {"endless": 1, "meeting": 1, "blocks": 1}:
            break
    assert str(rewards_of(judged, "endless")) == str(rewards_of(judged, "blocks")) == "[1.0, nan, 1.0, 1.0]"
    assert str(rewards_of(judged, "meeting")) == "[2.0, nan, 2.0, 2.0]"
    assert rewards_of(judged, "verdicts") == [1.0] * 4
    assert judged.timeouts == {"endless": 1, "meeting": 1, "blocks": 1}
    assert judged.errors == {"own_timeout": 4}  # a function's own limit is its own error
    children = file.read_text().split()
    awaited(lambda: len(children) == 3 and all(map(is_gone, children)))


def test_a_batch_that_takes_too_long_ends_no_run(tmp_path):
    with Rewards(pool_rewards.endless, timeout=0.5, workers=1) as rewards:
        judged = rewards(completions(f"hang {tmp_path / 'children'}"))  # which would refuse that nothing has a reward
    assert judged.timeouts == {"endless": 1} and not rewards.warned


@pytest.mark.slow
def test_bytes_that_a_function_writes_to_the_pipe_cost_its_call():
    judged = judge([pool_rewards.scribbles], ["fine", "half", "other", "long", "fine"])
    assert str(rewards_of(judged, "scribbles")) == "[1.0, nan, nan, nan, 1.0]" and judged.errors == {"scribbles": 3}


def test_a_death_costs_one_call_and_one_try(tmp_path):
    judged = judge([pool_rewards.deadly, pool_rewards.blocks], ["fine", f"die once {tmp_path / 'died'}", "die", "fine"])
    assert str(rewards_of(judged, "deadly")) == str(rewards_of(judged, "blocks")) == "[1.0, 1.0, nan, 1.0]"
    assert judged.errors == {"deadly": 1, "blocks": 1} and (tmp_path / "died").exists()


@pytest.mark.slow
def test_workers_may_be_killed_at_any_moment():
    pool = Pool({"process": pool_rewards.process}, 3)
    results = [submit(pool, index=i) for i in range(150)]
    for i in range(15):
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(results[i * 9].result()[0][0]), signal.SIGKILL)
    outcomes = [result.result() for result in results]
    pool.close()
    # A job survives the death of one worker, and few can have met two.
    assert sum(isinstance(outcome, Failure) for outcome in outcomes) <= 15


def test_a_pool_whose_jobs_wait_for_a_function_that_hangs_can_be_closed(tmp_path):
    pool = Pool({"endless": pool_rewards.endless}, 1)
    # More than a pipe holds: a process that is busy reads nothing.
    results = [submit(pool, f"hang {tmp_path / 'pids'}", column=["x" * 1_000_000]) for _ in range(3)]
    awaited((tmp_path / "pids").exists)
    closing = threading.Thread(target=pool.close, daemon=True)
    closing.start()
    closing.join(60)
    assert not closing.is_alive() and all(result.cancelled() for result in results)


def test_results_depend_neither_on_the_number_of_workers_nor_on_the_order_of_finishing():
    prompts = [Prompt([1], "p", {"answer": i, "vector": torch.ones(2)}) for i in range(4)]
    groups = {i: [drawn([70 + i, 71]), drawn([80]), drawn([81])] for i in range(4)}
    functions = [pool_rewards.noise, pool_rewards.noise_of_a_group, pool_rewards.length]

    def judged(order, workers, *seeds_and_steps):
        with Rewards(functions, workers=workers) as rewards:
            for rewards.seed, step in seeds_and_steps:
                judging = Judging(rewards, prompts, tiny.tokenizer(), TrainerState(7, 9, 0.5, 16), step=step)
                for i in order:
                    judging.add(i, groups[i])
                yield judging.result().completions

    (first,) = judged([0, 1, 2, 3], 1, (5, 0))
    same, other, later = judged([2, 0, 3, 1], 3, (5, 0), (6, 0), (5, 1))
    assert [c.rewards for c in first] == [c.rewards for c in same]
    assert [c.columns["answer"] for c in first] == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3]
    noise = [{c.rewards["noise"] for c in each} for each in (first, other, later)]
    assert len(noise[0]) == 12 and not noise[0] & noise[1] and not noise[0] & noise[2]
    assert [c.rewards["length"] + 1 for c in first] == [c.rewards["length"] for c in later]  # which reads the step
    assert all(3 <= c.rewards["noise_of_a_group"] < 4 for c in first)  # a group in one call
    with Rewards(functions, workers=1) as rewards:  # the calls of two steps wait for one process
        both = [Judging(rewards, prompts, tiny.tokenizer(), TrainerState(0, 9, 0.5, 16), step=step) for step in (3, 5)]
        [judging.add(0, groups[0]) for judging in both]
        lengths = [[c.rewards["length"] for c in judging.result().completions] for judging in both]
    assert [length + 2 for length in lengths[0]] == lengths[1]


def test_what_cannot_be_sent_is_refused_by_its_name():
    def closure(**_):
        return []

    with pytest.raises(ValueError, match="'closure' cannot be sent"):
        Rewards([pool_rewards.length, closure], workers=1)
    with pytest.raises(ValueError, match="reward_timeout"):
        Rewards(pool_rewards.length, timeout=1.0, workers=0)


def test_processes_end_with_the_pool_and_begin_again_with_the_next_call():
    class Own:
        pooled = False
        closed = 0

        def __call__(self, completions, **_):
            return [float(os.getpid())] * len(completions)

        def close(self):
            self.closed += 1

    own, seen = Own(), []
    rewards = Rewards([own, pool_rewards.process, pool_rewards.checked, pool_rewards.Judge(4.0)], workers=1)
    for _ in range(2):
        judged = rewards(completions(r"$\frac{2}{4}$", "$3$"))
        assert rewards_of(judged, "Own") == [os.getpid()] * 2 and rewards_of(judged, "Judge") == [4.0] * 2
        assert rewards_of(judged, "checked") == [1.0, 0.0]
        seen.append({int(pid) for pid in rewards_of(judged, "process")})
        rewards.close()
        assert all(is_gone(pid) for pid in seen[-1])
    assert not {os.getpid(), *seen[0]} & seen[1] and own.closed == 2


SCRIPT = """
import os, sys, time
from pathlib import Path
from fastgrpo.rewards.pool import Given, Pool

def own(completions, **_):
    Path(f"judged-{{os.getpid()}}").touch()
    time.sleep(100_000 * (completions[0] == "hang"))
    return [5.0]

def main(text):
    pool = Pool({{"own": own}}, 1)
    print(pool.submit("own", [Given({{"completions": [text]}}, (), 1)], 0, None)[0].result(), flush=True)
    pool.close()

{start}main(sys.argv[1])
"""


def script(folder, text, start='if __name__ == "__main__": '):
    folder.joinpath("script.py").write_text(SCRIPT.format(start=start))
    return subprocess.Popen(
        [sys.executable, "script.py", text], cwd=folder, env=os.environ | {"PYTHONPATH": str(ROOT)},
        text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def test_a_function_of_the_script_itself_is_found(tmp_path):
    assert script(tmp_path, "x").communicate()[0] == "([5.0], [])\n"
    said = script(tmp_path, "x", start="").communicate()[1]  # the script starts again in its worker
    assert 'under `if __name__ == "__main__":`' in said


@pytest.mark.parametrize("how", [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_no_process_outlives_the_trainer(tmp_path, how):
    with script(tmp_path, "hang") as trainer:
        awaited(lambda: list(tmp_path.glob("judged-*")))
        (worker,) = tmp_path.glob("judged-*")
        guards = [child.pid for child in psutil.Process(trainer.pid).children()]
        trainer.send_signal(how)
    pid = Path(worker).name.removeprefix("judged-")
    awaited(lambda: is_gone(pid) and all(map(is_gone, guards)))
