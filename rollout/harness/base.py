"""The contract of a harness: the program that wraps the policy, run unmodified inside the sandbox."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol, runtime_checkable

from rollout.sandbox.base import Completed, Mount
from rollout.types import CallTag, Resources, Rollout, TaskSpec

ToolRoute = Literal["registered", "mcp", "skill"]
"""How a task's tools reach the policy: in the harness's own list, by an MCP server, or by a SKILL.md for its shell."""
StopStyle = Literal["refuse", "end_turn"]
"""How a harness takes the end of its session: a 400 that it does not repeat, or an answer that ends its turn."""


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
    resources: Resources | None = None
    """Limits of the agent's sandbox where the harness needs more than the task has; None: the task's."""


class CallFacts(Protocol):
    """What a tag is derived from: the outside of one model call."""

    @property
    def dialect(self) -> str:
        """`chat`, `responses` or `messages`."""
        ...

    @property
    def path(self) -> str:
        """Path of the request, without its query."""
        ...

    @property
    def headers(self) -> Mapping[str, str]:
        """By lower-case name."""
        ...

    @property
    def tools(self) -> tuple[str, ...]:
        """Names as the client wrote them; those inside a namespace as `<namespace>.<name>`."""
        ...

    @property
    def system(self) -> str:
        """Text of the first system or developer message, or empty."""
        ...

    @property
    def user(self) -> str:
        """Text of the last user message, or empty."""
        ...


Tagged = tuple[CallTag, str]
"""Purpose of a call, and the agent thread that it belongs to (`main` for the root)."""
Tagger = Callable[[CallFacts], Tagged]


@runtime_checkable
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


@runtime_checkable
class Tagging(Protocol):
    """A harness that tells its calls apart, and says how it wants to be stopped."""

    stop: StopStyle

    @staticmethod
    def tag(call: CallFacts) -> Tagged:
        """Pure. A call that the harness itself would not make is `unattributed`: the agent's shell knows the key."""
        ...
