"""Scripts of transformers and TRL read the settings by their own parsers."""

from dataclasses import dataclass

import pytest
from transformers import HfArgumentParser
from trl import ScriptArguments, TrlParser

from fastgrpo import GRPOConfig, SFTConfig

FLAGS = """
    --beta 0.04 --num_generations 4 --report_to tensorboard wandb --reward_weights 1 0.5 --loss_type grpo
    --gradient_checkpointing True --use_peft --lora_r 8 --no_shuffle_dataset --save_steps 7
"""


@pytest.mark.parametrize("record", [GRPOConfig, SFTConfig])
def test_unstated_settings_have_their_defaults(record):
    (config,) = HfArgumentParser((record,)).parse_args_into_dataclasses([])
    assert config == record()


def test_flags_become_settings():
    (config,) = HfArgumentParser((GRPOConfig,)).parse_args_into_dataclasses(FLAGS.split())
    assert config == GRPOConfig(
        beta=0.04, num_generations=4, report_to=("tensorboard", "wandb"), reward_weights=(1, 0.5), loss_type="grpo",
        gradient_checkpointing=True, use_peft=True, lora_r=8, shuffle_dataset=False, save_steps=7,
    )  # fmt: skip


def test_a_wrong_value_is_refused(capsys):
    with pytest.raises(SystemExit):
        HfArgumentParser((GRPOConfig,)).parse_args_into_dataclasses(["--kl", "k9"])
    assert "k9" in capsys.readouterr().err
    with pytest.raises(ValueError, match="num_generations must be"):
        HfArgumentParser((GRPOConfig,)).parse_args_into_dataclasses(["--num_generations", "1"])


def test_help_has_every_setting(capsys):
    with pytest.raises(SystemExit):
        HfArgumentParser((GRPOConfig,)).parse_args_into_dataclasses(["--help"])
    assert "Coefficient of the KL divergence" in capsys.readouterr().out


@dataclass
class OwnArguments:
    note: str = "none"


def test_trl_reads_a_file_and_flags(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text("beta: 0.04\nlearning_rate: 5e-5\nreport_to: [tensorboard]\nnote: x\nlora_target_modules: all\n"
                    "use_peft: true\n")  # fmt: skip
    own, config = TrlParser((OwnArguments, GRPOConfig)).parse_args_and_config(
        ["--config", str(path), "--num_generations", "4"]
    )
    assert own.note == "x"
    assert config == GRPOConfig(
        beta=0.04, learning_rate=5e-5, report_to="tensorboard", num_generations=4, use_peft=True,
        lora_target_modules="all",
    )  # fmt: skip


def test_script_arguments_go_beside():
    """They name the data set, so that `GRPOConfig` must not."""
    parser = TrlParser((ScriptArguments, GRPOConfig))
    script, config = parser.parse_args_and_config(["--dataset_name", "a/b", "--beta", "0.1"])
    assert script.dataset_name == "a/b" and config == GRPOConfig(beta=0.1)
