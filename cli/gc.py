"""`openforge gc`: frees what nothing needs any more. Kept: every record, the last two and the best checkpoints."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter
from rich.console import Console

from rollout.config import Home, open_home
from rollout.processes import find_serve

KEEP_CHECKPOINTS = 2
BEST = "best"
LOG_DAYS = 14.0
console = Console(highlight=False, soft_wrap=True)


def gc(*, dry_run: Annotated[bool, Parameter(negative="")] = False) -> int:
    """Removes step checkpoints except the last two and the best, left-over sandboxes and old logs.

    Parameters
    ----------
    dry_run
        Only say what would be removed.
    """
    home = open_home()
    total = 0
    for path, why in garbage(home):
        size = _size(path)
        total += size
        console.print(f"{'would remove' if dry_run else 'removed'} {path} ({why}, {size / 2**20:.1f} MiB)")
        if not dry_run:
            _remove(path)
    console.print(f"{total / 2**20:.1f} MiB {'would be' if dry_run else ''} freed")
    return 0


def garbage(home: Home) -> Iterator[tuple[Path, str]]:
    """What may go, with the reason. Sandboxes only while no serve runs."""
    yield from _old_checkpoints(home)
    if find_serve(home) is None and home.sandboxes.is_dir():
        yield from ((path, "left-over sandbox") for path in sorted(home.sandboxes.iterdir()))
    for path in sorted(home.logs.glob("*.log")):
        if time.time() - path.stat().st_mtime > LOG_DAYS * 86400:
            yield path, f"log older than {LOG_DAYS:.0f} days"
    for path in sorted(home.blobs.glob("*/*.part")):
        if time.time() - path.stat().st_mtime > 3600:
            yield path, "half-written blob"


def _old_checkpoints(home: Home) -> Iterator[tuple[Path, str]]:
    """Folders `step-<n>` beside each other, older than the last two; one that `best` points at stays."""
    for parent in sorted({path.parent for path in home.checkpoints.rglob("step-*") if path.is_dir()}):
        steps = sorted((p for p in parent.glob("step-*") if p.is_dir()), key=lambda p: p.stat().st_mtime)
        best = (parent / BEST).resolve()
        for path in steps[:-KEEP_CHECKPOINTS]:
            if path.resolve() != best:
                yield path, "checkpoint of an earlier step"


def _size(path: Path) -> int:
    if path.is_file():
        return path.stat().st_size
    return sum(p.stat().st_size for p in path.rglob("*") if p.is_file() and not p.is_symlink())


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()
