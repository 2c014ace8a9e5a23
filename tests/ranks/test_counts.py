"""The traffic and memory of two ranks in a step, as in benchmarks/README.md."""

import json

import pytest
import tiny
from ranks import LIMIT, forked

pytestmark = pytest.mark.slow
SMALL = {"max_tokens_per_microbatch": 30}  # each rank has 2 groups of about 26 tokens, so that it makes 2 passes
CASES = {
    "ddp-small": {"parallel": "ddp", "num_iterations": 2, **SMALL},
    "fsdp2-small": {"parallel": "fsdp2", **SMALL}, "fsdp2-kept": {"parallel": "fsdp2_keep", **SMALL},
    "fsdp2-lora": {"parallel": "fsdp2", "use_peft": True, "lora_r": 4},
}  # fmt: skip
FP32 = 4  # bytes of a number
SCALARS = [["allreduce", FP32]] * 2  # the loss and the norm of the gradients


@pytest.fixture(scope="module")
def counts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("counted")
    model = tiny.save(folder / "model")
    codes, (lead, other) = forked("counted_ranks.py", folder, model, json.dumps(CASES), limit=3 * LIMIT)("counted")
    assert codes == [0, 0], lead + other
    for case in CASES.values():
        assert f"2 processes use {case['parallel'].partition('_')[0]} (set by parallel)" in lead
    assert "share the run" not in other
    return json.loads((folder / "counts.json").read_text())


@pytest.mark.parametrize("case", CASES)
def test_the_decode_loop_sends_nothing(counts, case):
    """Nor does it exchange objects; the completions are gathered after it."""
    assert counts[case]["called"]["decode"] > 1
    assert "decode" not in counts[case]["sent"] and "decode" not in counts[case]["host"]


def test_ddp_sends_the_gradients_once_an_update(counts):
    """With the loss beside them, whatever the number of micro-batches."""
    told = counts["ddp-small"]
    assert told["sent"] == {"update": [["allreduce", FP32 * (told["trained"] + 1)]] * 2}
    assert told["trained"] == sum(told["units"])


def parts_of(sent, kind):
    return sorted(size for name, size in sent if name == kind)


@pytest.mark.parametrize("case, passes, gathers", [("fsdp2-small", 2, 2), ("fsdp2-kept", 2, 1)])
def test_fsdp2_gathers_layers_for_each_pass_and_reduces_their_gradients(counts, case, passes, gathers):
    """Embedding and head, the last unit, stay whole from the forward to the backward pass."""
    sent, units = counts[case]["sent"], [FP32 * count for count in counts[case]["units"]]
    layers, root = units[:-1], units[-1]
    assert parts_of(sent["update"], "allgather_base") == sorted((layers * gathers + [root]) * passes)
    assert parts_of(sent["update"], "reduce_scatter_base") == sorted(units * passes)
    assert [entry for entry in sent["update"] if "_base" not in entry[0]] == SCALARS


@pytest.mark.parametrize("case", [name for name in CASES if name.startswith("fsdp2") and "lora" not in name])
def test_fsdp2_gathers_the_whole_weights_once_before_it_draws(counts, case):
    sent = counts[case]["sent"]
    assert sent.keys() == {"elsewhere", "update"}
    assert sorted(sent["elsewhere"]) == sorted(["allgather_base", FP32 * count] for count in counts[case]["units"])


def test_adapters_of_a_sharded_base_are_added_up_as_ddp_does(counts):
    told = counts["fsdp2-lora"]
    assert not parts_of(told["sent"]["update"], "reduce_scatter_base")
    assert 0 <= sum(parts_of(told["sent"]["update"], "allreduce")) - FP32 * told["trained"] <= 2 * FP32


@pytest.mark.parametrize("case", CASES)
def test_two_ranks_hold_twice_what_is_planned_for_one(counts, case):
    """A plan rounds a rank's share up."""
    for name, held in counts[case]["held"].items():
        assert 0 <= 2 * counts[case]["planned"][name] - held <= 1, name
