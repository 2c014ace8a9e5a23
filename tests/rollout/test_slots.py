"""Slots: their shapes and order in memory, which lanes belong to which prompt, and lanes that move."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fastgrpo.rollout.slots import Cache, Geometry, Slots

CPU = torch.device("cpu")
ORDERS = [(0, 1, 2), (0, 2, 1), (2, 0, 1)]


def make_slots(memory_order=(0, 1, 2), flat=False):
    """Seven lanes of 5 tokens, 4 prompts of 12, at most 3 lanes each; 2 key heads of 8 (values of 6) in one layer."""
    slots = Slots(Geometry(7, 5, 4, 12, 3, flat), CPU, memory_order)
    return slots, slots.cache(0, torch.empty(2, 1, 8), torch.empty(2, 1, 6, dtype=torch.bfloat16))


@pytest.mark.parametrize("memory_order", ORDERS)
@pytest.mark.parametrize("flat", [False, True])
def test_shapes_and_order_in_memory(memory_order, flat):
    slots, cache = make_slots(memory_order, flat)
    assert slots.cache(0, torch.empty(2, 1, 8), torch.empty(2, 1, 6)) is cache  # made once
    assert cache.keys.shape == (7, 2, 17 if flat else 5, 8) and cache.prompt_keys.shape == (0 if flat else 4, 2, 12, 8)
    assert cache.values.shape == (*cache.keys.shape[:3], 6) and cache.values.dtype == torch.bfloat16
    for tensor in cache:
        assert tensor.permute(*memory_order, 3).is_contiguous() and not tensor.any()


def test_each_prompt_knows_its_lanes():
    """On a CPU there is a row for each prompt up to the last one in use, and a column for each lane that one has."""
    slots, _ = make_slots()
    address = slots.members.data_ptr()
    slots.arrange([1, 3, -1, 1, 3, 1], group=3)
    assert slots.members.tolist() == [[-1] * 3, [0, 3, 5], [-1] * 3, [1, 4, -1]]
    slots.arrange([-1, 0], group=3)
    assert slots.members.tolist() == [[1]]
    assert slots.members.data_ptr() == address and slots.members.is_contiguous()
    slots.arrange([], group=0)
    assert slots.members.shape == (0, 0)


def test_shapes_that_a_graph_may_record():
    """Elsewhere the rows follow a bucket of the prompts in use, and the columns the group size of what is in flight."""
    slots = Slots(Geometry(512, 5, 300, 12, 8, False), torch.device("meta"))

    def shape(prompts, group):
        slots.arrange([prompt for prompt in range(prompts) for _ in range(group)], group)
        return tuple(slots.members.shape)

    assert [shape(n, 8) for n in (1, 4, 5, 17)] == [(4, 8), (4, 8), (16, 8), (64, 8)]
    assert shape(257, 1) == (300, 1) and shape(2, 1) == (4, 1)
    slots.arrange([2, -1, -1], 8)  # two completions of the group have finished
    assert tuple(slots.members.shape) == (4, 8)


@pytest.mark.parametrize("memory_order", ORDERS)
def test_lanes_move_with_their_keys(memory_order):
    slots, cache = make_slots(memory_order)
    for tensor in (cache.keys, cache.values):
        tensor.copy_(torch.arange(7)[:, None, None, None].expand_as(tensor))
    slots.move(torch.tensor([5, 6]), torch.tensor([2, 0]), 3)
    for tensor in (cache.keys, cache.values):
        assert (tensor[:, :, :3] == torch.tensor([6, 1, 5, 3, 4, 5, 6])[:, None, None, None]).all()
        assert (tensor[:, :, 3:] == torch.arange(7)[:, None, None, None]).all()  # tokens that no lane holds stay


class Puts(TorchDispatchMode):
    """Keeps the arguments of every `index_put_`."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        if operator.overloadpacket in (torch.ops.aten.index_put_, torch.ops.aten._index_put_impl_):
            self.seen.append(args)
        return operator(*args, **(kwargs or {}))


@pytest.mark.parametrize("memory_order", ORDERS)
@pytest.mark.parametrize("name", Cache._fields)
def test_tokens_are_written_without_a_copy_of_all_slots(memory_order, name):
    """In deterministic mode torch copies what is not contiguous, or is indexed elsewhere than side by side."""
    slots, cache = make_slots(memory_order)
    held = getattr(cache, name)
    lanes, tokens = torch.tensor([2, 0, 3, 3]), torch.tensor([4, 1, 0, 2])
    new = torch.randn(4, *held.shape[1::2]).to(held.dtype)
    with torch.no_grad(), Puts() as puts:
        slots.write(held, lanes, tokens, new)
    ((written, indices, *_),) = puts.seen
    assert written.is_contiguous() and all(index is not None for index in indices)
    expected = torch.zeros_like(held)
    for slot, token, value in zip(lanes.tolist(), tokens.tolist(), new, strict=True):
        expected[slot, :, token] = value
    assert torch.equal(held, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("memory_order", ORDERS)
def test_a_deterministic_write_takes_no_memory_of_the_size_of_the_slots(memory_order):
    slots = Slots(Geometry(64, 512, 4, 12, 16, False), torch.device("cuda"), memory_order)
    held = slots.cache(0, *[torch.empty(4, 1, 64, device="cuda")] * 2).keys
    lanes, new = torch.arange(64, device="cuda"), torch.randn(64, 4, 64, device="cuda")
    torch.use_deterministic_algorithms(True)
    try:
        slots.write(held, lanes, lanes * 3, new)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        slots.write(held, lanes, lanes * 3, new)
        assert torch.cuda.max_memory_allocated() - before < held.nbytes / 8
    finally:
        torch.use_deterministic_algorithms(False)
    assert torch.equal(held[lanes, :, lanes * 3], new)


def test_keys_and_values_are_reset_in_place():
    slots, cache = make_slots()
    for tensor in cache:
        tensor.fill_(torch.nan)
    slots.zero()
    assert slots.caches[0] is cache and not any(tensor.any() for tensor in cache)
