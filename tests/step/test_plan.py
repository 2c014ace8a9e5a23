"""The planned memory against tensors that exist."""

import pytest
import tiny
import torch

from fastgrpo.config.settings import GRPOConfig
from fastgrpo.policy.lora import add_lora
from fastgrpo.policy.model import Policy
from fastgrpo.policy.reference import make_reference
from fastgrpo.rollout.engine import RolloutEngine
from fastgrpo.rollout.sampling import SamplingParams
from fastgrpo.step.optim import MasterAdamW
from fastgrpo.step.plan import outline, plan

CPU = torch.device("cpu")


def size(tensors):
    """Bytes of the distinct tensors among these."""
    return sum({tensor.data_ptr(): tensor.nbytes for tensor in tensors}.values())


@pytest.mark.parametrize("architecture", ["qwen3", "smollm3-like"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_plan_is_what_training_holds(tmp_path, architecture, dtype):
    path = tiny.save(tmp_path / "model", name=architecture)
    config = GRPOConfig(beta=0.1)
    parts = plan(config, outline(path), dtype=dtype, device=CPU, prompt_tokens=10)
    planned = {part.name: part.bytes for part in parts}
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
    assert planned["value model"] == planned["policy"] and planned["its optimizer"] == planned["optimizer"]


def test_keys_and_values_of_a_rollout(tmp_path):
    path = tiny.save(tmp_path / "model")  # 2 layers, 2 key heads of width 8
    config = GRPOConfig(prompts_per_step=3, num_generations=4, max_num_seqs=256, max_completion_length=20)
    parts = {part.name: part for part in plan(config, outline(path), dtype=torch.float32, device=CPU, prompt_tokens=10)}
    engine = RolloutEngine(tiny.model(vocab_size=258))
    engine.generate([[5] * 10] * 3, 4, SamplingParams(max_tokens=20))
    held = size(t for tensors in vars(engine.slots).values() for t in flatten(tensors) if t.is_floating_point())
    assert parts["keys and values"].bytes == held
    assert parts["logits of a draw"].bytes == 3 * 4 * 258 * 4
    assert parts["reference"].bytes == 0 and parts["reference"].how == "none: beta is 0"


@pytest.mark.parametrize(
    "kl, softcap, chunks", [("full", None, 3), ("full", 30.0, 4), ("k3", 30.0, 2), ("k3", None, 1)]
)
def test_the_head_on_the_cpu(tmp_path, kl, softcap, chunks):
    """So many chunks of logits in fp32, whatever the dtype: those of all tokens, as they fit into one."""
    model = outline(tiny.save(tmp_path / "model"))
    model.config.final_logit_softcapping = softcap
    config = GRPOConfig(beta=0.1, kl=kl, use_peft=True, max_tokens_per_microbatch=100)
    parts = plan(config, model, dtype=torch.bfloat16, device=CPU, prompt_tokens=10)
    assert next(part for part in parts if part.name == "head").bytes == chunks * 100 * 258 * 4


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
        ({"ref_device": "cpu"}, "of host memory, streamed", 0),
        ({"use_peft": True}, "adapters off", 0),
        ({"ref_quantization": "int8"}, "x 8 bits", 0.5),
        ({"ref_quantization": "nf4"}, "x 4 bits", 0.3),
    ],
)
def test_references_that_take_less(tmp_path, settings, how, share):
    path = tiny.save(tmp_path / "model")
    parts = plan(
        GRPOConfig(beta=0.1, **settings), outline(path), dtype=torch.float32, device=CPU, prompt_tokens=10
    )  # fmt: skip
    by_name = {part.name: part for part in parts}
    assert how in by_name["reference"].how
    assert by_name["reference"].bytes <= (share + 0.35 * (share > 0)) * by_name["policy"].bytes


def test_adapters_alone_have_gradients_and_states(tmp_path):
    path = tiny.save(tmp_path / "model")
    config = GRPOConfig(use_peft=True, lora_r=4)
    parts = plan(config, outline(path), dtype=torch.bfloat16, device=CPU, prompt_tokens=10)
    planned = {part.name: part.bytes for part in parts}
    model = add_lora(tiny.model(vocab_size=258).to(torch.bfloat16), r=4)
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    assert planned["policy"] == size(model.parameters())
    assert planned["gradients"] == 4 * trained and planned["optimizer"] == 12 * trained


def test_nothing_is_downloaded(monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("a download was begun")

    monkeypatch.setattr("socket.socket.connect", refuse)
    with pytest.raises(ValueError, match=r"no config of a causal LM at 'org/model'.*nothing is downloaded"):
        outline("org/model")
