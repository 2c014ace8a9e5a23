"""The planned memory against tensors that exist."""

import dataclasses
import json
import math
import shlex
import sys
from types import SimpleNamespace

import pytest
import tiny
import torch
from transformers import Qwen2ForSequenceClassification

from fastgrpo.config.settings import GRPOConfig, SFTConfig
from fastgrpo.policy.load import outline
from fastgrpo.policy.lora import add_lora
from fastgrpo.policy.model import Policy
from fastgrpo.policy.ref_model import make_reference
from fastgrpo.ranks import Ranks
from fastgrpo.rewards.call import Rewards
from fastgrpo.rewards.models import RewardModel
from fastgrpo.rollout import attention
from fastgrpo.rollout.engine import RolloutEngine
from fastgrpo.rollout.sampling import SamplingParams
from fastgrpo.trainer.memory import _changes, activation_bytes, plan, plan_run
from fastgrpo.trainer.optim import MasterAdamW

CPU = torch.device("cpu")
GIB = 2**30
SHAPES = {
    "0.5B": {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14,
             "num_key_value_heads": 2, "vocab_size": 151_936, "tie_word_embeddings": True},
    "7B": {"hidden_size": 3584, "intermediate_size": 18_944, "num_hidden_layers": 28, "num_attention_heads": 28,
           "num_key_value_heads": 4, "vocab_size": 152_064, "tie_word_embeddings": False},
}  # fmt: skip


def parts_of(config, model, dtype=torch.float32):
    """The parts of a plan by name."""
    made = plan(config, model, dtype=dtype, device=CPU, prompt_tokens=10)
    return {part.name: part for part in [*made.parts, made.slots]}


def of_shape(tmp_path, name, room, **settings):
    """The plan of a run of Qwen2.5's shapes in bf16, whose device has so much memory."""
    tiny.config(**SHAPES[name]).save_pretrained(tmp_path)
    return plan_run(GRPOConfig(device="cpu", dtype="bfloat16", **settings), tmp_path, room=room)


def size(tensors):
    """Bytes of the distinct tensors among these."""
    return sum({tensor.data_ptr(): tensor.nbytes for tensor in tensors}.values())


@pytest.mark.parametrize("architecture", ["qwen3", "smollm3-like"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_plan_is_what_training_holds(tmp_path, architecture, dtype):
    path = tiny.save(tmp_path / "model", name=architecture)
    config = GRPOConfig(beta=0.1)
    planned = {name: part.bytes for name, part in parts_of(config, outline(path), dtype).items()}
    model = tiny.model(architecture, vocab_size=258).to(dtype)
    assert planned["policy"] == size(model.parameters())
    assert planned["reference"] == size(make_reference(Policy(model), config.beta).policy.module.parameters())
    optimizer = MasterAdamW(model, learning_rate=1.0)
    sum(parameter.float().sum() for parameter in model.parameters()).backward()
    assert planned["gradients"] == size(master.grad for master in optimizer.masters)
    optimizer.step()
    own_masters = [master for _, master in optimizer.pairs]
    states = [s for state in optimizer.adamw.state.values() for s in state.values() if s.ndim]
    assert planned["optimizer"] == size([*own_masters, *states])


def test_keys_and_values_of_a_rollout(tmp_path):
    path = tiny.save(tmp_path / "model")  # 2 layers, 2 key heads of width 8
    config = GRPOConfig(prompts_per_step=3, num_generations=4, max_num_seqs=256, max_completion_length=20)
    parts = parts_of(config, outline(path))
    engine = RolloutEngine(tiny.model(vocab_size=258))
    engine.generate([[5] * 10] * 3, 4, SamplingParams(max_tokens=20))
    held = size(t for tensors in vars(engine.slots).values() for t in flatten(tensors) if t.is_floating_point())
    assert parts["keys and values"].bytes == held
    assert parts["logits of a draw"].bytes == 3 * 4 * 258 * 4
    assert parts["reference"].bytes == 0 and parts["reference"].how == "none: beta is 0"


def test_what_a_repetition_penalty_holds(tmp_path):
    path = tiny.save(tmp_path / "model")
    config = GRPOConfig(prompts_per_step=3, num_generations=4, max_completion_length=20, repetition_penalty=1.2)
    parts = parts_of(config, outline(path))
    assert parts["logits of a draw"].bytes == 4 * 3 * 4 * 258 * 4


@pytest.mark.parametrize(
    "kl, softcap, chunks", [("full", None, 3), ("full", 30.0, 4), ("k3", 30.0, 2), ("k3", None, 1)]
)
def test_the_head_on_the_cpu(tmp_path, kl, softcap, chunks):
    """So many chunks of logits in fp32, whatever the dtype: those of all tokens, as they fit into one."""
    model = outline(tiny.save(tmp_path / "model"))
    model.config.final_logit_softcapping = softcap
    config = GRPOConfig(beta=0.1, kl=kl, use_peft=True, max_tokens_per_microbatch=100)
    assert parts_of(config, model, torch.bfloat16)["head"].bytes == chunks * 100 * 258 * 4


def flatten(value):
    """The tensors in nested lists, tuples and dicts."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = value.values()
    return [t for v in value for t in flatten(v)] if isinstance(value, (list, tuple, type({}.values()))) else []


@pytest.mark.parametrize(
    "settings, how, share",
    [
        ({"use_peft": True}, "adapters off", 0),
        ({"ref_storage": "int8"}, "x 8 bits", 0.5),
        ({"ref_storage": "nf4"}, "x 4 bits", 0.3),
    ],
)
def test_references_that_take_less(tmp_path, settings, how, share):
    path = tiny.save(tmp_path / "model")
    by_name = parts_of(GRPOConfig(beta=0.1, **settings), outline(path))
    assert how in by_name["reference"].how
    assert by_name["reference"].bytes <= (share + 0.35 * (share > 0)) * by_name["policy"].bytes


def test_a_streamed_reference_passes_through_the_device(tmp_path):
    """Two layers are there at once, in buffers of the largest, beside the weights that belong to no layer."""
    model = outline(tiny.save(tmp_path / "model"))
    config = GRPOConfig(beta=0.1, ref_storage="cpu")
    part = parts_of(config, model)["reference"]
    whole, *layers = (
        sum(parameter.nbytes for parameter in module.parameters()) for module in (model, *model.model.layers)
    )
    assert part.bytes == whole - sum(layers) + 2 * max(layers) > 0
    assert part.times == ("reference",) and "of host memory, streamed" in part.how


def test_adapters_alone_have_gradients_and_states(tmp_path):
    path = tiny.save(tmp_path / "model")
    config = GRPOConfig(use_peft=True, lora_r=4)
    planned = {name: part.bytes for name, part in parts_of(config, outline(path), torch.bfloat16).items()}
    model = add_lora(tiny.model(vocab_size=258).to(torch.bfloat16), r=4)
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    assert planned["policy"] == size(model.parameters())
    assert planned["gradients"] == 4 * trained and planned["optimizer"] == 12 * trained


def test_a_full_fine_tune_of_7b_is_refused_and_lora_is_named(tmp_path):
    with pytest.raises(ValueError) as error:
        of_shape(tmp_path, "7B", 80 * GIB, beta=0.04).check()
    needs, remedies = str(error.value).splitlines()
    assert "the run needs at least 1" in needs and "there are 80.00 GiB: optimizer 85.11 GiB, gradients 28.37" in needs
    assert "--use_peft True saves" in remedies and "which is enough" in remedies.split(";")[0]
    assert "--ref_storage cpu saves 14.19 GiB" in remedies and "--ref_storage nf4" in remedies
    assert "--beta 0 saves 14.19 GiB" in remedies and remedies.count("enough") == 1


def test_remedies_keep_what_was_stated_and_the_backend_of_transformers():
    config = GRPOConfig(reward_model_kwargs={"separator": "it's", "aggregation": "mean"}, rollout_backend="hf")
    changes = _changes(config, ranks=1)
    (flag,) = (flag for flag in changes if flag.startswith("--reward_model_kwargs"))
    _, text = shlex.split(flag)
    assert json.loads(text) == {"separator": "it's", "aggregation": "mean", "device": "cpu"}
    assert dataclasses.replace(config, **changes[flag]).reward_device == "cpu"
    assert "--rollout_backend eager" not in changes and "--rollout_backend eager" in _changes(GRPOConfig(), 1)


def test_only_flags_that_apply_are_named(tmp_path):
    with pytest.raises(ValueError) as error:
        of_shape(tmp_path, "7B", 80 * GIB).check()
    assert "--use_peft" in str(error.value) and "--ref_" not in str(error.value) and "--beta" not in str(error.value)
    with pytest.raises(ValueError, match="max_tokens_per_microbatch 8192 saves") as error:
        of_shape(tmp_path, "7B", 10 * GIB, use_peft=True, beta=0.04).check()
    assert "--use_peft" not in str(error.value) and "--ref_" not in str(error.value)
    assert "--gradient_checkpointing" not in str(error.value)  # auto has turned it on
    with pytest.raises(ValueError, match="--gradient_checkpointing True saves"):
        of_shape(tmp_path, "0.5B", 20 * GIB, gradient_checkpointing=False).check()


def test_a_refusal_without_peft_names_the_other_remedies(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ValueError, match="the run needs at least") as error:
        of_shape(tmp_path, "7B", 80 * GIB, beta=0.04).check()
    assert "--beta 0 saves" in str(error.value) and "--use_peft" not in str(error.value)


def test_one_group_of_long_completions_that_does_not_fit_is_told_so(tmp_path):
    settings = {"max_completion_length": 32_768, "num_generations": 24, "use_peft": True}
    with pytest.raises(ValueError) as error:
        of_shape(tmp_path, "7B", 80 * GIB, **settings).check()
    flags = str(error.value).splitlines()[1].split("; ")
    assert flags[0].strip() == "--max_completion_length 16384 saves 38.89 GiB, which is enough"
    assert any(flag.startswith("--rollout_memory_utilization 1 saves 18.") for flag in flags)
    by_generate = of_shape(tmp_path, "7B", 160 * GIB, **settings, rollout_backend="hf")
    assert by_generate.share == 1.0  # no share is set aside where the engine does not run


@pytest.mark.parametrize("name, settings", [("7B", {"use_peft": True}), ("0.5B", {}), ("0.5B", {"beta": 0.04})])
def test_runs_that_fit_pass(tmp_path, name, settings):
    planned = of_shape(tmp_path, name, 80 * GIB, **settings)
    planned.check()
    assert planned.needed < 80 * GIB


def test_gradient_checkpointing_is_chosen_by_memory(tmp_path):
    plenty, scarce = (of_shape(tmp_path, "0.5B", room * GIB) for room in (80, 24))
    assert not plenty.checkpointing and scarce.checkpointing
    assert "fit beside everything else" in plenty.rows()[-1][1] and "would not fit" in scarce.rows()[-1][1]
    scarce.check()
    for wanted in (True, False):
        assert of_shape(tmp_path, "0.5B", 80 * GIB, gradient_checkpointing=wanted).checkpointing is wanted
    outlined = outline(tmp_path)
    assert plan(GRPOConfig(), outlined, dtype=torch.bfloat16, device=CPU).checkpointing  # auto is on on a CPU
    activations = {part.name: part.bytes for part in plenty.parts}["activations"]
    tokens = GRPOConfig().max_tokens_per_microbatch
    assert activations == activation_bytes(outlined, torch.bfloat16, tokens, checkpointing=False)[0]


def test_keys_and_values_get_a_share_of_the_rest(tmp_path):
    wanted = of_shape(tmp_path, "0.5B", 80 * GIB, num_generations=32)
    most = wanted.needed - wanted.slots.bytes + GIB
    less = of_shape(tmp_path, "0.5B", most, num_generations=32, gradient_checkpointing=False)
    assert wanted.slots.bytes > 0.7 * GIB
    assert less.slots.bytes == int(0.7 * GIB)
    assert less.slots.how.startswith("0.7 of what the other parts leave; rollouts would fill 1.52 GiB: (8 prompts x")


def test_what_is_never_there_together_is_not_added_up(tmp_path):
    """The logits of a draw are gone when the update begins, and the head's chunk when the layers go backward."""
    names = ("logits of a draw", "head", "head's gradient", "activations", "the head's inputs", "a layer's backward")
    for name, tied in (("0.5B", True), ("7B", False)):
        planned = of_shape(tmp_path, name, 800 * GIB)
        draw, head, gradient, kept, ends, backward = ({p.name: p.bytes for p in planned.parts}[name] for name in names)
        assert min(draw, head, gradient, kept, ends, backward) > 0
        assert planned.passing == max(draw, kept + ends + head + gradient, kept + backward + gradient * tied)
    planned = of_shape(tmp_path, "7B", 23.5 * GIB, use_peft=True)
    planned.check()
    assert planned.needed < 23.5 * GIB


def test_supervised_training_has_neither_reference_nor_rollouts(tmp_path):
    path = tiny.save(tmp_path / "model")
    parts = parts_of(SFTConfig(), outline(path))
    assert parts["reference"].bytes == parts["keys and values"].bytes == parts["logits of a draw"].bytes == 0
    assert parts["activations"].bytes > 0


def test_a_supervised_run_is_not_refused_for_micro_batches_that_its_examples_may_not_fill(tmp_path):
    tiny.config(**SHAPES["0.5B"]).save_pretrained(tmp_path)
    config = SFTConfig(device="cpu", dtype="bfloat16")
    planned = plan_run(config, tmp_path, room=10 * GIB)
    planned.check()
    assert planned.needed > 10 * GIB and planned.checkpointing
    with pytest.raises(ValueError, match="needs at least 8") as error:
        plan_run(config, tmp_path, room=8 * GIB).check()
    assert "activations" not in str(error.value) and "max_tokens_per_microbatch" not in str(error.value)


def test_a_model_in_memory_is_planned_and_not_changed(tmp_path):
    model = tiny.model(vocab_size=258)
    of_folder = plan_run(GRPOConfig(device="cpu"), tiny.save(tmp_path / "model"), room=GIB)
    planned = plan_run(GRPOConfig(device="cpu"), model, room=GIB)
    assert planned.rows() == of_folder.rows() and model.device.type == "cpu"
    assert math.isinf(plan_run(GRPOConfig(device="cpu"), model).room)  # nobody limits the memory of a CPU


def test_reward_models_on_the_policys_device_take_their_place(tmp_path):
    here = RewardModel(Qwen2ForSequenceClassification(tiny.config(num_labels=1)), tiny.tokenizer())
    judge = RewardModel(Qwen2ForSequenceClassification(tiny.config(num_labels=1)).to("meta"), tiny.tokenizer())
    model, rewards = tiny.model(vocab_size=258), Rewards([judge])  # its weights have still to come
    weights = 4 * sum(parameter.numel() for parameter in judge.model.parameters())
    config = GRPOConfig(device="cpu", gradient_checkpointing=True)
    alone = plan_run(config, model, room=GIB)
    beside = plan_run(config, model, room=GIB, rewards=rewards)
    assert beside.needed == alone.needed + weights
    assert {part.name: part.bytes for part in beside.parts}["reward models"] == weights
    room = alone.least + weights // 2
    assert plan_run(config, model, room=room).fits and not plan_run(config, model, room=room, rewards=rewards).fits
    assert here.bytes_to_come(CPU) == 0  # they lie there already, and are not in the room that is left
    assert plan_run(config, model, room=GIB, rewards=Rewards([here])).needed == alone.needed


def test_what_has_no_attention_layers_is_not_planned():
    from transformers import MambaConfig, MambaForCausalLM

    mamba = MambaForCausalLM(MambaConfig(vocab_size=64, hidden_size=32, state_size=4, num_hidden_layers=1))
    assert plan_run(GRPOConfig(device="cpu"), mamba, room=GIB) is None
    assert plan_run(GRPOConfig(device="cpu"), tiny.model().base_model, room=GIB) is None
    assert plan_run(GRPOConfig(device="cpu"), 7, room=GIB) is None  # loading says what may be given


def test_a_model_on_another_gpu_takes_no_room_of_this_one(monkeypatch):
    class Asked(Exception):
        """Ends the plan where its room is known."""

    class Two(Ranks):
        def gather(self, value, what):
            raise Asked(value)

    model = tiny.model()
    sizes = {0: 100, 1: 10}
    parameters = [SimpleNamespace(device=torch.device("cuda", index), nbytes=size) for index, size in sizes.items()]
    monkeypatch.setattr(model, "parameters", lambda: parameters)
    monkeypatch.setattr("fastgrpo.trainer.memory.choose_device", torch.device)
    monkeypatch.setattr("fastgrpo.trainer.memory.memory_left", lambda device: 1000)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    for device, room in (("cuda", 1010), ("cuda:1", 1010), ("cuda:0", 1100)):
        with pytest.raises(Asked, match=str(room)):
            plan_run(GRPOConfig(device=device), model, ranks=Two())


def test_on_a_gpu_the_head_holds_a_chunk_of_16_bit_exponentials(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    tiny.config(**SHAPES["0.5B"]).save_pretrained(tmp_path)
    config = GRPOConfig(use_peft=True)
    made = plan(config, outline(tmp_path), dtype=torch.bfloat16, device=torch.device("cuda"), room=80 * GIB)
    head = next(part for part in made.parts if part.name == "head")
    assert head.bytes == 8192 * 151_936 * 2 and head.times == ("head",)


@pytest.mark.parametrize("backend, flat", [("hf", True), ("fast", False)])
def test_no_attention_of_rollouts_is_chosen_before_there_are_rollouts(tmp_path, monkeypatch, caplog, backend, flat):
    monkeypatch.setattr(attention, "_logged", set())
    with caplog.at_level("INFO"):
        made = plan(
            GRPOConfig(rollout_backend=backend), outline(tiny.save(tmp_path / "model")),
            dtype=torch.float32, device=CPU,
        )  # fmt: skip
    assert not attention._logged and "rollout attention" not in caplog.text
    assert ("prompts x" in made.slots.how) != flat
