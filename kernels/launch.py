"""Block sizes by compute capability, and the checks every launcher makes: tables and plain functions, no autotuner.

An autotuner cannot run under the interpreter and hides what was chosen. The sizes are those that compile without spills
for every option of the epilogue (tests/test_triton_aot.py holds them to it); times on a GPU may move them.

TRITON_INTERPRET=1 runs the kernels on CPU tensors: then, and only then, are CPU tensors accepted, with blocks so small
that a test's matrix has several of each kind.
"""

from functools import cache, wraps
from typing import NamedTuple

import torch
import triton

INTERPRET = triton.knobs.runtime.interpret  # as it was when the kernels were decorated
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
CHUNK_ROWS = 8192  # rows whose exponentials are held at once: 2 * 8192 * V bytes in bf16
MAX_SPLITS = 64  # of the vocabulary
GUARD_SPLITS = 16  # programs a row block in the passes over flagged rows, which nearly always return at once
REDUCE_ROWS, REDUCE_TILES = 32, 64
LOGITS_BLOCK, LOGITS_WARPS = 8192, 16  # columns of a row at a time, for logits that are already there
SAMPLE_WARPS = 4
MERGE_HEADS = 8  # heads a program merges
SEARCH_PIVOTS, SEARCH_WARPS = 16, 8  # thresholds that one sweep of a row tests


class Blocks(NamedTuple):
    """Of one launch: rows x cols of the output and depth of the product a program step, warps, pipeline stages."""

    rows: int
    cols: int
    depth: int
    warps: int
    stages: int


# Tensor-memory accelerator, and shared memory for its blocks; sm_120 has the former and 99 KiB of the latter.
DESCRIPTOR_MAJORS = (9, 10)
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


@torch.compiler.assume_constant_result
def runs_on(device):
    """Whether the kernels run there: NVIDIA GPUs of compute capability 8.0 and later, or the interpreter's CPU."""
    if device.type == "cpu":
        return INTERPRET
    return device.type == "cuda" and torch.version.hip is None and capability(device) >= (8, 0)


def operator(name, mutates_args=()):
    """torch.library.custom_op, run on the device of its first argument."""

    def decorate(function):
        return torch.library.custom_op(name, mutates_args=mutates_args)(on_its_device(function))

    return decorate


def on_its_device(function):
    """Run on the device of the first argument: Triton launches on the current one."""

    @wraps(function)
    def guarded(*args, **options):
        with torch.cuda.device_of(args[0] if args else next(iter(options.values()))):
            return function(*args, **options)

    return guarded


def precision(dtype):
    """fp32 products are exact unless torch was told that TF32 is fine; fp16 and bf16 have one precision."""
    if dtype != torch.float32:
        return "ieee"
    matmul = torch.backends.cuda.matmul
    # allow_tf32 raises where the newer setting was used; the newer one, since torch 2.9, knows both.
    allowed = matmul.fp32_precision == "tf32" if hasattr(matmul, "fp32_precision") else matmul.allow_tf32
    return "tf32" if allowed else "ieee"


def exp_blocks(major, has_softcap, has_bias):
    """The persistent descriptor kernel (sm_90 and sm_100, 16-bit): 3 stages and the stored tile fill 213,016 bytes.

    The soft-cap's tanh needs registers, and so does a bias on sm_100: half the columns, or it spills.
    """
    assert major in DESCRIPTOR_MAJORS
    return Blocks(128, 128 if has_softcap or (has_bias and major == 10) else 256, 64, 8, 3)


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
    return min(MAX_SPLITS, max(1, triton.next_power_of_2(8 * programs(device) // max(row_blocks, 1))))


def uses_descriptors(*matrices):
    """Whether the tensor-memory accelerator can read these: 16-byte base and pitch, 16-bit elements."""
    if capability(matrices[0].device)[0] not in DESCRIPTOR_MAJORS:
        return False
    fits = (m.data_ptr() % 16 == 0 and m.stride(0) * m.itemsize % 16 == 0 for m in matrices)
    return all(fits) and (matrices[0].itemsize == 2 or INTERPRET)


def sample_tile():
    """Columns of a row that a program draws from: the same for any number of rows, and so are then the draws."""
    return 32 if INTERPRET else 2048


def search_step():
    """Logits at a time against all pivots: step x pivots sums in registers."""
    return 16 if INTERPRET else 512


def search_candidates():
    """Logits of a tile that the end of a search may hold; with more of them it reads the row again."""
    return 4 if INTERPRET else 32


def decode_blocks(rows, depth, dtype):
    """Query rows x keys x padded depth of decode attention: what fits two or three times into a multiprocessor."""
    depth = max(16, triton.next_power_of_2(depth))
    rows = max(16, triton.next_power_of_2(max(rows, 1)))
    if INTERPRET:
        return Blocks(min(rows, 32), 16, depth, 4, 1)
    if dtype == torch.float32:
        return Blocks(min(rows, 32), 16, depth, 8, 2)
    if depth <= 64:
        return Blocks(min(rows, 128), 64 if rows > 32 else 128, depth, 8 if rows > 64 else 4, 3)
    return Blocks(128, 32, depth, 8, 3) if rows > 64 else Blocks(rows, 64, depth, 8 if rows == 64 else 4, 2)


def decode_splits(programs_without, length, blocks, device):
    """Splits of up to `length` keys: about four programs a multiprocessor, at least two blocks of keys in each."""
    if device.type == "cpu":
        return 2
    wanted = triton.cdiv(4 * programs(device), max(programs_without, 1))
    return max(1, min(wanted, triton.cdiv(length, 2 * blocks.cols), 32))


def check_device(tensor, name):
    """Raises ValueError where Triton cannot run on the tensor's device or dtype."""
    if tensor.device.type == "cpu" and not INTERPRET:
        raise ValueError(
            f"backend='triton' needs CUDA tensors, got {name} on the CPU; use backend='chunked', or set "
            "TRITON_INTERPRET=1 before the import to run the kernels slowly on the CPU"
        )
    if not runs_on(tensor.device):
        raise ValueError(
            f"backend='triton' needs an NVIDIA GPU of compute capability 8.0 or later, got {name} on {tensor.device}; "
            "use backend='chunked'"
        )
    if tensor.dtype not in DTYPES:
        raise ValueError(
            f"backend='triton' takes bf16, fp16 and fp32, got {name} {tensor.dtype}; use backend='chunked'"
        )


def rows_contiguous(matrix):
    """The matrix itself where its rows are contiguous, else a copy (a transposed weight is copied once).

    A clone, since contiguous() hands back a single row whatever its strides.
    """
    fits = matrix.stride(-1) == 1 and matrix.stride(0) >= matrix.shape[1]
    return matrix if fits else matrix.clone(memory_format=torch.contiguous_format)
