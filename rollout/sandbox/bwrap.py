"""bubblewrap's arguments for one command: a pure function of what the sandbox shows.

Own user, pid, network, ipc and uts namespace; uid 1000; no capability; no further user namespaces. Visible are
/usr read-only, four generated files of /etc, /proc, a small /dev, a bounded /tmp, the sandbox's own writable
directories, the mounts it was given, and the proxy's socket directory. Everything else of the root is read-only
and empty. The *directory* of the socket is bound: a bound socket file refuses for ever once its server restarts.

Started by root, uid 1000 is root's uid outside and owns what root owns. So /proc is read-only (its sysctls, such as
core_pattern, ask for root's uid and for no capability), and the device nodes are the sandbox's own: with the
host's a command could change the mode of the host's /dev/null.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rollout.sandbox.base import Mount

UID = 1000
ENV = {
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "HOME": "/tmp",
    "USER": "agent",
    "LANG": "C.UTF-8",
    "TMPDIR": "/tmp",
}
ETC = {
    "passwd": f"root:x:0:0:root:/root:/usr/sbin/nologin\nagent:x:{UID}:{UID}:agent:/tmp:/bin/bash\n",
    "group": f"root:x:0:\nagent:x:{UID}:\n",
    "hosts": "127.0.0.1 localhost sandbox\n::1 localhost\n",
    "nsswitch.conf": "passwd: files\ngroup: files\nhosts: files\n",
}
ISOLATION = (
    "--unshare-user",
    "--disable-userns",
    "--unshare-pid",
    "--unshare-net",
    "--unshare-ipc",
    "--unshare-uts",
    "--unshare-cgroup-try",
    "--die-with-parent",
    "--new-session",
    "--cap-drop",
    "ALL",
)
DEVICES = {"null": (1, 3), "zero": (1, 5), "full": (1, 7), "random": (1, 8), "urandom": (1, 9), "tty": (5, 0)}
"""Name -> major and minor number (Linux, Documentation/admin-guide/devices.txt)."""
HOST_ETC = ("/etc/alternatives", "/etc/ld.so.cache")
"""Links and tables that programs below /usr are found through."""


@dataclass(frozen=True)
class Layout:
    """What one sandbox shows. Host path -> place inside."""

    etc: Path
    """Host folder with the files of `ETC`."""
    writable: tuple[Mount, ...]
    readonly: tuple[Mount, ...] = ()
    devices: Path | None = None
    """Host folder with nodes of `DEVICES` for this sandbox alone; None: the host's."""
    proxy: Path | None = None
    tmp_bytes: int = 64 * 2**20


def options(layout: Layout, env: Mapping[str, str], cwd: str) -> tuple[str, ...]:
    """Everything before `--`. Passed through a descriptor, so that no key in `env` shows in a process list."""
    args = [*ISOLATION, "--uid", str(UID), "--gid", str(UID), "--hostname", "sandbox"]
    args += ["--ro-bind", "/usr", "/usr"]
    for name in ("bin", "sbin", "lib", "lib32", "lib64"):
        if Path("/usr", name).exists():
            args += ["--symlink", f"usr/{name}", f"/{name}"]
    for name in ETC:
        args += ["--ro-bind", str(layout.etc / name), f"/etc/{name}"]
    for path in HOST_ETC:
        args += ["--ro-bind-try", path, path]
    args += ["--proc", "/proc", "--dev", "/dev"]
    size = ["--size", str(layout.tmp_bytes)]
    args += [*size, "--tmpfs", "/dev/shm", "--remount-ro", "/dev", "--remount-ro", "/proc"]
    if layout.devices:
        for name in DEVICES:
            args += ["--dev-bind", str(layout.devices / name), f"/dev/{name}"]
    args += ["--perms", "1777", *size, "--tmpfs", "/tmp"]
    for mount in layout.writable:
        args += ["--bind", str(mount.source), mount.target]
    for mount in layout.readonly:
        args += ["--ro-bind", str(mount.source), mount.target]
    if layout.proxy:
        args += ["--ro-bind", str(layout.proxy), "/run/proxy"]
    args += ["--remount-ro", "/", "--chdir", cwd, "--clearenv"]
    for key, value in {**ENV, **env}.items():
        args += ["--setenv", key, value]
    return tuple(args)
