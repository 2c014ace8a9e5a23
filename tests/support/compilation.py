"""Ahead-of-time compilation of a Triton kernel for a GPU that is not there, and what is asked of the result."""

import ast
import re
import subprocess
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from fastgrpo.kernels import launch

NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
# Bytes of shared memory that a block may have (CUDA C++ Programming Guide, table of compute capabilities).
SHARED_LIMIT = {80: 166_912, 86: 101_376, 89: 101_376, 90: 232_448, 100: 232_448, 120: 101_376}
MATRIX_INSTRUCTION = {80: "HMMA", 89: "HMMA", 90: "HGMMA", 100: r"UTC\w*MMA", 120: "HMMA"}
FLOATS = {"inv_t", "cap", "low", "high", "delta", "beta", "tau_pos", "tau_neg", "scale", "scale2"}
FLOATS |= {"limit", "min_p_span", "eps"}
DIVISIBLE = re.compile(r".*_(ptr|stride)|depth|vocab")  # by 16, as in every model's head
PARSING, PARSE = threading.Lock(), ast.parse


def parse(*given, **named):
    """Parse in one thread at a time: two at once may raise a SystemError in Python 3.11."""
    with PARSING:
        return PARSE(*given, **named)


ast.parse = parse


@dataclass(eq=False)
class Compilation:
    """One specialization of a kernel."""

    kernel: object
    capability: int  # 90 for sm_90
    constants: dict  # constexprs by name, and None for absent pointers; names that the kernel lacks are left out
    types: dict  # by name, of the arguments that are not fp32 pointers, floats or i32
    warps: int
    stages: int = 3
    matrix: bool = True  # whether the machine code must hold matrix instructions
    wants: tuple[str, ...] = ()  # patterns that the machine code must hold
    name: str | None = None  # in the table of budgets

    def __post_init__(self):
        self.constants = {name: value for name, value in self.constants.items() if name in self.kernel.arg_names}

    def compile(self):
        """Return registers, stack bytes, shared bytes and machine code."""
        kernel, signature = self.kernel, {}
        for name in kernel.arg_names:
            default = "*fp32" if name.endswith("_ptr") else "fp32" if name in FLOATS else "i32"
            signature[name] = "constexpr" if name in self.constants else self.types.get(name, default)
        attributes = {
            (p.num,): [["tt.divisibility", 16]]
            for p in kernel.params
            if p.name not in self.constants and DIVISIBLE.fullmatch(p.name) and not p.do_not_specialize_on_alignment
        }
        constants = {(kernel.arg_names.index(name),): value for name, value in self.constants.items()}
        compiled = triton.compile(
            ASTSource(kernel, signature, constants, attributes),
            target=GPUTarget("cuda", self.capability, 32),
            options=launch.options(self.warps, self.stages),
        )
        tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
        with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
            cubin.write(compiled.asm["cubin"])
            cubin.flush()
            command = [tool, "--dump-resource-usage", "-sass", cubin.name]
            dump = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        registers, stack = (int(re.search(rf"{name}:(\d+)", dump)[1]) for name in ("REG", "STACK"))
        return registers, stack, compiled.metadata.shared, dump

    def check(self, result):
        """Assert that the kernel spills nothing, computes something, and finds its shared memory."""
        registers, stack, shared, code = result  # the usage LOCAL is 0 for kernels that spill
        assert stack == 0 and not re.search(r"\b(STL|LDL)\b", code), (registers, stack)
        assert not re.search(r"\b(DFMA|DADD|DMUL|DSETP|DMNMX|F2F\.F64)", code), "fp64, which is slow, and never meant"
        assert shared <= SHARED_LIMIT[self.capability]
        assert "EXIT" in code
        assert not self.matrix or re.search(rf"\b{MATRIX_INSTRUCTION[self.capability]}", code)
        assert all(re.search(pattern, code) for pattern in self.wants), self.wants
