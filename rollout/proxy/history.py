"""Which ids a call's prompt gets: the template's, with recorded ids wherever they say the same text.

Mode `template`: the prompt is what the chat template renders for this history. Where a recorded call (its prompt and
the ids sampled for it) reads the same, its ids are kept, so that calls extend each other token by token; where the
text differs the prompt forks with a reason. Mode `retain`: recorded ids win wherever the messages are equal, their
reasoning and their spelling included; what follows them is written as the template writes it.

Only calls of the same agent thread are looked at.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from rollout.proxy import forks
from rollout.proxy.dialects.base import CallRequest
from rollout.proxy.messages import Message
from rollout.proxy.render import Codec
from rollout.types import CallTag, HistoryMode

REACH = 32
"""How many calls back recorded ids are looked for."""
WINDOW, MARGIN = 64, 8
"""Ids that are read to tell two texts apart; those before, and characters at the end that may be half a code point."""


@dataclass
class Recorded:
    """A committed call, as far as later calls need it. `messages` ends with the answer."""

    index: int
    prompt: tuple[int, ...]
    completion: tuple[int, ...]
    messages: tuple[Message, ...]
    tools: tuple[object, ...]
    request: str
    response: str
    """Blob digests."""
    delivered: bool
    tag: CallTag = CallTag.MAIN
    ids: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        self.ids = self.prompt + self.completion


@dataclass(frozen=True)
class Prompt:
    ids: tuple[int, ...]
    fork_reason: str


def make_prompt(
    codec: Codec, request: CallRequest, calls: Sequence[Recorded], mode: HistoryMode, tag: CallTag = CallTag.MAIN
) -> Prompt:
    """`calls`: the thread's complete calls, oldest first. Raises Refused when the template refuses the history."""
    recent = list(reversed(calls[-REACH:]))
    full = tuple(codec.render(request.messages, request.tools))
    found = _extension(codec, request, full, recent, mode)
    if found is None:
        return Prompt(full, _why_not(codec, request, full, recent, tag))
    ids, call = found
    last = _conversation(recent)
    if last is None or call.index >= last.index:
        return Prompt(ids, forks.BRANCH if _gone_on(call, recent) else "")
    return Prompt(ids, _why_not(codec, request, full, recent, tag))


def _extension(
    codec: Codec, request: CallRequest, full: tuple[int, ...], recent: Sequence[Recorded], mode: HistoryMode
) -> tuple[tuple[int, ...], Recorded] | None:
    """The ids that begin with those of the latest call they can begin with, and that call."""
    for call in recent:
        ids = _retained(codec, request, full, call) if mode is HistoryMode.RETAIN else None
        ids = ids or splice(codec, full, call)
        if ids is not None:
            return ids, call
    return None


def _conversation(recent: Sequence[Recorded]) -> Recorded | None:
    """The thread's latest turn; calls beside the conversation are none."""
    return next((call for call in recent if call.tag not in forks.SIDE), None)


def _gone_on(call: Recorded, recent: Sequence[Recorded]) -> bool:
    size = len(call.ids)
    return any(later.index > call.index and later.prompt[:size] == call.ids for later in recent)


def _why_not(codec: Codec, request: CallRequest, full: Sequence[int], recent: Sequence[Recorded], tag: CallTag) -> str:
    last = _conversation(recent)
    if tag in forks.SIDE:
        return tag.value
    if last is None:
        return forks.SUBAGENT if tag is CallTag.SUBAGENT else ""
    if any(call.tag is CallTag.COMPACTION and call.index > last.index for call in recent):
        return forks.COMPACTION
    return forks.explain(codec, request.messages, request.tools, full, last)


# -- the same text in recorded ids -----------------------------------------------------------------------


def splice(codec: Codec, full: Sequence[int], call: Recorded) -> tuple[int, ...] | None:
    """`full` with its beginning replaced by the call's ids; None when they do not read the same."""
    size = len(call.ids)
    if tuple(full[:size]) == call.ids:
        return tuple(full)
    if _part(codec, full, call.ids):
        return None
    cut = _boundary(codec, full, call)
    if cut is None or codec.decode(full[:cut]) != codec.decode(call.ids):
        return None
    return call.ids + tuple(full[cut:])


def _part(codec: Codec, full: Sequence[int], ids: tuple[int, ...]) -> bool:
    """Whether two texts surely differ, by a few ids around the first one that does: most calls need no more."""
    at = forks.first_difference(full, ids)
    start = max(0, at - MARGIN)
    one, two = codec.decode(full[start : at + WINDOW]), codec.decode(ids[start : at + WINDOW])
    size = max(0, min(len(one), len(two)) - MARGIN)
    return one[:size] != two[:size]


def _boundary(codec: Codec, full: Sequence[int], call: Recorded) -> int | None:
    """Where the call's turn ends in `full`: behind as many end-of-turn ids as the call's ids hold.

    An answer that was cut by its length has no end of its own: then it is before the one that the template adds.
    """
    ends = set(codec.stop_ids)
    ended = call.ids[-1] in ends
    count = sum(1 for token in call.ids if token in ends) + (0 if ended else 1)
    for at, token in enumerate(full):
        count -= token in ends
        if count == 0:
            return at + 1 if ended else at
    return None


# -- the same messages in recorded ids -------------------------------------------------------------------


def _retained(codec: Codec, request: CallRequest, full: tuple[int, ...], last: Recorded) -> tuple[int, ...] | None:
    """The call's ids and then the new messages: as its renderer bridges them, else as `full` ends."""
    if tuple(request.tools) != last.tools or not forks.echoes(request.messages, last.messages):
        return None
    new = request.messages[len(last.messages) :]
    if not new:
        return None
    bridged = codec.extend(last.prompt, last.completion, new, request.tools)
    if bridged is not None and tuple(bridged[: len(last.ids)]) == last.ids:
        return tuple(bridged)
    return _with_tail(codec, full, last, new)


def _with_tail(codec: Codec, full: tuple[int, ...], last: Recorded, new: Sequence[Message]) -> tuple[int, ...] | None:
    """Only where the tail shows the new messages, in their order, and nothing of an earlier answer."""
    cut = _boundary(codec, full, last)
    if cut is None:
        return None
    tail, at = codec.decode(full[cut:]), 0
    for message in new:
        at = tail.find(message.content.strip(), at)
        if at < 0:
            return None
    return last.ids + full[cut:]
