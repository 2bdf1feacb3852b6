"""The demo's teacher: an engine that plays a bundle's `solution/plan.json`, in the student's own token ids.

`scripted:oracle?student=smollm2&lazy=0.86&wrong=0.05` plays the plan's shortcut for 86 of 100 rollouts, its mistake
for 5 and the oracle for the rest, so that rejection sampling has something to reject and RL something to teach.
Which one is drawn from the rollout's seed, the same for all of its calls; which step follows from how many tool
results the prompt holds, so that a repeated or retried call plays the same step again.
"""

from __future__ import annotations

import json
import random
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import parse_qsl

from rollout.errors import ConfigError, EngineError
from rollout.inference.base import CallContext, Chunk
from rollout.types import Sampling

PREFIX = "scripted:oracle"


class PlayCodec(Protocol):
    """What the teacher needs of the student's tokens."""

    def answer_ids(self, text: str, call: tuple[str, Mapping[str, Any]] | None) -> list[int]:
        """Ids of an assistant turn, end of turn included."""
        ...

    def tool_results(self, prompt: Sequence[int]) -> list[str]:
        """Text of each tool result in a rendered history, in order."""
        ...


@dataclass(frozen=True)
class Scripted:
    """A scripted teacher's name, read. `lazy` and `wrong` are shares of rollouts in [0, 1]."""

    student: str
    lazy: float = 0.0
    wrong: float = 0.0

    def choose(self, seed: int) -> str:
        """The plan that a rollout with this seed plays: `oracle`, `shortcut` or `mistake`."""
        drawn = random.Random(f"scripted:{seed}").random()
        if drawn < self.lazy:
            return "shortcut"
        return "mistake" if drawn < self.lazy + self.wrong else "oracle"


def is_scripted(model: str) -> bool:
    return model == PREFIX or model.startswith(f"{PREFIX}?")


def read_scripted(model: str) -> Scripted:
    """Reads `scripted:oracle?student=NAME&lazy=P&wrong=P`. Raises ConfigError."""
    if not is_scripted(model):
        raise ConfigError(
            f"no scripted model {model!r}; there is {PREFIX}, which plays each bundle's solution/plan.json"
        )
    values = dict(parse_qsl(model.partition("?")[2], keep_blank_values=True))
    unknown = sorted(set(values) - {"student", "lazy", "wrong"})
    if unknown:
        raise ConfigError(f"{model!r}: unknown key {unknown[0]!r}; a scripted teacher takes student, lazy and wrong")
    if not values.get("student"):
        raise ConfigError(f"{model!r} names no student; write scripted:oracle?student=MODEL, whose tokens it shall use")
    try:
        lazy, wrong = float(values.get("lazy", 0)), float(values.get("wrong", 0))
    except ValueError as error:
        raise ConfigError(f"{model!r}: lazy and wrong must be numbers") from error
    if not (0 <= lazy <= 1 and 0 <= wrong <= 1 and lazy + wrong <= 1):
        raise ConfigError(f"{model!r}: lazy and wrong must be in [0, 1] and add up to at most 1")
    return Scripted(values["student"], lazy, wrong)


class OracleEngine:
    """Plays plans; implements `Engine`. Its answers carry no log-probabilities and have version 0."""

    structured_outputs = False

    def __init__(self, script: Scripted, codec: PlayCodec) -> None:
        self._script = script
        self._codec = codec

    async def generate(
        self, ids: tuple[int, ...], sampling: Sampling, stop_ids: tuple[int, ...], context: CallContext
    ) -> AsyncIterator[Chunk]:
        """Raises EngineError for a bundle without a readable plan."""
        plan = read_plan(Path(context.task_bundle), self._script.choose(context.seed))
        text, call = next_step(plan, self._codec.tool_results(ids))
        answer = tuple(self._codec.answer_ids(text, call))
        kept = answer[: sampling.max_tokens]
        yield Chunk(kept, None, 0, "stop" if kept[-1] in stop_ids else "length")

    async def update(self, path: str, version: int) -> None:
        raise EngineError("the scripted teacher has no weights to update")

    async def close(self) -> None:
        return None


def read_plan(bundle: Path, kind: str) -> list[dict[str, Any]]:
    """Steps of one kind of play; a plan without that kind plays the oracle. Raises EngineError."""
    file = bundle / "solution" / "plan.json"
    try:
        plans = json.loads(file.read_text(encoding="utf-8"))
        steps = plans.get(kind) or plans["oracle"]
    except (OSError, ValueError, KeyError, AttributeError) as error:
        raise EngineError(f"{file} holds no plan for the scripted teacher ({error!r})") from error
    if not isinstance(steps, list):
        raise EngineError(f"{file}: {kind} must be a list of steps, not {type(steps).__name__}")
    return steps


def next_step(
    plan: Sequence[Mapping[str, Any]], results: Sequence[str]
) -> tuple[str, tuple[str, dict[str, Any]] | None]:
    """(text, call) of the step after `results`; beyond the plan's end a closing word. Raises EngineError.

    A result that a later step needs and that did not come (an injected error) ends the play like a policy that
    gives up: the verifier decides what that is worth.
    """
    step: Mapping[str, Any] = plan[len(results)] if len(results) < len(plan) else {"final": "Done."}
    if "final" in step:
        return str(step["final"]), None
    try:
        name, arguments = str(step["tool"]), dict(step["arguments"])
    except (KeyError, TypeError, ValueError) as error:
        raise EngineError(f"{step!r} is no step of a plan; a step has tool + arguments, or final") from error
    try:
        return "", (name, {key: _resolve(value, results) for key, value in arguments.items()})
    except (LookupError, TypeError, ValueError):
        return "I could not find what I needed.", None


def _resolve(value: Any, results: Sequence[str]) -> Any:
    """`{"$result": k, "path": "a.b"}` is the value at that path of the k-th call's result, counted from 0."""
    if not (isinstance(value, dict) and "$result" in value):
        return value
    found = json.loads(results[int(value["$result"])])
    if isinstance(found, dict) and set(found) == {"result"}:
        found = found["result"]
    for key in str(value.get("path", "")).split(".") if value.get("path") else ():
        found = found[int(key)] if isinstance(found, list) else found[key]
    return found
