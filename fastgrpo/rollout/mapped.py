"""GPU memory that is mapped at fixed addresses, so that CUDA graphs stay valid.

The CUDA driver separates addresses from memory: a tensor keeps its range of addresses, while `Mapped.release` and
`Mapped.restore` change the memory behind it, as in vLLM's sleep mode. In between, nothing may read or write the tensor.
In a tensor of `Mapped.pages`, memory is mapped page by page as needed, as in vAttention (arXiv 2405.04437).

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
    """A range of addresses. A tensor in it keeps it alive.

    Each part of `size` bytes has memory for its first bytes, at least one page; all parts have at most `most` pages.
    """

    def __init__(self, properties: Properties, page: int, size: int, parts: int = 1, most: int = 1) -> None:
        self.properties, self.page, self.part_size, self.most = properties, page, size, most
        self.size, self.address, self.spare = parts * size, ctypes.c_uint64(), []
        self.held = [[] for _ in range(parts)]  # the handles of the pages of each part, in the order of addresses
        _call("cuMemAddressReserve", ctypes.byref(self.address), self.size, 0, 0, 0)
        self.map()

    @property
    def __cuda_array_interface__(self):
        address = self.address.value, False  # not read-only
        return {"shape": (self.size,), "typestr": "|u1", "data": address, "strides": None, "version": 3}

    @property
    def free(self) -> int:
        """Number of pages that no part has."""
        return self.most - sum(map(len, self.held))

    @property
    def bytes(self) -> int:
        """Bytes of its memory."""
        return self.page * (len(self.spare) + sum(map(len, self.held)))

    def map(self) -> None:
        """Give each part one page of new memory, whose contents are undefined."""
        for part in range(len(self.held)):
            self.resize(part, 1)

    def resize(self, part: int, count: int) -> None:
        """Change the number of pages of a part. If it loses some, the device must have finished its work."""
        held, start = self.held[part], self.address.value + part * self.part_size
        while len(held) > count:
            _call("cuMemUnmap", start + (len(held) - 1) * self.page, self.page)
            self.spare.append(held.pop())
        access = Access(self.properties.location, READ_WRITE)
        while len(held) < count:  # after a failure, the pages in `held` are accessible and no handle is lost
            at = start + len(held) * self.page
            if not self.spare:
                self.spare.append(self._create())
            _call("cuMemMap", at, self.page, 0, self.spare[-1], 0)
            held.append(self.spare.pop())
            try:
                _call("cuMemSetAccess", at, self.page, ctypes.byref(access), 1)
            except BaseException:
                self.resize(part, len(held) - 1)
                raise

    def _create(self):
        handle = ctypes.c_uint64()
        given = ctypes.byref(handle), self.page, ctypes.byref(self.properties), 0
        try:
            _call("cuMemCreate", *given)
        except torch.OutOfMemoryError:  # torch's cache may hold memory that an update has freed
            torch.cuda.empty_cache()
            _call("cuMemCreate", *given)
        return handle.value

    def unmap(self) -> None:
        """Release the memory, if any is mapped. The device must have finished its work."""
        for part in range(len(self.held)):
            self.resize(part, 0)
        while self.spare:
            _call("cuMemRelease", self.spare.pop())

    def __del__(self) -> None:
        if self.address.value and not sys.is_finalizing():  # at exit, the driver may be gone already
            torch.cuda.synchronize(self.properties.location.id)
            self.unmap()
            _call("cuMemAddressFree", self.address.value, self.size)


def view(held: Range) -> torch.Tensor:
    """Return a tensor [bytes] uint8 of the memory of a range."""
    return torch.as_tensor(held, device=torch.device("cuda", held.properties.location.id))


class Mapped:
    """Allocates tensors on a CUDA device. Their memory can be released together."""

    def __init__(self, device: torch.device) -> None:
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        self.device, self.ranges = device, weakref.WeakSet()
        self.properties = Properties(PINNED, 0, Location(ON_DEVICE, device.index or 0), None, 0)

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Allocate a tensor with undefined contents."""
        count = math.prod(shape) * dtype.itemsize
        if not count:
            return torch.empty(shape, dtype=dtype, device=self.device)
        size = -(-count // self.page) * self.page
        return self._tensor(size, size)[1][:count].view(dtype).view(*shape)

    def pages(self, size: int, parts: int, most: int) -> tuple[Range, torch.Tensor]:
        """Allocate a range that grows page by page, and a tensor [bytes] uint8. Access only its mapped part."""
        return self._tensor(self.page, size, parts, most)

    @functools.cached_property
    def page(self) -> int:
        """The smallest number of bytes that can be mapped."""
        unit = ctypes.c_size_t()
        _call("cuMemGetAllocationGranularity", ctypes.byref(unit), ctypes.byref(self.properties), 0)
        return unit.value

    def _tensor(self, *sizes):
        with torch.cuda.device(self.device):  # the driver works in the context of the current device
            held = Range(self.properties, *sizes)
            tensor = view(held)
        if tensor.data_ptr() != held.address.value:
            raise RuntimeError("torch copied mapped memory instead of using it; use --rollout_backend eager")
        self.ranges.add(held)
        return held, tensor

    @property
    def bytes(self) -> int:
        """Bytes of the memory that is mapped."""
        return sum(held.bytes for held in self.ranges)

    def release(self) -> None:
        """Release the memory of all tensors, after the device has finished its work."""
        torch.cuda.synchronize(self.device)
        for held in self.ranges:
            held.unmap()

    def restore(self) -> bool:
        """Map memory for all released tensors; return whether there were any. After an error, call it again."""
        released = [held for held in self.ranges if not all(held.held)]
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
        logger.warning("the KV cache keeps its memory during updates, and does not grow: %s", error)
        return False
    return True
