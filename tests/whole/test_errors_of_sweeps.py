"""What a person can mend in the flags of a sweep: all of it is told before the first run starts."""

import pytest
import tiny
from mistakes import Case, check, flags, words

from fastgrpo.config.sweep import runs_of, take_sweep
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
    "no values": (words("--sweep beta"), "--sweep takes NAME=VALUE,VALUE, as in .*, got 'beta'"),
    "an empty value": (words("--sweep beta=0,,1"), "--sweep beta has an empty value in '0,,1'"),
    "a value out of range": (
        words("--sweep num_generations=4,1"), "with --num_generations 1: num_generations must be at least 2, got 1",
    ),
    "a value of another type": (words("--sweep num_generations=4,x"), "the run with --num_generations x: .*invalid"),
    "settings without effect": (
        words("--beta 0 --sweep ref_device=cpu,same"), "the run with --ref_device cpu: ref_device has an effect only",
    ),
    "a seed that is none": (words("--sweep_seeds 0,one"), "the run with --seed one: .*invalid"),
    "seeds as a setting": (words("--sweep seed=0,1"), "cannot vary seed: use --sweep_seeds 0,1,2"),
    "seeds twice": (words("--sweep_seeds 0 --sweep_seeds 1"), "--sweep_seeds is given twice"),
    "seeds and a seed": (words("--sweep_seeds 0,1 --seed 2"), "--seed is given besides its values in the sweep"),
    "a seed twice": (words("--sweep_seeds 0,1,0"), "the sweep has the run seed=0 twice; leave one of them out"),
    "a setting twice": (words("--sweep beta=0,1 --sweep beta=2"), "--sweep beta is given twice; put all values"),
    "a setting and its flag": (words("--beta 1 --sweep beta=0,1"), "--beta is given besides its values in the sweep"),
    "a value twice": (words("--sweep beta=1,1.0"), "has the run beta=1.0,seed=42 twice, once as beta=1,seed=42"),
    "folders": (words("--sweep output_dir=a,b"), "cannot vary output_dir: --output_dir names the folder of the whole"),
    "no jobs": (words("--sweep_seeds 0 --sweep_jobs 0"), "--sweep_jobs must be a whole number from 1 to 9999, got '0'"),
    "jobs alone": (words("--sweep_jobs 2"), "--sweep_jobs has an effect only with --sweep or --sweep_seeds"),
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
    check_runs(runs_of(*take_sweep(case.argv(sweep="beta=0,0.1,0.2", sweep_seeds="0,1,2"))))
    assert loaded == [str(case.model)]
