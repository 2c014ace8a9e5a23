"""GPU memory that is released and later mapped again at the same addresses, so that CUDA graphs stay valid.

The CUDA driver separates addresses from memory: a tensor keeps its range of addresses, while `Mapped.release` and
`Mapped.restore` change the memory behind it, as in vLLM's sleep mode. In between, nothing may read or write the tensor.

https://docs.nvidia.com/cuda/cuda-c-programming-guide/#virtual-memory-management
"""

import ctypes
import functools
import logging
import math
import sys
import weakref
from collections.abc import Sequence

import torch

logger = logging.getLogger(__name__)
PINNED, ON_DEVICE, READ_WRITE = 1, 1, 3  # CU_MEM_ALLOCATION_TYPE_, CU_MEM_LOCATION_TYPE_, CU_MEM_ACCESS_FLAGS_PROT_
OUT_OF_MEMORY = 2  # CUDA_ERROR_OUT_OF_MEMORY


class Location(ctypes.Structure):
    """CUmemLocation."""

    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class Properties(ctypes.Structure):
    """CUmemAllocationProp."""

    _fields_ = (
        ("type", ctypes.c_int), ("handle_types", ctypes.c_int), ("location", Location), ("metadata", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
    )  # fmt: skip


class Access(ctypes.Structure):
    """CUmemAccessDesc."""

    _fields_ = (("location", Location), ("flags", ctypes.c_int))


@functools.cache
def driver() -> ctypes.CDLL:
    """Load the CUDA driver."""
    return ctypes.CDLL("libcuda.so.1")


def _call(name, *arguments):
    """Call a function of the driver, whose numbers all have 64 bits. Raise if it fails."""
    code = getattr(driver(), name)(*(ctypes.c_uint64(a) if isinstance(a, int) else a for a in arguments))
    if code == OUT_OF_MEMORY:
        raise torch.OutOfMemoryError(f"{name}: the KV cache does not fit; lower --rollout_memory_utilization")
    if code:
        text = ctypes.c_char_p()
        driver().cuGetErrorString(code, ctypes.byref(text))
        reason = (text.value or b"unknown error").decode()
        raise RuntimeError(f"{name} failed: {reason} (CUDA error {code}); use --rollout_backend eager")


class Range:
    """A range of addresses with memory. A tensor in it keeps it alive."""

    def __init__(self, count: int, index: int) -> None:
        self.properties, self.handle = Properties(PINNED, 0, Location(ON_DEVICE, index), None, 0), None
        unit, self.address = ctypes.c_size_t(), ctypes.c_uint64()
        _call("cuMemGetAllocationGranularity", ctypes.byref(unit), ctypes.byref(self.properties), 0)
        self.size = -(-count // unit.value) * unit.value
        _call("cuMemAddressReserve", ctypes.byref(self.address), self.size, 0, 0, 0)
        self.map()

    @property
    def __cuda_array_interface__(self):
        address = self.address.value, False  # not read-only
        return {"shape": (self.size,), "typestr": "|u1", "data": address, "strides": None, "version": 3}

    def map(self) -> None:
        """Map new memory, whose contents are undefined, unless some is mapped."""
        if self.handle is not None:
            return
        handle = ctypes.c_uint64()
        create = functools.partial(
            _call, "cuMemCreate", ctypes.byref(handle), self.size, ctypes.byref(self.properties), 0
        )
        try:
            create()
        except torch.OutOfMemoryError:  # torch's cache may hold memory that an update has freed
            torch.cuda.empty_cache()
            create()
        _call("cuMemMap", self.address.value, self.size, 0, handle.value, 0)
        self.handle = handle.value
        access = Access(self.properties.location, READ_WRITE)
        _call("cuMemSetAccess", self.address.value, self.size, ctypes.byref(access), 1)

    def unmap(self) -> None:
        """Release the memory, if any is mapped. The device must have finished its work."""
        if self.handle is not None:
            _call("cuMemUnmap", self.address.value, self.size)
            _call("cuMemRelease", self.handle)
            self.handle = None

    def __del__(self) -> None:
        if self.address.value and not sys.is_finalizing():  # at exit, the driver may be gone already
            torch.cuda.synchronize(self.properties.location.id)
            self.unmap()
            _call("cuMemAddressFree", self.address.value, self.size)


def view(held: Range) -> torch.Tensor:
    """Return a tensor [bytes] uint8 of the memory of a range."""
    return torch.as_tensor(held, device=torch.device("cuda", held.properties.location.id))


class Mapped:
    """Allocates tensors whose memory can be released together.

    Args:
        device: A CUDA device.
    """

    def __init__(self, device: torch.device) -> None:
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        self.device, self.ranges = device, weakref.WeakSet()

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Allocate a tensor with undefined contents."""
        count = math.prod(shape) * dtype.itemsize
        if not count:
            return torch.empty(shape, dtype=dtype, device=self.device)
        with torch.cuda.device(self.device):  # the driver works in the context of the current device
            held = Range(count, self.device.index or 0)
            tensor = view(held)
        if tensor.data_ptr() != held.address.value:
            raise RuntimeError("torch copied mapped memory instead of using it; use --rollout_backend eager")
        self.ranges.add(held)
        return tensor[:count].view(dtype).view(*shape)

    @property
    def bytes(self) -> int:
        """Bytes of the memory that is mapped."""
        return sum(held.size for held in self.ranges if held.handle is not None)

    def release(self) -> None:
        """Release the memory of all tensors, after the device has finished its work."""
        torch.cuda.synchronize(self.device)
        for held in self.ranges:
            held.unmap()

    def restore(self) -> bool:
        """Map memory for all tensors whose memory was released. Return whether there were any."""
        released = [held for held in self.ranges if held.handle is None]
        with torch.cuda.device(self.device):
            for held in released:
                held.map()
        return bool(released)


@functools.cache
def works(device: torch.device) -> bool:
    """Return whether a CUDA graph stays valid when memory is released and restored, by trying it. If not, log why."""
    try:
        driver()
        mapped, graph = Mapped(device), torch.cuda.CUDAGraph()
        numbers = mapped.empty((256,), torch.float32).zero_().add_(1)  # loads the kernels, which a capture cannot
        with torch.cuda.device(device), torch.cuda.graph(graph, capture_error_mode="thread_local"):
            numbers.add_(1)
        mapped.release()
        mapped.restore()
        numbers.zero_()
        graph.replay()
        if not numbers.eq(1).all():
            raise RuntimeError("a CUDA graph wrote elsewhere")
    except (OSError, AttributeError, RuntimeError) as error:
        logger.warning("the KV cache keeps its memory during updates: %s", error)
        return False
    return True
