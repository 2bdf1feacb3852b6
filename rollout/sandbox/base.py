"""The contract of a sandbox: the isolated place where one phase of one rollout runs.

A sandbox is driven from inside: a small stdlib-only runner (`runner.py`) holds one outbound long-poll to `serve`
and performs typed operations. Nothing relies on `exec` from outside. One `Sandbox` object is one isolated place;
fresh verification makes a second one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from rollout.types import Resources


@dataclass(frozen=True)
class Mount:
    """A host path seen read-only inside the sandbox."""

    source: Path
    target: str


@dataclass(frozen=True)
class SandboxSpec:
    """What a sandbox is made of. `id` is unique: rollout id + phase."""

    id: str
    resources: Resources
    mounts: tuple[Mount, ...] = ()
    proxy: Path | None = None
    """Host directory that holds the proxy's socket `proxy.sock`, bound to /run/proxy; None: no way out at all."""
    files: Mapping[str, bytes] = field(default_factory=dict)
    """Absolute paths below a writable directory (/workspace, /logs, /tests, /solution, /harness) -> contents."""
    needs_image: bool = False
    """The task asks for an image of its own: a back end without images refuses it."""
    state: bytes = b""
    """What `Sandbox.export` returned elsewhere, unpacked before `files` are written; empty: nothing."""


@dataclass(frozen=True)
class Command:
    argv: tuple[str, ...]
    timeout: float
    """Seconds of wall clock, enforced by the runner: the whole process tree is gone when `run` returns."""
    env: Mapping[str, str] = field(default_factory=dict)
    stdin: bytes = b""
    cwd: str = "/workspace"


@dataclass(frozen=True)
class Completed:
    """Outcome of a command. Exactly one of `timed_out` and `returncode` tells how it ended."""

    returncode: int | None
    stdout: bytes
    stderr: bytes
    truncated: bool
    """Output beyond `Resources.output_kb` was cut at the source."""
    timed_out: bool
    seconds: float
    limit: str = ""
    """The resource limit that the command's own processes hit: `memory`, `pids`, `disk`, `output` or empty."""


class Sandbox(Protocol):
    """All raise SandboxError when the place itself is broken or gone."""

    async def start(self, spec: SandboxSpec) -> None: ...

    async def run(self, command: Command) -> Completed: ...

    async def get(self, path: str, max_bytes: int) -> bytes | None:
        """The first `max_bytes` bytes of a regular file, no link followed in any component; None if there is none.

        Raises SandboxError also for a path outside of the writable directories.
        """
        ...

    async def export(self, paths: Sequence[str], max_bytes: int) -> bytes:
        """The regular files, folders and inner links below `paths` as a tar for another sandbox's `state`.

        Links that lead out of `paths` are left out, and so are files beyond `max_bytes` in all.
        """
        ...

    async def stop(self) -> None:
        """Removes everything; safe after a failed start and when called twice."""
        ...
