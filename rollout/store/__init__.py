"""The store: what is true about rollouts, calls, engines and stage records, across processes and restarts."""

from __future__ import annotations

from dataclasses import dataclass

from rollout.blobs import Blobs
from rollout.config import Home
from rollout.store.calls import CallStore
from rollout.store.database import Database
from rollout.store.records import EngineStore, RecordStore
from rollout.store.rollouts import RolloutStore
from rollout.store.tables import CALLS, ROLLOUTS

__all__ = ["CallStore", "Database", "EngineStore", "RecordStore", "RolloutStore", "Store", "open_store"]


@dataclass(frozen=True)
class Store:
    """Everything a process needs of the store; `close` it when the process ends."""

    home: Home
    rollouts: RolloutStore
    calls: CallStore
    engines: EngineStore
    records: RecordStore
    blobs: Blobs
    databases: tuple[Database, ...]

    def close(self) -> None:
        for database in self.databases:
            database.close()


def open_store(home: Home) -> Store:
    """Opens `rollouts.db` and `calls.db` of a home. Raises NewerHomeError, StoreError."""
    queue = Database(home.database_url("rollouts"), ROLLOUTS)
    recorded = Database(home.database_url("calls"), CALLS, synchronous="FULL")
    blobs = Blobs(home.blobs)
    calls = CallStore(recorded, blobs)
    return Store(
        home=home,
        rollouts=RolloutStore(queue),
        calls=calls,
        engines=EngineStore(queue),
        records=RecordStore(queue),
        blobs=Blobs(home.blobs, beside=calls.wire),
        databases=(queue, recorded),
    )
