"""What a sandbox's processes may not ask of the kernel, as a classic BPF program for bubblewrap's `--seccomp`.

Namespaces leave three things shared with the host: the other address families (AF_VSOCK reaches the hypervisor and
the host's listeners whatever the network namespace), key rings, and kernel interfaces that an agent has no use for.
io_uring also performs what a filter forbids, so it is answered with ENOSYS: Node and others then do without.
Another ABI (i386, x32) would bypass the numbers below; the process that uses one is killed.

Numbers: Linux arch/x86/entry/syscalls/syscall_64.tbl and include/uapi/asm-generic/unistd.h (aarch64).
"""

from __future__ import annotations

import errno
import platform
import struct
from dataclasses import dataclass

from rollout.errors import SandboxError

ALLOW, ERRNO, KILL = 0x7FFF0000, 0x00050000, 0x80000000
LOAD, JUMP_EQUAL, JUMP_AT_LEAST, RETURN = 0x20, 0x15, 0x35, 0x06
NUMBER, ARCH, FIRST_ARGUMENT = 0, 4, 16
"""Offsets in struct seccomp_data; both machines are little-endian, so an int argument is its first four bytes."""
X32 = 0x40000000
"""Set in the number of every system call of the x32 ABI."""
FAMILIES = (1, 2, 10, 16)
"""AF_UNIX, AF_INET, AF_INET6, AF_NETLINK."""


@dataclass(frozen=True)
class Machine:
    audit: int
    """AUDIT_ARCH_ value."""
    sockets: tuple[int, ...]
    """socket, socketpair."""
    forbidden: tuple[int, ...]
    """add_key, request_key, keyctl, perf_event_open, bpf, userfaultfd, kexec_load, kexec_file_load."""
    absent: tuple[int, ...] = (425, 426, 427)
    """io_uring_setup, io_uring_enter, io_uring_register."""


MACHINES = {
    "x86_64": Machine(0xC000003E, (41, 53), (248, 249, 250, 298, 321, 323, 246, 320)),
    "aarch64": Machine(0xC00000B7, (198, 199), (217, 218, 219, 241, 280, 282, 104, 294)),
}


def program(machine: str = "") -> bytes:
    """The filter for `machine` (this one's by default). Raises SandboxError for a machine that has none."""
    name = machine or platform.machine()
    if name not in MACHINES:
        raise SandboxError(f"no system call filter for {name}: the sandbox needs one of {', '.join(MACHINES)}")
    m = MACHINES[name]
    code = [_step(LOAD, ARCH), *_unless(JUMP_EQUAL, m.audit, KILL), _step(LOAD, NUMBER)]
    code += _if(JUMP_AT_LEAST, X32, KILL)
    for numbers, answer in ((m.forbidden, errno.EPERM), (m.absent, errno.ENOSYS)):
        for number in numbers:
            code += _if(JUMP_EQUAL, number, ERRNO | answer)
    return b"".join([*code, *_families(m.sockets)])


def _families(sockets: tuple[int, ...]) -> list[bytes]:
    """The end of the program: a socket of another family than FAMILIES is refused, everything else allowed."""
    code = [_step(JUMP_EQUAL, number, len(sockets) - i) for i, number in enumerate(sockets)]
    code += [_step(RETURN, ALLOW), _step(LOAD, FIRST_ARGUMENT)]
    for family in FAMILIES:
        code += _if(JUMP_EQUAL, family, ALLOW)
    return [*code, _step(RETURN, ERRNO | errno.EAFNOSUPPORT)]


def _step(code: int, k: int, true: int = 0, false: int = 0) -> bytes:
    """struct sock_filter; `true` and `false` are the steps that a jump leaves out."""
    return struct.pack("=HBBI", code, true, false, k)


def _if(jump: int, k: int, answer: int) -> list[bytes]:
    return [_step(jump, k, 0, 1), _step(RETURN, answer)]


def _unless(jump: int, k: int, answer: int) -> list[bytes]:
    return [_step(jump, k, 1, 0), _step(RETURN, answer)]
