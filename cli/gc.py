"""`openforge gc`: frees what nothing needs any more. Kept: every record, every checkpoint, what a running flow uses.

checkpoints/<run>-<stage>/               a finished stage: stays
checkpoints/<run>-<stage>.work/          goes once the stage is done; before, the last two states and the last
                                         two and best weights stay, from which it goes on
**/.<name>.<pid>.part/                   half-written by a process that is gone
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import psutil
from cyclopts import Parameter
from rich.console import Console

from cli.gc_calls import old_rollouts, remove_calls
from rollout.config import Home, open_home
from rollout.errors import ConfigError
from rollout.processes import find_serve

KEPT = 2
WORK = ".work"
LOG_DAYS = 14.0
DAY_S = 86400.0
console = Console(highlight=False, soft_wrap=True)


def gc(*, older_than: float = 0.0, dry_run: Annotated[bool, Parameter(negative="")] = False) -> int:
    """Removes work folders of finished stages, old steps of others, left-over sandboxes and old logs.

    Parameters
    ----------
    older_than
        Also remove the recorded calls of rollouts that ended more than this many days ago, except those that an
        unfinished stage or the dataset of a checkpoint needs; 0 keeps all. Not while serve runs.
    dry_run
        Only say what would be removed.
    """
    home = open_home()
    if older_than and find_serve(home):
        raise ConfigError(f"serve of {home.root} runs and may write calls; end it first: openforge down")
    total = 0
    for path, why in garbage(home):
        size = _size(path)
        total += size
        console.print(f"{'would remove' if dry_run else 'removed'} {path} ({why}, {size / 2**20:.1f} MiB)")
        if not dry_run:
            _remove(path)
    if older_than:
        total += _old_calls(home, time.time() - older_than * DAY_S, dry_run)
    console.print(f"{total / 2**20:.1f} MiB {'would be ' if dry_run else ''}freed")
    return 0


def garbage(home: Home) -> Iterator[tuple[Path, str]]:
    """What may go, with the reason. Sandboxes only while no serve runs."""
    for work in sorted(home.checkpoints.glob(f"*{WORK}")):
        with _idle(home, work.name.removesuffix(WORK)) as idle:
            if idle:
                yield from _of_work(home, work)
    for folder in (home.checkpoints, home.datasets, home.models, home.tasks):
        yield from ((path, "half-written folder") for path in sorted(folder.rglob(".*.part")) if _abandoned(path))
    if find_serve(home) is None and home.sandboxes.is_dir():
        yield from ((path, "left-over sandbox") for path in sorted(home.sandboxes.iterdir()))
    for path in sorted(home.logs.glob("*.log")):
        if time.time() - path.stat().st_mtime > LOG_DAYS * DAY_S:
            yield path, f"log older than {LOG_DAYS:.0f} days"
    for path in sorted(home.blobs.glob("*/*.part")):
        if time.time() - path.stat().st_mtime > 3600:
            yield path, "half-written blob"


@contextmanager
def _idle(home: Home, name: str) -> Iterator[bool]:
    """Holds the lock of a stage, so that no flow begins it meanwhile; False when one is in it."""
    from filelock import Timeout

    from tasks.context import stage_lock

    lock = stage_lock(home, *name.rsplit("-", 1)) if "-" in name else None
    try:
        if lock:
            lock.acquire(timeout=0)
    except Timeout:
        yield False
        return
    try:
        yield True
    finally:
        if lock:
            lock.release()


def _of_work(home: Home, work: Path) -> Iterator[tuple[Path, str]]:
    from training.models import ENTRY

    if (home.checkpoints / work.name.removesuffix(WORK) / ENTRY).exists():
        yield work, "work folder of a finished stage"
        return
    states = sorted(path for path in (work / "state").glob("[0-9]*"))
    best = _best(states[-1]) if states else ""
    weights = sorted(path for path in (work / "weights").glob("v*"))
    for path in states[:-KEPT] + [p for p in weights if str(p) != best][:-KEPT]:
        yield path, "earlier step"


def _best(state: Path) -> str:
    from training.rl_state import LOOP_FILE, LoopState

    return LoopState.model_validate_json((state / LOOP_FILE).read_text()).best_weights


def _abandoned(path: Path) -> bool:
    pid = path.name.split(".")[-2]
    return path.is_dir() and pid.isdecimal() and not psutil.pid_exists(int(pid))


def _old_calls(home: Home, before: float, dry_run: bool) -> int:
    """Bytes that go with the calls of rollouts which ended before that time."""
    from rollout.store import open_store

    store = open_store(home)
    try:
        old = old_rollouts(store, before)
        freed = remove_calls(store, old, dry_run=dry_run)
    finally:
        store.close()
    done = "would remove" if dry_run else "removed"
    console.print(f"{done} the calls of {len(old)} rollouts ({freed / 2**20:.1f} MiB)")
    return freed


def _size(path: Path) -> int:
    if path.is_file():
        return path.stat().st_size
    return sum(p.stat().st_size for p in path.rglob("*") if p.is_file() and not p.is_symlink())


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()
