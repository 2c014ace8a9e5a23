"""A stand-in for the CUDA driver: Triton's launch path compiles for a capability, but no kernel runs.

What would fail on that GPU fails here: compilation, shared memory, threads, grids, tensor descriptors. The tensors are
on the CPU, and outputs hold what their memory held before.
"""

from itertools import product

import pytest
import torch
from compilation import SHARED_LIMIT
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.tools.tensor_descriptor import TensorDescriptor

MULTIPROCESSORS = {80: 108, 86: 84, 89: 128, 90: 132, 100: 148, 120: 170}
LARGEST_GRID = (2**31 - 1, 65_535, 65_535)
SWIZZLES = (None, 32, 64, 128)  # bytes that the innermost dimension of a descriptor's block may have


class StandIn:
    """A driver with one device of some capability.

    `launches` holds the names of the kernels that were launched since the list was last cleared.
    """

    def __init__(self, capability):
        self.capability, self.launches = capability, []
        self.utils = self
        self.launcher_cls = self._launcher

    def install(self):
        """Make it Triton's driver, and let the package take CPU tensors for tensors of this device."""
        from fastgrpo.kernels import decode, launch, sampling
        from fastgrpo.loss import losses

        assert not launch.INTERPRET, "the stand-in needs a process without TRITON_INTERPRET"
        driver.set_active(self)
        launch.capability = lambda _: divmod(self.capability, 10)
        launch.programs = lambda _: MULTIPROCESSORS[self.capability]
        launch.runs_on = lambda _: True
        launch.check_device = lambda *_: None
        splits = launch.decode_splits
        launch.decode_splits = lambda *arguments: splits(*arguments[:-1], torch.device("cuda"))
        losses.compacts = lambda compact, backend, tokens: compact == "sync"  # what it returns for CUDA tensors
        for module in (sampling, decode):
            module._check = lambda *tensors: None

    # What Triton asks of a driver.

    def get_current_target(self):
        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self, device=None):
        return 0

    get_current_stream = get_current_device

    # What Triton asks of a driver's utilities.

    def get_device_properties(self, device):
        shared, processors = SHARED_LIMIT[self.capability], MULTIPROCESSORS[self.capability]
        return {"max_shared_mem": shared, "multiprocessor_count": processors, "warpSize": 32}

    def load_binary(self, name, binary, shared, device):
        return 1, 1, 0, 0, 1024  # module, function, registers, spills, most threads of a block

    def _launcher(self, source, metadata):
        """Return what is called in place of cuLaunchKernel."""
        assert metadata.global_scratch_size == 0, "a kernel wants scratch memory, which no allocator is set for"

        def launch(x, y, z, stream, function, packed, launch_metadata, enter_hook, exit_hook, *arguments):
            assert all(0 < size <= most for size, most in zip((x, y, z), LARGEST_GRID, strict=True)), (x, y, z)
            descriptors = [each for each in arguments if isinstance(each, TensorDescriptor)]
            for descriptor, meta in zip(descriptors, metadata.tensordesc_meta or (), strict=True):
                _check_descriptor(descriptor, meta)
            self.launches.append(source.fn.__name__)

        return launch


def _check_descriptor(descriptor, meta):
    """Assert what cuTensorMapEncodeTiled asks of a tensor and its block."""
    base, size = descriptor.base, descriptor.base.itemsize
    assert base.data_ptr() % 16 == 0, "the base is not aligned to 16 bytes"
    assert all(0 < length <= 2**32 for length in descriptor.shape), descriptor.shape
    assert descriptor.strides[-1] == 1
    assert all(stride * size % 16 == 0 and stride * size < 2**40 for stride in descriptor.strides[:-1])
    assert all(0 < length <= 256 for length in meta["block_size"]), meta
    inner, swizzle = meta["block_size"][-1] * size, SWIZZLES[meta["swizzle"]]
    assert inner % 16 == 0 and (swizzle is None or inner <= swizzle), meta


def crossed(**axes):
    """Parametrize a test by all combinations of the axes. All are slow but a few, in which each value occurs once."""
    most = max(map(len, axes.values()))
    ordinary = {tuple(list(axis)[i % len(axis)] for axis in axes.values()) for i in range(most)}
    cases = [
        pytest.param(*case, id="-".join(map(str, case)), marks=[] if case in ordinary else [pytest.mark.slow])
        for case in product(*axes.values())
    ]
    return pytest.mark.parametrize(tuple(axes), cases)
