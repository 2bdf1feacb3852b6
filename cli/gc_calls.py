"""Which recorded calls may go, and their removal with the blobs that no other call names."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rollout.store import Store
    from rollout.types import ModelCall

BATCH = 400


def old_rollouts(store: Store, before: float) -> list[str]:
    """Ids of rollouts that ended before that time and that neither an unfinished stage nor a dataset needs."""
    free, busy = set(store.calls.rollouts()) - _in_datasets(store), _unfinished(store)
    old = (r for r in store.rollouts.query() if r.state.terminal and r.ended is not None and r.ended < before)
    return [r.id for r in old if r.id in free and r.run not in busy]


def _in_datasets(store: Store) -> set[str]:
    """Rollouts whose rows trained a checkpoint that stands, or that no stage has used yet."""
    from training.dataset import read_manifest, read_rows

    folders = [path for path in sorted(store.home.datasets.glob("[!.]*")) if read_manifest(path) is not None]
    return {row.rollout_id for folder in folders if _is_needed(store, folder) for row in read_rows(folder)}


def _is_needed(store: Store, dataset: Path) -> bool:
    from rollout.types import StageRecord

    trained = [r for r in store.records.all(StageRecord) if r.details.get("dataset") == str(dataset)]
    checkpoints = [Path(str(r.details["checkpoint"])) for r in trained if "checkpoint" in r.details]
    return not checkpoints or any(path.is_dir() for path in checkpoints)


def _unfinished(store: Store) -> set[str]:
    """Runs with a stage under way, in this moment or until it was killed: they find their rollouts in the store."""
    from filelock import FileLock, Timeout

    runs = {path.name.removesuffix(".work") for path in store.home.checkpoints.glob("*.work")}
    for path in (store.home.run / "stages").glob("*.lock"):
        try:
            FileLock(path).acquire(timeout=0).lock.release()
        except Timeout:
            runs |= {path.stem, path.stem.rpartition("-")[0]}
    return runs


def remove_calls(store: Store, rollout_ids: Sequence[str], *, dry_run: bool) -> int:
    """Bytes of the rows and blobs removed. The database file keeps its size and reuses the room."""
    gone = set(rollout_ids)
    kept = _blobs(store, [i for i in store.calls.rollouts() if i not in gone])
    freed = store.calls.size(rollout_ids)
    for digest in _blobs(store, sorted(gone)) - kept:
        freed += store.blobs.size(digest)
        if not dry_run:
            store.blobs.remove(digest)
    if not dry_run:
        store.calls.remove(rollout_ids)
    return freed


def _blobs(store: Store, rollout_ids: Sequence[str]) -> set[str]:
    return {digest for call in _calls(store, rollout_ids) for digest in (call.request, call.response) if digest}


def _calls(store: Store, rollout_ids: Sequence[str]) -> Iterator[ModelCall]:
    for at in range(0, len(rollout_ids), BATCH):
        for calls in store.calls.of_many(rollout_ids[at : at + BATCH]).values():
            yield from calls
