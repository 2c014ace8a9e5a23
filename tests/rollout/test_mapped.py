"""The memory of the KV cache is released during updates, and mapped again at the same addresses.

A stand-in for the CUDA driver maps memory of the host: released memory cannot be accessed, and new memory is NaN.
"""

import contextlib
import ctypes
import gc
import mmap
from functools import partial

import pytest
import tiny
import torch
from drawing import ids_of
from runs import make_trainer

from fastgrpo.policy.lora import add_lora, merged_weight
from fastgrpo.policy.model import Policy
from fastgrpo.rollout import mapped as module
from fastgrpo.rollout import weights as weights_module
from fastgrpo.rollout.engine import RolloutEngine
from fastgrpo.rollout.graph import Graphs
from fastgrpo.rollout.layers import groups
from fastgrpo.rollout.mapped import Mapped
from fastgrpo.rollout.sampling import SamplingParams
from fastgrpo.rollout.weights import HeldWeights

CPU, UNIT, FREE = torch.device("cpu"), 2**16, 2**30
PROMPTS, SAMPLING = [[5, 6, 7], [8], [9, 10, 11, 12]], SamplingParams(max_tokens=12, seed=1)
LIBC = ctypes.CDLL(None)
LIBC.mmap.restype, LIBC.munmap.argtypes = ctypes.c_void_p, [ctypes.c_void_p, ctypes.c_size_t]
LIBC.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]


def host_memory(address, size, access):
    """Map fresh memory of the host, at an address if there is one."""
    fixed = 0x10 if address else 0
    return LIBC.mmap(address, size, access, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | fixed, -1, 0)


class Driver:
    """The driver's functions. `failing` has the error codes of functions that fail."""

    def __init__(self):
        self.calls, self.free, self.failing = [], FREE, {}
        self.reserved, self.created, self.behind = {}, {}, {}  # address -> size, handle -> size, address -> handle

    def __getattr__(self, name):
        return partial(self._call, name)

    def _call(self, name, *arguments):
        self.calls.append(name)
        if name in self.failing:
            return self.failing[name]
        match name, *(getattr(each, "_obj", getattr(each, "value", each)) for each in arguments):
            case "cuGetErrorString", _, text:
                text.value = b"a reason"
            case "cuMemGetAllocationGranularity", unit, properties, 0:
                assert (properties.type, properties.location.type, properties.location.id) == (1, 1, 0)
                unit.value = UNIT
            case "cuMemAddressReserve", address, size, 0, 0, 0:
                address.value = host_memory(None, size, 0)
                self.reserved[address.value] = size
            case "cuMemCreate", handle, size, _, 0:
                if size > self.free:
                    return 2
                handle.value, self.free = len(self.calls), self.free - size
                self.created[handle.value] = size
            case "cuMemMap", address, size, 0, handle, 0:
                assert self.reserved[address] == self.created[handle] == size and address not in self.behind
                self.behind[address] = handle
            case "cuMemSetAccess", address, size, access, 1:
                assert address in self.behind and (access.flags, access.location.type) == (3, 1)
                ctypes.memset(host_memory(address, size, mmap.PROT_READ | mmap.PROT_WRITE), 0xFF, size)
            case "cuMemUnmap", address, size:
                assert self.behind.pop(address) in self.created and self.reserved[address] == size
                host_memory(address, size, 0)
            case "cuMemRelease", handle:
                assert handle not in self.behind.values()
                self.free += self.created.pop(handle)
            case "cuMemAddressFree", address, size:
                assert address not in self.behind and self.reserved.pop(address) == size
                LIBC.munmap(address, size)
            case other:
                pytest.fail(f"called with {other}")
        return 0


def view(held):
    buffer = (ctypes.c_uint8 * held.size).from_address(held.address.value)
    buffer.owner = held
    return torch.frombuffer(buffer, dtype=torch.uint8)


@pytest.fixture
def driver(monkeypatch):
    """The stand-in. At the end, everything must be released."""
    driver = Driver()
    monkeypatch.setattr(module, "driver", lambda: driver)
    monkeypatch.setattr(module, "view", view)
    monkeypatch.setattr(torch.cuda, "device", contextlib.nullcontext)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: driver.calls.append("synchronize"))
    yield driver
    gc.collect()
    assert not (driver.reserved or driver.created) and driver.free == FREE


def test_completions_are_the_same_after_the_kv_cache_was_released(driver):
    model, places = tiny.model(), set()
    engine = RolloutEngine(model)
    engine.mapped = Mapped(CPU)  # as with CUDA graphs
    for _ in range(3):
        found, expected = (each.generate(PROMPTS, 4, SAMPLING) for each in (engine, RolloutEngine(model)))
        assert ids_of(found) == ids_of(expected)
        assert all(torch.equal(a.logps, b.logps) for a, b in zip(found, expected, strict=True))
        places.add(tuple(tensor.data_ptr() for cache in engine.slots.caches.values() for tensor in cache))
        count, held = len(driver.created), engine.mapped.bytes
        assert len(places) == 1 and count == len(driver.reserved) > 0 and held == FREE - driver.free
        driver.calls.clear()
        engine.sleep()
        assert driver.calls == ["synchronize", *["cuMemUnmap", "cuMemRelease"] * count]
        assert driver.free == FREE and engine.mapped.bytes == 0 and engine.peak == held
        tiny.stir(model, std=0.02)  # the update
    engine.generate([[5] * 40], 9, SAMPLING)  # slots of other sizes
    engine.add_request([5], 1, SAMPLING)
    with pytest.raises(ValueError, match="finish or abort"):
        engine.sleep()


def test_merged_adapters_are_made_again_at_the_same_addresses(driver, monkeypatch):
    monkeypatch.setattr(weights_module, "uses_kernels", lambda policy: True)
    policy, mapped = Policy(add_lora(tiny.model(), r=2, target_modules="all-linear")), Mapped(CPU)
    held, places = HeldWeights(policy, Graphs(CPU, enabled=False), lambda: 1e9, mapped), set()
    for _ in range(2):
        mapped.restore()
        held.hold(1)
        expected = [torch.cat([merged_weight(linear) for linear in each]) for each in groups(policy)]
        assert all(map(torch.equal, held.copies.values(), expected))
        places.add(tuple(copy.data_ptr() for copy in held.copies.values()))
        held.release()
        mapped.release()
        tiny.stir(policy.module, std=0.02)
    assert len(places) == 1 and driver.free == FREE


def test_an_error_of_the_driver_names_the_remedy(driver, monkeypatch):
    """Before memory counts as used up, torch frees what it keeps."""
    kept, mapped = [UNIT], Mapped(CPU)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: setattr(driver, "free", driver.free + sum(kept)))
    driver.free = 0
    tensor = mapped.empty((UNIT // 8, 1), torch.float64)
    assert tensor.shape == (UNIT // 8, 1) and driver.free == 0
    mapped.release()
    driver.free, kept[:] = 0, []
    with pytest.raises(torch.OutOfMemoryError, match="does not fit; lower --rollout_memory_utilization"):
        mapped.restore()
    driver.free = FREE
    assert mapped.restore() and not mapped.restore()
    driver.failing = {"cuMemUnmap": 201, "cuMemGetAllocationGranularity": 801}
    with pytest.raises(RuntimeError, match=r"cuMemUnmap failed: a reason \(CUDA error 201\).* --rollout_backend eager"):
        mapped.release()
    del driver.failing["cuMemUnmap"], tensor
    monkeypatch.setattr(torch.cuda, "CUDAGraph", object)
    assert not module.works.__wrapped__(torch.device("cuda", 0))  # the plan then keeps the KV cache


def test_updates_that_release_the_kv_cache_change_no_bit(tmp_path, monkeypatch):
    """Here without CUDA graphs."""
    settings = {"eval_steps": 1, "eval_rows": [{"prompt": "a"}], "max_completion_length": 20}
    plain, trainer = (make_trainer(tmp_path / name, **settings) for name in ("plain", "sleeps"))
    plain.train()
    trainer.sleeps, slots = True, []

    def watched(real, *given):
        slots.append(trainer.engine.slots)
        return real(*given)

    for name in ("step", "measure"):
        monkeypatch.setattr(trainer.learner, name, partial(watched, getattr(trainer.learner, name)))
    trainer.train()
    assert all(map(torch.equal, trainer.policy.parameters(), plain.policy.parameters()))
    assert slots == [None] * 5  # 2 updates, and 3 losses of held-out rows
