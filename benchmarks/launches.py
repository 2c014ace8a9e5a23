"""Counts the kernels that a decode step launches on a GPU, without one: `python -m benchmarks.launches`.

Three kinds of layers are counted: those of transformers, those with liger-kernel's parts, and the engine's own
(fastgrpo/rollout/layers.py). With adapters the latter multiply with merged weights ("lora"), which costs no launch, or
add the adapters apart ("lora apart").

The step runs on the `meta` device, where nothing is computed, and a dispatch mode sees every operator. An operator that
only returns views of its inputs, or uninitialized memory, launches nothing. Every other operator counts as one launch.
Composite operators are decomposed first. A Triton launch counts as one too, both ours and liger-kernel's.

An operator may launch more than one kernel on a GPU: cuBLAS may split a product and add the parts, and FlashAttention
may split the keys. Such launches depend on sizes and are not counted.
"""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from itertools import product

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from triton.runtime.jit import JITFunction

from benchmarks.architectures import tiny_model
from fastgrpo.kernels import launch
from fastgrpo.policy import liger_layers
from fastgrpo.policy.device import cast
from fastgrpo.policy.load import prepare
from fastgrpo.policy.lora import add_lora, base_layer
from fastgrpo.policy.model import Policy
from fastgrpo.rollout.attention import TOKENS_BEFORE_HEADS, DecodeAttention, GroupDecode
from fastgrpo.rollout.layers import Joined, Layers, groups
from fastgrpo.rollout.slots import Geometry, Slots

LANES = 8
GEOMETRY = Geometry(lanes=LANES, capacity=32, prompts=4, longest_prompt=16, group=4, flat=False)
ARCHITECTURES = ("qwen2", "llama", "qwen3")
ALLOCATIONS = ("empty", "new_empty")  # prefixes of operators that return uninitialized memory


@contextmanager
def launches() -> Iterator[list[str]]:
    """Yield a list that receives the name of every operator and Triton kernel launched within the context."""
    run, names = JITFunction.run, []
    JITFunction.run = lambda kernel, *_, **__: names.append(kernel.__name__)
    try:
        with _Operators(names):
            yield names
    finally:
        JITFunction.run = run


class _Operators(TorchDispatchMode):
    """Records the names of operators that launch something."""

    def __init__(self, names: list[str]) -> None:
        super().__init__()
        self.names = names

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        with self:
            result = operator.decompose(*args, **kwargs)
        if result is not NotImplemented:
            return result
        result = operator(*args, **kwargs)
        name = operator.overloadpacket.__name__
        only_views = _storages(result) <= _storages((args, kwargs))
        if operator._schema.is_mutable or not (only_views or name.startswith(ALLOCATIONS)):
            self.names.append(name)
        return result


def _storages(tree):
    """Return the addresses of the storages of all tensors in a tree; on `meta` the data has no address."""
    return {leaf.untyped_storage()._cdata for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)}


@contextmanager
def meta_gpu(*modules: str) -> Iterator[None]:
    """Let our kernels and liger-kernel's layers treat the `meta` device as an H100 within the context.

    liger-kernel replaces names in transformers' modules. They are restored in the modules of `ARCHITECTURES` and in
    the given ones.
    """
    names = [f"transformers.models.{name}.modeling_{name}" for name in ARCHITECTURES]
    modules = {module: dict(vars(module)) for module in map(import_module, (*names, *modules))}
    before = launch.capability, launch.programs, liger_layers._obstacle, torch.cuda.set_device
    launch.capability, launch.programs = lambda device: (9, 0), lambda device: 132
    liger_layers._obstacle, torch.cuda.set_device = lambda model, device: None, lambda device: None
    try:
        yield
    finally:
        launch.capability, launch.programs, liger_layers._obstacle, torch.cuda.set_device = before
        for module, contents in modules.items():
            vars(module).update(contents)


def of_step(architecture: str, lora: str, kind: str, layers: int) -> list[str]:
    """Run the layers of one decode step in bf16, from embedding to last norm, and return its launches in order."""
    with meta_gpu():
        model = prepare(tiny_model(architecture, num_hidden_layers=layers)).module
        cast(model, torch.bfloat16)
        if kind == "liger":
            liger_layers.apply_liger(model, True)
        if lora:
            add_lora(model, r=8, alpha=16, target_modules=("all-linear",))
        policy = Policy.of(model.to("meta"))
        slots = Slots(GEOMETRY, torch.device("meta"), TOKENS_BEFORE_HEADS)
        ids = torch.zeros(LANES, dtype=torch.int64, device="meta")
        with torch.inference_mode():
            run = policy if kind != "fused" else Layers(policy, list(_products(policy, lora)), fused=True)
            for _ in range(2):  # the first step allocates the slots
                with launches() as names:
                    run.states(ids, ids, DecodeAttention(slots, GroupDecode(), ids))
    return names


def _products(policy, lora):
    """Yield the products of the engine's own layers."""
    for linears in groups(policy):
        merged = [base_layer(linear).weight for linear in linears] if lora == "lora" else None
        yield Joined(linears, merged and torch.cat(merged))


def table() -> dict[str, dict[str, int]]:
    """Count the launches per layer and outside the layers."""
    counts = {}
    for kind, architecture, lora in product(("", "liger", "fused"), ARCHITECTURES, ("", "lora", "lora apart")):
        if lora == "lora apart" and kind != "fused":
            continue
        two, three = (len(of_step(architecture, lora, kind, layers)) for layers in (2, 3))
        name = " ".join(filter(None, (architecture, kind, lora)))
        counts[name] = {"a layer": three - two, "besides": 3 * two - 2 * three}
    return counts


if __name__ == "__main__":
    if find_spec("liger_kernel") is None:
        sys.exit("the table needs liger-kernel: pip install 'fastgrpo[train]'")
    rows = (f" {json.dumps(name)}: {json.dumps(counts)}" for name, counts in table().items())
    print("{", ",\n".join(rows), "}", sep="\n")
