"""The filter of system calls, run here by an interpreter of classic BPF, and once by the kernel in a jail."""

import platform
import struct

import pytest
from jails import PATIENT, judge, needs_namespaces

from fastgrpo.rewards.sandbox import REFUSED, Sandbox, make_filter

ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}  # linux/audit.h
ALLOW, REFUSE = 0x7FFF0000, 0x00050001


def decide(program, number, architecture):
    """What the kernel would do with a call."""
    data, at, value = {0: number, 4: architecture}, 0, 0
    instructions = list(struct.iter_unpack("=HBBI", program))
    while True:
        code, yes, no, constant = instructions[at]
        at += 1
        if code == 0x20:
            value = data[constant]
        elif code == 0x06:
            return constant
        else:
            assert code in (0x15, 0x35)
            at += yes if (value == constant if code == 0x15 else value >= constant) else no


@pytest.mark.parametrize("column, machine", list(enumerate(ARCHITECTURES)))
def test_what_the_filter_refuses(column, machine):
    program, own = make_filter(machine), ARCHITECTURES[machine]
    refused = {pair[column] for pair in REFUSED.values()}
    assert len(refused) == len(REFUSED)
    found = {number for number in range(1000) if decide(program, number, own) == REFUSE}
    assert found == refused and {decide(program, number, own) for number in range(1000)} == {ALLOW, REFUSE}
    for other in {*ARCHITECTURES.values(), 0x40000003} - {own}:
        assert decide(program, 0, other) == REFUSE
    assert decide(program, 0x40000000, own) == decide(program, 0xFFFFFFFF, own) == REFUSE


def test_other_machines_have_no_filter():
    with pytest.raises(ValueError, match="a jail runs on x86_64 and aarch64, and this machine is riscv64"):
        make_filter("riscv64")
    assert make_filter() == make_filter(platform.machine())


@needs_namespaces
def test_the_kernel_refuses_each():
    numbers = [pair[list(ARCHITECTURES).index(platform.machine())] for pair in REFUSED.values()]
    program = (
        f"import ctypes\nlibc = ctypes.CDLL(None, use_errno=True)\nfor number in {numbers}:\n"
        "    print(libc.syscall(number, 0, 0, 0, 0, 0), ctypes.get_errno())"
    )
    sandbox = Sandbox(limits=PATIENT)
    assert judge(sandbox, program, {"output": "-1 1\n" * len(numbers)}) == (["passed"], 1.0)
    sandbox.close()
