"""Block sizes by compute capability, and the checks every launcher makes: tables and plain functions, no autotuner.

An autotuner cannot run under the interpreter and hides what was chosen. The sizes are those that compile without spills
for every option of the epilogue (tests/test_triton_aot.py holds them to it); times on a GPU may move them.

TRITON_INTERPRET=1 runs the kernels on CPU tensors: then, and only then, are CPU tensors accepted, with blocks so small
that a test's matrix has several of each kind.
"""

from functools import cache
from typing import NamedTuple

import torch
import triton

INTERPRET = triton.knobs.runtime.interpret  # as it was when the kernels were decorated
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
CHUNK_ROWS = 8192  # rows whose exponentials are held at once: 2 * 8192 * V bytes in bf16
GUARD_SPLITS = 16  # programs a row block in the passes over flagged rows, which nearly always return at once
REDUCE_ROWS, REDUCE_TILES = 32, 64
LOGITS_BLOCK, LOGITS_WARPS = 8192, 16  # columns of a row at a time, for logits that are already there


class Blocks(NamedTuple):
    """Of one launch: rows x cols of the output and depth of the product a program step, warps, pipeline stages."""

    rows: int
    cols: int
    depth: int
    warps: int
    stages: int


INTERPRETED = Blocks(16, 32, 16, 4, 1)
INTERPRETED_PROGRAMS = 3


@cache
def capability(device):
    """(major, minor) of a CUDA device; the interpreter stands in for the newest."""
    return (10, 0) if device.type == "cpu" else torch.cuda.get_device_capability(device)


@cache
def programs(device):
    """Persistent programs: one a streaming multiprocessor."""
    if device.type == "cpu":
        return INTERPRETED_PROGRAMS
    return torch.cuda.get_device_properties(device).multi_processor_count


def precision(dtype):
    """fp32 products are exact unless torch was told that TF32 is fine; fp16 and bf16 have one precision."""
    return "tf32" if dtype == torch.float32 and torch.backends.cuda.matmul.allow_tf32 else "ieee"


def exp_blocks(major, has_softcap, has_bias):
    """The persistent descriptor kernel (sm_90 and later, 16-bit): 3 stages and the stored tile fill 213,016 bytes.

    The soft-cap's tanh needs registers, and so does a bias on sm_100: half the columns, or it spills.
    """
    assert major >= 9
    return Blocks(128, 128 if has_softcap or (has_bias and major >= 10) else 256, 64, 8, 3)


def exp_ptr_blocks(major, minor, dtype, tf32, plain):
    """The pointer kernel. plain: no soft-cap, no entropy, depth a multiple of the block, one tile a program."""
    if dtype == torch.float32:
        return Blocks(128, 128, 32, 8, 3) if tf32 else Blocks(32, 64, 32, 4, 3)
    if plain and major == 8:
        # 99 KiB of shared memory a block on sm_86 and sm_89, 163 KiB on sm_80
        return Blocks(128, 256, 64, 8, 3) if minor == 0 else Blocks(128, 256, 32, 8, 3)
    return Blocks(128, 128, 64, 8, 3)


def online_blocks(dtype, tf32):
    """The online softmax keeps its running maxima beside the tile."""
    if dtype == torch.float32:
        return Blocks(128, 128, 32, 8, 3) if tf32 else Blocks(64, 64, 32, 8, 3)
    return Blocks(128, 128, 64, 8, 3)


def anchor_blocks(dtype):
    """Square, since only the diagonal is used; small, since it is one program a row block."""
    return Blocks(64, 64, 32 if dtype == torch.float32 else 64, 4, 3)


def online_splits(row_blocks, device):
    """Vocabulary splits that give each multiprocessor about eight row blocks to hide the tail; a power of two."""
    if device.type == "cpu":
        return 2
    return min(64, max(1, triton.next_power_of_2(8 * programs(device) // max(row_blocks, 1))))


def uses_descriptors(*matrices):
    """Whether the tensor-memory accelerator can read these: sm_90, 16-byte base and pitch, 16-bit elements."""
    if capability(matrices[0].device)[0] < 9:
        return False
    fits = (m.data_ptr() % 16 == 0 and m.stride(0) * m.itemsize % 16 == 0 for m in matrices)
    return all(fits) and (matrices[0].itemsize == 2 or INTERPRET)


def check_device(tensor, name):
    """Raises ValueError where Triton cannot run on the tensor's device or dtype."""
    if tensor.device.type == "cpu" and not INTERPRET:
        raise ValueError(
            f"backend='triton' needs CUDA tensors, got {name} on the CPU; use backend='chunked', or set "
            "TRITON_INTERPRET=1 before the import to run the kernels slowly on the CPU"
        )
    if tensor.dtype not in DTYPES:
        raise ValueError(
            f"backend='triton' takes bf16, fp16 and fp32, got {name} {tensor.dtype}; use backend='chunked'"
        )


def rows_contiguous(matrix):
    """The matrix itself where its rows are contiguous, else a copy (a transposed weight is copied once)."""
    return matrix if matrix.stride(-1) == 1 and matrix.stride(0) >= matrix.shape[1] else matrix.contiguous()
