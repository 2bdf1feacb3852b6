"""Harnesses: the programs that wrap the policy, each run unmodified inside the sandbox."""

from __future__ import annotations

import importlib
import re

from rollout.config import Home, open_home
from rollout.errors import ConfigError
from rollout.harness.base import CallFacts, Harness, StopStyle, Tagged, Tagger, Tagging
from rollout.harness.claude_code import ClaudeCodeHarness
from rollout.harness.codex import CodexHarness
from rollout.harness.mini_swe_agent import MiniSweAgentHarness
from rollout.harness.openclaw import OpenClawHarness
from rollout.harness.react import ReactHarness
from rollout.harness.solution import PREFIX, SolutionHarness
from rollout.harness.zeroclaw import ZeroClawHarness
from rollout.types import CallTag

__all__ = ["ADAPTERS", "make_harness", "stop_style", "tagger_of"]

Adapter = (
    type[ClaudeCodeHarness]
    | type[CodexHarness]
    | type[MiniSweAgentHarness]
    | type[OpenClawHarness]
    | type[ZeroClawHarness]
)
ADAPTERS: dict[str, Adapter] = {
    "codex": CodexHarness,
    "claude-code": ClaudeCodeHarness,
    "openclaw": OpenClawHarness,
    "zeroclaw": ZeroClawHarness,
    "mini-swe-agent": MiniSweAgentHarness,
}
"""Name -> adapter of a foreign program."""
OWN = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
"""`package.module:Class`: a harness of the user's own."""


def make_harness(name: str, home: Home | None = None) -> Harness:
    """`home` is where installed programs are; None: OPENFORGE_HOME. Raises ConfigError that names the known ones."""
    if name == "react":
        return ReactHarness()
    if name.startswith(PREFIX) and len(name) > len(PREFIX):
        return SolutionHarness(name)
    if name in ADAPTERS:
        return ADAPTERS[name](home or open_home())
    if OWN.fullmatch(name):
        return _load(name)
    known = ("react", *ADAPTERS, f"{PREFIX}solve", f"{PREFIX}wrong/<name>", f"{PREFIX}idle", "package.module:Class")
    raise ConfigError(f"no harness {name!r}; there are: {', '.join(known)}")


def tagger_of(name: str) -> Tagger:
    """How the calls of a harness are told apart; one without a way of its own makes main calls alone."""
    if name in ADAPTERS:
        return ADAPTERS[name].tag
    harness = make_harness(name)
    return harness.tag if isinstance(harness, Tagging) else _main


def stop_style(name: str) -> StopStyle:
    """How the proxy ends a session of this harness; a 400 unless it says otherwise."""
    if name in ADAPTERS:
        return ADAPTERS[name].stop
    harness = make_harness(name)
    return harness.stop if isinstance(harness, Tagging) else "refuse"


def _load(name: str) -> Harness:
    module, _, attribute = name.partition(":")
    try:
        harness = getattr(importlib.import_module(module), attribute)()
    except (ImportError, AttributeError, TypeError) as error:
        raise ConfigError(
            f"harness {name!r} cannot be made ({error}); it must be importable and take no argument"
        ) from error
    if not isinstance(harness, Harness):
        raise ConfigError(f"harness {name!r} must have `name`, `launch` and `check`")
    return harness


def _main(call: CallFacts) -> Tagged:
    return CallTag.MAIN, "main"
