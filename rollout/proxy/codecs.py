"""Codecs by model: read from the model's folder once, off the event loop, and shared between equal tokenizers.

`openforge.json` names the renderer. A hand-written one needs only the tokenizer's own file: transformers, which takes
seconds and hundreds of MiB, is imported for the stock-template renderer alone.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from rollout.config import Home
from rollout.errors import ConfigError
from rollout.inference.scripted import is_scripted, read_scripted
from rollout.proxy.render import CALL_MARK, Codec

ENTRY = "openforge.json"
CACHED = 4096
"""Texts of up to so many characters, and so many of them, keep their ids: a history is rendered again at each call."""
LONG, LONG_CACHED = 65536, 128
"""Likewise for longer ones: system prompts and files."""


class Codecs:
    """Codecs by model name. A failed load is tried again by the next caller."""

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
        renderer = renderer_name(folder)
        key = _fingerprint(folder, renderer)
        if key not in self._same:
            self._same[key] = load_codec(folder, renderer)
        return self._same[key]


def model_folder(home: Home, name: str) -> Path:
    """Folder of a model name, or the checkpoint folder that the name is."""
    return Path(name) if "/" in name else home.models / name


def renderer_name(folder: Path) -> str:
    """Raises ConfigError for a folder that is no model folder."""
    file = folder / ENTRY
    try:
        name = json.loads(file.read_text(encoding="utf-8"))["renderer"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{file} cannot be read ({error!r}); add the model with `openforge models add`") from error
    if name not in ("qwen3", "default"):
        raise ConfigError(f"{file} names the renderer {name!r}; there are: qwen3, default")
    return str(name)


def load_codec(folder: Path, renderer: str) -> Codec:
    """Reads tokenizer and template of a model folder; `renderer` is `qwen3` or `default`. Raises ConfigError."""
    try:
        tokenizer, made = _qwen3(folder) if renderer == "qwen3" else _stock(folder)
    except (OSError, ValueError, AssertionError) as error:
        raise ConfigError(f"the tokenizer in {folder} cannot be used ({error}); add the model again") from error
    stops = dict.fromkeys([*made.get_stop_token_ids(), *_end_ids(folder)])
    return Codec(tokenizer, made, [int(i) for i in stops], max(len(tokenizer), _scored(folder)))


class FileTokenizer:
    """A `tokenizer.json` with what a hand-written renderer asks of a tokenizer."""

    unk_token_id = None  # SmolLM2 names <|endoftext|> so, which the renderer would refuse as an end

    def __init__(self, file: Path) -> None:
        from tokenizers import Tokenizer

        if not file.exists():
            raise ConfigError(f"{file} is not there; a model folder needs a fast tokenizer")
        self.name_or_path = str(file.parent)
        self._core = Tokenizer.from_file(str(file))
        self._core.no_truncation()
        self._core.no_padding()
        self._short = lru_cache(CACHED)(self._encode)
        self._long = lru_cache(LONG_CACHED)(self._encode)

    def __len__(self) -> int:
        return int(self._core.get_vocab_size())

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        if len(text) > LONG:
            return list(self._encode(text))
        return list(self._short(text) if len(text) <= CACHED else self._long(text))

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        return str(self._core.decode(ids, skip_special_tokens=skip_special_tokens))

    def convert_tokens_to_ids(self, token: str) -> int | None:
        found = self._core.token_to_id(token)
        return None if found is None else int(found)

    def _encode(self, text: str) -> tuple[int, ...]:
        return tuple(self._core.encode(text, add_special_tokens=False).ids)


def _qwen3(folder: Path) -> tuple[Any, Any]:
    import renderers

    tokenizer = FileTokenizer(folder / "tokenizer.json")
    return tokenizer, renderers.create_renderer(tokenizer, renderers.Qwen3RendererConfig(enable_thinking=False))


def _stock(folder: Path) -> tuple[Any, Any]:
    import renderers
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    tokenizer.clean_up_tokenization_spaces = False  # decoding must give back what was encoded
    marked = CALL_MARK in (tokenizer.chat_template or "")
    parser = "qwen3" if marked and len(tokenizer.encode(CALL_MARK, add_special_tokens=False)) == 1 else None
    return tokenizer, renderers.create_renderer(tokenizer, renderers.DefaultRendererConfig(tool_parser=parser))


def _fingerprint(folder: Path, renderer: str) -> str:
    total = hashlib.sha256(renderer.encode())
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        file = folder / name
        total.update(file.read_bytes() if file.exists() else b"\0")
    return total.hexdigest()


def _scored(folder: Path) -> int:
    """How many ids the weights score: often more than the tokenizer names, to fill a block."""
    file = folder / "config.json"
    found = json.loads(file.read_text()).get("vocab_size") if file.exists() else None
    return found if isinstance(found, int) else 0


def _end_ids(folder: Path) -> list[int]:
    """End ids of generation_config.json: the engine stops at them of its own accord."""
    file = folder / "generation_config.json"
    found = json.loads(file.read_text()).get("eos_token_id") if file.exists() else None
    return [found] if isinstance(found, int) else list(found or [])
