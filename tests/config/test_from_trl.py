"""`GRPOConfig` takes TRL's arguments: what becomes of them, what is refused, and what stays as it was."""

import copy
import dataclasses
import inspect
import pickle

import pytest

from fastgrpo.config import recipe
from fastgrpo.config.settings import GRPOConfig, SFTConfig
from fastgrpo.config.trl import ACCEPTED, IDLE_WHY, INSTEAD


def changed(**arguments):
    """What these arguments change."""
    config = dataclasses.asdict(GRPOConfig(**arguments))
    return {name: value for name, value in config.items() if value != dataclasses.asdict(GRPOConfig())[name]}


def test_a_script_of_trl():
    arguments = {
        "output_dir": "out", "learning_rate": 0.1, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2,
        "num_generations": 4, "max_completion_length": 8, "report_to": "none", "bf16": False, "use_cpu": True,
        "logging_steps": 1, "save_strategy": "no", "eval_strategy": "steps", "eval_steps": 2, "max_steps": 3,
        "log_completions": True, "num_completions_to_print": 2, "remove_unused_columns": False, "scale_rewards": False,
        "dataloader_num_workers": 2, "optim": "adamw_torch",
    }  # fmt: skip
    assert changed(**arguments) == {
        "output_dir": "out", "learning_rate": 0.1, "prompts_per_step": 2, "num_generations": 4, "logging_steps": 1,
        "max_completion_length": 8, "dtype": "float32", "device": "cpu", "save_steps": None, "eval_steps": 2,
        "eval_on_start": False, "max_steps": 3, "scale_rewards": "none", "log_completions": True,
        "num_completions_to_print": 2,
    }  # fmt: skip


@pytest.mark.parametrize("name", IDLE_WHY)
def test_what_does_nothing_changes_nothing(name):
    assert changed(**{name: "anything"}) == {}


@pytest.mark.parametrize("name", INSTEAD)
def test_what_is_refused_says_what_to_do_instead(name):
    with pytest.raises(ValueError, match=f"^{name}='anything' is TRL's and not for fastgrpo; .{{20,}}"):
        GRPOConfig(**{name: "anything"})
    for value in (None, False, *ACCEPTED.get(name, ())):
        assert changed(**{name: value}) == {}


@pytest.mark.parametrize(
    "arguments",
    [
        {"optim": "adamw_torch"}, {"fsdp": ""}, {"fsdp": []}, {"fsdp_config": {}}, {"router_aux_loss_coef": 0.0},
        {"eval_delay": 0.0}, {"debug": []}, {"hub_strategy": "end"},
    ],
)  # fmt: skip
def test_values_that_mean_the_default_are_taken(arguments):
    assert changed(**arguments) == {}


def test_contradictions_are_told_with_their_numbers():
    with pytest.raises(ValueError) as error:
        GRPOConfig(per_device_train_batch_size=16, gradient_accumulation_steps=2, prompts_per_step=3)
    assert str(error.value) == (
        "per_device_train_batch_size=16 and gradient_accumulation_steps=2 make prompts_per_step=4, but "
        "prompts_per_step=3 is given too; leave one of them out"
    )
    assert changed(per_device_train_batch_size=32, prompts_per_step=4) == {"prompts_per_step": 4}
    with pytest.raises(ValueError, match="bf16=True makes dtype='bfloat16', but dtype='float32' is given too"):
        GRPOConfig(bf16=True, dtype="float32")


def test_a_misspelt_name_of_trl_names_the_nearest():
    with pytest.raises(TypeError, match=r"unknown setting 'use_vlm'; did you mean 'use_vllm'\?"):
        GRPOConfig(use_vlm=False)


def test_transformers_enums_are_their_values():
    from transformers import IntervalStrategy, SchedulerType

    arguments = {"lr_scheduler_type": SchedulerType.COSINE, "eval_strategy": IntervalStrategy.NO}
    config = changed(**arguments)
    assert config == {"lr_scheduler_type": "cosine", "eval_on_start": False}
    assert type(config["lr_scheduler_type"]) is str


def test_the_record_stays_as_it_is():
    config = GRPOConfig(per_device_train_batch_size=16, max_steps=4)
    assert dataclasses.replace(config, beta=0.1).prompts_per_step == 2
    assert pickle.loads(pickle.dumps(config)) == copy.deepcopy(config) == config
    assert "per_device_train_batch_size" not in dataclasses.asdict(config)
    assert list(inspect.signature(GRPOConfig).parameters)[:1] == ["model_name_or_path"]
    assert {*inspect.signature(GRPOConfig).parameters} == {field.name for field in dataclasses.fields(GRPOConfig)}


def test_files_commands_and_other_records_take_settings_alone(tmp_path, capsys):
    with pytest.raises(ValueError, match="per_device_train_batch_size"):
        recipe.parse(["--per_device_train_batch_size", "8"])
    (tmp_path / "a.yaml").write_text("use_cpu: true\n")
    with pytest.raises(ValueError, match="unknown setting 'use_cpu'"):
        recipe.parse(["--config", str(tmp_path / "a.yaml")])
    with pytest.raises(TypeError, match="SFTConfig: unknown setting 'use_cpu'"):
        SFTConfig(use_cpu=True)
    with pytest.raises(SystemExit):
        recipe.parse(["--help"])
    assert "use_cpu" not in capsys.readouterr().out
