"""Records of stages, steps and results, and the table of running engines."""

from __future__ import annotations

import time
from typing import Any, TypeVar

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from rollout.store.database import Database
from rollout.store.tables import engines, records
from rollout.types import EngineRecord, Record

R = TypeVar("R", bound=Record)


class RecordStore:
    """Typed rows by (kind, run, key); putting one again replaces it. `kind` is the record's class name."""

    def __init__(self, db: Database) -> None:
        self._db = db

    def put(self, record: Record, *, run: str, key: str) -> None:
        row = {"kind": type(record).__name__, "run": run, "key": key}
        where = sa.and_(*(records.c[name] == value for name, value in row.items()))

        def change(c: Connection) -> None:
            c.execute(sa.delete(records).where(where))
            c.execute(sa.insert(records), {**row, "created": time.time(), "body": record.model_dump_json()})

        self._db.write(change)

    def get(self, kind: type[R], *, run: str, key: str) -> R | None:
        found = [r for k, r in self.items(kind, run=run) if k == key]
        return found[0] if found else None

    def all(self, kind: type[R], *, run: str = "") -> list[R]:
        """In the order in which they were first put; of every run when `run` is empty."""
        return [r for _, r in self.items(kind, run=run)]

    def items(self, kind: type[R], *, run: str = "") -> list[tuple[str, R]]:
        query = sa.select(records.c.key, records.c.body).where(records.c.kind == kind.__name__)
        if run:
            query = query.where(records.c.run == run)
        rows = self._db.read(lambda c: list(c.execute(query.order_by(records.c.created, records.c.key))))
        return [(key, kind.model_validate_json(body)) for key, body in rows]


class EngineStore:
    """Running engines. Routing: an exclusive engine serves only the run that leases it."""

    def __init__(self, db: Database) -> None:
        self._db = db

    def put(self, record: EngineRecord) -> None:
        row: dict[str, Any] = {
            "id": record.id,
            "model": record.model,
            "exclusive": record.exclusive,
            "lease_until": record.lease_until,
            "body": record.model_dump_json(),
        }

        def change(c: Connection) -> None:
            c.execute(sa.delete(engines).where(engines.c.id == record.id))
            c.execute(sa.insert(engines), row)

        self._db.write(change)

    def remove(self, engine_id: str) -> None:
        self._db.write(lambda c: c.execute(sa.delete(engines).where(engines.c.id == engine_id)))

    def all(self) -> list[EngineRecord]:
        bodies = self._db.read(lambda c: list(c.execute(sa.select(engines.c.body).order_by(engines.c.id)).scalars()))
        return [EngineRecord.model_validate_json(b) for b in bodies]

    def routes(self, model: str, run: str, *, exclusive_only: bool = False) -> list[EngineRecord]:
        """The replicas that serve `model` to `run`: the run's own exclusive ones if there are any, else the shared.

        With `exclusive_only` a shared one never stands in for them.
        """
        found = [e for e in self.all() if e.model == model]
        own = [e for e in found if e.exclusive == run]
        return own if own or exclusive_only else [e for e in found if not e.exclusive]
