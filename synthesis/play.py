"""Plans: the steps of a solution, their JSON for the scripted teacher, and playing them against the services.

A plan is a list of `{"tool", "arguments"}` steps that may end with `{"final": text}`. An argument may be
`{"$result": k, "path": "a.b"}`: the value at that path of the k-th call's result.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rollout.errors import ConfigError
from rollout.services import ServiceHost, find_tool

TOOL = "python3 -I -S /opt/openforge/tool.py"
ANSWER_FILE = "/workspace/answer.txt"


@dataclass(frozen=True)
class Act:
    tool: str
    arguments: Mapping[str, Any]

    def dump(self) -> dict[str, Any]:
        return {"tool": self.tool, "arguments": dict(self.arguments)}


@dataclass(frozen=True)
class Final:
    text: str

    def dump(self) -> dict[str, Any]:
        return {"final": self.text}


Step = Act | Final


@dataclass(frozen=True)
class Played:
    final: dict[str, Any]
    """Final states and audit, as the verifier reads them."""
    answer: str | None
    acts: tuple[Act, ...]
    """The calls with their references resolved."""


def from_result(call: int, path: str) -> dict[str, Any]:
    return {"$result": call, "path": path}


def dump_plan(steps: Sequence[Step]) -> list[dict[str, Any]]:
    return [step.dump() for step in steps]


def parse_plan(rows: Any) -> tuple[Step, ...]:
    """Raises ConfigError for what is no list of steps."""
    steps: list[Step] = []
    for row in rows if isinstance(rows, list) else [rows]:
        match row:
            case {"final": str(text)}:
                steps.append(Final(text))
            case {"tool": str(tool), "arguments": dict(arguments)}:
                steps.append(Act(tool, arguments))
            case _:
                raise ConfigError(f"solution/plan.json: {row!r} is no step; a step has tool + arguments, or final")
    return tuple(steps)


def play(services: Mapping[str, Any], steps: Sequence[Step]) -> Played:
    """Plays the steps on freshly seeded services, in this process."""
    host = ServiceHost()
    host.open("play", services)
    acts: list[Act] = []
    results: list[Any] = []
    answer: str | None = None
    for step in steps:
        if isinstance(step, Final):
            answer = step.text
            continue
        act = Act(step.tool, {key: _resolve(value, results) for key, value in step.arguments.items()})
        acts.append(act)
        results.append(host.call("play", find_tool(act.tool).service, act.tool, act.arguments).body)
    return Played(host.final("play"), answer, tuple(acts))


def _resolve(value: Any, results: Sequence[Any]) -> Any:
    if not (isinstance(value, dict) and "$result" in value):
        return value
    try:
        found = results[value["$result"]]
        for key in str(value["path"]).split("."):
            found = found[key]
    except (IndexError, KeyError, TypeError) as error:
        raise ConfigError(f"solution/plan.json: {value!r} names no result of an earlier call") from error
    return found


def script(services: Mapping[str, Any], steps: Sequence[Step]) -> str:
    """The steps as a shell script that works through the same gateway as a policy."""
    played = play(services, steps)
    lines = ["#!/bin/bash", "set -eu"]
    for act in played.acts:
        arguments = shlex.quote(json.dumps(dict(act.arguments)))
        lines.append(f"{TOOL} {find_tool(act.tool).service} {act.tool} {arguments}")
    if played.answer is not None:
        lines.append(f"printf '%s\\n' {shlex.quote(played.answer)} > {ANSWER_FILE}")
    return "\n".join(lines) + "\n"
