"""What a person can mend in the settings of the KL: exit code 2, and a line that names the setting and the remedy."""

import pytest
from mistakes import Case, check, flags

from fastgrpo import train

CASES = {
    # name: (command line, what its message must say)
    "a KL without its coefficient": (flags(kl="full"), "kl has an effect only where beta is above 0; leave it out"),
    "no such KL": (flags(kl="k4", beta=0.1), "invalid choice 'k4' for argument '--kl'"),
}


@pytest.mark.parametrize("name", CASES)
def test_a_mistake_is_told_in_a_line_or_two(name, tmp_path, saved, monkeypatch, capfd):
    build, message = CASES[name]
    monkeypatch.chdir(tmp_path)
    check(train.main, build(Case(tmp_path, saved, monkeypatch)), message, capfd)
