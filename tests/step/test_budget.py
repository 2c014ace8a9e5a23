"""The sum of a plan's parts, what comes and goes, and the refusal with the flags that would help."""

import math

import pytest

from fastgrpo.step.budget import Part, Plan, gib

GIB = 2**30


def make_plan(room, share=0.5, **saved_by):
    parts = [
        Part("policy", 4 * GIB, "weights"),
        Part("optimizer", 10 * GIB, "states", saved_by={f"--{name}": size * GIB for name, size in saved_by.items()}),
        Part("head", GIB, "logits", passing=True),
        Part("value model", 100 * GIB, "of PPO", ppo=True),
    ]
    slots = Part("keys and values", 3 * GIB, "slots", saved_by={"--rollout_memory_utilization 1": GIB / share - GIB})
    return Plan(parts, slots, GIB, share, room, True, "so it is")


def test_parts_of_ppo_do_not_count():
    plan = make_plan(math.inf)
    assert plan.needed == 18 * GIB and plan.passing == GIB
    rows = dict(plan.rows())
    assert list(rows) == ["policy", "optimizer", "head", "keys and values", "in all", "gradient checkpointing"]
    assert rows["in all"].strip() == "18.00 GiB" and rows["gradient checkpointing"].split() == ["on", "so", "it", "is"]
    assert dict(make_plan(20 * GIB).rows())["in all"].endswith("of the 20.00 GiB that the run may take")


def test_a_run_fits_where_the_share_of_what_is_left_holds_a_group():
    make_plan(17 * GIB).check()  # 15 are taken, and a half of 2 are enough for a group of 1
    with pytest.raises(ValueError) as error:
        make_plan(16 * GIB).check()
    assert str(error.value) == (
        "the run needs at least 17.00 GiB of memory, and there are 16.00 GiB: optimizer 10.00 GiB, policy 4.00 GiB, "
        "head 1.00 GiB, and 2.00 GiB of which keys and values get the share 0.5\n"
        "  --rollout_memory_utilization 1 saves 1.00 GiB, which is enough"
    )


def test_flags_are_named_by_what_they_save():
    with pytest.raises(ValueError) as error:
        make_plan(12 * GIB, small=0.01, large=8, middle=2).check()
    assert str(error.value).splitlines()[1] == (
        "  --large saves 8.00 GiB, which is enough; --middle saves 2.00 GiB; --rollout_memory_utilization 1 saves "
        "1.00 GiB"
    )
    with pytest.raises(ValueError, match="take a smaller model or a larger GPU"):
        make_plan(12 * GIB, share=1).check()


def test_bytes_in_words():
    assert [gib(n) for n in (0, 512, 3 * 2**20, 1.5 * GIB)] == ["0.00 KiB", "0.50 KiB", "3.00 MiB", "1.50 GiB"]
