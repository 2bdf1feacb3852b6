"""How a command is limited on this host: through cgroups where they can be written, else through rlimits.

    memory   cgroup v1 memory.limit_in_bytes, v2 memory.max        else RLIMIT_AS of each process
    pids     pids.max                                              else RLIMIT_NPROC inside the user namespace
    cpu      cpu.cfs_quota_us, cpu.max                             else RLIMIT_CPU (seconds of the deadline)
    disk     RLIMIT_FSIZE for one file, and the runner's watch over the writable directories, always
    files    RLIMIT_NOFILE, always

With cgroups the kernel's counters say which limit was hit; an rlimit only shows as an error inside the command.
RLIMIT_NPROC is counted per user namespace since Linux 5.14 (per uid before) and never binds root, whatever
namespace its process is in. So root without a writable pids cgroup gets no sandbox at all (`pids_problem`).
"""

from __future__ import annotations

import functools
import hashlib
import os
import resource
import subprocess
import threading
from dataclasses import dataclass
from pathlib import Path

from rollout.types import Resources

CONTROLLERS = ("memory", "pids", "cpu")
CPU_PERIOD_US = 100_000
BWRAP_PIDS = 2
"""bubblewrap itself and the init of its namespace."""
BWRAP_MB = 4
OPEN_FILES = 4096
"""Enough for Node's and Chromium's harnesses."""
PROBE_S = 5.0
PREFIX = "openforge-"
_PROBING = threading.Lock()  # guards the probe: two at once would take each other for a host without cgroups


@dataclass(frozen=True)
class Cgroups:
    """Writable parent folder of each usable controller; v2 names the same folder for all."""

    version: int = 0
    """0: none can be written."""
    parents: tuple[tuple[str, Path], ...] = ()


@dataclass(frozen=True)
class Group:
    """One cgroup folder to make: files to write, and counters of violations as (file, counter, limit)."""

    path: str
    writes: tuple[tuple[str, str], ...]
    counters: tuple[tuple[str, str, str], ...] = ()


@dataclass(frozen=True)
class Plan:
    groups: tuple[Group, ...]
    rlimits: tuple[tuple[int, int], ...]
    """(RLIMIT_ number, value), set before bubblewrap starts."""
    wrap: tuple[str, ...] = ()
    """Put before the command inside the sandbox."""


def host_cgroups() -> Cgroups:
    """What this process may use, probed once by making a group and moving a child into it."""
    with _PROBING:
        return _probed()


@functools.cache
def _probed() -> Cgroups:
    found = detect(Path("/proc/self"))
    usable = tuple((name, parent) for name, parent in found.parents if _probe(parent))
    return Cgroups(found.version, usable) if any(name == "memory" for name, _ in usable) else Cgroups()


def detect(proc: Path) -> Cgroups:
    """Candidates from `<proc>/cgroup` and `<proc>/mountinfo`; v1 wins where it holds the memory controller."""
    own: dict[str, str] = {}
    for line in (proc / "cgroup").read_text().splitlines():
        _, names, path = line.split(":", 2)
        own.update(dict.fromkeys(names.split(","), path))
    v1: dict[str, Path] = {}
    v2: Path | None = None
    for line in (proc / "mountinfo").read_text().splitlines():
        left, _, right = line.partition(" - ")
        root, point = left.split()[3:5]
        kind, _, options = right.split(maxsplit=2)
        if kind == "cgroup":
            for name in set(options.split(",")) & set(CONTROLLERS) & own.keys():
                v1[name] = _below(point, root, own[name])
        elif kind == "cgroup2" and "" in own:
            v2 = _below(point, root, own[""])
    if "memory" in v1:
        return Cgroups(1, tuple((name, v1[name]) for name in CONTROLLERS if name in v1))
    return _v2(v2) if v2 else Cgroups()


def _below(point: str, root: str, own: str) -> Path:
    inner = own[len(root) :] if root != "/" and own.startswith(root) else own
    return Path(point) / inner.lstrip("/")


def _v2(own: Path) -> Cgroups:
    """A v2 group with processes gives its children no controllers, so ours may have to be its siblings."""
    for parent in (own, own.parent):
        try:
            enabled = (parent / "cgroup.subtree_control").read_text().split()
        except OSError:
            continue
        if "memory" in enabled:
            return Cgroups(2, tuple((name, parent) for name in CONTROLLERS if name in enabled))
    return Cgroups()


def _probe(parent: Path) -> bool:
    probe = parent / f"{PREFIX}probe-{os.getpid()}"
    try:
        probe.mkdir()
    except OSError:
        return False
    try:
        enter = ["/bin/sh", "-c", 'echo 0 > "$0/cgroup.procs"', str(probe)]
        return subprocess.run(enter, capture_output=True, timeout=PROBE_S).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False
    finally:
        probe.rmdir()


def pids_problem(cgroups: Cgroups, proc: Path = Path("/proc/self")) -> str:
    """Why nothing would limit the number of a sandbox's processes, and what mends it; empty: something does."""
    if "pids" in dict(cgroups.parents) or os.geteuid() != 0:
        return ""
    if (proc / "uid_map").read_text().split()[1] != "0":
        return ""  # root of a container's user namespace only: an ordinary user to the kernel, whom rlimits bind
    return (
        "nothing limits a sandbox's processes: this is root, whom RLIMIT_NPROC does not bind, and no pids cgroup can "
        "be written; run as an unprivileged user (docker run --user 1000:1000), or make /sys/fs/cgroup writable"
    )


def plan(resources: Resources, cgroups: Cgroups, name: str, timeout: float) -> Plan:
    """Pure: the groups and rlimits of one command. `name` is unique on the host; `timeout` in seconds."""
    rlimits = [(resource.RLIMIT_FSIZE, resources.disk_mb * 2**20), (resource.RLIMIT_CORE, 0)]
    rlimits.append((resource.RLIMIT_NOFILE, OPEN_FILES))
    if not cgroups.version:
        rlimits.append((resource.RLIMIT_AS, resources.memory_mb * 2**20))
        rlimits.append((resource.RLIMIT_CPU, int(timeout * max(1.0, resources.cpus)) + 1))
    count = resources.pids + BWRAP_PIDS
    wrap = () if "pids" in dict(cgroups.parents) else ("/usr/bin/prlimit", f"--nproc={count}:{count}", "--")
    return Plan(_groups(resources, cgroups, name), tuple(rlimits), wrap)


def _groups(resources: Resources, cgroups: Cgroups, name: str) -> tuple[Group, ...]:
    memory = str((resources.memory_mb + BWRAP_MB) * 2**20)
    pids = str(resources.pids + BWRAP_PIDS)
    quota = str(max(1000, int(resources.cpus * CPU_PERIOD_US)))
    v1 = {
        "memory": Group("", (("memory.limit_in_bytes", memory),), (("memory.oom_control", "oom_kill", "memory"),)),
        "pids": Group("", (("pids.max", pids),), (("pids.events", "max", "pids"),)),
        "cpu": Group("", (("cpu.cfs_quota_us", quota),)),
    }
    v2 = {
        "memory": Group("", (("memory.max", memory),), (("memory.events", "oom_kill", "memory"),)),
        "pids": Group("", (("pids.max", pids),), (("pids.events", "max", "pids"),)),
        "cpu": Group("", (("cpu.max", f"{quota} {CPU_PERIOD_US}"),)),
    }
    merged: dict[Path, Group] = {}
    for controller, parent in cgroups.parents:
        if controller == "cpu" and resources.cpus >= (os.cpu_count() or 1):
            continue
        new = (v1 if cgroups.version == 1 else v2)[controller]
        path = parent / name
        have = merged.get(path, Group(str(path), ()))
        merged[path] = Group(str(path), have.writes + new.writes, have.counters + new.counters)
    return tuple(merged.values())


def group_name(folder: Path) -> str:
    """Name of the cgroups of the sandbox in state directory `folder`, unique on the host."""
    return f"{PREFIX}{folder.name[:80]}-{hashlib.sha256(str(folder).encode()).hexdigest()[:12]}"
