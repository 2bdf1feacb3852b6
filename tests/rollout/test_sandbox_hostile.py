"""What gets around a sandbox's limits and namespaces when only names, deadlines and devices are looked at."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from rollout_servers import hosted

from rollout.config import Home, open_home
from rollout.errors import SandboxError
from rollout.sandbox import limits, seccomp
from rollout.sandbox.base import Command, Completed, SandboxSpec
from rollout.sandbox.limits import Cgroups
from rollout.types import Resources

pytestmark = pytest.mark.sandbox
PYTHON = ("/usr/bin/python3", "-I", "-S", "-c")


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return open_home(tmp_path / "home", min_free_mb=1)


def run(
    home: Home, argv: tuple[str, ...], timeout: float = 20.0, cgroups: Cgroups | None = None, **resources: int
) -> Completed:
    async def main() -> Completed:
        spec = SandboxSpec(id="s1", resources=Resources.model_validate(resources))
        async with hosted(home, cgroups) as host, host.sandbox(spec) as sandbox:
            return await sandbox.run(Command(argv, timeout=timeout))

    return asyncio.run(main())


# -- processes -----------------------------------------------------------------------------------------

SPAWN = "for i in $(seq 60); do sleep 30 & done; wait"
"""Bounded on purpose: a fork bomb that no limit held would take the machine down."""


def test_a_process_limit_that_was_hit_is_the_end_and_not_the_deadline(home: Home) -> None:
    if "pids" not in dict(limits.host_cgroups().parents):
        pytest.skip("no pids cgroup can be written here")
    stubborn = f"trap '' TERM; ({SPAWN}); sleep 30"
    done = run(home, ("bash", "-c", stubborn), timeout=3.0, pids=20)
    assert (done.limit, done.timed_out, done.returncode) == ("pids", False, 137)
    assert 3 <= done.seconds < 8


def test_a_deadline_without_a_limit_stays_a_deadline(home: Home) -> None:
    done = run(home, ("sleep", "30"), timeout=1.0)
    assert (done.limit, done.timed_out, done.returncode) == ("", True, None)


def test_root_without_a_pids_cgroup_is_refused(home: Home) -> None:
    if not limits.pids_problem(Cgroups()):
        pytest.skip("rlimits bind this user")
    for cgroups in (Cgroups(), Cgroups(1, (("memory", Path("/sys/fs/cgroup/memory")),))):
        with pytest.raises(SandboxError, match="unprivileged user"):
            run(home, ("true",), cgroups=cgroups)
    assert not list(home.sandboxes.glob("[!.]*"))


def test_who_is_bound_by_rlimits(tmp_path: Path) -> None:
    (tmp_path / "uid_map").write_text("         0     100000      65536\n")
    assert limits.pids_problem(Cgroups(), tmp_path) == ""
    (tmp_path / "uid_map").write_text("         0          0 4294967295\n")
    assert bool(limits.pids_problem(Cgroups(), tmp_path)) == (os.geteuid() == 0)
    assert limits.pids_problem(Cgroups(2, (("pids", tmp_path),)), tmp_path) == ""


def test_the_process_rlimit_stands_in_for_a_missing_pids_controller(tmp_path: Path) -> None:
    plan = limits.plan(Resources(pids=10), Cgroups(2, (("memory", tmp_path),)), "x", 5.0)
    assert plan.wrap[1] == "--nproc=12:12"
    assert len(plan.groups) == 1


# -- disk ----------------------------------------------------------------------------------------------

HIDE = """
import mmap, os, sys, time
keep = []
for i in range(8):
    fd = os.open(f"/workspace/{i}", os.O_RDWR | os.O_CREAT)
    os.unlink(f"/workspace/{i}")
    os.write(fd, b"x" * (3 << 20))
    if sys.argv[1] == "mapped":
        keep.append(mmap.mmap(fd, 3 << 20))
        keep[-1].flush()
        os.close(fd)
if sys.argv[1] == "by an orphan" and os.fork() == 0:
    os.setsid()
    if os.fork():
        os._exit(0)
time.sleep(15)
"""


@pytest.mark.parametrize("how", ["open", "mapped", "by an orphan"])
def test_deleted_files_count_as_long_as_they_are_held(home: Home, how: str) -> None:
    done = run(home, (*PYTHON, HIDE, how), disk_mb=16)
    assert done.limit == "disk"
    assert done.seconds < 12, "it was not killed"


def test_a_deleted_file_within_the_limit_is_fine(home: Home) -> None:
    script = "exec 3<>/workspace/f; rm /workspace/f; head -c 3000000 /dev/zero >&3; sleep 1.5; ulimit -n"
    done = run(home, ("bash", "-c", script), disk_mb=16)
    assert (done.returncode, done.limit) == (0, "")
    assert int(done.stdout) <= limits.OPEN_FILES


# -- system calls --------------------------------------------------------------------------------------

CALLS = """
import ctypes, errno, json, socket
libc = ctypes.CDLL(None, use_errno=True)
said = {}
def call(name, *args):
    said[name] = errno.errorcode[ctypes.get_errno()] if libc.syscall(*args) < 0 else "done"
numbers = json.loads(%r)
for name, number in numbers.items():
    call(name, number, 0, 0, 0, 0, 0)
for family in (1, 2, 10, 16, 0, 4, 17, 21, 31, 38, 40, 44):
    try:
        socket.socket(family, socket.SOCK_RAW if family == 16 else socket.SOCK_STREAM).close()
        said[f"family {family}"] = "done"
    except OSError as error:
        said[f"family {family}"] = errno.errorcode[error.errno]
socket.socketpair()
print(json.dumps(said))
"""


def test_the_kernels_other_ways_out_are_closed(home: Home) -> None:
    machine = seccomp.MACHINES[os.uname().machine]
    numbers = {f"{n}": n for n in (*machine.forbidden, *machine.absent)}
    done = run(home, (*PYTHON, CALLS % json.dumps(numbers)))
    said = json.loads(done.stdout)
    assert {said[str(n)] for n in machine.forbidden} == {"EPERM"}
    assert {said[str(n)] for n in machine.absent} == {"ENOSYS"}
    families = {int(name.split()[1]): answer for name, answer in said.items() if name.startswith("family")}
    assert {family for family, answer in families.items() if answer == "done"} == set(seccomp.FAMILIES)
    assert {answer for answer in families.values() if answer != "done"} == {"EAFNOSUPPORT"}


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="x32 is an ABI of x86_64")
def test_another_abi_is_killed(home: Home) -> None:
    call = f"import ctypes; ctypes.CDLL(None).syscall({seccomp.X32 | 39}); print('LEAK')"
    done = run(home, (*PYTHON, call))
    assert (done.returncode, done.stdout) == (128 + 31, b"")


@pytest.mark.parametrize(
    ("program", "argv"),
    [
        ("node", ("-e", "require('fs').promises.readFile('/etc/passwd').then(d => console.log(d.length > 9))")),
        (
            "/usr/lib/chromium/chromium",
            ("--headless", "--no-sandbox", "--disable-gpu", "--dump-dom", "data:text/html,<b>true</b>"),
        ),
    ],
)
def test_large_programs_work_under_the_filter(home: Home, program: str, argv: tuple[str, ...]) -> None:
    if not shutil.which(program):
        pytest.skip(f"{program} is not installed")
    done = run(home, (program, *argv), timeout=60.0, memory_mb=1024, pids=256, disk_mb=256)
    assert b"true" in done.stdout, done.stderr[-500:]


def test_a_machine_without_a_filter_is_refused() -> None:
    with pytest.raises(SandboxError, match="riscv64"):
        seccomp.program("riscv64")


# -- the filter as data --------------------------------------------------------------------------------


def outcome(machine: str, number: int, argument: int = 0, arch: int | None = None) -> int:
    """Interprets the program as the kernel does."""
    import struct

    code = list(struct.iter_unpack("=HBBI", seccomp.program(machine)))
    data = struct.pack("=iIQ6Q", number, arch or seccomp.MACHINES[machine].audit, 0, argument, *[0] * 5)
    loaded = at = 0
    while True:
        kind, true, false, k = code[at]
        at += 1
        if kind == seccomp.RETURN:
            return int(k)
        if kind == seccomp.LOAD:
            (loaded,) = struct.unpack_from("=I", data, k)
        else:
            at += true if (loaded == k if kind == seccomp.JUMP_EQUAL else loaded >= k) else false


def machines() -> Iterator[tuple[str, seccomp.Machine]]:
    yield from seccomp.MACHINES.items()


@pytest.mark.parametrize(("name", "machine"), machines())
def test_the_filter_answers_each_call(name: str, machine: seccomp.Machine) -> None:
    refused = {n: seccomp.ERRNO | errno.EPERM for n in machine.forbidden}
    refused |= {n: seccomp.ERRNO | errno.ENOSYS for n in machine.absent}
    for number in set(range(500)) - set(machine.sockets):
        assert outcome(name, number, 40) == refused.get(number, seccomp.ALLOW), number
    for number in machine.sockets:
        for family in range(50):
            allowed = family in seccomp.FAMILIES
            want = seccomp.ALLOW if allowed else seccomp.ERRNO | errno.EAFNOSUPPORT
            assert outcome(name, number, family) == want
            assert outcome(name, number, family | 1 << 32) == want, "the kernel reads an int"
    assert outcome(name, 0, arch=0x40000003) == seccomp.KILL
    assert outcome(name, seccomp.X32 | 41) == seccomp.KILL
