"""Which rollouts a report embeds, what it shows of each, and their compressed chunks.

An index row a rollout stands in the page as plain JSON; messages and tokens are zlib-compressed in chunks that the
browser inflates when one is opened. The same tasks are chosen for every model, so that trials can be compared.
"""

from __future__ import annotations

import base64
import json
import math
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from evaluation.report.collect import TEACHER, Evaluated, RunData, rollouts_of
from evaluation.report.tables import title_of, tone_of
from evaluation.run import family_of
from rollout.store import Store
from rollout.types import ModelCall, ModelRef, Rollout

CHUNK = 12
MAX_TEXT = 8_000
MAX_TOKENS = 4_000
MAX_CALLS = 64
Pieces = Callable[[ModelRef, Sequence[int]], list[str]]


@dataclass(frozen=True)
class Pick:
    label: str
    family: str
    rollout: Rollout


@dataclass(frozen=True)
class IndexRow:
    """What the list shows and filters by, and where the rest is."""

    id: str
    label: str
    title: str
    tone: str
    family: str
    task: str
    trial: int
    outcome: str
    """`passed`, `failed`, or `dropped` when there is no verdict."""
    reward: float | None
    calls: int
    tokens: int
    chunk: int
    place: int


@dataclass(frozen=True)
class ToolCall:
    name: str
    arguments: str


@dataclass(frozen=True)
class Message:
    role: str
    text: str
    calls: tuple[ToolCall, ...] = ()
    cut: int = 0
    """Characters left out."""


@dataclass(frozen=True)
class Turn:
    """What is new in a call's prompt, and its answer."""

    messages: tuple[Message, ...]
    answer: Message | None
    tokens: tuple[tuple[str, float | None, int], ...]
    """Text, log-probability, id."""
    finish: str
    version: str
    seconds: float
    notes: tuple[str, ...]


@dataclass(frozen=True)
class View:
    id: str
    model: str
    reward: float | None
    passed: bool
    explanation: str
    criteria: tuple[tuple[str, float], ...]
    failure: str
    end_reason: str
    seconds: float | None
    tools: tuple[tuple[str, str], ...]
    turns: tuple[Turn, ...]
    calls_left_out: int = 0


@dataclass(frozen=True)
class Packed:
    index: tuple[IndexRow, ...]
    chunks: tuple[str, ...]
    """base64 of the zlib-compressed JSON list of `View`s."""
    notes: tuple[str, ...]


def pack(store: Store, data: RunData, pieces: Pieces, cap: int) -> Packed:
    """Chooses at most `cap` rollouts of each model and packs them, reading calls a chunk at a time."""
    picks, notes = choose(store, data, cap)
    index: list[IndexRow] = []
    chunks: list[str] = []
    for at in range(0, len(picks), CHUNK):
        part = picks[at : at + CHUNK]
        calls = store.calls.of_many([p.rollout.id for p in part])
        views = [view(p.rollout, calls.get(p.rollout.id, []), pieces) for p in part]
        index += [_row(p, len(calls.get(p.rollout.id, ())), len(chunks), i) for i, p in enumerate(part)]
        chunks.append(compress([asdict(v) for v in views]))
    return Packed(tuple(index), tuple(chunks), tuple(notes))


# -- choosing ------------------------------------------------------------------------------------------


def choose(store: Store, data: RunData, cap: int) -> tuple[list[Pick], list[str]]:
    """Whole tasks, turn by turn from each family, the same for all models; then the teacher's rollouts."""
    picks: list[Pick] = []
    notes = []
    tasks = _tasks(data.results, cap)
    for item in data.results:
        stored = rollouts_of(store, item.result)
        ids = [rid for task in tasks for rid in item.result.rollouts.get(task, ())]
        found = [stored[rid] for rid in ids if rid in stored]
        total = sum(map(len, item.result.rollouts.values()))
        picks += [Pick(item.label, item.result.families.get(r.task_id, family_of(r.task)), r) for r in found]
        if len(found) < total:
            notes.append(f"{title_of(item.label)}: {len(found)} of {total}")
    taught = list(_round_robin(data.teacher, lambda r: (family_of(r.task), _outcome(r))))[:cap]
    picks += [Pick(TEACHER, family_of(r.task), r) for r in taught]
    if len(taught) < len(data.teacher):
        notes.append(f"{title_of(TEACHER)}: {len(taught)} of {len(data.teacher)}")
    order = {label: i for i, label in enumerate([*(e.label for e in data.results), TEACHER])}
    picks.sort(key=lambda p: (p.label == TEACHER, p.family, p.rollout.task_id, order[p.label], p.rollout.start_index))
    return picks, notes


def _tasks(results: Sequence[Evaluated], cap: int) -> list[str]:
    families = {t: f for item in results for t, f in item.result.families.items()}
    out: list[str] = []
    used = dict.fromkeys((e.label for e in results), 0)
    for task in _round_robin(sorted(families), lambda t: families[t]):
        cost = {e.label: len(e.result.rollouts.get(task, ())) for e in results}
        if any(used[label] + n > cap for label, n in cost.items()):
            break
        used = {label: used[label] + n for label, n in cost.items()}
        out.append(task)
    return out


def _round_robin(items: Sequence[Any], key: Callable[[Any], Any]) -> Iterator[Any]:
    groups: dict[Any, list[Any]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    for i in range(max(map(len, groups.values()), default=0)):
        for name in sorted(groups):
            if i < len(groups[name]):
                yield groups[name][i]


# -- what is shown of one ------------------------------------------------------------------------------


def view(rollout: Rollout, calls: Sequence[ModelCall], pieces: Pieces) -> View:
    verdict = rollout.verdict
    shown = list(calls[:MAX_CALLS])
    turns = tuple(
        _turn(rollout.model, call, before, pieces) for before, call in zip([None, *shown], shown, strict=False)
    )
    return View(
        id=rollout.id,
        model=rollout.model.name,
        reward=verdict.reward if verdict else None,
        passed=bool(verdict and verdict.passed),
        explanation=_cut(verdict.explanation)[0] if verdict else "",
        criteria=tuple(verdict.criteria.items()) if verdict else (),
        failure=f"{rollout.failure.kind.value} ({rollout.failure.phase}): {rollout.failure.message}"
        if rollout.failure
        else "",
        end_reason=rollout.end_reason,
        seconds=rollout.ended - rollout.started if rollout.ended and rollout.started else None,
        tools=_tools(shown[0]) if shown else (),
        turns=turns,
        calls_left_out=len(calls) - len(shown),
    )


def _turn(model: ModelRef, call: ModelCall, before: ModelCall | None, pieces: Pieces) -> Turn:
    answered = bool(call.messages) and call.messages[-1].get("role") == "assistant"
    prompt = call.messages[:-1] if answered else call.messages
    seen = before.messages if before else ()
    same = 0
    while same < min(len(seen), len(prompt)) and seen[same] == prompt[same]:
        same += 1
    if same == len(seen) - 1 and same < len(prompt) and prompt[same].get("role") == "assistant":
        same += 1  # the harness restates the answer in its own form
    ids = call.completion_ids[:MAX_TOKENS]
    logprobs = call.logprobs[:MAX_TOKENS] if call.logprobs else (None,) * len(ids)
    return Turn(
        messages=tuple(message(m) for m in prompt[same:]),
        answer=message(call.messages[-1]) if answered else None,
        tokens=tuple((text, _finite(p), i) for text, p, i in zip(pieces(model, ids), logprobs, ids, strict=True)),
        finish=call.finish_reason,
        version=", ".join(dict.fromkeys(str(span.version) for span in call.versions)),
        seconds=round(call.latency, 3),
        notes=tuple(_notes(call)),
    )


def _notes(call: ModelCall) -> Iterator[str]:
    if call.fork_reason:
        yield f"does not extend the last call: {call.fork_reason}"
    if call.tag.value != "main":
        yield f"purpose: {call.tag.value}"
    if call.malformed:
        yield "a tool call did not parse"
    if not call.delivered:
        yield "not delivered to the harness"
    if call.failure:
        yield f"failed: {call.failure.kind.value} {call.failure.message}"
    if len(call.completion_ids) > MAX_TOKENS:
        yield f"{len(call.completion_ids) - MAX_TOKENS} more tokens are in the store"


def message(raw: dict[str, Any]) -> Message:
    """A chat message as text and tool calls; whatever shape its content has, it is shown."""
    text, cut = _cut(_text(raw.get("content")))
    reasoning = raw.get("reasoning_content")
    if reasoning:
        text = f"<think>{_cut(_text(reasoning))[0]}</think>\n{text}"
    calls = raw.get("tool_calls")
    return Message(
        role=str(raw.get("role", "?")),
        text=text,
        calls=tuple(_tool_call(c) for c in calls) if isinstance(calls, list | tuple) else (),
        cut=cut,
    )


def _text(content: Any) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list | tuple):
        return "\n".join(str(p["text"]) if isinstance(p, dict) and "text" in p else _json(p) for p in content)
    return _json(content)


def _tool_call(raw: Any) -> ToolCall:
    function = raw.get("function", raw) if isinstance(raw, dict) else {"name": _json(raw)}
    arguments = function.get("arguments", "") if isinstance(function, dict) else ""
    name = function.get("name", "?") if isinstance(function, dict) else _json(function)
    return ToolCall(str(name), _cut(arguments if isinstance(arguments, str) else _json(arguments))[0])


def _tools(call: ModelCall) -> tuple[tuple[str, str], ...]:
    specs = [t.get("function", t) for t in call.tools]
    return tuple((str(s.get("name", "?")), str(s.get("description", ""))[:400]) for s in specs if isinstance(s, dict))


def _row(pick: Pick, calls: int, chunk: int, place: int) -> IndexRow:
    r = pick.rollout
    return IndexRow(
        id=r.id,
        label=pick.label,
        title=title_of(pick.label),
        tone=tone_of(pick.label),
        family=pick.family,
        task=r.task_id,
        trial=r.start_index + 1,
        outcome=_outcome(r),
        reward=r.verdict.reward if r.verdict else None,
        calls=calls,
        tokens=r.tokens,
        chunk=chunk,
        place=place,
    )


def _outcome(rollout: Rollout) -> str:
    if not rollout.verdict:
        return "dropped"
    return "passed" if rollout.verdict.passed else "failed"


def _cut(text: str) -> tuple[str, int]:
    return (text, 0) if len(text) <= MAX_TEXT else (text[:MAX_TEXT], len(text) - MAX_TEXT)


def _finite(value: float | None) -> float | None:
    return round(value, 4) if value is not None and math.isfinite(value) else None


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=str)


def compress(value: Any) -> str:
    """base64 of zlib of ASCII JSON: what `DecompressionStream("deflate")` inflates."""
    return base64.b64encode(zlib.compress(json.dumps(value, separators=(",", ":")).encode("ascii"), 9)).decode()
