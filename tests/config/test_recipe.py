"""YAML files of settings, and what goes before what on the command line of training."""

import pytest

from fastgrpo.config.recipe import RECIPES, load_yaml, parse, take_flag, task_defaults
from fastgrpo.config.settings import GRPOConfig, SFTConfig
from fastgrpo.tasks import find_task

SINGLE = sorted(RECIPES.glob("*.yaml"))


@pytest.mark.parametrize("path", SINGLE, ids=lambda path: path.stem)
def test_recipes_are_valid(path):
    record = SFTConfig if path.stem.endswith("-sft") else GRPOConfig
    settings = load_yaml(path, record)
    config = record(**settings)
    assert settings and all(getattr(config, name) == value for name, value in settings.items())


@pytest.mark.parametrize("path", SINGLE, ids=lambda path: path.stem)
def test_a_model_of_the_tasks_own_trains_in_float32_on_a_gpu_too(path):
    """The accuracies in the documents are of float32; auto would be bfloat16 there."""
    settings = load_yaml(path, SFTConfig if path.stem.endswith("-sft") else GRPOConfig)
    task = find_task(settings.get("task", path.stem.removesuffix("-sft")))
    own = hasattr(task, "make_model") and "model_name_or_path" not in settings
    assert settings.get("dtype") == ("float32" if own else None)


def test_without_flags_the_embedded_example_trains_in_float32():
    assert parse([]).dtype == parse([], SFTConfig).dtype == "float32"
    assert parse(["--dtype", "bfloat16"]).dtype == "bfloat16"


def test_config_takes_the_name_of_a_shipped_recipe(tmp_path, monkeypatch):
    assert parse(["--config", "r1"]).num_generations == 16
    monkeypatch.chdir(tmp_path)
    (tmp_path / "r1").write_text("num_generations: 3\n")
    assert parse(["--config", "r1"]).num_generations == 3  # a person's own file goes first
    with pytest.raises(ValueError, match="no such file: r2"):
        parse(["--config", "r2"])
    (tmp_path / "arithmetic").mkdir()
    assert parse(["--config", "arithmetic"]).max_steps == 500  # a folder hides no recipe


def test_an_empty_name_is_not_that_of_a_default():
    with pytest.raises(ValueError, match="--config got an empty name; name a YAML file, or a recipe"):
        parse(["--config", ""])
    with pytest.raises(ValueError, match="--config got an empty name"):
        parse(["--config="], SFTConfig)
    assert parse(["--task", ""]).task == ""  # which find_task refuses


@pytest.mark.parametrize(
    "name, record, command",
    [
        ("arithmetic", SFTConfig, "train"),
        ("arithmetic-sft", GRPOConfig, "sft"),
    ],
)
def test_a_recipe_of_another_command_names_this_command(name, record, command):
    told = f"{name}.yaml holds settings for python -m fastgrpo.{command}, not for python -m fastgrpo.{record.command};"
    with pytest.raises(ValueError, match=told):
        parse(["--config", name], record)


def test_supervised_training_has_recipes_of_its_own():
    config = parse([], SFTConfig)
    assert (config.command, config.batch_size, config.max_completion_length) == ("sft", 64, 28)
    with pytest.raises(ValueError, match="Unrecognized options: --num_iterations"):
        parse(["--num_iterations", "2"], SFTConfig)


WARM_STARTED = [name for name in ("bandit", "countdown", "pizza") if (RECIPES / f"{name}-sft.yaml").exists()]


@pytest.mark.parametrize("task", WARM_STARTED)
def test_supervised_training_of_a_task_alone_is_its_warm_start(task):
    config, run = parse(["--task", task], SFTConfig), parse(["--task", task])
    known = {"steps": config.max_steps, "batch_size": config.batch_size, "learning_rate": config.learning_rate}
    assert known == find_task(task).WARM_START
    assert (config.lr_scheduler_type, config.warmup_steps, config.weight_decay) == ("linear", 0.05, 0.0)
    for name in ("max_completion_length", "reward_funcs", "eval_num_generations", "max_num_seqs"):
        assert getattr(config, name) == getattr(run, name), name


def test_yaml_names_the_nearest_setting(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text("learning_rat: 1\n")
    with pytest.raises(ValueError, match="unknown setting 'learning_rat'; did you mean 'learning_rate'"):
        load_yaml(path)


def test_yaml_numbers_may_lack_their_point(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text("learning_rate: 5e-5\n")
    assert load_yaml(path) == {"learning_rate": 5e-5}
    for line, match in (
        ("learning_rate: fast", "learning_rate must be a number, got 'fast'"),
        ("learning_rate: [1]", r"learning_rate must be a number, got \[1\]"),
        ("max_steps: 2.5", "max_steps must be a whole number, got 2.5"),
        ("max_steps: [", "is not YAML"),
        ("1: 2", "the name of a setting must be text, got 1"),
        ("null: 2", "the name of a setting must be text, got None"),
        ("beta: 1\nbeta: 2", "recipe.yaml is not YAML that can be read: beta is given twice, in lines 1 and 2"),
        ("- max_steps", "must hold lines of `setting: value`, got a list"),
    ):
        path.write_text(line + "\n")
        with pytest.raises(ValueError, match=match):
            load_yaml(path)
    path.write_text("max_steps: 1e3\n")
    assert repr(load_yaml(path)) == "{'max_steps': 1000}"


def test_what_the_file_begins_flags_may_complete(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("resume_from_checkpoint: auto\nmetric_for_best_model: eval/accuracy\nsave_steps: 20\n")
    config = parse(["--config", str(path), "--output_dir", "x", "--eval_steps", "10"])
    assert config.resume_from_checkpoint == "auto" and config.output_dir == "x"
    with pytest.raises(ValueError, match="resume_from_checkpoint=auto needs output_dir"):
        parse(["--config", str(path), "--eval_steps", "10"])


def test_flags_go_before_the_file_before_the_tasks_recipe(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("beta: 0.5\nnum_generations: 4\n")
    recipe = load_yaml(RECIPES / "arithmetic.yaml")
    config = parse(["--config", str(path), "--num_generations", "6", "--report_to", "tensorboard"])
    assert (config.beta, config.num_generations) == (0.5, 6)
    assert config.prompts_per_step == recipe["prompts_per_step"]
    assert config.report_to == ("tensorboard",)
    gsm8k = parse(["--task", "gsm8k", "--reward_weights", "1", "0.5", "0.1", "--gradient_checkpointing", "False"])
    assert gsm8k.task == "gsm8k" and gsm8k.prompts_per_step == 8
    assert gsm8k.reward_weights == (1.0, 0.5, 0.1) and gsm8k.gradient_checkpointing is False


def test_a_task_may_ship_no_recipe():
    assert task_defaults("arithmetic")["max_completion_length"] == 28 and task_defaults("gsm8k") == {}


@pytest.mark.parametrize(
    "argv", [["--task", "gsm8k", "-n", "2"], ["-n", "--task=gsm8k", "2"], ["-n", "2", "--task=gsm8k"]]
)
def test_a_flag_is_taken_out_of_the_arguments(argv):
    assert take_flag(argv, "--task") == (["-n", "2"], "gsm8k")
    assert take_flag(["-n", "2"], "--task") == (["-n", "2"], None)
    with pytest.raises(ValueError, match="--task needs a value"):
        take_flag(["--task"], "--task")
