"""Why a prompt does not extend the call before it: the words of a record's `fork_reason`, in one place.

The first cause in this order is told, the way a prompt is read:

    subagent               an agent thread of its own begins
    title, compaction ...  a call beside the conversation, by its tag
    compaction             the history was rebuilt behind a summary
    branch                 another call has gone on from the same place
    tool list changed, system changed
    history shortened      the history ends inside the earlier one
    client edit at token k the client changed what had been said; k counts the earlier call's ids from 0
    reasoning stripped     by the client or by the chat template
    non-canonical text     the model wrote what the template writes in another way (spacing, key order)
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from rollout.proxy.messages import Message, without_ids
from rollout.types import CallTag

SIDE = frozenset({CallTag.TITLE, CallTag.COMPACTION, CallTag.PROBE})
"""Calls beside a thread's conversation: the next turn does not follow them."""
SUBAGENT, COMPACTION, BRANCH = "subagent", "compaction", "branch"
TOOLS, SYSTEM = "tool list changed", "system changed"
SHORTENED, EDIT = "history shortened", "client edit"
REASONING, TEXT = "reasoning stripped", "non-canonical text"
BLOCK = 512
MARGIN = 8
"""Ids before the first one that differs, so that a character of several ids is read whole."""
THINK, THINK_END = "<think>", "</think>"
_BLOCKS = re.compile(r"(?:<think>.*?</think>\s*)+", re.DOTALL)


class Decoder(Protocol):
    def decode(self, ids: Sequence[int]) -> str: ...


class Earlier(Protocol):
    """A call that has been answered."""

    @property
    def ids(self) -> tuple[int, ...]:
        """Prompt and completion."""
        ...

    @property
    def messages(self) -> tuple[Message, ...]: ...

    @property
    def tools(self) -> tuple[object, ...]: ...


def kind_of(reason: str) -> str:
    """A reason without its place, for counting."""
    return reason.partition(" at token ")[0]


def explain(
    codec: Decoder, messages: Sequence[Message], tools: Sequence[object], full: Sequence[int], last: Earlier
) -> str:
    """Why `full`, the rendered history `messages`, does not begin with the ids of `last`."""
    if tuple(tools) != last.tools:
        return TOOLS
    if _system(messages) != _system(last.messages):
        return SYSTEM
    if len(messages) < len(last.messages) and echoes(last.messages, messages):
        return SHORTENED
    before, now = codec.decode(last.ids), codec.decode(full)
    at = first_difference(before, now)
    if not echoes(messages, last.messages):
        start = max(0, first_difference(last.ids, full) - MARGIN)
        return f"{EDIT} at token {token_at(codec, last.ids, at, start)}"
    return REASONING if _stripped(before, now, at) else TEXT


def echoes(history: Sequence[Message], earlier: Sequence[Message]) -> bool:
    """True when `history` begins with `earlier`, ids of calls aside; reasoning may be missing from it."""
    return len(history) >= len(earlier) and all(_echo(a, b) for a, b in zip(history, earlier, strict=False))


def first_difference(a: Sequence[object], b: Sequence[object]) -> int:
    """Index of the first place where two texts, or tuples of ids, differ; the shorter one's end included."""
    size = min(len(a), len(b))
    for start in range(0, size, BLOCK):
        if a[start : start + BLOCK] != b[start : start + BLOCK]:
            return next((i for i in range(start, min(start + BLOCK, size)) if a[i] != b[i]), size)
    return size


def token_at(codec: Decoder, ids: Sequence[int], character: int, start: int = 0) -> int:
    """Which id wrote that character of the ids' text; none before `start` did."""
    before, reach = len(codec.decode(ids[:start])), 1
    while start + reach < len(ids) and before + len(codec.decode(ids[start : start + reach])) <= character:
        reach *= 2
    found = bisect_right(range(reach + 1), character - before, key=lambda n: len(codec.decode(ids[start : start + n])))
    return min(start + max(0, found - 1), len(ids))


def _echo(now: Message, then: Message) -> bool:
    if now is then:
        return True
    kept = now.reasoning or not then.reasoning
    return without_ids(now) == without_ids(then if kept else replace(then, reasoning=""))


def _system(messages: Sequence[Message]) -> list[str]:
    """The system turns that the history begins with."""
    out = []
    for message in messages:
        if message.role != "system":
            break
        out.append(message.content)
    return out


def _stripped(before: str, now: str, at: int) -> bool:
    """Whether the texts part where blocks of reasoning stand in the earlier one and none, or empty ones, in the later.

    What follows a block that is gone may begin as the block does.
    """
    start = before.rfind(THINK, 0, at + len(THINK))
    if start < 0 or THINK_END in before[start:at]:
        return False
    then, left = _BLOCKS.match(before, start), _BLOCKS.match(now, start)
    return then is not None and (left is None or (_thought(left[0]) == "" and _thought(then[0]) != ""))


def _thought(blocks: str) -> str:
    return blocks.replace(THINK, "").replace(THINK_END, "").strip()
