"""Harnesses: the programs that wrap the policy, each run unmodified inside the sandbox."""

from __future__ import annotations

from rollout.errors import ConfigError
from rollout.harness.base import Harness
from rollout.harness.react import ReactHarness
from rollout.harness.solution import PREFIX, SolutionHarness

__all__ = ["make_harness"]


def make_harness(name: str) -> Harness:
    """Raises ConfigError that names the known ones."""
    if name == "react":
        return ReactHarness()
    if name.startswith(PREFIX) and len(name) > len(PREFIX):
        return SolutionHarness(name)
    raise ConfigError(f"no harness {name!r}; there are: react, {PREFIX}solve, {PREFIX}wrong/<name>, {PREFIX}idle")
