"""An answer as it grows: exact ids, log-probabilities and weight versions in; text, reasoning and tool calls out.

`Splitter` cuts the text. What may be the start of a tool call is held back until the answer has ended, so that its
markup never reaches the harness as text, and no code point is ever split. The streamed pieces of an answer always
add up to its unary form, because both come from the same cut.
"""

from __future__ import annotations

from collections.abc import Sequence

from rollout.errors import EngineError
from rollout.inference.base import Chunk
from rollout.proxy.dialects.base import Answer, Piece
from rollout.proxy.render import Codec
from rollout.types import VersionSpan

THINK, THINK_END = "<think>", "</think>"
_LOST = "\N{REPLACEMENT CHARACTER}"


class TextStream:
    """Ids to text, a piece at a time. Text that may end inside a code point waits for the next id."""

    def __init__(self, codec: Codec) -> None:
        self._codec = codec
        self._window: list[int] = []
        self._done = 0
        """How many ids of the window have been given out; they stay as context for the next ones."""

    def feed(self, ids: Sequence[int], *, last: bool = False) -> str:
        self._window.extend(ids)
        given = self._codec.decode(self._window[: self._done])
        text = self._codec.decode(self._window)
        if len(text) <= len(given) or (text.endswith(_LOST) and not last):
            return ""
        self._window = self._window[self._done :]
        self._done = len(self._window)
        return text[len(given) :]


class Splitter:
    """Cuts a text into reasoning (a leading think block), content, and what begins with the first tool call."""

    def __init__(self, call_mark: str) -> None:
        self._mark = call_mark
        self._state = self._start
        self._rest = ""
        self.held = ""
        """From the first tool call on, the newline before it included."""

    def feed(self, text: str) -> list[Piece]:
        self._rest += text
        out: list[Piece] = []
        state = None
        while state != self._state:
            state = self._state
            state(out)
        return out

    def finish(self) -> list[Piece]:
        """The text that was held back and turned out to be no call; `held` is left to the caller."""
        rest, self._rest = self._rest, ""
        kind = "reasoning" if self._state == self._reasoning else "content"
        return [Piece(kind, rest)] if rest else []  # type: ignore[arg-type]

    def _start(self, out: list[Piece]) -> None:
        text = self._rest.lstrip()
        if text.startswith(THINK):
            self._rest, self._state = text[len(THINK) :], self._opened
        elif not THINK.startswith(text):
            self._state = self._content

    def _opened(self, out: list[Piece]) -> None:
        self._rest = self._rest.lstrip("\n")
        if self._rest:
            self._state = self._reasoning

    def _reasoning(self, out: list[Piece]) -> None:
        end = self._rest.find(THINK_END)
        call = self._rest.find(self._mark) if self._mark else -1
        if call >= 0 and (end < 0 or call < end):
            self._emit(out, "reasoning", self._rest[:call].rstrip("\n"))
            self._rest, self._state = self._rest[call:], self._content
        elif end >= 0:
            self._emit(out, "reasoning", self._rest[:end].rstrip("\n"))
            self._rest, self._state = self._rest[end + len(THINK_END) :], self._closed
        else:
            marks = [m for m in (THINK_END, self._mark) if m]
            keep = max(_partial(self._rest, mark) for mark in marks)
            free = self._rest[: len(self._rest) - keep].rstrip("\n")
            self._emit(out, "reasoning", free)
            self._rest = self._rest[len(free) :]

    def _closed(self, out: list[Piece]) -> None:
        self._rest = self._rest.lstrip("\n")
        if self._rest:
            self._state = self._content

    def _content(self, out: list[Piece]) -> None:
        at = self._rest.find(self._mark) if self._mark else -1
        if at >= 0:
            cut = at - 1 if self._rest[:at].endswith("\n") else at
            self._emit(out, "content", self._rest[:cut])
            self._rest, self._state = self._rest[cut:], self._call
            return
        keep = max(_partial(self._rest, self._mark), _partial(self._rest, "\n" + self._mark)) if self._mark else 0
        free = self._rest[: len(self._rest) - keep]
        self._emit(out, "content", free)
        self._rest = self._rest[len(free) :]

    def _call(self, out: list[Piece]) -> None:
        self.held += self._rest
        self._rest = ""

    @staticmethod
    def _emit(out: list[Piece], kind: str, text: str) -> None:
        if text:
            out.append(Piece(kind, text))  # type: ignore[arg-type]


def _partial(text: str, mark: str) -> int:
    """Length of the longest end of `text` that `mark` begins with, short of the whole mark."""
    for size in range(min(len(text), len(mark) - 1), 0, -1):
        if mark.startswith(text[-size:]):
            return size
    return 0


class Capture:
    """Collects the chunks of one answer. Without `stream` its text is read once, at the end."""

    def __init__(self, codec: Codec, prompt: tuple[int, ...], *, tools: bool, stream: bool = True) -> None:
        self._codec = codec
        self._prompt = prompt
        self._text = TextStream(codec)
        self._split = Splitter(codec.call_mark if tools else "")
        self._stream = stream
        self._unread: list[int] = []
        self._parts: dict[str, list[str]] = {"content": [], "reasoning": []}
        self.ids: list[int] = []
        self.logprobs: list[float] | None = []
        self.versions: list[VersionSpan] = []
        self.finish_reason = ""

    def feed(self, chunk: Chunk) -> list[Piece]:
        """Takes the next ids; returns the text that is certain now. Raises EngineError for a wrong chunk."""
        if self.finish_reason:
            raise EngineError("the engine sent more ids after it had said that the answer was finished")
        if chunk.logprobs is not None and len(chunk.logprobs) != len(chunk.ids):
            raise EngineError(f"the engine sent {len(chunk.ids)} ids with {len(chunk.logprobs)} log-probabilities")
        if any(not 0 <= token < self._codec.size for token in chunk.ids):
            raise EngineError(f"the engine sent an id outside the vocabulary of {self._codec.size}: {chunk.ids}")
        self.ids.extend(chunk.ids)
        if chunk.logprobs is None:
            self.logprobs = None if chunk.ids else self.logprobs
        elif self.logprobs is not None:
            self.logprobs.extend(chunk.logprobs)
        self._count(chunk)
        self.finish_reason = chunk.finish_reason
        self._unread.extend(self._codec.body(chunk.ids) if chunk.finish_reason == "stop" else chunk.ids)
        if not (self._stream or chunk.finish_reason):
            return []
        text = self._text.feed(self._unread, last=bool(chunk.finish_reason))
        self._unread = []
        return self._keep(self._split.feed(text))

    def finish(self, call_id: str) -> tuple[Answer, list[Piece]]:
        """The answer, and the pieces that had been held back. Raises EngineError when the engine did not finish."""
        if not self.finish_reason:
            raise EngineError(f"the engine's answer ended after {len(self.ids)} ids without a finish reason")
        rest = self._keep(self._split.finish())
        held = self._split.held
        calls = self._codec.calls(self.ids, self._prompt, call_id) if held else ()
        malformed = bool(held) and not calls
        if malformed:
            rest += self._keep([Piece("content", held)])
        answer = Answer(
            content="".join(self._parts["content"]),
            reasoning="".join(self._parts["reasoning"]),
            tool_calls=calls or (),
            malformed=malformed,
            finish_reason="tool_calls" if calls and self.finish_reason == "stop" else self.finish_reason,
            prompt_tokens=len(self._prompt),
            completion_tokens=len(self.ids),
        )
        return answer, rest

    def _keep(self, pieces: list[Piece]) -> list[Piece]:
        for piece in pieces:
            self._parts[piece.kind].append(piece.text)
        return pieces

    def _count(self, chunk: Chunk) -> None:
        if not chunk.ids:
            return
        if self.versions and self.versions[-1].version == chunk.version:
            last = self.versions.pop()
            self.versions.append(VersionSpan(version=chunk.version, tokens=last.tokens + len(chunk.ids)))
        else:
            self.versions.append(VersionSpan(version=chunk.version, tokens=len(chunk.ids)))
