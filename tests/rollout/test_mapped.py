"""The memory of the KV cache is released during updates, mapped again at the same addresses, and grows page by page.

A stand-in for the CUDA driver maps memory of the host: released memory cannot be accessed, and new memory is NaN.
"""

import contextlib
import ctypes
import gc
import mmap
from functools import partial
from itertools import count

import pytest
import tiny
import torch
from dialogues import Scripted
from drawing import finish, ids_of
from runs import make_trainer

from fastgrpo.policy.lora import add_lora, merged_weight
from fastgrpo.policy.model import Policy
from fastgrpo.rollout import engine as engine_module
from fastgrpo.rollout import mapped as module
from fastgrpo.rollout import weights as weights_module
from fastgrpo.rollout.attention import TOKENS_BEFORE_HEADS, GroupDecode, SharedPrefix, products
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
        self.calls, self.free, self.failing, self.unit, self.numbers = [], FREE, {}, UNIT, count(1)
        self.reserved, self.created, self.behind = {}, {}, {}  # address -> size, handle -> size, address -> handle

    def __getattr__(self, name):
        return partial(self._call, name)

    def _call(self, name, *arguments):
        freeing = {"synchronize", "cuMemUnmap", "cuMemRelease", *self.failing}
        assert name != "cuMemUnmap" or self.calls[-1] in freeing  # nothing may be queued that uses what is unmapped
        self.calls.append(name)
        if name in self.failing:
            return self.failing[name]
        match name, *(getattr(each, "_obj", getattr(each, "value", each)) for each in arguments):
            case "cuGetErrorString", _, text:
                text.value = b"a reason"
            case "cuMemGetAllocationGranularity", unit, properties, 0:
                assert (properties.type, properties.location.type, properties.location.id) == (1, 1, 0)
                unit.value = self.unit
            case "cuMemAddressReserve", address, size, 0, 0, 0:
                address.value = host_memory(None, size, 0)
                self.reserved[address.value] = size
            case "cuMemCreate", handle, size, _, 0:
                if size > self.free:
                    return 2
                handle.value, self.free = next(self.numbers), self.free - size
                self.created[handle.value] = size
            case "cuMemMap", address, size, 0, handle, 0:
                assert any(start <= address <= start + length - size for start, length in self.reserved.items())
                assert self.created[handle] == size and not {address, handle} & {*self.behind, *self.behind.values()}
                self.behind[address] = handle
            case "cuMemSetAccess", address, size, access, 1:
                assert (access.flags, access.location.type) == (3, 1)
                assert size == sum(self.created[h] for at, h in self.behind.items() if address <= at < address + size)
                ctypes.memset(host_memory(address, size, mmap.PROT_READ | mmap.PROT_WRITE), 0xFF, size)
            case "cuMemUnmap", address, size:
                assert self.created[self.behind.pop(address)] == size
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


def exact_part(query, keys, values, lengths, scale):
    """`products`, without a look at what is behind a length: as the Triton kernel reads."""
    slots = ([tensor[i : i + 1] for tensor in (query, keys, values, lengths)] for i in range(len(query)))
    parts = [products(q, k[:, :, :n], v[:, :, :n], n, scale) for q, k, v, n in slots]
    return tuple(map(torch.cat, zip(*parts, strict=True)))


@pytest.fixture
def grown(driver, monkeypatch):
    """Makes an engine whose lanes may grow, with memory for this number of pages of 16 tokens."""
    driver.unit = PAGE
    monkeypatch.setattr(engine_module, "works", lambda device: True)
    monkeypatch.setattr(SharedPrefix, "exact", True)
    monkeypatch.setattr(engine_module, "make_provider", lambda *_: SharedPrefix(exact_part, TOKENS_BEFORE_HEADS))

    def make(model, pages, **options):
        engine = RolloutEngine(model, **options)
        engine.grows, engine.budget = True, pages * PAGE
        engine.mapped = engine.growth = Mapped(CPU)
        return engine

    return make


PAGE, LONG = 2**12, [[5 + i] * (1 + i) for i in range(8)]
SHORTER, LONGER = (SamplingParams(max_tokens=90, stop_token_ids=tuple(range(n)), seed=3) for n in (9, 2))


@pytest.mark.parametrize("on_gpu", [False, True])
def test_lanes_that_grow_draw_the_same_completions(driver, grown, on_gpu):
    model, lanes, preempted = tiny.model(), [], 0
    engine, plain = grown(model, 44), RolloutEngine(model)  # 44 pages hold 6 completions of full length
    engine.on_gpu = on_gpu  # decodes the next steps before it handles the last
    for prompts, sampling in ((LONG, SHORTER), (LONG, LONGER), (LONG[:1], LONGER), (LONG, LONGER)):
        found, expected = (each.generate(prompts, 3, sampling) for each in (engine, plain))
        assert ids_of(found) == ids_of(expected)
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one.logps, other.logps, atol=1e-5, rtol=0)
        preempted += engine.metrics().get("rollout/preemptions", 0)
        lanes.append(max(engine.live_lanes))
        assert engine.beside == FREE - driver.free <= engine.budget + 4 * PAGE
        engine.sleep()
        assert driver.free == FREE and engine.beside == 0
        tiny.stir(model, std=0.02)  # the update
    assert preempted and lanes[0] == 6 < lanes[3] < lanes[1]  # longer completions were seen before the last
    for each in (engine, plain):  # lanes 3 and 4 move to the front, where a decode step still computes lane 3
        for i, limits in enumerate(([10, 90, 10], [90, 90, 10])):
            each.add_request(LONG[i], 3, SamplingParams(seed=1), request_id=i, max_tokens=limits)
    assert [*map(ids_of, finish(engine).values())] == [*map(ids_of, finish(plain).values())] and engine.geometry.pages


@pytest.mark.parametrize("limits, pages, steps", [([160, 65, 65, 65], 61, 1), ([160] * 4, 80, 50)])
def test_preempted_groups_finish(driver, grown, monkeypatch, limits, pages, steps):
    model = tiny.model()
    engine, plain = grown(model, pages, max_num_seqs=19), RolloutEngine(model)
    engine.mapped = None  # does not sleep
    for each in (engine, plain):
        each.generate([[5]], len(limits), SamplingParams(max_tokens=8, seed=1))  # a short one first: lanes grow
        for i in range(5):
            each.add_request(LONG[i], len(limits), SamplingParams(seed=1), request_id=i, max_tokens=limits)
    with monkeypatch.context() as patch, pytest.raises(TypeError):
        patch.setattr(engine_module, "sample", None)
        engine.step()
    assert engine.geometry.pages and engine.lanes.finished.all() and engine.lanes.length.eq(1).all()
    found = [engine.step() for _ in range(steps)]
    lost, driver.free = (driver.free, 0) if steps > 1 else (0, driver.free)
    found += [engine.step() for _ in range(1500)]
    driver.free += lost
    done = {i: ids_of(group) for step in found for i, group in step.items()}
    assert done == {i: ids_of(group) for i, group in finish(plain).items()}
    assert engine.metrics()["rollout/preemptions"] and engine.drawn[4][0] == 4 / 4 + 5 * 4
    assert (engine.slots.pages.most < engine.geometry.pages) == (steps > 1) and len(engine.growth.ranges) == 1


def test_lanes_do_not_grow_where_all_fit_or_layers_differ_or_tools_answer(grown, monkeypatch):
    model, found = tiny.model(), []
    ample, unlike, engine, plain = grown(model, 250), grown(model, 88), grown(model, 44), RolloutEngine(model)
    for each in (ample, unlike, engine, plain):
        with monkeypatch.context() as patch:
            if each is not engine:
                patch.setattr(engine_module, "works", lambda device: pytest.fail("tried for nothing"))
            if each is unlike:
                patch.setattr(engine_module, "kv_token_bytes", lambda *_: 512)
            each.generate(LONG, 3, SHORTER)
            for i, prompt in enumerate(LONG):
                each.add_request(prompt, 3, SHORTER, request_id=i)
            each.step()
        assert bool(each.geometry.pages) == (each is engine) == ("rollout/preemptions" in each.metrics())
    provider = engine.provider
    engine.provider = GroupDecode()
    engine.provider._trusted = lambda *_: False
    with pytest.raises(RuntimeError, match="--rollout_backend eager"):
        engine.step()
    engine.provider = provider
    for each in (engine, plain):
        each.add_request(LONG[1], 1, SHORTER, request_id=99, dialogues=[Scripted([[7] * 40])])
        found.append(finish(each))
    assert not engine.geometry.pages and all(ids_of(found[0][i]) == ids_of(found[1][i]) for i in found[1])


def test_pages_are_mapped_behind_those_that_a_part_has(driver):
    allocator = Mapped(CPU)
    pages, tensor = allocator.pages(4 * UNIT, 3, 6)
    start, bytes_of = pages.address.value, tensor.view(3, 4, UNIT)

    def mapped():
        return sorted((at - start) // UNIT for at in driver.behind)

    assert mapped() == [0, 4, 8] and pages.free == 3
    driver.calls.clear()
    pages.resize(1, 3)
    assert driver.calls == ["cuMemCreate", "cuMemMap", "cuMemSetAccess"] * 2 and mapped() == [0, 4, 5, 6, 8]
    bytes_of[1, :3], driver.calls[:] = 1, ["synchronize"]
    pages.resize(1, 1)
    pages.resize(2, 2)
    assert driver.calls[1:] == ["cuMemUnmap"] * 2 + ["cuMemMap", "cuMemSetAccess"]
    assert mapped() == [0, 4, 8, 9] and bytes_of[1, 0].eq(1).all() and pages.bytes == 5 * UNIT and pages.free == 2
    for failing in ("cuMemMap", "cuMemSetAccess"):  # the page stays spare
        driver.failing = {failing: 2}
        with pytest.raises(torch.OutOfMemoryError):
            pages.resize(0, 2)
        assert mapped() == [0, 4, 8, 9] and pages.bytes == 5 * UNIT
    driver.failing, driver.free = {}, UNIT
    with pytest.raises(torch.OutOfMemoryError):
        pages.resize(0, 4)
    assert mapped() == [0, 1, 2, 4, 8, 9] and driver.calls[-5:-2] == ["cuMemCreate", "cuMemMap", "cuMemSetAccess"]
    allocator.release()
    driver.free = UNIT
    with pytest.raises(torch.OutOfMemoryError):
        allocator.restore()
    driver.free = FREE - UNIT
    assert allocator.restore() and mapped() == [0, 4, 8] and not allocator.restore()
