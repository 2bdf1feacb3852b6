"""Completion ids -> the text of each token, by the model's own tokenizer.

A character may take several tokens, and some tokenizers give a token another text at the start: so each token's
text is what it adds to the decoded text before it, and a token that ends inside a character adds nothing yet.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import parse_qs, urlsplit

from rollout.config import Home
from rollout.types import ModelRef

log = logging.getLogger(__name__)
_BROKEN = "\N{REPLACEMENT CHARACTER}"


class Decoder(Protocol):
    def decode(self, ids: list[int], /) -> str: ...


def pieces(decoder: Decoder, ids: Sequence[int]) -> list[str]:
    """One text for each id; together they are the decoded text."""
    out: list[str] = []
    start = read = 0
    for i in range(len(ids)):
        before = decoder.decode(list(ids[start:read]))
        text = decoder.decode(list(ids[start : i + 1]))
        whole = not text.endswith(_BROKEN) or i + 1 == len(ids)
        out.append(text[len(before) :] if whole else "")
        if whole and len(text) > len(before):
            start, read = read, i + 1
    return out


@dataclass
class Tokenizers:
    """Loads each model's tokenizer once; a model whose folder is gone has none, and its ids are shown instead."""

    home: Home
    missing: set[str] = field(default_factory=set)
    _loaded: dict[str, Decoder | None] = field(default_factory=dict)

    def pieces(self, model: ModelRef, ids: Sequence[int]) -> list[str]:
        if not ids:
            return []
        name = writer_of(model)
        if name not in self._loaded:
            self._loaded[name] = self._load(name)
        decoder = self._loaded[name]
        return pieces(decoder, ids) if decoder else [f"[{i}]" for i in ids]

    def _load(self, name: str) -> Decoder | None:
        folder = Path(name) if Path(name).is_absolute() else self.home.models / name
        try:
            return load_tokenizer(folder)
        except (OSError, ValueError, ImportError) as error:
            log.warning("no tokenizer for %s (%s): its token ids are shown instead of texts", name, error)
            self.missing.add(name)
            return None


def writer_of(model: ModelRef) -> str:
    """The model whose tokens these are; `scripted:oracle?student=NAME` writes with those of NAME."""
    return parse_qs(urlsplit(model.name).query).get("student", [model.name])[0]


@dataclass(frozen=True)
class _Exact:
    """Decodes without dropping special tokens or tidying spaces."""

    tokenizer: Any
    options: Mapping[str, bool]

    def decode(self, ids: list[int], /) -> str:
        return str(self.tokenizer.decode(ids, **self.options))


def load_tokenizer(folder: Path) -> Decoder:
    """Raises OSError or ValueError when `folder` holds no tokenizer.

    A `tokenizer.json` is read by `tokenizers` itself, in a fraction of the seconds that importing transformers takes.
    """
    if not folder.is_dir():
        raise OSError(f"there is no folder {folder}")
    if (folder / "tokenizer.json").exists():
        from tokenizers import Tokenizer

        text = (folder / "tokenizer.json").read_text(encoding="utf-8")
        json.loads(text)  # a broken file is a ValueError here, a bare Exception there
        return _Exact(Tokenizer.from_str(text), {"skip_special_tokens": False})
    from transformers import AutoTokenizer

    options = {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}
    return _Exact(AutoTokenizer.from_pretrained(str(folder), local_files_only=True), options)
