"""The settings of distillation, and its command line."""

import pytest

from fastgrpo.distill import parse


def test_the_tasks_limit_of_a_completion_holds():
    config = parse(["MODEL"])
    assert (config.model, config.task, config.max_completion_length, config.output) == (
        "MODEL", "arithmetic", 28, "distilled.jsonl",
    )  # fmt: skip
    assert parse(["MODEL", "--task", "gsm8k", "--max_per_prompt", "3"]).max_completion_length == 512


@pytest.mark.parametrize(
    "argv, message",
    [
        ([], "an argument is missing: "),
        (["M", "--max_per_promt", "3"], "max_per_promt.*did you mean --max_per_prompt"),
        (["M", "--temperature", "0"], "temperature must be at least 1e-30"),
        (["M", "--max_repetition", "2"], r"max_repetition must be in \[0, 1\]"),
    ],
)
def test_mistakes(argv, message):
    with pytest.raises(ValueError, match=message):
        parse(argv)
