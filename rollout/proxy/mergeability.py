"""How well a session's calls merge into training rows, and what broke those that do not: pure, over recorded calls.

A call joins the row whose ids its prompt begins with; any other opens a row of its own. The report names, for each
call that opened one, the reason that the proxy recorded, with the text of the earlier call and of this prompt from
where they part.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from rollout.proxy import forks
from rollout.types import CallTag, ModelCall, Record, Rollout

BEFORE, AFTER = 60, 240
"""Characters shown before and behind the place where two texts part."""
Decode = Callable[[Sequence[int]], str]


class Fork(Record):
    """A call that opened a row although its thread had one."""

    index: int
    tag: CallTag
    thread: str
    reason: str
    earlier: int | None = None
    """Index of the call that it might have extended."""
    token: int | None = None
    """First id, counted in the earlier call, that is another one."""
    recorded: str = ""
    rendered: str = ""
    """The two texts around that place; empty where the tokenizer is not at hand."""


class SessionReport(Record):
    rollout: str
    harness: str
    history: str
    calls: int
    """Those that are trained."""
    rows: int
    trained_tokens: int
    tags: dict[str, int]
    left_out: dict[str, int]
    """Calls that are not trained, by reason."""
    forks: tuple[Fork, ...]


class HarnessReport(Record):
    harness: str
    sessions: int
    calls: int
    rows: int
    reasons: dict[str, int]


def rows_of(calls: Iterable[ModelCall]) -> list[list[ModelCall]]:
    """The calls of each training row. Each call is in exactly one."""
    rows: list[list[ModelCall]] = []
    for call in calls:
        fitting = [row for row in rows if _extends(call, row[-1])]
        joined = max(fitting, key=lambda row: len(row[-1].prompt_ids) + len(row[-1].completion_ids), default=None)
        if joined is None:
            rows.append([call])
        else:
            joined.append(call)
    return rows


def session_report(
    rollout: Rollout, calls: Sequence[ModelCall], left_out: dict[str, int], decode: Decode | None = None
) -> SessionReport:
    """`calls`: the trained ones in commit order. `decode`: ids to text, special tokens shown."""
    rows = rows_of(calls)
    opened = sorted((row[0] for row in rows), key=lambda call: call.index)
    begun: set[str] = set()
    found = []
    for call in opened:
        if call.fork_reason or call.thread in begun:
            found.append(_fork(call, calls, decode))
        begun.add(call.thread)
    return SessionReport(
        rollout=rollout.id,
        harness=rollout.harness,
        history=rollout.history.value,
        calls=len(calls),
        rows=len(rows),
        trained_tokens=sum(len(call.completion_ids) for call in calls),
        tags=dict(Counter(call.tag.value for call in calls)),
        left_out=dict(left_out),
        forks=tuple(found),
    )


def by_harness(reports: Iterable[SessionReport]) -> list[HarnessReport]:
    groups: dict[str, list[SessionReport]] = {}
    for report in reports:
        groups.setdefault(report.harness, []).append(report)
    return [
        HarnessReport(
            harness=name,
            sessions=len(found),
            calls=sum(report.calls for report in found),
            rows=sum(report.rows for report in found),
            reasons=dict(Counter(forks.kind_of(fork.reason) for report in found for fork in report.forks)),
        )
        for name, found in sorted(groups.items())
    ]


def _extends(call: ModelCall, last: ModelCall) -> bool:
    whole = last.prompt_ids + last.completion_ids
    return call.prompt_ids[: len(whole)] == whole


def _fork(call: ModelCall, calls: Sequence[ModelCall], decode: Decode | None) -> Fork:
    """A row without a reason of the proxy's began because the call before it is not trained."""
    earlier = [c for c in calls if c.thread == call.thread and c.index < call.index and c.tag not in forks.SIDE]
    base = Fork(index=call.index, tag=call.tag, thread=call.thread, reason=call.fork_reason or "earlier call left out")
    if not earlier:
        return base
    before = earlier[-1].prompt_ids + earlier[-1].completion_ids
    size = min(len(before), len(call.prompt_ids))
    token = next((i for i in range(size) if before[i] != call.prompt_ids[i]), size)
    shown = _texts(decode, before, call.prompt_ids) if decode else ("", "")
    return base.model_copy(
        update={"earlier": earlier[-1].index, "token": token, "recorded": shown[0], "rendered": shown[1]}
    )


def _texts(decode: Decode, before: Sequence[int], now: Sequence[int]) -> tuple[str, str]:
    one, two = decode(before), decode(now)
    at = forks.first_difference(one, two)
    start = max(0, at - BEFORE)
    return one[start : at + AFTER], two[start : at + AFTER]
