"""The contract of a harness: the program that wraps the policy, run unmodified inside the sandbox."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from rollout.sandbox.base import Completed, Mount
from rollout.types import Rollout, TaskSpec


@dataclass(frozen=True)
class Endpoint:
    """How the harness reaches the proxy. `base_path` is `/rollouts/<id>`; dialect routes hang below `<base>/v1`."""

    socket: str
    """Unix socket inside the sandbox."""
    base_path: str
    key: str


@dataclass(frozen=True)
class Launch:
    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, bytes] = field(default_factory=dict)
    """Absolute sandbox path -> contents, written before the start."""
    mounts: tuple[Mount, ...] = ()


class Harness(Protocol):
    name: str

    def launch(self, rollout: Rollout, task: TaskSpec, endpoint: Endpoint) -> Launch:
        """Pure: everything needed to start it."""
        ...

    def check(self, completed: Completed, end_reason: str) -> None:
        """Returns on a normal end. Raises HarnessError, PolicyEnd or PhaseTimeout.

        `end_reason` is why the proxy ended the session (`call_cap`, ...), or empty.
        """
        ...
