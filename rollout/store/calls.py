"""Recorded model calls (`calls.db`). Written by the proxy alone; everyone may read."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import sqlalchemy as sa
import zstandard
from sqlalchemy.engine import Connection

from rollout.store.database import Database
from rollout.store.tables import calls
from rollout.types import ModelCall


class CallStore:
    def __init__(self, db: Database) -> None:
        self._db = db

    async def append(self, call: ModelCall) -> None:
        """Commits one call. A second call with the same rollout and index is an error (IntegrityError)."""
        row = _row(call)
        await self._db.awrite(lambda c: c.execute(sa.insert(calls), row))

    async def delivered(self, rollout_id: str, index: int) -> None:
        """Flags a committed call as delivered to the harness."""
        await self._db.awrite(lambda c: _deliver(c, (calls.c.rollout_id == rollout_id) & (calls.c.index == index)))

    def of(self, rollout_id: str) -> list[ModelCall]:
        return self.of_many([rollout_id]).get(rollout_id, [])

    def of_many(self, rollout_ids: Iterable[str]) -> dict[str, list[ModelCall]]:
        """Calls of each rollout, in commit order."""
        wanted = list(rollout_ids)
        out: dict[str, list[ModelCall]] = {}
        for at in range(0, len(wanted), 400):
            query = (
                sa.select(calls.c.body, calls.c.delivered)
                .where(calls.c.rollout_id.in_(wanted[at : at + 400]))
                .order_by(calls.c.rollout_id, calls.c.index)
            )
            rows = self._db.read(lambda c, q=query: list(c.execute(q)))  # type: ignore[misc]
            for body, delivered in rows:
                call = ModelCall.model_validate_json(zstandard.decompress(body))
                out.setdefault(call.rollout_id, []).append(call.model_copy(update={"delivered": bool(delivered)}))
        return out

    def count(self) -> int:
        return self._db.read(lambda c: c.execute(sa.select(sa.func.count()).select_from(calls)).scalar_one())

    def rollouts(self) -> list[str]:
        """Ids of the rollouts that have calls."""
        query = sa.select(calls.c.rollout_id).distinct().order_by(calls.c.rollout_id)
        return self._db.read(lambda c: list(c.execute(query).scalars()))

    def size(self, rollout_ids: Sequence[str]) -> int:
        """Bytes of the calls of these rollouts."""
        query = sa.select(sa.func.coalesce(sa.func.sum(sa.func.length(calls.c.body)), 0))
        parts = [query.where(calls.c.rollout_id.in_(part)) for part in _parts(rollout_ids)]
        return sum(int(self._db.read(lambda c, q=q: c.execute(q).scalar_one())) for q in parts)  # type: ignore[misc]

    def remove(self, rollout_ids: Sequence[str]) -> None:
        """Removes all calls of these rollouts; only while no proxy writes."""
        changes = [sa.delete(calls).where(calls.c.rollout_id.in_(part)) for part in _parts(rollout_ids)]
        self._db.write(lambda c: [c.execute(change) for change in changes])


def _parts(rollout_ids: Sequence[str]) -> list[Sequence[str]]:
    return [rollout_ids[at : at + 400] for at in range(0, len(rollout_ids), 400)]


def _row(call: ModelCall) -> dict[str, Any]:
    return {
        "rollout_id": call.rollout_id,
        "index": call.index,
        "delivered": call.delivered,
        "failed": call.failure is not None,
        "tokens": len(call.completion_ids),
        "body": zstandard.compress(call.model_dump_json().encode(), 3),
    }


def _deliver(c: Connection, where: sa.ColumnElement[bool]) -> None:
    c.execute(sa.update(calls).where(where).values(delivered=True))
