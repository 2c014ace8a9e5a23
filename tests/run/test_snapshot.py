"""The parts of a snapshot: copies that training does not touch, and generators that go on where they stood."""

import random

import numpy
import pytest
import torch

from fastgrpo.run.snapshot import GlobalRNG, _compare, _read


@pytest.mark.parametrize("content", [b"", b"rubbish", b"\x80\x02cos\nsystem\n(S'true'\ntR."])
def test_a_file_that_torch_cannot_read_is_named(tmp_path, content):
    (tmp_path / "optimizer.pt").write_bytes(content)
    with pytest.raises(ValueError, match=r"optimizer.pt cannot be read: \w+: "):
        _read(tmp_path / "optimizer.pt")


def draws():
    return random.random(), numpy.random.rand(), torch.rand(1).item()


def test_the_generators_go_on_where_they_stood(tmp_path):
    generators = GlobalRNG()
    draws()
    torch.save(generators.state_dict(), tmp_path / "rng.pt")
    expected = draws()
    assert draws() != expected
    generators.load_state_dict(torch.load(tmp_path / "rng.pt", weights_only=True))
    assert draws() == expected


@pytest.mark.parametrize(
    "setting, chosen, now, warned",
    [
        ("auto", True, True, False),  # as it was
        ("auto", True, False, True),  # another GPU, or another amount of free memory
        (True, True, True, False),
        (True, True, False, True),
    ],
)
def test_another_choice_of_gradient_checkpointing_is_told(tmp_path, setting, chosen, now, warned):
    same = {"dtype": "torch.float32", "rows": 4, "data_digest": None, "model_digest": None}
    state = same | {"config": {"gradient_checkpointing": setting}}
    state["gradient_checkpointing"] = chosen
    config = {"gradient_checkpointing": "auto"}
    said = []
    _compare(state, tmp_path, same | {"config": config, "gradient_checkpointing": now}, said.append)
    told = f"warning: gradient_checkpointing was True and is {now} now, by what auto chooses: "
    assert [line.startswith(told) for line in said] == [True] * warned
