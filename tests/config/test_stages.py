"""The file of settings of several stages."""

import pytest

from fastgrpo.config.stages import read_stages, to_flags

EMPTY = "sft: {}\ntrain: {}\ndistill: {}\ndistilled: {}\n"


def written(tmp_path, text):
    path = tmp_path / "stages.yaml"
    path.write_text(text)
    return str(path)


def test_the_shipped_file_is_valid_and_what_is_for_all_goes_where_it_is_known():
    stages = read_stages("three-stages")
    assert list(stages) == ["sft", "train", "distill", "distilled"]
    assert all(stage["seed"] == 42 and stage["task"] == "arithmetic" for stage in stages.values())
    assert stages["sft"]["eval_num_generations"] == 8 and "eval_num_generations" not in stages["distill"]


def test_a_section_overrides_what_is_for_all(tmp_path):
    text = "all: {seed: 1, beta: 0.1}\nsft: {seed: 2}\ntrain: {}\ndistill: {}\ndistilled: {}\n"
    stages = read_stages(written(tmp_path, text))
    assert stages["sft"] == {"seed": 2} and stages["train"] == {"seed": 1, "beta": 0.1}


def test_settings_become_arguments():
    assert to_flags({"reward_weights": (1.0, 0.0), "use_peft": True, "system_prompt": "--x"}) == [
        "--reward_weights", "1.0", "0.0", "--use_peft=True", "--system_prompt=--x",
    ]  # fmt: skip


@pytest.mark.parametrize(
    "text, message",
    [
        ("sft: {}\n", "has no section 'train'; its sections are all, sft, train, distill, distilled"),
        (EMPTY + "evaluate: {}\n", "has an unknown section 'evaluate'"),
        (EMPTY.replace("train: {}", "train: 3"), "section train must hold lines of `setting: value`, got 3"),
        (EMPTY + "all: {sead: 1}\n", "all: unknown setting 'sead'; did you mean 'seed'"),
        (EMPTY.replace("sft: {}", "sft: {beta: 1}", 1), "sft: unknown setting 'beta'"),
        (EMPTY.replace("distilled: {}", "distilled: {batch_size: 0}"), "distilled: .*batch_size must be at least 1"),
        (
            EMPTY.replace("distill: {}", "distill: {max_repetition: 7}"),
            r"distill: .*max_repetition must be in \[0, 1\]",
        ),
        (EMPTY.replace("train: {}", "train: {output_dir: x}"), "train: output_dir follows from the other stages"),
        (EMPTY + "all: {output_dir: x}\n", "sft: output_dir follows from the other stages"),
        (EMPTY + "all: {max_per_promt: 2}\n", "all: unknown setting 'max_per_promt'; did you mean 'max_per_prompt'"),
        (EMPTY.replace("sft: {}", "sft: {max_steps: 2.5}", 1), "sft: max_steps must be a whole number, got 2.5"),
        (EMPTY.replace("train: {}", "train: {overwrite_output_dir: true}"), "overwrite_output_dir follows"),
    ],
)
def test_mistakes_are_told_before_the_first_stage(tmp_path, text, message):
    with pytest.raises(ValueError, match=message):
        read_stages(written(tmp_path, text))


def test_no_such_file():
    with pytest.raises(ValueError, match="no such file: four-stages"):
        read_stages("four-stages")
