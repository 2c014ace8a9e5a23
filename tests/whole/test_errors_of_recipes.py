"""What a person can mend where a flag and the recipe of a task do not go together: the remedy can be followed."""

import pytest
from mistakes import check

from fastgrpo import train
from fastgrpo.config.recipe import parse

CASES = {
    # name: (command, command line, what its message must say)
    "the recipe's KL without its coefficient": (
        train,
        "--task bandit --beta 0",
        "kl has an effect only where beta is above 0; leave it out or, where a recipe sets it, pass --kl k3",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_mistake_is_told_in_a_line_or_two(name, tmp_path, monkeypatch, capfd):
    command, line, message = CASES[name]
    monkeypatch.chdir(tmp_path)
    check(command.main, line.split(), message, capfd)


def test_the_remedy_can_be_followed():
    assert parse(["--task", "bandit", "--beta", "0", "--kl", "k3"]).beta == 0
