"""Which teacher trajectories become SFT data: named rules with counts, pure. Serves distillation.

The first rules are rejection sampling (paper section 3.3: only successes are kept); those on identical actions and
on the shortest success are the paper's browser rules (B.3, 5-7), off by default. Rule 6 drops turns as training
samples only: recorded prompts are never edited.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from rollout.types import ModelCall, RolloutState, Trajectory
from training.config import CleanConfig

Action = tuple[str, str]
"""Name and canonical JSON of the arguments of a tool call."""


@dataclass(frozen=True)
class Cleaned:
    kept: tuple[Trajectory, ...]
    dropped: Counter[str] = field(default_factory=Counter)
    """Rule -> trajectories it dropped; each trajectory counts once, for the first rule that hit."""


def clean(trajectories: Sequence[Trajectory], config: CleanConfig) -> Cleaned:
    """Applies the rules in the order of `RULES`, then the shortest-success rule."""
    kept, dropped = [], Counter[str]()
    for trajectory in trajectories:
        hit = next((name for name, rule in RULES.items() if rule(trajectory, config)), "")
        if hit:
            dropped[hit] += 1
        else:
            kept.append(trajectory)
    if config.shortest_per_task:
        shortest = {t.rollout.task_id: t for t in sorted(kept, key=lambda t: -len(t.calls))}
        survivors = [t for t in kept if shortest[t.rollout.task_id] is t]
        dropped["longer_success"] += len(kept) - len(survivors)
        kept = survivors
    return Cleaned(tuple(squash(t, config) for t in kept), +dropped)


def squash(trajectory: Trajectory, config: CleanConfig) -> Trajectory:
    """Paper B.3 rule 6: of an overlong run of identical actions only the last turn stays trainable."""
    limit = config.squash_identical_over
    if not limit:
        return trajectory
    gone = {call.index for run in identical_runs(trajectory) if len(run) > limit for call in run[:-1]}
    return trajectory.model_copy(update={"calls": tuple(c for c in trajectory.calls if c.index not in gone)})


def identical_runs(trajectory: Trajectory) -> list[list[ModelCall]]:
    """Consecutive calls with the same single action, as runs; calls without an action break a run."""
    acting = [(actions_of(call), call) for call in trajectory.calls]
    return [[call for _, call in run] for actions, run in groupby(acting, key=lambda pair: pair[0]) if actions]


def actions_of(call: ModelCall) -> tuple[Action, ...]:
    """The tool calls of the answer, which is the last canonical message."""
    answer = call.messages[-1] if call.messages else {}
    return tuple(_actions(answer.get("tool_calls") or ()))


def _actions(tool_calls: Sequence[dict[str, Any]]) -> Iterator[Action]:
    for tool_call in tool_calls:
        function = tool_call.get("function", tool_call)
        arguments = function.get("arguments", {})
        if isinstance(arguments, str):
            with suppress(ValueError):  # a malformed payload is compared as text
                arguments = json.loads(arguments)
        yield str(function.get("name", "")), json.dumps(arguments, sort_keys=True)


Rule = Callable[[Trajectory, CleanConfig], bool]

RULES: dict[str, Rule] = {
    "not_finished": lambda t, c: t.rollout.state is not RolloutState.SUCCEEDED or t.reward is None,
    "below_reward": lambda t, c: (t.reward or 0.0) < c.min_reward,
    "policy_end": lambda t, c: bool(t.rollout.end_reason) and not c.allow_policy_ends,
    "malformed": lambda t, c: any(call.malformed for call in t.calls) and not c.allow_policy_ends,
    "cut_answer": lambda t, c: any(call.finish_reason == "length" for call in t.calls),
    "identical_actions": lambda t, c: (
        bool(c.drop_identical_over) and any(len(run) > c.drop_identical_over for run in identical_runs(t))
    ),
}
"""Rule name -> whether it drops the trajectory, in the order in which they are tried."""
