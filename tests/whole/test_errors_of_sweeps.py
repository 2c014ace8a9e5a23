"""What a person can mend in the flags of a sweep: all of it is told before the first run starts."""

import pytest
import tiny
from mistakes import Case, check, flags, words

from fastgrpo.run.sweep import take_sweep
from fastgrpo.train import check_runs, main


def another_folder(case):
    case.run.mkdir()
    (case.run / "notes.txt").write_text("mine")
    return case.argv(sweep_seeds="0,1")


CASES = {
    # name: (command line, what its message must say)
    "unknown setting": (
        words("--sweep num_generation=2,4"),
        "error: --sweep: unknown setting 'num_generation'; did you mean 'num_generations'",
    ),
    "unknown flag": (words("--sweep_seeds 0 --bta 1"), "Unrecognized options: --bta, 1; did you mean --beta"),
    "no value": (words("--sweep"), "--sweep needs a value"),
    "no values": (words("--sweep beta"), "--sweep takes each NAME=VALUE,VALUE once, as in .*, got 'beta'"),
    "a setting twice": (words("--sweep beta=0,1 --sweep beta=2"), "takes each NAME=VALUE,VALUE once"),
    "a value out of range": (words("--sweep num_generations=4,1"), "num_generations must be at least 2, got 1"),
    "a value of another type": (words("--sweep num_generations=4,x"), "invalid"),
    "a setting and its flag": (words("--beta 1 --sweep beta=0,1"), "beta is set by the sweep itself; leave it out"),
    "folders": (words("--sweep output_dir=a,b"), "output_dir is set by the sweep itself; leave it out"),
    "a folder to overwrite": (
        words("--sweep_seeds 0 --overwrite_output_dir True"), "overwrite_output_dir is set by the sweep itself",
    ),
    "an unknown task": (words("--sweep task=arithmetic,gsm8"), "task must be one of .*, got 'gsm8'"),
    "an unknown schedule": (words("--sweep lr_scheduler_type=linear,lineal"), "lr_scheduler_type.*lineal"),
    "no reward function": (
        flags(reward_funcs=None, sweep="reward_funcs=own_rewards:share,own_rewards:shared"),
        "reward function 'own_rewards:shared' cannot be imported",
    ),
    "no such model": (
        lambda case: case.argv(model_name_or_path=None, sweep=f"model_name_or_path={case.model},/no/such/model"),
        "no such model folder: /no/such/model",
    ),
    "weights that do not fit": (
        flags(sweep="reward_weights=1,1 2"), "reward_weights has 2 entries for 1 reward functions",
    ),
    "no data": (flags(dataset_name=None, sweep="dataset_name=train.jsonl,none.jsonl"), "none.jsonl"),
    "no model": (words("--task gsm8k --sweep beta=0,1"), "task gsm8k needs --model_name_or_path"),
    "a folder with something else": (another_folder, "is not empty and holds no sweep to go on with; choose another"),
    "a file for a folder": (flags(output_dir=__file__, sweep_seeds="0,1"), "is a file; name a folder"),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_mistake_is_told_before_any_run_starts(name, tmp_path, saved, monkeypatch, capfd):
    build, message = CASES[name]
    case = Case(tmp_path, saved, monkeypatch)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("fastgrpo.run.sweep.COMMAND", ("no such command",))
    check(main, build(case), message, capfd)
    assert not (tmp_path / "runs").exists() and not list(tmp_path.rglob("sweep.*"))


def test_a_tokenizer_is_loaded_once_for_each_model(tmp_path, saved, monkeypatch):
    case, loaded = Case(tmp_path, saved, monkeypatch), []
    case.patch("fastgrpo.policy.load.load_tokenizer", lambda path, trust: loaded.append(path) or tiny.tokenizer())
    check_runs(take_sweep(case.argv(sweep="beta=0,0.1,0.2", sweep_seeds="0,1,2")))
    assert loaded == [str(case.model)]
