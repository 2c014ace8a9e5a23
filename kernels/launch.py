"""Block sizes by compute capability, and checks for launchers: tables and functions, without an autotuner.

An autotuner cannot run under the interpreter, and hides its choice. The sizes compile without spills for every option
of the epilogue, which tests/kernels/test_aot.py checks.

TRITON_INTERPRET=1 runs the kernels on CPU tensors, which are not accepted otherwise. Its blocks are so small that the
matrices of tests have several blocks of each kind.
"""

from collections.abc import Callable
from functools import cache, wraps
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from fastgrpo.kernels.objectives import constant

LOG2E = tl.constexpr(1.4426950408889634)


LN2 = tl.constexpr(0.6931471805599453)


# Values that change between batches must not cause a new compilation: the number of tokens, and the alignment of
# per-token vectors, which may be slices.
ROWS_VARY = {
    "do_not_specialize": ("n_rows", "n_splits", "SPLITS"),
    "do_not_specialize_on_alignment": (
        "advantage_ptr", "anchor_ptr", "bonus_ptr", "entropy_ptr", "flag_ptr", "g_ptr", "importance_ptr", "inv_t_ptr",
        "log_ratio_ptr", "logp_ptr", "mix_ptr", "norm_ptr", "old_ptr", "patch_ptr", "phi_ptr", "place_ptr", "ref_ptr",
        "target_ptr", "target_y_ptr", "total_ptr", "weight_ptr",
    ),
}  # fmt: skip
INTERPRET = triton.knobs.runtime.interpret  # its value when the kernels were decorated
TRITON = tuple(map(int, triton.__version__.split(".")[:2]))
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
HEAD_DTYPES = DTYPES if INTERPRET else (torch.bfloat16,)  # the interpreter computes bf16 wrongly
CHUNK_ROWS = 8192  # rows of exponentials in memory: 2 * 8192 * V bytes in bf16
# Vocabulary splits of the passes over flagged rows, whose programs nearly always return immediately.
GUARD_SPLITS = 4 if INTERPRET else 16
REDUCE_ROWS, REDUCE_TILES = 32, 64
LOGITS_BLOCK, LOGITS_WARPS = 8192, 16  # columns of a row at a time, for given logits
# Warps of the kernel that reads a row twice. One program then fills a multiprocessor. With V = 152k in bf16, 132 rows
# in flight take 40 MB and stay in a 50 MB cache until the second read; with two programs they would not.
LOGITS_FUSED_WARPS = 32
SAMPLE_WARPS = 4
MERGE_HEADS = 8  # query heads per program of the merge
DECODE_MEMBERS = 4 if INTERPRET else 1024  # lanes of prompts that decode attention compares at once


class Blocks(NamedTuple):
    """Block sizes of one launch."""

    rows: int  # of the output, per tile
    cols: int  # of the output, per tile
    depth: int  # elements of the inner dimension per step of the product
    warps: int  # per program
    stages: int  # of the software pipeline


def options(warps: int = 4, stages: int = 3) -> dict[str, Any]:
    """Return the compiler options of a launch. Fused multiply-adds are explicit, because Triton 3.10 disables them."""
    return {"num_warps": warps, "num_stages": stages, "enable_fp_fusion": True}


# Major capabilities with the tensor-memory accelerator and enough shared memory for its blocks. sm_120 has the
# accelerator too, but only 99 KiB of shared memory.
DESCRIPTOR_MAJORS = (9, 10)
INTERPRETED = Blocks(16, 32, 16, 4, 1)
INTERPRETED_PROGRAMS = 3


@triton.jit
def log1p(x):
    """Return log(1 + x) of fp32 x >= 0 to full relative precision, for log-probs of confident tokens, about -x."""
    series = x * (1.0 - x * (0.5 - x * (0.33333333 - x * 0.25)))
    return tl.where(x < 0.01, series, tl.log(1.0 + x))


@cache
def capability(device: torch.device) -> tuple[int, int]:
    """Return (major, minor) of a CUDA device, and (10, 0) for the interpreter."""
    return (10, 0) if device.type == "cpu" else torch.cuda.get_device_capability(device)


@cache
def programs(device: torch.device) -> int:
    """Return the number of programs of a persistent kernel, one per streaming multiprocessor."""
    if device.type == "cpu":
        return INTERPRETED_PROGRAMS
    return torch.cuda.get_device_properties(device).multi_processor_count


@constant
def runs_on(device: torch.device) -> bool:
    """Return whether kernels support a device: NVIDIA GPUs of compute capability 8.0 or later, or the interpreter."""
    if device.type == "cpu":
        return INTERPRET
    return device.type == "cuda" and torch.version.hip is None and capability(device) >= (8, 0)


def describe(device: torch.device) -> str:
    """Return the names and versions of device and compilers, for a report."""
    about = f"torch {torch.__version__}, triton {triton.__version__}"
    if device.type == "cpu":
        return f"the interpreter, {about}"
    major, minor = capability(device)
    return f"{torch.cuda.get_device_name(device)} (sm_{major}{minor}), CUDA {torch.version.cuda}, {about}"


def operator(name: str, mutates_args: tuple[str, ...] = ()) -> Callable[[Callable], Callable]:
    """Return a decorator that registers a function as an operator of torch, run on the device of its first argument."""

    def decorate(function: Callable) -> Callable:
        return torch.library.custom_op(name, mutates_args=mutates_args)(on_its_device(function))

    return decorate


def on_its_device(function: Callable) -> Callable:
    """Make a function run on the device of its first argument, since Triton launches on the current device."""

    @wraps(function)
    def guarded(*args, **options):
        with torch.cuda.device_of(args[0] if args else next(iter(options.values()))):
            return function(*args, **options)

    return guarded


def precision(dtype: torch.dtype) -> str:
    """Return the input precision of a product, "ieee" or "tf32".

    fp32 products use full precision unless torch allows TF32; fp16 and bf16 have one precision.
    """
    if dtype != torch.float32:
        return "ieee"
    return "tf32" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "ieee"


def exp_blocks(major: int, has_softcap: bool, has_bias: bool) -> Blocks:
    """Return the block sizes of the persistent kernel with descriptors (sm_90 and sm_100, 16-bit operands).

    Three stages and the stored tile fill 213,016 bytes of shared memory. The soft-cap's tanh needs registers, and so
    does a bias on sm_100: both use half the columns, to avoid spills.
    """
    assert major in DESCRIPTOR_MAJORS
    return Blocks(128, 128 if has_softcap or (has_bias and major == 10) else 256, 64, 8, 3)


def exp_ptr_blocks(major: int, minor: int, plain: bool, guard: bool = False) -> Blocks:
    """Return the block sizes of the kernel with pointer loads.

    `plain` means: the epilogue has no soft-cap and no entropy, D is a multiple of the block, and a program computes one
    tile. The `guard` loops over the tiles of flagged rows; with 128 rows, Triton 3.8 spills on sm_100.
    """
    if guard and major == 10:
        return Blocks(64, 128, 64, 8, 3)
    if plain and major == 8 and TRITON != (3, 8):  # Triton 3.8 spills
        # sm_80 has 163 KiB of shared memory per block, sm_86 and sm_89 have 99 KiB.
        return Blocks(128, 256, 64, 8, 3) if minor == 0 else Blocks(128, 256, 32, 8, 3)
    return Blocks(128, 128, 64, 8, 3)


ONLINE_BLOCKS = Blocks(128, 128, 64, 8, 3)  # the online softmax keeps running maxima besides the tile
ANCHOR_BLOCKS = Blocks(64, 64, 64, 4, 3)  # square, because only the diagonal is used; small, for more programs


def uses_descriptors(*matrices: torch.Tensor) -> bool:
    """Return whether the tensor-memory accelerator can read all of these matrices.

    Base and pitch must be multiples of 16 bytes; our blocks need 16-bit elements.
    """
    if capability(matrices[0].device)[0] not in DESCRIPTOR_MAJORS:
        return False
    fits = (m.data_ptr() % 16 == 0 and m.stride(0) * m.itemsize % 16 == 0 for m in matrices)
    return all(fits) and (matrices[0].itemsize == 2 or INTERPRET)


def sample_tile() -> int:
    """Return how many logits of a row a program of the sampler reads: constant, so draws do not depend on the batch."""
    return 32 if INTERPRET else 2048


def decode_blocks(rows: int, depth: int, dtype: torch.dtype) -> Blocks:
    """Return the block sizes of decode attention: rows of queries, columns of keys, and the padded head width as depth.

    A multiprocessor runs two or three programs of this size.
    """
    depth = max(16, triton.next_power_of_2(depth))
    rows = max(16, triton.next_power_of_2(max(rows, 1)))
    if INTERPRET:
        return Blocks(min(rows, 32), 16, depth, 4, 1)
    if dtype == torch.float32:
        # Other sizes spill on some capability.
        return Blocks(16, 16, depth, 16 if depth == 128 else 4, 2)
    if depth > 128:
        # Larger blocks exceed the 99 KiB of shared memory of sm_86, sm_89 and sm_120, and spill elsewhere.
        return Blocks(min(rows, 64), 32, depth, 8, 2)
    if depth <= 64:
        # From 3.8 on, Triton keeps twice as much in shared memory: 128 KiB for 128 columns.
        few = 128 if TRITON < (3, 8) else 64
        return Blocks(min(rows, 128), 64 if rows > 32 else few, depth, 8 if rows > 64 else 4, 3)
    many = 16 if TRITON == (3, 8) else 32  # with 32, Triton 3.8 spills on sm_89
    return Blocks(min(rows, 128), many, depth, 8, 3) if rows >= 64 else Blocks(rows, 64, depth, 4, 2)


def decode_splits(programs_without: int, length: int, blocks: Blocks, device: torch.device) -> int:
    """Return the splits of a slot's keys: about four programs per multiprocessor, at least two blocks of keys each."""
    if device.type == "cpu":
        return 2
    wanted = triton.cdiv(4 * programs(device), max(programs_without, 1))
    return max(1, min(wanted, triton.cdiv(length, 2 * blocks.cols), 32))


def check_device(tensor: torch.Tensor, name: str, dtypes: tuple[torch.dtype, ...] = DTYPES) -> None:
    """Check that the kernels support a tensor's device and dtype."""
    if tensor.device.type == "cpu" and not INTERPRET:
        raise ValueError(
            f"backend='triton' needs CUDA tensors, got {name} on the CPU; use backend='chunked', or set "
            "TRITON_INTERPRET=1 before the import to run the kernels in the slow interpreter"
        )
    if not runs_on(tensor.device):
        raise ValueError(
            f"backend='triton' needs an NVIDIA GPU of compute capability 8.0 or later, got {name} on {tensor.device}; "
            "use backend='chunked'"
        )
    if tensor.dtype not in dtypes:
        raise ValueError(
            f"backend='triton' needs {', '.join(map(str, dtypes))}, got {name} {tensor.dtype}; use backend='chunked'"
        )


def rows_contiguous(matrix: torch.Tensor) -> torch.Tensor:
    """Return the matrix itself if its rows are contiguous, else a copy (as for a transposed weight)."""
    fits = matrix.stride(-1) == 1 and matrix.stride(0) >= matrix.shape[1]
    # clone, because contiguous() returns a single row unchanged, whatever its strides.
    return matrix if fits else matrix.clone(memory_format=torch.contiguous_format)
