"""One command in one bubblewrap, as the runner sees it: limits, output, deadline, and the end of every process.

    fork -> enter the cgroups -> bwrap -> init of a new pid namespace -> the command

bubblewrap names the namespace's init; the command has ended when bubblewrap *and* that init are gone, because
the kernel lets init go only after every process of the namespace.
"""

from __future__ import annotations

import json
import os
import resource
import select
import signal
import stat
import time
from binascii import a2b_base64, b2a_base64

from rollout.sandbox.runner_link import RETRY_S, Link, Lost, Stop

TYPE_CHECKING = False
if TYPE_CHECKING:  # the typing module would cost CPU at each start
    from typing import Any

    Json = dict[str, Any]

DISK_POLL_S = 0.5
FLOOD = 256
"""A command that writes more than FLOOD times its output limit is killed."""
MAX_DEPTH = 100
CLEAN_S = 2.0


def measure(roots: list[str], limit: int) -> int:
    """Bytes below `roots`, at least 4 KiB an entry; stops counting beyond `limit`.

    What cannot be measured (too deep, unreadable) counts as beyond the limit: else it would be a place to hide in.
    """
    total, stack = 0, [(root, 0) for root in roots]
    while stack:
        folder, depth = stack.pop()
        try:
            with os.scandir(folder) as entries:
                for entry in entries:
                    info = entry.stat(follow_symlinks=False)
                    total += max(info.st_size, info.st_blocks * 512, 4096)
                    if entry.is_dir(follow_symlinks=False):
                        stack.append((entry.path, depth + 1))
                    if total > limit or depth > MAX_DEPTH:
                        return limit + 1
        except FileNotFoundError:
            continue
        except OSError:
            return limit + 1
    return total


def family(pid: int) -> list[int]:
    """`pid` and all its descendants. In a pid namespace the orphans are init's children, so none is missed."""
    found = [pid]
    for parent in found:
        try:
            for task in os.listdir(f"/proc/{parent}/task"):
                with open(f"/proc/{parent}/task/{task}/children") as file:
                    found += map(int, file.read().split())
        except OSError:
            continue  # it has just ended
    return found


def measure_deleted(pids: list[int], roots: list[str]) -> int:
    """Bytes of files without a name, on the disks of `roots`, that `pids` hold open or mapped."""
    devices = {os.stat(root).st_dev for root in roots}
    opened: dict[tuple[int, int], int] = {}
    mapped: dict[tuple[int, int], int] = {}
    for pid in pids:
        try:
            for name in os.listdir(f"/proc/{pid}/fd"):
                _count_open(f"/proc/{pid}/fd/{name}", opened)
            _count_mapped(f"/proc/{pid}/maps", mapped)
        except OSError:
            continue
    return sum(size for (device, _), size in {**mapped, **opened}.items() if device in devices)


def _count_open(path: str, sizes: dict[tuple[int, int], int]) -> None:
    try:
        info = os.stat(path)
    except OSError:
        return  # closed meanwhile
    if stat.S_ISREG(info.st_mode) and info.st_nlink == 0:
        sizes[info.st_dev, info.st_ino] = max(info.st_size, info.st_blocks * 512, 4096)


def _count_mapped(path: str, sizes: dict[tuple[int, int], int]) -> None:
    """A mapping keeps a closed file alive; the file is taken to reach to its last mapped byte."""
    with open(path, errors="replace") as file:
        for line in file:
            if line.endswith(" (deleted)\n"):
                span, _, offset, device, inode = line.split(maxsplit=5)[:5]
                begin, end = (int(n, 16) for n in span.split("-"))
                major, minor = (int(n, 16) for n in device.split(":"))
                key = os.makedev(major, minor), int(inode)
                sizes[key] = max(sizes.get(key, 0), int(offset, 16) + end - begin)


class Groups:
    """The cgroups of one command: made before it, read and removed after it."""

    def __init__(self, plans: list[Json]) -> None:
        self._plans = plans

    def make(self) -> None:
        for plan in self._plans:
            os.makedirs(plan["path"], exist_ok=True)
            for name, value in plan["writes"]:
                write_file(f"{plan['path']}/{name}", value)

    def enter(self) -> None:
        """Moves the calling process."""
        for plan in self._plans:
            write_file(f"{plan['path']}/cgroup.procs", "0")

    def hit(self) -> str:
        """The limit that the kernel counted a violation of, or empty."""
        for plan in self._plans:
            for name, counter, limit in plan["counters"]:
                with open(f"{plan['path']}/{name}") as file:
                    for line in file:
                        key, _, value = line.partition(" ")
                        if key == counter and int(value) > 0:
                            return str(limit)
        return ""

    def remove(self) -> None:
        """Retries while the kernel lets go of processes that have just died."""
        end = time.monotonic() + CLEAN_S
        for plan in self._plans:
            while True:
                try:
                    os.rmdir(plan["path"])
                    break
                except FileNotFoundError:
                    break
                except OSError:
                    if time.monotonic() > end:
                        break
                    time.sleep(0.05)


def write_file(path: str, value: str) -> None:
    fd = os.open(path, os.O_WRONLY)
    try:
        os.write(fd, value.encode())
    finally:
        os.close(fd)


def memory_file(data: bytes) -> int:
    """A descriptor that reads `data` from its beginning."""
    fd = os.memfd_create("bwrap")
    os.write(fd, data)
    os.lseek(fd, 0, os.SEEK_SET)
    return fd


class Run:
    """One command in one bubblewrap, from fork to the death of its pid namespace."""

    def __init__(self, op: Json) -> None:
        self._op = op
        self._groups = Groups(op["groups"])
        self._cap = op["output"]
        self._kept: dict[int, bytearray] = {}
        self._seen = 0
        self._input = a2b_base64(op["stdin"])
        self._status = b""
        self._init = -1
        self._outer = -1
        self._limit = ""
        self._timed_out = False
        self._returncode: int | None = None
        self._poll = select.poll()

    def start(self) -> None:
        self._groups.make()
        options = b"".join(option.encode(errors="surrogateescape") + b"\0" for option in self._op["options"])
        args, rules = memory_file(options), memory_file(a2b_base64(self._op["seccomp"]))
        pipes = [os.pipe() for _ in range(4)]
        self._pid = os.fork()
        if self._pid == 0:
            self._child(args, rules, pipes)
        (child_in, self._in), (self._out, child_out), (self._err, child_err), (self._stat, child_stat) = pipes
        for fd in (args, rules, child_in, child_out, child_err, child_stat):
            os.close(fd)
        self._outer = os.pidfd_open(self._pid)
        self._kept = {self._out: bytearray(), self._err: bytearray()}
        self._open = {self._out, self._err, self._stat, self._outer}
        for fd in self._open:
            self._poll.register(fd, select.POLLIN)
        os.set_blocking(self._in, False)
        if self._input:
            self._poll.register(self._in, select.POLLOUT)
        else:
            os.close(self._in)

    def _child(self, args: int, rules: int, pipes: list[tuple[int, int]]) -> None:
        """Never returns. Python ignores SIGPIPE and SIGXFSZ, which an exec would pass on."""
        try:
            for ignored in (signal.SIGPIPE, signal.SIGXFSZ):
                signal.signal(ignored, signal.SIG_DFL)
            self._groups.enter()
            for number, value in self._op["rlimits"]:
                hard = resource.getrlimit(number)[1]
                value = value if hard == resource.RLIM_INFINITY else min(value, hard)
                resource.setrlimit(number, (value, value))
            for fd, target in ((pipes[0][0], 0), (pipes[1][1], 1), (pipes[2][1], 2)):
                os.dup2(fd, target)
            given = {"--args": args, "--seccomp": rules, "--json-status-fd": pipes[3][1]}
            for fd in given.values():
                os.set_inheritable(fd, True)
            bwrap, flags = self._op["bwrap"], [word for flag, fd in given.items() for word in (flag, str(fd))]
            os.execv(bwrap, [bwrap, *flags, "--", *self._op["argv"]])
        except BaseException as error:
            os.write(2, f"runner: {error!r}\n".encode())
        os._exit(126)

    def loop(self, link: Link) -> Json:
        """Serves the command until its whole process tree is gone. Raises Stop, Lost with the tree killed."""
        began = time.monotonic()
        deadline, look = began + self._op["timeout"], began + DISK_POLL_S
        try:
            while self._open:
                now = time.monotonic()
                link.ask()
                if now >= deadline and not self._timed_out:
                    self._timed_out = True
                    self.kill()
                if now >= look:
                    self._check_disk()
                    spent = time.monotonic() - now
                    look = now + max(DISK_POLL_S, 20 * spent)
                self._turn(link, max(0.0, min(deadline if not self._timed_out else now + 1, look) - now))
        except (Stop, Lost):
            self._drain()
            raise
        self._check_disk()
        return self._result(time.monotonic() - began)

    def _turn(self, link: Link, seconds: float) -> None:
        polled = link.fileno()
        if polled >= 0:
            self._poll.register(polled, select.POLLIN)
        elif not link.op:
            seconds = min(seconds, RETRY_S)
        events = self._poll.poll(seconds * 1000 + 1)
        if polled >= 0:
            self._poll.unregister(polled)
        for fd, _ in events:
            if fd == polled:
                link.pump()
            elif fd == self._in and self._input:
                self._feed()
            elif fd == self._outer:
                self._reap()
            elif fd == self._init:
                self._forget(fd)
            else:
                self._read(fd)

    def _read(self, fd: int) -> None:
        data = os.read(fd, 65536)
        if not data:
            self._forget(fd)
        elif fd == self._stat:
            self._status += data
            self._watch_init()
        else:
            self._seen += len(data)
            room = min(self._cap - sum(map(len, self._kept.values())), self._cap * 3 // 4 - len(self._kept[fd]))
            self._kept[fd] += data[: max(0, room)]
            if self._seen > self._cap * FLOOD and not self._limit:
                self._limit = "output"
                self.kill()

    def _watch_init(self) -> None:
        """Opens the pid namespace's init as soon as bubblewrap names it: its end is the end of every process."""
        if self._init < 0 and (pid := self._facts().get("child-pid")):
            try:
                self._init = os.pidfd_open(pid)
            except ProcessLookupError:
                return
            self._open.add(self._init)
            self._poll.register(self._init, select.POLLIN)

    def _facts(self) -> Json:
        facts: Json = {}
        for line in self._status.split(b"\n")[:-1]:
            facts.update(json.loads(line))
        return facts

    def _feed(self) -> None:
        try:
            self._input = self._input[os.write(self._in, self._input[:65536]) :]
        except BrokenPipeError:
            self._input = b""
        if not self._input:
            self._close_input()

    def _close_input(self) -> None:
        self._input = b""
        self._poll.unregister(self._in)
        os.close(self._in)

    def _reap(self) -> None:
        status = os.waitpid(self._pid, 0)[1]
        self._returncode = os.waitstatus_to_exitcode(status)
        self._forget(self._outer)
        self.kill()

    def _forget(self, fd: int) -> None:
        self._poll.unregister(fd)
        self._open.discard(fd)
        os.close(fd)

    def kill(self) -> None:
        """Kills bubblewrap and the namespace's init, and with it every process below."""
        for fd in (self._outer, self._init):
            if fd in self._open:
                signal.pidfd_send_signal(fd, signal.SIGKILL)

    def _check_disk(self) -> None:
        if not self._limit and self._used() > self._op["disk"]:
            self._limit = "disk"
            self.kill()

    def _used(self) -> int:
        """Bytes on disk, also those of deleted files that a process still holds."""
        roots = self._op["disk_roots"]
        held = measure_deleted(family(self._facts()["child-pid"]), roots) if self._init in self._open else 0
        return held + measure(roots, self._op["disk"])

    def _drain(self) -> None:
        self.kill()
        if self._input:
            self._close_input()
        end = time.monotonic() + CLEAN_S
        while self._open & {self._outer, self._init} and time.monotonic() < end:
            for fd, _ in self._poll.poll(50):
                if fd == self._outer:
                    self._reap()
                elif fd == self._init:
                    self._forget(fd)
                else:
                    self._read(fd)
        self._groups.remove()

    def _result(self, seconds: float) -> Json:
        if self._input:
            self._close_input()
        limit = self._limit or self._groups.hit()
        timed_out = self._timed_out and not limit  # the limit is the reason why it was not done in time
        self._groups.remove()
        out, err = (bytes(self._kept[fd]) for fd in (self._out, self._err))
        started = "exit-code" in self._facts() or timed_out or bool(limit)
        code = self._returncode
        if code is not None and code < 0:
            code = 128 - code
        return {
            "returncode": None if timed_out else code,
            "stdout": b2a_base64(out, newline=False).decode(),
            "stderr": b2a_base64(err, newline=False).decode(),
            "truncated": self._seen > len(out) + len(err),
            "timed_out": timed_out,
            "seconds": seconds,
            "limit": limit,
            "error": "" if started else f"bubblewrap ended with {code}: {err[-500:].decode(errors='replace')}",
        }
