"""The parts of a toy run with several ranks, whose training needs no loss: gradients follow from names and steps."""

import functools
import random
from types import SimpleNamespace

import tiny
import torch

from fastgrpo import GRPOConfig
from fastgrpo.data.records import TrainerState
from fastgrpo.policy.model import Policy
from fastgrpo.policy.shard import ShardedPolicy, ShardLayout, fill, local
from fastgrpo.ranks import ALONE
from fastgrpo.run.snapshot import GlobalRNG
from fastgrpo.trainer.optim import MasterAdamW, make_schedule

STEPS = 3
SOURCE = SimpleNamespace(state_dict=dict, load_state_dict=lambda state: None)  # of rows, without a state
NEVER = "model.norm.weight"  # this parameter never gets a gradient, so AdamW has no state of it


class Follower:
    """A reference with weights of its own, and something that is no tensor."""

    def __init__(self, policy, seed):
        self.weights = {name: value.detach().clone() for name, value in policy.module.state_dict().items()}
        generator = torch.Generator().manual_seed(seed)
        for value in self.weights.values():
            noise = torch.randn(value.shape, generator=generator).bfloat16()  # the same in either dtype
            fill(value, noise)
        self.measured = seed == 0

    def state_dict(self):
        return {**self.weights, "measured": self.measured}

    def load_state_dict(self, state):
        self.measured = state["measured"]
        for name in self.weights.keys() & state.keys():
            fill(self.weights[name], state[name])


def gradient(name, step, shape):
    generator = torch.Generator().manual_seed(sum(map(ord, name)) + 1000 * step)
    return torch.randn(shape, generator=generator)


def make_parts(dtype, mesh=None, ranks=ALONE, seed=0, trained=True):
    """The parts of a toy run: with a mesh sharded over its ranks, else whole. With another seed all is different."""
    model = tiny.model(seed=seed, tie_word_embeddings=dtype == torch.float32).to(dtype)
    policy = Policy(model)
    if mesh is not None:
        layout = ShardLayout(mesh, policy.device, dtype, reshard_after_forward=True, cpu_offload=False, ranks=ranks)
        policy = ShardedPolicy(policy, layout)
    optimizer = MasterAdamW(policy.module, learning_rate=1e-2, weight_decay=0.1)
    schedule = make_schedule(optimizer, "cosine", warmup_steps=2, total_steps=10)
    for step in range(1, STEPS + 1 if trained else 1):
        for name, master in zip(optimizer.names, optimizer.masters, strict=True):
            if name != NEVER:
                master.grad = torch.zeros_like(master)
                fill(master.grad, gradient(name, step, master.shape))
        optimizer.adamw.step()
        optimizer.adamw.zero_grad(set_to_none=True)
        optimizer.to_module()
        schedule.step()
    if mesh is not None and trained:  # a part of another length may be rounded otherwise than the whole
        whole = trained_parts(dtype)["optimizer"].named_state()
        for name, value in optimizer.named_state().items():
            if isinstance(value, torch.Tensor):
                fill(value, whole[name])
    return {
        "policy": policy, "optimizer": optimizer, "schedule": schedule, "progress": TrainerState(STEPS, 10, 0.3, 6),
        "source": SOURCE, "reference": Follower(policy, seed), "rng": GlobalRNG(),
    }  # fmt: skip


@functools.cache
def trained_parts(dtype):
    """The parts of the run as one process has them at its end, which nothing may change."""
    return make_parts(dtype)


def about(dtype):
    config = {"gradient_checkpointing": False, "seed": 5}
    same = {"dtype": str(dtype), "rows": 4, "data_digest": None, "model_digest": "one", "gradient_checkpointing": False}
    return same | {"config": config, "command": "train"}


def settings(folder):
    return GRPOConfig(output_dir=str(folder), device="cpu", ddp_timeout=60, save_total_limit=1)


def addresses(parts):
    tensors = [*parts["optimizer"].masters, *parts["policy"].module.parameters(), *parts["reference"].weights.values()]
    return [local(tensor).data_ptr() for tensor in tensors]


def differences(mine, expected):
    """What differs between the parts and those of a whole run in one process, to the last bit."""
    pairs = {}
    for part, method in (("optimizer", "named_state"), ("reference", "state_dict")):
        got, want = (getattr(parts[part], method)() for parts in (mine, expected))
        if got.keys() != want.keys():
            return [f"{part}: {sorted(got.keys() ^ want.keys())}"]
        pairs |= {f"{part}.{name}": (got[name], value) for name, value in want.items()}
    weights = expected["policy"].state_dict()
    pairs |= {name: (value, weights[name]) for name, value in mine["policy"].module.state_dict().items()}
    pairs["schedule"] = mine["schedule"].state_dict(), expected["schedule"].state_dict()
    return [name for name, (value, whole) in pairs.items() if not _same(name, value, whole)]


def _same(name, value, whole):
    if not isinstance(whole, torch.Tensor):
        return value == whole
    if not name.startswith("optimizer"):
        value = value.to(whole.dtype)  # the parts of a policy are in fp32, as its masters are
    part = torch.empty_like(value)
    fill(part, whole)
    return torch.equal(local(value), local(part))


def draws():
    return random.random(), torch.rand(1).item()
