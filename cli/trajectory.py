"""A trajectory for the terminal: the last call's conversation, each call's end, the verdict."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.rule import Rule

from rollout.types import ModelCall, Trajectory

COLOURS = {"system": "dim", "user": "cyan", "assistant": "green", "tool": "yellow"}
LONGEST = 4000


def print_trajectory(console: Console, trajectory: Trajectory) -> None:
    """Prints every message once: of each call only what the calls before it did not show."""
    rollout = trajectory.rollout
    console.print(Rule(escape(f"{rollout.id}  {rollout.harness}  {rollout.model.name}"), style="bold"))
    seen: tuple[dict[str, Any], ...] = ()
    for call in trajectory.calls:
        shared = _shared(seen, call.messages)
        for message in call.messages[shared:]:
            print_message(console, message)
        console.print(f"[dim]{escape(call_line(call))}[/dim]")
        seen = call.messages
    if rollout.failure:
        console.print(
            f"[red]{rollout.failure.kind} in {rollout.failure.phase}: {escape(rollout.failure.message)}[/red]"
        )
    if rollout.end_reason:
        console.print(f"the session ended by: {escape(rollout.end_reason)}")
    if rollout.verdict:
        verdict = rollout.verdict
        colour = "green" if verdict.passed else "red"
        console.print(f"[{colour}]reward {verdict.reward:g}[/{colour}]  {escape(verdict.explanation)}")
        for name, value in verdict.criteria.items():
            console.print(f"  {value:g}  {escape(name)}")
    console.print(f"state {rollout.state}")


def print_message(console: Console, message: Mapping[str, Any]) -> None:
    role = str(message.get("role", "?"))
    colour = COLOURS.get(role, "white")
    content = message.get("content")
    text = content if isinstance(content, str) else json.dumps(content, ensure_ascii=False) if content else ""
    console.print(f"[bold {colour}]{escape(role)}[/bold {colour}] {escape(text[:LONGEST])}")
    for call in message.get("tool_calls") or ():
        function = call.get("function", call)
        console.print(
            f"  [{colour}]-> {escape(str(function.get('name')))}({escape(str(function.get('arguments')))})[/]"
        )


def call_line(call: ModelCall) -> str:
    parts = [f"call {call.index}", f"{len(call.prompt_ids)}+{len(call.completion_ids)} tokens", call.finish_reason]
    parts.append(f"{call.latency:.2f} s")
    if call.logprobs:
        parts.append(f"mean logprob {sum(call.logprobs) / len(call.logprobs):.3f}")
    if call.fork_reason:
        parts.append(f"fork: {call.fork_reason}")
    if call.malformed:
        parts.append("malformed")
    if not call.delivered:
        parts.append("not delivered")
    return " · ".join(part for part in parts if part)


def _shared(seen: tuple[dict[str, Any], ...], messages: tuple[dict[str, Any], ...]) -> int:
    count = 0
    for old, new in zip(seen, messages, strict=False):
        if old != new:
            break
        count += 1
    return count
