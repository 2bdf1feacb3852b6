"""Tokens <-> messages: one `Codec` per model, made from its folder, and the rule of which recorded ids are reused.

The ids come from the `renderers` package: a hand-written renderer where `openforge.json` names its family, else the
tokenizer's own chat template. Loading takes seconds, so that codecs are shared: by folder, and by equal tokenizer.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2

from rollout.config import Home
from rollout.errors import ConfigError
from rollout.inference.scripted import is_scripted, read_scripted
from rollout.proxy.dialects.base import Refused
from rollout.proxy.messages import Message, ToolCall

CALL_MARK = "<tool_call>"
_RESPONSE = re.compile(r"<tool_response>\n?(.*?)\n?</tool_response>", re.DOTALL)
ENTRY = "openforge.json"


class Codec:
    """Renders histories, reads answers. Not bound to a rollout; every method is a pure function of its arguments."""

    def __init__(self, tokenizer: Any, renderer: Any, stop_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._renderer = renderer
        self.stop_ids: tuple[int, ...] = tuple(stop_ids)
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
    """True for an object that is JSON and can be written as UTF-8."""
    if not isinstance(arguments, dict):
        return False
    try:
        json.dumps(arguments, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, UnicodeEncodeError, RecursionError):
        return False
    return True


# -- loading -------------------------------------------------------------------------------------------


class Codecs:
    """Codecs by model name, loaded off the event loop. A failed load is tried again by the next caller."""

    def __init__(self, home: Home) -> None:
        self._home = home
        self._loading: dict[str, asyncio.Task[Codec]] = {}
        self._same: dict[str, Codec] = {}

    async def of(self, model: str) -> Codec:
        """Raises ConfigError for a model folder that is missing or half-written."""
        name = read_scripted(model).student if is_scripted(model) else model
        task = self._loading.get(name)
        if task is None or (task.done() and (task.cancelled() or task.exception())):
            task = asyncio.create_task(asyncio.to_thread(self._load, model_folder(self._home, name)))
            self._loading[name] = task
        return await asyncio.shield(task)

    def _load(self, folder: Path) -> Codec:
        renderer = _renderer_name(folder)
        key = _fingerprint(folder, renderer)
        if key not in self._same:
            self._same[key] = load_codec(folder, renderer)
        return self._same[key]


def model_folder(home: Home, name: str) -> Path:
    """Folder of a model name, or the checkpoint folder that the name is."""
    return Path(name) if "/" in name else home.models / name


def load_codec(folder: Path, renderer: str) -> Codec:
    """Reads tokenizer and template of a model folder; `renderer` is `qwen3` or `default`."""
    import renderers
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    tokenizer.clean_up_tokenization_spaces = False  # decoding must give back what was encoded
    if renderer == "qwen3":
        tokenizer.unk_token = None  # SmolLM2 names <|endoftext|> so, which the renderer refuses
        made = renderers.create_renderer(tokenizer, renderers.Qwen3RendererConfig(enable_thinking=False))
    else:
        parser = "qwen3" if CALL_MARK in (tokenizer.chat_template or "") and _is_token(tokenizer, CALL_MARK) else None
        made = renderers.create_renderer(tokenizer, renderers.DefaultRendererConfig(tool_parser=parser))
    stops = dict.fromkeys([*made.get_stop_token_ids(), *_end_ids(folder)])
    return Codec(tokenizer, made, [int(i) for i in stops])


def _is_token(tokenizer: Any, text: str) -> bool:
    return len(tokenizer.encode(text, add_special_tokens=False)) == 1


def _renderer_name(folder: Path) -> str:
    file = folder / ENTRY
    try:
        name = json.loads(file.read_text(encoding="utf-8"))["renderer"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{file} cannot be read ({error!r}); add the model with `openforge models add`") from error
    if name not in ("qwen3", "default"):
        raise ConfigError(f"{file} names the renderer {name!r}; there are: qwen3, default")
    return str(name)


def _fingerprint(folder: Path, renderer: str) -> str:
    total = hashlib.sha256(renderer.encode())
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        file = folder / name
        total.update(file.read_bytes() if file.exists() else b"\0")
    return total.hexdigest()


def _end_ids(folder: Path) -> list[int]:
    """End ids of generation_config.json: the engine stops at them of its own accord."""
    file = folder / "generation_config.json"
    found = json.loads(file.read_text()).get("eos_token_id") if file.exists() else None
    return [found] if isinstance(found, int) else list(found or [])
