"""Folders of weights: written beside their place and renamed, so that a reader finds a whole one or none."""

from __future__ import annotations

import copy
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

WEIGHTS = (".safetensors", ".bin", ".pt", ".index.json", ".gguf")
OWN = ("config.json", "openforge.json")


@contextmanager
def whole_folder(target: Path) -> Iterator[Path]:
    """A folder to fill; it takes the place of `target` at the end, and vanishes when the body raises."""
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(f".{target.name}.{os.getpid()}.part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir()
    try:
        yield part
        if target.exists():
            shutil.rmtree(target)
        part.rename(target)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def export_model(
    model: Any, folder: Path, *, companions: Path, state: Mapping[str, torch.Tensor] | None = None
) -> None:
    """Writes `model` as a Hugging Face folder, with tokenizer and template files copied from `companions`.

    `state` replaces the model's own tensors; its dtype becomes the one that `config.json` names.
    """
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder, state_dict=None if state is None else dict(state))
    if state is not None:
        config = copy.deepcopy(model.config)
        config.dtype = next(iter(state.values())).dtype
        config.save_pretrained(folder)
    for file in sorted(companions.iterdir()):
        if file.is_file() and file.name not in OWN and not file.name.endswith(WEIGHTS):
            shutil.copyfile(file, folder / file.name)
