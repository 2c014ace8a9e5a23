"""YAML files of settings, recipes, and the priority of flags, files and recipes."""

import pytest

from fastgrpo.config.recipe import RECIPES, load_yaml, parse, read_yaml, task_defaults
from fastgrpo.config.settings import GRPOConfig, SFTConfig
from fastgrpo.tasks import find_task


@pytest.mark.parametrize("path", sorted(RECIPES.glob("*.yaml")), ids=lambda path: path.stem)
def test_shipped_recipes_are_valid(path):
    """A task's own small model trains in float32 on a GPU too: the accuracies in the docs are of float32."""
    record = SFTConfig if path.stem.endswith("-sft") else GRPOConfig
    settings = load_yaml(path, record)
    config = record(**settings)
    assert settings and all(getattr(config, name) == value for name, value in settings.items())
    task = find_task(settings.get("task", path.stem.removesuffix("-sft")))
    own = hasattr(task, "make_model") and "model_name_or_path" not in settings
    assert settings.get("dtype") == ("float32" if own else None)


def test_config_takes_the_name_of_a_shipped_recipe(tmp_path, monkeypatch):
    assert parse(["--config", "r1"]).num_generations == 16
    monkeypatch.chdir(tmp_path)
    (tmp_path / "r1").write_text("num_generations: 3\n")
    assert parse(["--config", "r1"]).num_generations == 3  # the user's own file goes first
    (tmp_path / "arithmetic").mkdir()
    assert parse(["--config", "arithmetic"]).max_steps == 280  # a folder hides no recipe
    for argv in (["--config", "r2"], ["--config", ""], ["--config="], ["--config"], ["--config", "r1"] * 2):
        with pytest.raises(ValueError, match=r"no such file: r2|--config"):
            parse(argv)


@pytest.mark.parametrize(
    "name, record, command", [("arithmetic", SFTConfig, "train"), ("arithmetic-sft", GRPOConfig, "sft")]
)
def test_a_recipe_of_another_command_names_that_command(name, record, command):
    with pytest.raises(ValueError, match=rf"{name}\.yaml .* python -m fastgrpo\.{command}"):
        parse(["--config", name], record)


@pytest.mark.parametrize("task", ["bandit", "pizza"])
def test_supervised_training_of_a_task_is_its_warm_start(task):
    config, run = parse(["--task", task], SFTConfig), parse(["--task", task])
    known = {"steps": config.max_steps, "batch_size": config.batch_size, "learning_rate": config.learning_rate}
    assert known == find_task(task).WARM_START
    assert (config.lr_scheduler_type, config.warmup_steps, config.weight_decay) == ("linear", 0.05, 0.0)
    for name in ("max_completion_length", "reward_funcs", "eval_num_generations", "max_num_seqs"):
        assert getattr(config, name) == getattr(run, name), name


def test_auto_is_none(tmp_path):
    (tmp_path / "mine.yaml").write_text("max_num_seqs: 64")
    file = ["--config", str(tmp_path / "mine.yaml")]
    assert parse(file).max_num_seqs == 64 and parse([*file, "--max_num_seqs", "32"]).max_num_seqs == 32
    assert parse([*file, "--max_num_seqs", "auto"]).max_num_seqs is None
    (tmp_path / "mine.yaml").write_text("max_num_seqs: None\nsystem_prompt: None")
    assert parse(file).max_num_seqs is parse(file).system_prompt is None
    (tmp_path / "mine.yaml").write_text("max_num_seqs: auto")
    assert parse(file).max_num_seqs is None and GRPOConfig(max_num_seqs="auto").max_num_seqs is None


def test_flags_go_before_the_file_before_the_recipe_of_the_task(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("beta: 0.5\nnum_generations: 4\nresume_from_checkpoint: auto\n")
    argv = ["--config", str(path), "--num_generations", "6", "--report_to", "tensorboard"]
    with pytest.raises(ValueError, match="resume_from_checkpoint=auto needs output_dir"):
        parse(argv)
    config = parse([*argv, "--output_dir", "x"])  # a flag may complete what the file begins
    assert (config.beta, config.num_generations, config.report_to) == (0.5, 6, ("tensorboard",))
    assert config.prompts_per_step == load_yaml(RECIPES / "arithmetic.yaml")["prompts_per_step"]
    assert parse(["--dtype", "bfloat16"]).dtype == "bfloat16" != parse([]).dtype
    assert task_defaults("arithmetic")["max_completion_length"] == 28 and task_defaults("gsm8k") == {}
    assert task_defaults("countdown")["reward_weights"] == (1.0, 0.0)
    own = ["--task", "countdown", "--model_name_or_path", "m", "--reward-funcs=correctness"]
    assert parse(own).reward_weights == ()  # those of the recipe belong to its functions
    assert (parse(["--task", "gsm8k"]).prompts_per_step, parse(["--task", ""]).task) == (8, "")


def test_numbers_in_yaml_may_lack_their_point(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text("learning_rate: 5e-5\nmax_steps: 1e3\nlr_scheduler_kwargs: {min_lr: 1e-7}\nreward_weights: null")
    kept = {"learning_rate": 5e-05, "max_steps": 1000, "lr_scheduler_kwargs": '{"min_lr": 1e-07}', "reward_weights": ()}
    assert repr(load_yaml(path)) == repr(kept)


def test_yaml_holds_plain_values_and_names_for_them():
    text = "beta: 0.5\nreward_funcs: [a, b]\nuse_peft: true\ndevice: null  # none\nsave: &often 50\neval: *often\n"
    assert read_yaml(text) == {
        "beta": 0.5, "reward_funcs": ["a", "b"], "use_peft": True, "device": None, "save": 50, "eval": 50,
    }  # fmt: skip
    assert read_yaml("") is None


@pytest.mark.parametrize("text", [
    "a: " + "[" * 5000, "a: [", "a: !!timestamp x", "a: !!bool x", "a: 2020-13-45",
    "a: !!python/object/apply:os.getcwd []", "? [a]\n: 1",
])  # fmt: skip
def test_yaml_that_holds_more_is_a_value_error(text):
    with pytest.raises(ValueError):
        read_yaml(text)
