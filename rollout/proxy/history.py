"""Which ids a call's prompt gets: the template's, with recorded ids wherever they say the same text.

Mode `template`: the prompt is what the chat template renders for this history. Where a recorded call (its prompt and
the ids sampled for it) reads the same, its ids are kept, so that calls extend each other token by token; where the
text differs the prompt forks with a reason. Mode `retain`: recorded ids win wherever the messages are equal.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from rollout.proxy.dialects.base import CallRequest
from rollout.proxy.messages import Message, continues
from rollout.proxy.render import Codec
from rollout.types import HistoryMode

REACH = 32
"""How many calls back recorded ids are looked for."""


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
    ids: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        self.ids = self.prompt + self.completion


@dataclass(frozen=True)
class Prompt:
    ids: tuple[int, ...]
    fork_reason: str


def make_prompt(codec: Codec, request: CallRequest, calls: Sequence[Recorded], mode: HistoryMode) -> Prompt:
    """`calls`: the thread's complete calls, oldest first. Raises Refused when the template refuses the history."""
    recent = list(reversed(calls[-REACH:]))
    if mode is HistoryMode.RETAIN and recent and (kept := _retained(codec, request, recent[0])):
        return Prompt(kept, "")
    full = codec.render(request.messages, request.tools)
    for call in recent:
        ids = splice(codec, full, call)
        if ids is not None:
            return Prompt(ids, "" if call is recent[0] else _reason(codec, request, recent[0]))
    return Prompt(tuple(full), _reason(codec, request, recent[0]) if recent else "")


def splice(codec: Codec, full: Sequence[int], call: Recorded) -> tuple[int, ...] | None:
    """`full` with its beginning replaced by the call's ids; None when they do not read the same."""
    size = len(call.ids)
    if tuple(full[:size]) == call.ids:
        return tuple(full)
    cut = _boundary(codec, full, call)
    if cut is None or codec.decode(full[:cut]) != codec.decode(call.ids):
        return None
    return call.ids + tuple(full[cut:])


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


def _retained(codec: Codec, request: CallRequest, last: Recorded) -> tuple[int, ...] | None:
    if tuple(request.tools) != last.tools or not continues(request.messages, last.messages):
        return None
    new = request.messages[len(last.messages) :]
    ids = codec.extend(last.prompt, last.completion, new, request.tools) if new else None
    return tuple(ids) if ids is not None else None


def _reason(codec: Codec, request: CallRequest, last: Recorded) -> str:
    """Why the prompt does not extend the previous call."""
    if tuple(request.tools) != last.tools:
        return "tools changed"
    if len(request.messages) < len(last.messages):
        return "history shortened"
    if not continues(request.messages, last.messages):
        return "client edit"
    return "reasoning stripped" if last.messages[-1].reasoning else "non-canonical"
