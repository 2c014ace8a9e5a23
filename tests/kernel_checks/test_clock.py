"""Times are taken in turns, and a call without enough memory is left out."""

import torch

from fastgrpo.kernel_checks.clock import medians

CPU = torch.device("cpu")


def test_calls_take_turns():
    called = []
    found = medians({name: lambda name=name: called.append(name) for name in "ab"}, CPU, rounds=3)
    assert "".join(called) == "ab" + "ab" + "ba" + "ab" and found.keys() == {"a", "b"}
    assert all(seconds >= 0 for seconds in found.values())


def test_what_does_not_fit_is_left_out():
    def too_large():
        raise torch.cuda.OutOfMemoryError("no")

    assert medians({"large": too_large, "small": lambda: None}, CPU, rounds=1).keys() == {"small"}
