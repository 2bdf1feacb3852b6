"""Tokens <-> messages: `Codec` is the only place that does either (codecs.py makes one for each model).

The ids come from the `renderers` package: a hand-written renderer for a family that it knows, else the tokenizer's own
chat template. Prompts, answers, tool results and the scripted teacher's turns all go through here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2

from rollout.errors import ConfigError
from rollout.proxy.dialects.base import Refused, check_depth
from rollout.proxy.messages import Message, ToolCall

CALL_MARK = "<tool_call>"
_RESPONSE = re.compile(r"<tool_response>\n?(.*?)\n?</tool_response>", re.DOTALL)


class Codec:
    """Renders histories, reads answers. Not bound to a rollout; every method is a pure function of its arguments."""

    def __init__(self, tokenizer: Any, renderer: Any, stop_ids: Sequence[int], size: int) -> None:
        """`size`: ids below it are the model's."""
        self._tokenizer = tokenizer
        self.size = size
        self._renderer = renderer
        self.stop_ids: tuple[int, ...] = tuple(stop_ids)
        self.vision = False
        """Whether pictures can be shown to the model: no renderer here shows any."""
        self.call_mark: str = CALL_MARK if getattr(renderer, "supports_tools", True) else ""

    def render(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> list[int]:
        """Ids of the whole history up to where the answer begins. Raises Refused for what the template refuses."""
        rows = [m.dump() for m in messages]
        try:
            ids = self._renderer.render_ids(rows, tools=list(tools) or None, add_generation_prompt=True)
        except (jinja2.TemplateError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise Refused(
                400, "unrenderable", f"the chat template refuses this history: {error}", "messages"
            ) from error
        return [int(i) for i in ids]

    def extend(
        self,
        prompt: Sequence[int],
        completion: Sequence[int],
        new: Sequence[Message],
        tools: Sequence[Mapping[str, Any]],
    ) -> list[int] | None:
        """`prompt + completion` and then `new` messages, up to where the answer begins; None where it cannot be."""
        rows = [m.dump() for m in new]
        found = self._renderer.bridge_to_next_turn(list(prompt), list(completion), rows, tools=list(tools) or None)
        return [int(i) for i in found.token_ids] if found is not None else None

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False)) if ids else ""

    def encode(self, text: str) -> list[int]:
        return [int(i) for i in self._tokenizer.encode(text, add_special_tokens=False)]

    def body(self, completion: Sequence[int]) -> list[int]:
        """The completion without the id that stopped it."""
        ids = list(completion)
        return ids[:-1] if ids and ids[-1] in self.stop_ids else ids

    def calls(self, completion: Sequence[int], prompt: Sequence[int], call_id: str) -> tuple[ToolCall, ...] | None:
        """The tool calls of an answer; None when one of them is malformed."""
        parsed = self._renderer.parse_response(list(completion), prompt_ids=list(prompt))
        calls: list[ToolCall] = []
        for found in parsed.tool_calls:
            if found.status.value != "ok" or not found.name or not _is_plain(found.arguments):
                return None
            calls.append(ToolCall(f"{call_id}_{len(calls)}", str(found.name), found.arguments))
        return tuple(calls)

    def answer_ids(self, text: str, call: tuple[str, Mapping[str, Any]] | None) -> list[int]:
        """Ids that a model would have to sample so that the template writes this answer, end of turn included."""
        calls = (ToolCall("", *call),) if call else ()
        asked = Message("user", "?")
        before = self.decode(self.render([asked], ()))
        answered = [asked.dump(), Message("assistant", text, "", calls).dump()]
        whole = self.decode(self._renderer.render_ids(answered, add_generation_prompt=False))
        if not whole.startswith(before):
            raise ConfigError("this chat template does not write an answer behind its own generation prompt")
        ids = self.encode(whole[len(before) :])
        end = next((i for i, token in enumerate(ids) if token in self.stop_ids), len(ids) - 1)
        return ids[: end + 1]

    def tool_results(self, prompt: Sequence[int]) -> list[str]:
        """Text of each tool result in a rendered history, in order."""
        return _RESPONSE.findall(self.decode(prompt))


def _is_plain(arguments: Any) -> bool:
    """True for an object that is JSON, not too deep, and can be written as UTF-8."""
    if not isinstance(arguments, dict):
        return False
    try:
        check_depth(arguments)
        json.dumps(arguments, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, UnicodeEncodeError, RecursionError):
        return False
    return True
