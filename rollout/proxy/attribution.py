"""Whose call it is: purpose and agent thread, told by the rollout's harness adapter from the outside of the request.

The proxy knows no harness: `serve` hands in how each one's calls are told apart and how it wants to be stopped. A call
that fits none of an adapter's profiles is `unattributed`: the agent's shell can read the key. It is recorded in a
thread of its own and no other call goes on from it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from rollout.proxy.dialects.base import CallRequest, DialectName
from rollout.types import CallTag

UNATTRIBUTED = "unattributed"
THREAD_MAX = 128
"""Characters of a thread's name, which a client's header gives."""


@dataclass(frozen=True)
class Facts:
    """The outside of one model call; what a tagger goes by."""

    dialect: DialectName
    path: str
    headers: Mapping[str, str]
    """By lower-case name."""
    tools: tuple[str, ...]
    system: str
    user: str


Tagger = Callable[[Facts], tuple[CallTag, str]]
StopStyle = Literal["refuse", "end_turn"]


@dataclass(frozen=True)
class Tagged:
    tag: CallTag = CallTag.MAIN
    thread: str = "main"


@dataclass(frozen=True)
class Adapters:
    """Harness name -> how its calls are told apart, and how its session is ended. Both may raise ConfigError."""

    tagger_of: Callable[[str], Tagger]
    stop_style: Callable[[str], StopStyle]


def main_alone() -> Adapters:
    """For harnesses whose calls are all the agent's own, and that take a 400 as their end."""
    return Adapters(lambda _: lambda _: (CallTag.MAIN, "main"), lambda _: "refuse")


def attribute(tagger: Tagger, dialect: DialectName, path: str, headers: Mapping[str, str], call: CallRequest) -> Tagged:
    outside = call.outside
    tag, thread = tagger(Facts(dialect, path, headers, outside.tools, outside.system, outside.user))
    return Tagged(tag, UNATTRIBUTED if tag is CallTag.UNATTRIBUTED else thread[:THREAD_MAX])
