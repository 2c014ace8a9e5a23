"""Settings: defaults, validation, YAML and the command line."""

import copy
import dataclasses
import pickle

import pytest

from fastgrpo.config.recipe import RECIPES, load_yaml
from fastgrpo.config.settings import GRPOConfig
from fastgrpo.train import main, parse


def test_unstated_defaults_are_trls():
    config = GRPOConfig()
    assert (config.beta, config.epsilon, config.num_generations, config.loss_type) == (0.0, 0.2, 8, "dapo")
    assert (config.learning_rate, config.temperature, config.scale_rewards) == (1e-6, 1.0, "group")
    assert (config.max_completion_length, config.logging_steps, config.max_grad_norm) == (512, 10, 1.0)
    trl = pytest.importorskip("trl", reason="TRL is not installed (extra: bench)")
    for field in dataclasses.fields(trl.GRPOConfig):
        if field.name in ("seed", "report_to", "output_dir", "reward_weights", "lr_scheduler_type", "use_liger_kernel"):
            continue  # of other types, or of transformers' Trainer, where use_liger_kernel is about the head too
        if hasattr(config, field.name) and field.name != "use_bias_correction_kl":
            assert getattr(config, field.name) == field.default, field.name


@pytest.mark.parametrize(
    "settings, match",
    [
        ({"loss_type": "ppo"}, "loss_type must be one of grpo"),
        ({"scale_rewards": "std"}, "scale_rewards"),
        ({"advantage_baseline": "best"}, "advantage_baseline must be one of group, leave_one_out"),
        ({"advantage_clip": 0}, "advantage_clip must be positive"),
        ({"multi_objective_aggregation": "sum"}, "multi_objective_aggregation must be one of sum_then_normalize"),
        (
            {"multi_objective_aggregation": "normalize_then_sum", "scale_rewards": "batch"},
            "scale_rewards must be group, got batch",
        ),
        ({"num_generations": 1}, "num_generations must be at least 2"),
        ({"temperature": 0}, "temperature must be positive"),
        ({"learning_rate": 0}, "learning_rate"),
        ({"max_steps": 0}, "max_steps"),
        ({"updates_per_rollout": 9}, "raise prompts_per_step"),
        ({"report_to": ["mlflow"]}, "report_to must be of none, tensorboard, wandb, got mlflow"),
        ({"epsilon": 1.5}, "epsilon"),
        ({"beta": -0.1}, "beta"),
        ({"dtype": "float8"}, "dtype"),
        ({"top_p": 0}, "top_p"),
        ({"min_p": 2}, "min_p"),
        ({"eval_steps": 0}, "eval_steps must be at least 1"),
        ({"max_eval_samples": -1}, "max_eval_samples"),
        ({"num_train_epochs": 0}, "num_train_epochs"),
        ({"eval_num_generations": 300}, "max_num_seqs=256 must hold the eval_num_generations=300"),
        ({"eval_temperature": 0}, "eval_temperature must be positive"),
        ({"eval_top_p": 1.5}, "eval_top_p must be in"),
        ({"reward_errors": "ignore"}, "reward_errors must be one of raise, skip"),
        ({"max_num_seqs": 4}, "max_num_seqs=4 must hold a group of num_generations=8"),
    ],
)
def test_out_of_range(settings, match):
    with pytest.raises(ValueError, match=match):
        GRPOConfig(**settings)


def test_an_unknown_setting_names_the_nearest():
    with pytest.raises(TypeError, match="unknown setting 'learning_rat'; did you mean 'learning_rate'"):
        GRPOConfig(learning_rat=1e-6)
    config = GRPOConfig(beta=0.1)
    assert pickle.loads(pickle.dumps(config)) == copy.deepcopy(config) == dataclasses.replace(config) == config


def test_frozen_and_lists_are_welcome():
    config = GRPOConfig(reward_weights=[1, 2], report_to="tensorboard")
    assert config.reward_weights == (1, 2) and config.report_to == ("tensorboard",)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.beta = 1


def test_the_objective_gets_every_knob_of_its_own():
    config = GRPOConfig(
        loss_type="dr_grpo", epsilon_high=0.28, delta=4.0, beta=0.1, kl="k2", max_completion_length=77,
        importance_sampling_level="sequence",
    )  # fmt: skip
    objective = config.objective
    for name in ("loss_type", "epsilon_high", "delta", "beta", "kl", "max_completion_length"):
        assert getattr(objective, name) == getattr(config, name)
    assert objective.importance_sampling_level == "sequence"


@pytest.mark.parametrize("path", sorted(RECIPES.glob("*.yaml")), ids=lambda path: path.stem)
def test_recipes_are_valid(path):
    settings = load_yaml(path)
    config = GRPOConfig(**settings)
    assert settings and all(getattr(config, name) == value for name, value in settings.items())


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


@pytest.mark.parametrize(
    "argv, match",
    [
        (["--learning_rat", "1"], "learning_rate"),
        (["--num_generations", "1"], "num_generations must be at least 2, got 1"),
        (["--beta", "much"], "beta"),
    ],
)
def test_a_bad_flag_is_refused_with_a_hint(argv, match):
    with pytest.raises(ValueError, match=match) as error:
        parse(argv)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "argv, match",
    [
        (["--task", "gsm9k"], "task must be one of arithmetic, dataset, gsm8k"),
        (["--task", "gsm8k"], "needs --model_name_or_path"),
        (["--config"], "--config needs a value"),
    ],
)
def test_mistakes_are_one_line_and_exit_code_2(argv, match, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(argv) == 2
    error = capsys.readouterr().err
    assert match in error and "Traceback" not in error and len(error.strip().splitlines()) <= 2
