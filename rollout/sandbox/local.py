"""The local sandbox: bubblewrap behind a runner of its own, without any daemon or image.

`start` lays out a state directory and starts the runner in a session of its own; `run` and `get` are operations
that the runner fetches by its long-poll; `export` and `stop` work on the state directory. A server that dies
leaves its sandboxes to `reap`, which the next one calls.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import stat
import subprocess
import sys
from base64 import b64decode, b64encode
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil

from rollout.config import CODE_ROOT, Home
from rollout.errors import SandboxError
from rollout.sandbox import bwrap, limits, seccomp, tree
from rollout.sandbox.base import Command, Completed, Mount, SandboxSpec
from rollout.sandbox.checks import check_local
from rollout.sandbox.hub import RunnerHub
from rollout.sandbox.runner import BOOT
from rollout.sandbox.state import folder_of, read_log, reap, remove_groups, write_config, write_state

__all__ = ["LocalSandbox", "check_local", "reap"]

ALWAYS = ("workspace", "logs")
ON_DEMAND = ("tests", "solution", "harness")
"""Shown only where the spec puts files there: the verifier and the solution are not there while the agent runs."""
TRANSPORT_S = 30.0
"""Added to a command's own deadline, for the way to the runner and back."""
STOP_S = 5.0


class LocalSandbox:
    """One isolated place of this host. Implements `rollout.sandbox.base.Sandbox`."""

    def __init__(self, hub: RunnerHub, home: Home, cgroups: limits.Cgroups | None = None) -> None:
        """`cgroups` overrides what the host offers: `Cgroups()` forces the rlimits."""
        self._hub = hub
        self._home = home
        self._cgroups = cgroups
        self._spec: SandboxSpec | None = None
        self._folder: Path | None = None
        self._runner: subprocess.Popen[bytes] | None = None
        self._gone = asyncio.Event()
        self._making: asyncio.Future[None] | None = None
        self._pidfd = -1

    async def start(self, spec: SandboxSpec) -> None:
        """Raises SandboxError, also when bubblewrap is missing or the task needs an image."""
        if spec.needs_image:
            raise SandboxError(
                f"{spec.id}: the task's Dockerfile is more than the plain base; it needs a sandbox with images (docker)"
            )
        if not shutil.which("bwrap"):
            raise SandboxError("; ".join(await asyncio.to_thread(check_local)))
        if unlimited := limits.pids_problem(await asyncio.to_thread(self._limited_by)):
            raise SandboxError(unlimited)
        folder = folder_of(self._home, spec.id)
        key = self._hub.open(folder.name)
        try:
            folder.mkdir(mode=0o700, parents=True)
        except OSError as error:
            self._hub.close(folder.name)
            raise SandboxError(f"{folder} cannot be made ({error}): does a sandbox of this id run already?") from error
        self._spec, self._folder = spec, folder
        self._making = asyncio.ensure_future(asyncio.to_thread(self._prepare, spec, folder, key))
        try:
            await asyncio.shield(self._making)
        except (OSError, psutil.Error) as error:
            raise SandboxError(f"sandbox {spec.id} could not be made: {error}") from error
        self._watch()

    async def run(self, command: Command) -> Completed:
        """Raises SandboxError when the sandbox is broken or gone."""
        spec, folder = self._started()
        plan = limits.plan(spec.resources, self._limited_by(), limits.group_name(folder), command.timeout)
        result = await self._call(_run_op(command, plan, spec, self._layout(spec, folder)), command.timeout)
        return Completed(
            returncode=result["returncode"],
            stdout=b64decode(result["stdout"]),
            stderr=b64decode(result["stderr"]),
            truncated=result["truncated"],
            timed_out=result["timed_out"],
            seconds=result["seconds"],
            limit=result["limit"],
        )

    async def get(self, path: str, max_bytes: int) -> bytes | None:
        """See the protocol."""
        _, folder = self._started()
        roots = _roots(folder)
        root, inner = roots.split(path)
        op = {"kind": "get", "root": str(roots.folders[root]), "path": inner, "max_bytes": max_bytes}
        result = await self._call(op, 0.0)
        return b64decode(result["data"]) if result["found"] else None

    async def export(self, paths: Sequence[str], max_bytes: int) -> bytes:
        """See the protocol. No command may be running."""
        _, folder = self._started()
        return await asyncio.to_thread(tree.pack, _roots(folder), paths, max_bytes)

    async def stop(self) -> None:
        """Ends the runner, every process and the state directory. Raises SandboxError when something is left."""
        folder, self._folder = self._folder, None
        if folder is None:
            return
        if self._making and not self._making.done():  # a start that was cancelled still runs in its thread
            await asyncio.wait([self._making], timeout=TRANSPORT_S)
        if self._runner and not self._gone.is_set():
            self._watch()
            self._hub.tell(folder.name, {"kind": "stop"})
            if not await self._ends():
                self._runner.kill()
                if not await self._ends():
                    raise SandboxError(f"the runner of {folder.name} (pid {self._runner.pid}) cannot be killed")
        self._hub.close(folder.name)
        await asyncio.to_thread(self._clean, folder)

    # -- in a thread: all of it blocks on the disk ---------------------------------------------------------

    def _prepare(self, spec: SandboxSpec, folder: Path, key: str) -> None:
        bwrap_etc(self._home)
        roots = _roots(folder)
        for name in ("workspace", "logs/agent", "logs/verifier", "logs/artifacts"):
            (folder / "root" / name).mkdir(parents=True)
        make_devices(folder / "dev")
        for path in spec.files:
            root, _ = roots.split(path)
            roots.folders[root].mkdir(exist_ok=True)
        if spec.state:
            tree.unpack(roots, spec.state)
        for path, data in spec.files.items():
            tree.write(roots, path, data, executable=path.endswith(".sh"))
        socket = self._home.run / "runner" / "runner.sock"
        config = write_config(folder, socket=socket, sandbox_id=folder.name, key=key)
        with (folder / "runner.log").open("wb") as log:
            self._runner = subprocess.Popen(
                [os.path.realpath(sys.executable), "-I", "-S", "-c", BOOT, str(CODE_ROOT), str(config)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                cwd="/",
                env={},
            )
        write_state(folder, self._runner.pid, self._groups(folder))

    def _clean(self, folder: Path) -> None:
        remove_groups(self._groups(folder))
        tree.remove(folder)

    def _groups(self, folder: Path) -> tuple[str, ...]:
        name = limits.group_name(folder)
        return tuple(sorted({str(parent / name) for _, parent in self._limited_by().parents}))

    def _limited_by(self) -> limits.Cgroups:
        return limits.host_cgroups() if self._cgroups is None else self._cgroups

    # -- the runner ----------------------------------------------------------------------------------------

    def _started(self) -> tuple[SandboxSpec, Path]:
        if self._spec is None or self._folder is None:
            raise SandboxError("the sandbox was not started, or is stopped")
        return self._spec, self._folder

    def _layout(self, spec: SandboxSpec, folder: Path) -> bwrap.Layout:
        shown = [Mount(path, inside) for inside, path in _roots(folder).folders.items() if path.is_dir()]
        return bwrap.Layout(
            etc=bwrap_etc(self._home),
            writable=tuple(shown),
            readonly=spec.mounts,
            devices=folder / "dev" if (folder / "dev").exists() else None,
            proxy=spec.proxy,
            tmp_bytes=spec.resources.disk_mb * 2**20,
        )

    async def _call(self, op: Mapping[str, Any], seconds: float) -> dict[str, Any]:
        _, folder = self._started()
        if self._gone.is_set():
            raise SandboxError(f"the runner of {folder.name} is gone: {read_log(folder)}")
        try:
            async with asyncio.timeout(seconds + TRANSPORT_S):
                result = await self._hub.call(folder.name, op)
        except TimeoutError as error:
            raise SandboxError(f"the runner of {folder.name} did not answer in time: {read_log(folder)}") from error
        if result.get("error"):
            mends = "; ".join(await asyncio.to_thread(check_local)) if "bubblewrap" in result["error"] else ""
            raise SandboxError(f"{folder.name}: {result['error']}" + (f" ({mends})" if mends else ""))
        return result

    def _watch(self) -> None:
        if self._runner and self._pidfd < 0:
            self._pidfd = os.pidfd_open(self._runner.pid)
            asyncio.get_running_loop().add_reader(self._pidfd, self._ended)

    async def _ends(self) -> bool:
        """Whether the runner is gone within STOP_S."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._gone.wait(), STOP_S)
        return self._gone.is_set()

    def _ended(self) -> None:
        """The runner's process is gone: reap it, and fail what waits for it."""
        asyncio.get_running_loop().remove_reader(self._pidfd)
        os.close(self._pidfd)
        assert self._runner
        code = self._runner.wait()
        self._gone.set()
        if self._folder:
            self._hub.lost(self._folder.name, f"the runner ended with {code}: {read_log(self._folder)}")


def _roots(folder: Path) -> tree.Roots:
    return tree.Roots({f"/{name}": folder / "root" / name for name in (*ALWAYS, *ON_DEMAND)})


def bwrap_etc(home: Home) -> Path:
    """The folder with the sandboxes' /etc files, made once per home."""
    folder = home.sandboxes / ".etc"
    if not folder.exists():
        part = home.sandboxes / f".etc.{os.getpid()}.{os.urandom(4).hex()}"
        part.mkdir(parents=True)
        for name, text in bwrap.ETC.items():
            (part / name).write_text(text)
        try:
            part.rename(folder)
        except OSError:  # another thread was first
            shutil.rmtree(part)
    return folder


def make_devices(folder: Path) -> None:
    """Device nodes of a sandbox's own, where root starts it and the disk allows them (see `bwrap`)."""
    if os.geteuid() != 0:
        return
    folder.mkdir(mode=0o755)
    try:
        for name, (major, minor) in bwrap.DEVICES.items():
            os.mknod(folder / name, stat.S_IFCHR | 0o666, os.makedev(major, minor))
            (folder / name).chmod(0o666)
        os.close(os.open(folder / "null", os.O_WRONLY))
    except PermissionError:  # no CAP_MKNOD, or a file system mounted nodev
        shutil.rmtree(folder)


def _run_op(command: Command, plan: limits.Plan, spec: SandboxSpec, layout: bwrap.Layout) -> dict[str, Any]:
    """The typed operation `run`, as the runner reads it."""
    return {
        "kind": "run",
        "bwrap": shutil.which("bwrap") or "/usr/bin/bwrap",
        "options": bwrap.options(layout, command.env, command.cwd),
        "seccomp": b64encode(seccomp.program()).decode(),
        "argv": (*plan.wrap, *command.argv),
        "stdin": b64encode(command.stdin).decode(),
        "timeout": command.timeout,
        "output": spec.resources.output_kb * 1024,
        "disk": spec.resources.disk_mb * 2**20,
        "disk_roots": [str(mount.source) for mount in layout.writable],
        "groups": [asdict(group) for group in plan.groups],
        "rlimits": plan.rlimits,
    }
