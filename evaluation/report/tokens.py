"""Completion ids -> the text of each token, by the model's own tokenizer.

A character may take several tokens, and some tokenizers give a token another text at the start: so each token's
text is what it adds to the decoded text before it, and a token that ends inside a character adds nothing yet.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

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
        if model.name not in self._loaded:
            self._loaded[model.name] = self._load(model.name)
        decoder = self._loaded[model.name]
        return pieces(decoder, ids) if decoder else [f"[{i}]" for i in ids]

    def _load(self, name: str) -> Decoder | None:
        folder = Path(name) if Path(name).is_absolute() else self.home.models / name
        try:
            return load_tokenizer(folder)
        except (OSError, ValueError, ImportError) as error:
            log.warning("no tokenizer for %s (%s): its token ids are shown instead of texts", name, error)
            self.missing.add(name)
            return None


@dataclass(frozen=True)
class _Exact:
    """Decodes without dropping special tokens or tidying spaces."""

    tokenizer: Any

    def decode(self, ids: list[int], /) -> str:
        return str(self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))


def load_tokenizer(folder: Path) -> Decoder:
    """Raises OSError or ValueError when `folder` holds no tokenizer."""
    if not folder.is_dir():
        raise OSError(f"there is no folder {folder}")
    from transformers import AutoTokenizer

    return _Exact(AutoTokenizer.from_pretrained(str(folder), local_files_only=True))
