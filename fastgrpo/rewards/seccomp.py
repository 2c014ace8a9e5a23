"""A filter of system calls for jails: it refuses what could hold memory outside of every limit, and what needs no one.

`RLIMIT_AS` counts neither memory files nor System V segments that are not mapped. The filter is a classic BPF program,
as seccomp(2) describes it, which bwrap installs.
"""

import platform
import struct

# Name -> number of the system call on x86_64 and on aarch64 (asm/unistd_64.h, asm-generic/unistd.h of Linux).
REFUSED = {
    "shmget": (29, 194),
    "semget": (64, 190),
    "msgget": (68, 186),
    "mq_open": (240, 180),
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "perf_event_open": (298, 241),
    "bpf": (321, 280),
    "userfaultfd": (323, 282),
    "pidfd_getfd": (438, 438),
    "io_uring_setup": (425, 425),
}
_ARCHITECTURES = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}  # AUDIT_ARCH_*, and the column above
_LOAD, _IF_EQUAL, _IF_AT_LEAST, _RETURN = 0x20, 0x15, 0x35, 0x06
_ALLOW, _EPERM = 0x7FFF0000, 0x00050001  # SECCOMP_RET_ALLOW; SECCOMP_RET_ERRNO with EPERM
_X32 = 0x40000000  # the calls of x86_64's second set of calls, whose numbers are others


def make_filter(machine: str | None = None) -> bytes:
    """Assemble the filter."""
    machine = machine or platform.machine()
    if machine not in _ARCHITECTURES:
        raise ValueError(f"a jail runs on {' and '.join(_ARCHITECTURES)}, and this machine is {machine}")
    architecture, column = _ARCHITECTURES[machine]
    numbers = [pair[column] for pair in REFUSED.values()]
    refuse = 4 + len(numbers) + 1  # the index of the last instruction
    program = [
        (_LOAD, 0, 0, 4),  # seccomp_data.arch
        (_IF_EQUAL, 0, refuse - 2, architecture),
        (_LOAD, 0, 0, 0),  # seccomp_data.nr
        (_IF_AT_LEAST, refuse - 4, 0, _X32),
        *[(_IF_EQUAL, refuse - 5 - i, 0, number) for i, number in enumerate(numbers)],
        (_RETURN, 0, 0, _ALLOW),
        (_RETURN, 0, 0, _EPERM),
    ]
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in program)
