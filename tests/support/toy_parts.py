"""The parts of a toy run with several ranks, whose state needs no training: it is drawn by the names of its tensors."""

import functools
import random
from types import SimpleNamespace
from unittest import mock

import tiny
import torch
from torch.distributed.tensor import DTensor

from fastgrpo import GRPOConfig
from fastgrpo.data.records import TrainerState
from fastgrpo.policy.model import Policy
from fastgrpo.policy.ref_model import make_reference
from fastgrpo.policy.shard import fill, local, shard
from fastgrpo.ranks import ALONE
from fastgrpo.run.snapshot import GlobalRNG, HostCopies, Snapshot, _named
from fastgrpo.trainer.optim import MasterAdamW, make_schedule

STEPS = 3
SOURCE = SimpleNamespace(state_dict=dict, load_state_dict=lambda state: None)  # of rows, without a state
NEVER = "model.norm.weight"  # as if this parameter never got a gradient: AdamW has no state of it


def make_parts(dtype, mesh=None, ranks=ALONE, seed=0, trained=True):
    policy = Policy(tiny.model(seed=seed, tie_word_embeddings=dtype == torch.float32).to(dtype))
    if mesh is not None:
        with mock.patch("fastgrpo.policy.shard.init_device_mesh", return_value=mesh):
            policy = shard(policy, ranks, dtype=dtype)
    reference = make_reference(policy, 0.1, moving=True)
    optimizer = MasterAdamW(policy.module, learning_rate=1e-2, weight_decay=0.1)
    schedule = make_schedule(optimizer, "cosine", warmup_steps=2, total_steps=10)
    if trained:
        optimizer.adamw.step()  # without a gradient, as nothing may be scheduled before a step
        masters = {f"master.{name}" for name in optimizer.names}
        optimizer.make_room(masters | {f"step.{name}" for name in optimizer.names if name != NEVER})
        for name, value in optimizer.named_state().items():
            if name != "groups":
                fill(value, torch.randn(value.shape, generator=torch.Generator().manual_seed(sum(map(ord, name)))))
        optimizer.to_module()
        for _ in range(STEPS):
            schedule.step()
    return {
        "policy": policy, "optimizer": optimizer, "schedule": schedule, "progress": TrainerState(STEPS, 10, 0.3, 6),
        "source": SOURCE, "reference": reference, "rng": GlobalRNG(),
    }  # fmt: skip


@functools.cache
def trained_parts(dtype):
    return make_parts(dtype)


def about(dtype):
    config = {"gradient_checkpointing": False, "seed": 5}
    same = {"dtype": str(dtype), "rows": 4, "data_digest": None, "model_digest": "one", "gradient_checkpointing": False}
    return same | {"config": config, "command": "train"}


def snapshot_of(parts, dtype, ranks=ALONE):
    return Snapshot(parts, tiny.tokenizer(), about(dtype), HostCopies(), ranks)


def settings(folder):
    return GRPOConfig(output_dir=str(folder), device="cpu", ddp_timeout=60, save_total_limit=1)


def addresses(parts):
    modules = parts["policy"].module, parts["reference"].policy.module
    tensors = [*parts["optimizer"].masters, *(weight for module in modules for weight in module.parameters())]
    return [local(tensor).data_ptr() for tensor in tensors]


def differences(mine, expected):
    (tensors, values), (whole, others) = map(_state, (mine, expected))
    if tensors.keys() != whole.keys() or values != others:
        return [tensors.keys() ^ whole.keys(), values, others]
    # The shards of a policy are in fp32, as its masters are.
    return [name for name, tensor in tensors.items() if not torch.equal(tensor.to(whole[name].dtype), whole[name])]


def _state(parts):
    tensors, values = _named(parts)
    tensors |= parts["policy"].module.state_dict()
    return {n: t.full_tensor() if isinstance(t, DTensor) else t for n, t in tensors.items()}, values


def draws():
    return random.random(), torch.rand(1).item()
