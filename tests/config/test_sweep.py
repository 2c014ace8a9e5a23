"""The flags of a sweep, and the runs that they stand for."""

import pytest

from fastgrpo.config.sweep import runs_of, take_sweep
from fastgrpo.run.folder import NAMES


def runs(line):
    return runs_of(*take_sweep(line.split()))


def test_a_run_for_each_combination_and_seed():
    found = runs("--max_steps 3 --sweep num_generations=2,4 --sweep=learning_rate=1e-4,2e-4 --sweep_seeds 0,7")
    assert [(r.config.num_generations, r.config.learning_rate, r.config.seed) for r in found] == [
        (generations, rate, seed) for generations in (2, 4) for rate in (1e-4, 2e-4) for seed in (0, 7)
    ]
    assert {r.config.max_steps for r in found} == {3}
    assert found[1].setting == "num_generations=2,learning_rate=1e-4"
    assert found[1].name == "num_generations=2,learning_rate=1e-4,seed=7"
    assert found[1].argv == ("--max_steps", "3", "--num_generations", "2", "--learning_rate", "1e-4", "--seed", "7")


def test_seeds_or_settings_alone():
    assert [(r.setting, r.name) for r in runs("--sweep_seeds 1,2")] == [("", "seed=1"), ("", "seed=2")]
    assert [r.name for r in runs("--sweep beta=0,0.1 --seed 5")] == ["beta=0,seed=5", "beta=0.1,seed=5"]


def test_without_its_flags_there_is_no_sweep():
    argv = ["--max_steps", "3"]
    assert take_sweep(argv) == (argv, None)


def test_lists_and_paths():
    """The values of a list go in one by one, and a folder is not named with slashes."""
    first, _ = runs("--sweep model_name_or_path=/a/b,c --task gsm8k")
    assert first.config.model_name_or_path == "/a/b" and first.name == "model_name_or_path=-a-b-985d155e,seed=42"
    (one, two) = runs_of(*take_sweep(["--sweep", "lora_target_modules=q_proj k_proj,v_proj", "--use_peft", "True"]))
    assert one.config.lora_target_modules == ("q_proj", "k_proj") and two.config.lora_target_modules == ("v_proj",)


def test_every_text_gives_a_folder_of_its_own():
    """Whatever a file system may refuse in a name, and however long it is."""
    prefix = "/models/" + "x" * 300
    values = ["a/b", "a-b", "a b", "a//b", "ä", "ö", "模" * 90, prefix + "1", prefix + "2"]
    names = [
        run.name
        for run in runs_of(*take_sweep(["--task", "gsm8k", "--sweep", f"model_name_or_path={','.join(values)}"]))
    ]
    assert len(set(names)) == len(values) and "model_name_or_path=a-b,seed=42" in names
    assert all(name.isascii() and len(name) < 200 and NAMES.fullmatch(f"{name}.log") for name in names)


def test_jobs():
    assert take_sweep(["--sweep_seeds", "1", "--sweep_jobs", "3"])[1].jobs == 3
    assert take_sweep(["--sweep_seeds", "1"])[1].jobs == 1


@pytest.mark.parametrize(
    "line, message",
    [
        ("--sweep beta=0,0.0", "has the run beta=0.0,seed=42 twice, once as beta=0,seed=42; leave one"),
        ("--sweep_seeds 1,1", "has the run seed=1 twice; leave one"),
        ("--sweep beta=0.1,-1", r"the run with --beta -1: beta must be at least 0, got -1"),
        ("--sweep beta=0,0.1 --resume_from_checkpoint auto --output_dir x", "is not for sweeps: a sweep goes on where"),
        ("--sweep_seeds 1 --overwrite_output_dir True --output_dir x", "is not for sweeps: delete the folder"),
    ],
)
def test_runs_that_cannot_be(line, message):
    with pytest.raises(ValueError, match=message):
        runs(line)
