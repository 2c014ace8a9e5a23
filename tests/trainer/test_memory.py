"""The planned memory of a run: against tensors that exist, against numbers of parameters, and what it refuses."""

import copy
import dataclasses
import functools
import math

import pytest
import tiny
import torch
from runs import make_trainer
from torch.utils._pytree import tree_leaves
from transformers import Qwen2ForSequenceClassification

from benchmarks.plans import planned as planned_on
from benchmarks.scale import outlined
from fastgrpo.config.settings import GRPOConfig, SFTConfig
from fastgrpo.data.records import Batch, Sample
from fastgrpo.policy.load import outline
from fastgrpo.policy.lora import add_lora
from fastgrpo.policy.model import Policy
from fastgrpo.policy.ref_model import make_reference
from fastgrpo.ranks import ALONE, Ranks
from fastgrpo.rewards.call import Rewards
from fastgrpo.rewards.models import RewardModel
from fastgrpo.rollout.engine import RolloutEngine
from fastgrpo.rollout.sampling import SamplingParams
from fastgrpo.trainer import setup
from fastgrpo.trainer.memory import TIMES, activation_bytes, can_release, plan, plan_run
from fastgrpo.trainer.optim import MasterAdamW
from fastgrpo.trainer.setup import keep_activations

CPU, CUDA, GIB = torch.device("cpu"), torch.device("cuda"), 2**30


@pytest.fixture(scope="module")
def planned():
    """A function that plans a run of Qwen2.5's shapes in bf16, on so many devices with so much memory."""

    def of(name, ranks=1, device=CPU, room=80 * GIB, kind=GRPOConfig, waits=False, **settings):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
            on = {"dtype": torch.bfloat16, "device": device, "room": room, "ranks": ranks, "waits": waits}
            return plan(kind(**settings), outlined(name), **on)

    return of


def sizes(made):
    return {part.name: part.bytes for part in [*made.parts, made.slots]}


def size(tensors):
    return sum({tensor.data_ptr(): tensor.nbytes for tensor in tensors}.values())


def tiny_plan(model, dtype=torch.float32, **settings):
    config = settings.pop("kind", GRPOConfig)(**settings)
    return sizes(plan(config, model, dtype=dtype, device=CPU, prompt_tokens=10))


@pytest.mark.parametrize(
    "architecture, dtype, lora",
    [("qwen3", torch.bfloat16, False), ("smollm3-like", torch.float32, False), ("qwen3", torch.bfloat16, True)],
)
def test_planned_memory_equals_that_of_training(tmp_path, architecture, dtype, lora):
    path = tiny.save(tmp_path / "model", name=architecture)
    settings = {"use_peft": True, "lora_r": 4} if lora else {}
    held = tiny_plan(outline(path), dtype, beta=0.1, **settings)
    model = tiny.model(architecture, vocab_size=258).to(dtype)
    reference = make_reference(Policy(model), 0.1).policy.module.parameters()
    model = add_lora(model, r=4) if lora else model
    assert held["policy"] == size(model.parameters())
    assert held["reference"] == (0 if lora else size(reference))
    optimizer = MasterAdamW(model, learning_rate=1.0)
    with optimizer.receiving():
        sum(p.float().sum() for p in model.parameters() if p.requires_grad).backward()
    assert held["gradients"] == size(master.grad for master in optimizer.masters)
    optimizer.step()
    own_masters = [master for _, master in optimizer.pairs]
    states = [s for state in optimizer.adamw.state.values() for s in state.values() if s.ndim]
    assert held["optimizer"] == size([*own_masters, *states])


def test_planned_memory_equals_that_of_a_rollout(saved):
    settings = {"prompts_per_step": 3, "num_generations": 4, "max_num_seqs": 256, "max_completion_length": 20}
    held = tiny_plan(outline(saved), **settings)
    engine = RolloutEngine(tiny.model(vocab_size=258))
    engine.generate([[5] * 10] * 3, 4, SamplingParams(max_tokens=20))
    tensors = [t for t in tree_leaves([*vars(engine.slots).values()]) if isinstance(t, torch.Tensor)]
    assert held["KV cache"] == size(t for t in tensors if t.is_floating_point())
    assert held["logits of a decode step"] == 3 * 4 * 258 * 4
    penalized = tiny_plan(outline(saved), **settings, repetition_penalty=1.2)
    assert penalized["logits of a decode step"] == 4 * held["logits of a decode step"]
    supervised = tiny_plan(outline(saved), kind=SFTConfig)
    assert supervised["reference"] == supervised["KV cache"] == supervised["logits of a decode step"] == 0


def kept(model, batch):
    """Bytes that autograd keeps of a forward pass, beside the model's own tensors."""
    own = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
    held = []  # the tensors themselves, so that no address is used twice
    with torch.autograd.graph.saved_tensors_hooks(lambda t: held.append(t) or t, lambda t: t):
        Policy(model).completion_states(batch)
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in held}
    return sum(size for address, size in storages.items() if address not in own)


@pytest.mark.parametrize("architecture, dtype, layers, recomputed", [
    ("qwen3", torch.bfloat16, (1, 3), (0, 0)),
    ("llama", torch.float32, (1, 3), (0, 0)),
    ("qwen2", torch.bfloat16, (1, 3), (1, 3)),
    ("llama", torch.float32, (2, 4), (1, 2)),
])  # fmt: skip
def test_the_activations_are_those_that_autograd_keeps(architecture, dtype, layers, recomputed):
    batch, found, formula = Batch.pack([Sample(list(range(5, 25)), [7] * 30, 1.0)] * 4, "cpu"), [], []
    for count, first in zip(layers, recomputed, strict=True):
        model = tiny.model(architecture, num_hidden_layers=count, gradient_checkpointing=first > 0).to(dtype)
        keep_activations(model, first)
        found.append(kept(model, batch))
        formula.append(activation_bytes(model, dtype, len(batch.input_ids), recomputed=first)[0])
    assert found[1] - found[0] == formula[1] - formula[0]


def test_offloaded_activations_change_no_bit_of_the_gradient(monkeypatch):
    policy = Policy(tiny.model("qwen3", num_hidden_layers=3, gradient_checkpointing=True))
    held, real = [], torch.autograd.graph.save_on_cpu

    def recorded(**settings):
        hooks = real(**settings)
        pack = hooks.pack_hook
        hooks.pack_hook = lambda tensor: held.append(pack(tensor)) or held[-1]
        return hooks

    monkeypatch.setattr(torch.autograd.graph, "save_on_cpu", recorded)
    batch, gradients = Batch.pack([Sample(list(range(5, 25)), [7] * 30, 1.0)] * 4, "cpu"), []
    for policy.offloads in (False, True):
        assert not held
        policy.completion_states(batch).square().sum().backward()
        gradients.append([parameter.grad for parameter in policy.parameters() if parameter.grad is not None])
        policy.module.zero_grad()
    assert all(map(torch.equal, *gradients)) and len(gradients[0]) > 3
    inputs = [tensor for _, tensor in held if tensor.numel() == 32 * len(batch.input_ids)]
    assert len(inputs) >= 3  # one of each layer


@pytest.mark.parametrize("kl, softcap, chunks", [("full", None, 3), ("full", 30.0, 4), ("k3", 30.0, 2)])
def test_the_head_holds_chunks_of_logits(saved, planned, kl, softcap, chunks):
    model = outline(saved)
    model.config.final_logit_softcapping = softcap
    held = tiny_plan(model, torch.bfloat16, beta=0.1, kl=kl, use_peft=True, max_tokens_per_microbatch=100)
    assert held["head"] == chunks * 100 * 258 * 4
    assert sizes(planned("0.5B", device=CUDA, use_peft=True))["head"] == 8192 * 151_936 * 2


def test_peaks_at_different_times_are_not_added(planned):
    names = ("logits of a decode step", "head", "head's gradient", "activations", "head's inputs",
             "one layer's backward")  # fmt: skip
    for name, tied in (("0.5B", True), ("7B", False)):
        made = planned(name, room=800 * GIB)
        draw, head, gradient, activations, ends, backward = (sizes(made)[part] for part in names)
        assert min(draw, head, gradient, activations, ends, backward) > 0
        times = (draw, activations + ends + head + gradient, activations + backward + gradient * tied)
        assert made.passing == max(times) + sizes(made)["gradients"]


def test_longer_prompts_than_planned_fill_a_micro_batch_only_as_far_as_memory_is_left():
    step = {"prompts_per_step": 1, "num_generations": 8, "max_completion_length": 512, "use_liger_kernel": False}
    made, ample = (planned_on("0.5B", gigabytes, **step) for gigabytes in (24, 141))
    assert made.planned == 256 + 8 * 512 < made.most_tokens < made.tokens == ample.most_tokens == 16384


@pytest.mark.parametrize("name", ["0.5B", "1.5B", "7B"])
def test_as_many_completions_draw_as_a_step_has_or_fit_into_memory(name):
    before, update = 0, {"max_tokens_per_microbatch": 4096, "gradient_checkpointing": True, "releases": False}
    for gigabytes in (24, 40, 80, 141):
        made = planned_on(name, gigabytes, **update)
        assert made.fits == (made.needed <= made.room) and before <= made.lanes <= 1024
        for most in (made.lanes, min(made.lanes + 1, 1024)):
            assert planned_on(name, gigabytes, max_num_seqs=most, **update).lanes == made.lanes
        held, before = sizes(made), made.lanes
        assert held["logits of a decode step"] == made.lanes * outlined(name).vocab_size * 4
        eager = planned_on(name, gigabytes, rollout_backend="eager", max_num_seqs=made.lanes, **update)
        assert made.passing - eager.passing == held["logits of a decode step"] + held["CUDA graphs"]
    assert (before == 1024) == (name != "7B")
    assert planned_on(name, 141, prompts_per_step=8, num_generations=4).lanes == 32


@pytest.mark.parametrize("name, gigabytes", [("0.5B", 24), ("7B, LoRA", 80)])
def test_updates_release_the_kv_cache_where_that_is_faster(name, gigabytes):
    made, kept = (planned_on(name, gigabytes, releases=releases) for releases in (True, False))
    assert made.released and made.fits and made.lanes > kept.lanes and made.cost < kept.cost
    draw, *others = (sum(part.bytes for part in made.parts if time in (part.times or TIMES)) for time in TIMES)
    assert made.needed == max(draw + made.slots.bytes, *others) < 0.95 * made.room and draw < max(others)
    assert made.slots.bytes <= 0.7 * (made.room - draw)
    assert made.passing == sum(sizes(made)[part] for part in ("logits of a decode step", "CUDA graphs", "prefill"))
    for part in {"KV cache", "merged adapters"} & sizes(made).keys():
        assert dict(made.rows())[part].endswith(", while completions are generated")


def test_the_kv_cache_stays_where_all_fits_or_a_server_may_need_it():
    assert planned_on("0.5B", 80) == planned_on("0.5B", 80, releases=False)
    eager, live = GRPOConfig(rollout_backend="eager"), GRPOConfig(rollout_backend="eager", serve_port=0)
    assert [can_release(eager, CUDA), can_release(live, CUDA), can_release(eager, CPU)] == [True, False, False]


def test_completions_that_wait_for_tools_keep_their_slots(planned):
    few, all_of_them = (planned("0.5B", max_num_seqs=n, waits=True, device=CUDA) for n in (8, 64))
    assert few.lanes == all_of_them.lanes == 64 and few.slots == all_of_them.slots
    assert sizes(few)["logits of a decode step"] == outlined("0.5B").vocab_size * 4 * 8


def test_a_run_that_does_not_fit_is_refused_with_flags_that_help(planned):
    with pytest.raises(ValueError, match=r"80.00 GiB are available: optimizer 85.11 GiB, gradients 28.37") as error:
        planned("7B", beta=0.04).check()
    first, *others = str(error.value).splitlines()[1].split("; ")
    assert all("which is enough" in told and "--use_peft True" in told for told in (first, others[0]))
    assert {"--ref_storage cpu saves 14.19 GiB", "--beta 0 saves 14.19 GiB"} <= set(others)
    offload = r"fsdp2_offload \(with 276.70 GiB of host memory\) saves [^;]*, which is enough"
    assert error.match(offload) and planned("7B", parallel="fsdp2_offload").fits


@pytest.mark.parametrize("name, gigabytes, settings, tokens, recomputed", [
    ("0.5B", 80, {}, 16384, range(1)),
    ("1.5B", 40, {}, 4096, range(1, 28)),
    ("1.5B", 40, {"max_tokens_per_microbatch": 16384}, 16384, range(28, 29)),
    ("0.5B", 24, {"gradient_checkpointing": True}, 16384, range(24, 25)),
    ("7B, LoRA", 80, {"prompts_per_step": 4, "max_tokens_per_microbatch": 8192}, 8192, range(1, 28)),
    ("7B, fsdp2_offload", 80, {}, 16384, range(1, 28)),
])  # fmt: skip
def test_the_cheapest_micro_batch_and_recomputation_that_fit_are_chosen(name, gigabytes, settings, tokens, recomputed):
    made = planned_on(name, gigabytes, releases=False, **settings)
    assert made.fits and made.tokens == tokens and made.recomputed in recomputed, made.rows()
    assert f"{tokens:,} tokens of a micro-batch" in dict(made.rows())["gradient checkpointing"]
    if tokens < 16384:
        assert f"fits: {settings.get('max_tokens_per_microbatch', 16384):,} tokens without it" in made.why
    assert ("merged adapters" in dict(made.rows())) == (name == "7B, LoRA")
    assert made.why.endswith("leave no room for merged adapters") == (name == "7B, LoRA")


def test_gradient_checkpointing_follows_its_setting(planned):
    assert [planned("0.5B", gradient_checkpointing=wanted).checkpointing for wanted in (True, False)] == [True, False]
    made = planned("0.5B", room=math.inf)  # auto is on on a CPU
    assert (made.recomputed, made.tokens) == (24, 16384)
    made = planned_on("0.5B", 24, activation_offloading=True)  # inputs of one layer remain
    assert made.recomputed == 24 and sizes(made)["activations"] == made.tokens * 896 * 2


def test_reward_models_on_the_policys_device_take_their_place():
    model, config = tiny.model(vocab_size=258), GRPOConfig(device="cpu", gradient_checkpointing=True)
    judge = Qwen2ForSequenceClassification(tiny.config(num_labels=1))

    def needed(device):
        rewards = Rewards([RewardModel(copy.deepcopy(judge).to(device), tiny.tokenizer())])
        return plan_run(config, model, room=GIB, rewards=rewards).needed

    assert needed("cpu") == plan_run(config, model, room=GIB).needed  # its weights are in memory already
    assert needed("meta") == needed("cpu") + 4 * judge.num_parameters()


# With whole weights a device needs 18 bytes a parameter: 26 GiB of the 1.5B model, 128 of the 7B. With shards it needs
# its share of 16 bytes and 2 bytes to draw from: 57 + 14 GiB of the 7B model on 2 devices.
@pytest.mark.parametrize(
    "name, ranks, mode, fits", [("1.5B", 8, "ddp", True), ("7B", 1, "ddp", False), ("7B", 2, "fsdp2", True)]
)
def test_auto_takes_ddp_where_everything_fits_one_device(planned, name, ranks, mode, fits):
    made = planned(name, ranks)
    assert (made.parallel, made.fits) == (mode, fits), made.rows()
    held, share = sizes(made), 1 if mode == "ddp" else ranks
    parameters, sharded = outlined(name).num_parameters(), mode == "fsdp2"
    assert held["policy"] == math.ceil((4 if sharded else 2) * parameters / share)
    assert held["gradients"] == math.ceil(4 * parameters / share)
    assert held["optimizer"] == math.ceil((8 if sharded else 12) * parameters / share)
    assert ("whole weights" in held) == sharded


def test_each_of_eight_devices_holds_its_share_and_what_it_gathers(planned):
    model = outlined("7B")
    whole, layers = model.num_parameters(), model.base_model.layers
    layer = sum(parameter.numel() for parameter in layers[0].parameters())
    rest = whole - layer * len(layers)  # embedding and head are more than two layers
    held = sizes(planned("7B", 8, beta=0.04))
    assert held["reference"] == 2 * whole // 8 and held["whole weights"] == 2 * whole
    assert held["gathered unit"] == 2 * rest and held["gathered layers"] == 2 * (2 * layer + rest)
    assert held["unsharded gradients"] == 4 * rest
    assert sizes(planned("7B", 8, parallel="fsdp2_keep"))["gathered layers"] == 2 * whole
    offload = sizes(planned("7B", 8, parallel="fsdp2_offload"))
    assert offload["policy"] == offload["gradients"] == offload["optimizer"] == 0 < offload["whole weights"]


def test_8_bit_moments_save_6_bytes_of_each_trained_parameter(planned):
    full, small = (sizes(planned("1.5B", optim=optim)) for optim in ("adamw_torch", "adamw_8bit"))
    assert full["optimizer"] - small["optimizer"] == 6 * outlined("1.5B").num_parameters()


def test_a_32b_model_in_4_bits_fits_80_gb():
    name, layers = "32B, LoRA in 4 bits, 6,144 tokens", outlined("32B").base_model.modules()
    made, other = planned_on(name, 80), planned_on(name, 141, load_in_4bit=False)
    weights = sum(layer.weight.numel() for layer in layers if isinstance(layer, torch.nn.Linear))
    assert made.fits and sizes(other)["policy"] - sizes(made)["policy"] == weights * 23 // 16  # 2 bytes less 9 / 16


def test_the_device_with_the_least_room_decides_for_all(planned, tmp_path):
    outlined("1.5B").config.save_pretrained(tmp_path)
    config = GRPOConfig(device="cpu", dtype="bfloat16")
    two = Ranks(0, 2)
    two.gather = lambda told, what: [told, (told[0] / 4, False, 0)]
    made = plan_run(config, tmp_path, 80 * GIB, two)
    assert (made.room, made.parallel, made.ranks) == (20 * GIB, "fsdp2", 2)
    assert plan_run(config, tmp_path, 80 * GIB, ALONE).room == 80 * GIB


def test_a_trainer_refuses_a_run_that_does_not_fit_before_it_loads_weights(tmp_path, monkeypatch):
    monkeypatch.setattr(setup, "plan_run", functools.partial(plan_run, room=2**20))
    monkeypatch.setattr(setup, "policy_and_tokenizer", lambda *_: pytest.fail("the weights were loaded"))
    with pytest.raises(ValueError, match=r"the run needs at least .* MiB .*, and 1.00 MiB are available"):
        make_trainer(tmp_path)
    assert not (tmp_path / "run").exists()


def test_transformers_generates_as_many_completions_at_once_as_are_planned(tmp_path, monkeypatch):
    planned = lambda *given, **named: dataclasses.replace(plan_run(*given, **named, room=2**40), lanes=20)  # noqa: E731
    monkeypatch.setattr(setup, "plan_run", planned)
    assert make_trainer(tmp_path, rollout_backend="hf", prompts_per_step=8, num_generations=4).engine.max_num_seqs == 16


def test_a_trainer_prints_its_plan_where_memory_is_limited(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(setup, "plan_run", functools.partial(plan_run, room=2**40))
    offloading = {"gradient_checkpointing": "auto", "activation_offloading": True}
    assert make_trainer(tmp_path / "offloading", **offloading).policy.offloads
    trainer = make_trainer(tmp_path, gradient_checkpointing="auto")
    assert not trainer.policy.offloads
    assert "of 1024.00 GiB" in capsys.readouterr().out and not trainer.model.is_gradient_checkpointing
    to_come = trainer.optimizer.bytes_to_come(trainer.policy.device, False)
    assert trainer.engine.reserved() == to_come + trainer.plan.passing
    assert trainer.about()["config"]["gradient_checkpointing"] == "auto"  # the choice is made anew where a run resumes
