"""The sum of a plan's parts, what comes and goes, and the refusal with the flags that would help."""

import math

import pytest

from fastgrpo.trainer.memory import MemoryPlan, Part, gib

GIB = 2**30


def make_plan(room, share=0.5, **instead):
    parts = [
        Part("policy", 4 * GIB, "weights"),
        Part("optimizer", 10 * GIB, "states"),
        Part("head", GIB, "logits", times=("head",)),
    ]
    slots = Part("keys and values", 3 * GIB, "slots")
    instead = {f"--{name}": (17 - saved) * GIB for name, saved in instead.items()}
    return MemoryPlan(parts, slots, GIB, share, room, True, "so it is", instead=instead)


def test_the_table_of_a_plan():
    plan = make_plan(math.inf)
    assert plan.needed == 18 * GIB and plan.passing == GIB
    rows = dict(plan.rows())
    assert list(rows) == ["policy", "optimizer", "head", "keys and values", "in all", "gradient checkpointing"]
    assert rows["in all"].strip() == "18.00 GiB   the most at once, while the loss computes logits"
    assert rows["head"].strip() == "1.00 GiB   logits, while the loss computes logits"
    assert rows["gradient checkpointing"].split() == ["on", "so", "it", "is"]
    assert dict(make_plan(20 * GIB).rows())["in all"].endswith("of the 20.00 GiB that the run may take")


def test_a_run_fits_where_the_share_of_what_is_left_holds_a_group():
    make_plan(17 * GIB).check()  # 15 are taken, and a half of 2 are enough for a group of 1
    with pytest.raises(ValueError) as error:
        make_plan(16 * GIB).check()
    assert str(error.value) == (
        "the run needs at least 17.00 GiB of memory while the loss computes logits, and there are 16.00 GiB: "
        "optimizer 10.00 GiB, policy 4.00 GiB, head 1.00 GiB, and keys and values of one group 1.00 GiB, within 0.5 of "
        "what is left\n  take a smaller model or larger GPUs, or more of them with --parallel fsdp2"
    )


def test_flags_are_named_by_what_they_save():
    with pytest.raises(ValueError) as error:
        make_plan(12 * GIB, small=0.01, large=8, middle=2).check()
    assert str(error.value).splitlines()[1] == ("  --large saves 8.00 GiB, which is enough; --middle saves 2.00 GiB")


def test_parts_that_pass_count_at_the_time_at_which_they_are_most():
    def made(backward, room=math.inf):
        parts = [
            Part("policy", GIB, "weights"),
            Part("activations", 4 * GIB, "kept", times=("head", "layers")),
            Part("logits", 2 * GIB, "drawn from", times=("draw",)),
            Part("head", 3 * GIB, "logits", times=("head",)),
            Part("a layer", backward * GIB, "one layer", times=("layers",)),
        ]
        return MemoryPlan(parts, Part("keys and values", 0, "none"), 0, 1.0, room, True, "so it is")

    assert [made(backward).passing // GIB for backward in (1, 3, 4)] == [7, 7, 8]
    assert "while the loss computes" in dict(made(1).rows())["in all"]
    assert "while the layers go backward" in dict(made(4).rows())["in all"]
    made(1, room=8 * GIB).check()
    with pytest.raises(ValueError) as error:
        made(1, room=7 * GIB).check()
    assert "a layer" not in str(error.value) and "logits 2.00" not in str(error.value)


def test_bytes_in_words():
    assert [gib(n) for n in (0, 512, 3 * 2**20, 1.5 * GIB)] == ["0.00 KiB", "0.50 KiB", "3.00 MiB", "1.50 GiB"]
