"""The plan of several devices, against numbers computed by hand from Qwen2.5's shapes and 80 GiB a device.

A layer has 2 h h + 2 h k + (h + 2 k) + 3 h f + 2 h parameters (h hidden size, k width of all keys, f width of the MLP):
of the 7B model 25,690,112 + 3,670,016 + 4,608 + 203,685,888 + 7,168 = 233,057,792.
"""

import math

import pytest
import tiny
import torch

from fastgrpo.config.settings import GRPOConfig, SFTConfig
from fastgrpo.policy.load import outline
from fastgrpo.ranks import ALONE, Ranks
from fastgrpo.trainer.memory import Count, choose_parallel, plan, plan_run

CPU, CUDA, GIB, ROOM = torch.device("cpu"), torch.device("cuda"), 2**30, 80 * 2**30
SHAPES = {
    "1.5B": {"hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12,
             "num_key_value_heads": 2, "vocab_size": 151_936, "tie_word_embeddings": True},
    "7B": {"hidden_size": 3584, "intermediate_size": 18_944, "num_hidden_layers": 28, "num_attention_heads": 28,
           "num_key_value_heads": 4, "vocab_size": 152_064, "tie_word_embeddings": False},
    "32B": {"hidden_size": 5120, "intermediate_size": 27_648, "num_hidden_layers": 64, "num_attention_heads": 40,
            "num_key_value_heads": 8, "vocab_size": 152_064, "tie_word_embeddings": False},
}  # fmt: skip
# Parameters of the model, of one layer, and of what belongs to no layer, as the technical report's models have them.
COUNTS = {
    "1.5B": (1_543_714_304, 46_797_824, 233_375_232),
    "7B": (7_615_616_512, 233_057_792, 1_089_998_336),
    "32B": (32_763_876_352, 487_605_248, 1_557_140_480),
}
PEFT = {"use_peft": True, "lora_target_modules": ("q_proj",), "lora_r": 8}


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    """A folder with the config of each model."""
    folder = tmp_path_factory.mktemp("shapes")
    for name, shape in SHAPES.items():
        tiny.config(**shape).save_pretrained(folder / name)
    return {name: folder / name for name in SHAPES}


@pytest.fixture(scope="module")
def outlined(paths):
    """Each model without weights, for plans that add nothing to it."""
    return {name: outline(path) for name, path in paths.items()}


@pytest.fixture
def planned(paths, outlined, monkeypatch):
    """A function that plans a run in bf16: of a model, on so many devices."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))

    def of(name, ranks, device=CPU, room=ROOM, kind=GRPOConfig, **settings):
        model = outline(paths[name]) if "use_peft" in settings else outlined[name]
        return plan(kind(**settings), model, dtype=torch.bfloat16, device=device, room=room, ranks=ranks)

    return of


def sizes(made):
    return {part.name: part.bytes for part in made.parts}


@pytest.mark.parametrize("name", COUNTS)
def test_the_counts_of_the_models(outlined, name):
    count = Count.of(outlined[name])
    assert (count.base, count.layers[0], count.rest) == COUNTS[name] and len(set(count.layers)) == 1
    assert count.trained == count.base and count.adapters == 0


# Whole, 18 bytes a parameter (weight 2, gradient 4, master and states 12): 25.9, 127.7 and 549.2 GiB. In shards, 16
# bytes (weight 4, gradient 4, states 8) over the devices, and beside them 2 to draw from: on 2 devices 56.7 + 14.2 GiB
# of the 7B model, on 8 and 64 devices 61.0 + 61.0 and 7.6 + 61.0 GiB of the 32B model.
@pytest.mark.parametrize(
    "name, ranks, mode, fits",
    [
        ("1.5B", 1, "ddp", True), ("1.5B", 2, "ddp", True), ("1.5B", 8, "ddp", True), ("1.5B", 64, "ddp", True),
        ("7B", 1, "ddp", False), ("7B", 2, "fsdp2", True), ("7B", 8, "fsdp2", True), ("7B", 64, "fsdp2", True),
        ("32B", 1, "ddp", False), ("32B", 2, "fsdp2", False), ("32B", 8, "fsdp2", False), ("32B", 64, "fsdp2", True),
    ],
)  # fmt: skip
def test_auto_takes_ddp_where_everything_fits_one_device(planned, name, ranks, mode, fits):
    made = planned(name, ranks)
    assert (made.parallel, made.fits) == (mode, fits), made.rows()
    parameters = COUNTS[name][0]
    held, share = sizes(made), 1 if mode == "ddp" else ranks
    weights = 2 if mode == "ddp" else 4
    assert held["policy"] == math.ceil(weights * parameters / share)
    assert held["gradients"] == math.ceil(4 * parameters / share)
    assert held["optimizer"] == math.ceil((12 if mode == "ddp" else 8) * parameters / share)
    assert ("whole weights" in held) == (mode == "fsdp2")
    rows = dict(made.rows())
    assert ("parallel" in rows) == (ranks > 1)
    if ranks > 1:
        assert rows["parallel"].split()[0] == mode and ("do not fit" in rows["parallel"]) == (mode == "fsdp2")


def test_the_shards_of_7b_on_8_devices(planned):
    made = planned("7B", 8, beta=0.04)
    held = sizes(made)
    assert held["policy"] == held["gradients"] == 3_807_808_256  # 4 x 7,615,616,512 / 8
    assert held["optimizer"] == 7_615_616_512
    assert held["reference"] == 1_903_904_128  # 2 x 7,615,616,512 / 8
    assert held["whole weights"] == 15_231_233_024
    assert held["gathered unit"] == 2 * 1_089_998_336
    assert held["gathered layers"] == 2 * (2 * 233_057_792 + 1_089_998_336)
    assert held["unsharded gradients"] == 4 * 1_089_998_336  # embedding and head are more than two layers
    by_name = {part.name: part for part in made.parts}
    assert by_name["whole weights"].times == ("draw",) and by_name["head's gradient"].times == ("head", "layers")
    kept = sizes(planned("7B", 8, parallel="fsdp2_keep", beta=0.04))
    assert kept["gathered layers"] == 15_231_233_024
    assert {n: s for n, s in kept.items() if s != held[n]}.keys() <= {
        "gathered layers",
        "activations",
        "a layer's backward",
    }


def test_the_full_kl_has_the_reference_beside_the_policy(planned):
    """A sharded copy runs while embedding and head of the policy are whole, and its head stays for the loss."""
    made = planned("7B", 8, beta=0.04, kl="full")
    parts = {part.name: part for part in made.parts}
    unit = parts["reference's unit"]
    assert (unit.bytes, unit.times) == (2 * 1_089_998_336, ("reference", "head"))
    for how in ({"kl": "k3"}, {"ref_storage": "cpu"}, {"ref_storage": "int8"}, {"parallel": "ddp"}, PEFT):
        assert unit.name not in sizes(planned("7B", 8, **{"beta": 0.04, "kl": "full", "parallel": "fsdp2", **how}))


def test_offloaded_shards_lie_in_host_memory(planned):
    held, parts = (
        sizes(planned("7B", 8, parallel="fsdp2_offload")),
        planned("7B", 8, parallel="fsdp2_offload").parts,
    )
    assert held["policy"] == held["gradients"] == held["optimizer"] == 0 < held["whole weights"]
    assert next(part for part in parts if part.name == "gradients").how.startswith("3,807,808,256 bytes of host memory")


def test_adapters_are_whole_on_each_device_and_the_base_is_sharded(planned):
    made = planned("32B", 8, parallel="fsdp2", **PEFT)
    adapters = 64 * 8 * (5120 + 5120)  # of rank 8, on the queries of 64 layers
    held = sizes(made)
    assert held["policy"] == 2 * 32_763_876_352 // 8 + 2 * adapters
    assert held["gradients"] == 4 * adapters and held["optimizer"] == 12 * adapters
    assert held["whole weights"] == 2 * (32_763_876_352 + adapters) and held["unsharded gradients"] == 0
    assert made.fits and planned("32B", 8, **PEFT).parallel == "ddp"


def test_each_rank_has_room_for_its_prompts(planned):
    """11 prompts of 16 completions on 4 devices: 3 prompts at most on one."""
    settings = {"num_generations": 16, "max_num_seqs": 10_000, "max_tokens_per_microbatch": 10**9}
    made = planned("1.5B", 4, prompts_per_step=11, **settings)
    alone = planned("1.5B", 1, prompts_per_step=3, **settings)
    assert made.slots == alone.slots and sizes(made) == sizes(alone)
    assert "48 completions" in made.slots.how


def test_weights_that_graphs_read_stay(planned):
    """On a GPU the whole weights have fixed addresses, unless rollouts are eager: 32B then has no room for updates."""
    stay, go = (planned("32B", 64, CUDA, rollout_backend=backend) for backend in ("fast", "eager"))
    whole = [next(part for part in made.parts if part.name == "whole weights") for made in (stay, go)]
    assert [part.times for part in whole] == [(), ("draw",)] and "at fixed addresses" in whole[0].how
    assert go.fits and not stay.fits
    with pytest.raises(ValueError, match=r"each of 64 processes needs at least 88.*\n  --rollout_backend eager saves"):
        stay.check()
    held = sizes(go)
    assert go.passing + held["whole weights"] == go.fixed - sum(held[n] for n in ("policy", "gradients", "optimizer"))


def test_remedies_name_what_helps(planned):
    with pytest.raises(ValueError) as error:
        planned("7B", 2, parallel="ddp").check()
    flags = str(error.value).splitlines()[1].split("; ")
    (shards,) = (flag.strip() for flag in flags if "--parallel fsdp2 saves" in flag)
    assert shards.startswith("--parallel fsdp2 saves") and "enough" in shards
    with pytest.raises(ValueError, match=r"each of 8 processes needs .*: whole weights 61.03 GiB") as error:
        planned("32B", 8).check()
    flags = str(error.value).splitlines()[1]
    assert "--parallel fsdp2_offload saves 61.03 GiB, which is enough" in flags
    with pytest.raises(ValueError, match="--parallel fsdp2 saves"):
        planned("7B", 8, room=32 * GIB, parallel="fsdp2_keep").check()


def test_whole_weights_that_no_device_holds(planned):
    with pytest.raises(
        ValueError, match=r"(?s)there are 48.00 GiB: whole weights 61.03 GiB.*; take a smaller"
    ) as error:
        planned("32B", 64, room=48 * GIB).check()
    assert "enough" not in str(error.value)


def test_what_is_asked_for_is_not_chosen(planned):
    for mode in ("ddp", "fsdp2"):
        made = planned("1.5B", 2, parallel=mode)
        assert (made.parallel, made.chosen) == (mode, "as parallel says")
    on_a_cpu = planned("7B", 2, room=math.inf)
    assert (
        choose_parallel(GRPOConfig(), on_a_cpu)
        == ("ddp", "auto is ddp on a CPU")
        == (on_a_cpu.parallel, on_a_cpu.chosen)
    )
    assert choose_parallel(GRPOConfig(), planned("7B", 1))[0] == "ddp"
    assert choose_parallel(GRPOConfig(), None) == ("ddp", "auto is ddp where the memory of a model cannot be planned")


def test_supervised_training_draws_in_evaluations_alone(planned):
    made = planned("1.5B", 2, kind=SFTConfig)
    assert made.parallel == "ddp" and made.fits


class Others(Ranks):
    """Two ranks, of which the other one has less room."""

    def __init__(self):
        super().__init__(0, 2)

    def gather(self, value, what):
        return [value, value / 4]


def test_the_device_with_the_least_room_decides_for_all(paths):
    config = GRPOConfig(device="cpu", dtype="bfloat16")
    made = plan_run(config, paths["1.5B"], ROOM, Others())
    assert made.room == ROOM / 4 and made.parallel == "fsdp2" and made.ranks == 2
    assert plan_run(config, paths["1.5B"], ROOM, ALONE).room == ROOM
