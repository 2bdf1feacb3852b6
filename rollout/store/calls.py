"""Recorded model calls (`calls.db`). Written by the proxy alone; everyone may read.

A call, its wire bytes and its parts (parts.py) are one transaction: a call that is there is whole, and one that is
not has left nothing. A part's base is looked for in memory (`Leaves` of the rollout) and checked in the transaction.
"""

from __future__ import annotations

import asyncio
import threading
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.engine import Connection

from rollout.blobs import Blobs
from rollout.store.database import Database
from rollout.store.garbage import Garbage, find_garbage, remove_garbage
from rollout.store.parts import (
    LEAVES,
    Entry,
    Leaves,
    Part,
    make_entry,
    make_leaf,
    pictures_of,
    read_call,
    read_contents,
    with_pictures,
)
from rollout.store.tables import PARTS, calls, parts
from rollout.types import ModelCall

REMEMBERED = 256 * 2**20
"""Bytes of leaves kept in memory; those of the rollout that was idle for longest go first."""
READ = 16
"""Rollouts whose parts are read at once."""
_MADE_OF = ("prompt", "answer", "messages", "tools")


class CallStore:
    def __init__(self, db: Database, blobs: Blobs) -> None:
        """`blobs` keeps the pictures of requests."""
        self._db = db
        self._blobs = blobs
        self._memory = Memory()

    async def append(self, call: ModelCall, request: bytes | None = None, response: bytes | None = None) -> ModelCall:
        """Commits one call with the bytes as received and as sent; returns it with their digests.

        A second call with the same rollout and index is an error (IntegrityError).
        """
        wire = {kind: sent for kind, sent in (("request", request), ("response", response)) if sent is not None}
        entry = await asyncio.to_thread(self._prepare, call, wire)
        entry = await self._db.awrite(lambda c: write_entry(c, entry, call, wire))
        self._memory.grow(call.rollout_id, entry)
        return call.model_copy(update={kind: entry.row[kind].hex() for kind in wire})

    async def delivered(self, rollout_id: str, index: int) -> None:
        """Flags a committed call as delivered to the harness."""
        await self._db.awrite(lambda c: _deliver(c, (calls.c.rollout_id == rollout_id) & (calls.c.index == index)))

    def of(self, rollout_id: str) -> list[ModelCall]:
        return self.of_many([rollout_id]).get(rollout_id, [])

    def of_many(self, rollout_ids: Iterable[str]) -> dict[str, list[ModelCall]]:
        """Calls of each rollout, in commit order."""
        wanted, out = list(rollout_ids), dict[str, list[ModelCall]]()
        for at in range(0, len(wanted), READ):
            names = wanted[at : at + READ]
            rows, found = self._db.read(lambda c, names=names: _load(c, names))  # type: ignore[misc]
            contents = read_contents(found)
            for row in rows:
                out.setdefault(row["rollout_id"], []).append(read_call(row, contents))
        return out

    def wire(self, digest: str) -> bytes | None:
        """The bytes of a request or a response, as they came or went; None for an unknown digest."""
        name = bytes.fromhex(digest)
        found = self._db.read(lambda c: load_parts(c, sa.select(sa.literal(name, sa.LargeBinary).label("id"))))
        if name not in found:
            return None
        holes = found[name].holes
        return with_pictures(
            read_contents(found)[name], holes, {p: self._blobs.get(p) for p in sorted(pictures_of([holes]))}
        )

    def count(self) -> int:
        return self._db.read(lambda c: c.execute(sa.select(sa.func.count()).select_from(calls)).scalar_one())

    def rollouts(self) -> list[str]:
        """Ids of the rollouts that have calls."""
        query = sa.select(calls.c.rollout_id).distinct().order_by(calls.c.rollout_id)
        return self._db.read(lambda c: list(c.execute(query).scalars()))

    def size(self, rollout_ids: Sequence[str]) -> int:
        """Bytes of the calls of these rollouts: what `remove` would free."""
        found: Garbage = self._db.read(lambda c: find_garbage(c, rollout_ids))
        return found.bytes + sum(self._blobs.size(picture) for picture in found.pictures)

    def remove(self, rollout_ids: Sequence[str]) -> None:
        """Removes all calls of these rollouts and what no other call needs; only while no proxy writes."""
        found: Garbage = self._db.write(lambda c: remove_garbage(c, rollout_ids))
        self._memory.clear()
        for picture in found.pictures:
            self._blobs.remove(picture)

    def _prepare(self, call: ModelCall, wire: Mapping[str, bytes]) -> Entry:
        leaves = self._memory.of(call.rollout_id)
        if leaves is None:
            leaves = self._db.read(lambda c: load_leaves(c, call.rollout_id)) if call.index else Leaves()
            self._memory.keep(call.rollout_id, leaves)
        entry = make_entry(call, wire, leaves)
        for picture in entry.pictures:
            self._blobs.put(picture)
        return entry


class Memory:
    """The leaves of rollouts that are under way, bounded by `REMEMBERED`."""

    def __init__(self) -> None:
        self._leaves: OrderedDict[str, Leaves] = OrderedDict()
        self._total = 0
        self._lock = threading.Lock()  # guards _leaves: calls are prepared in threads

    def of(self, rollout_id: str) -> Leaves | None:
        """A copy: what another call commits meanwhile is not seen."""
        with self._lock:
            found = self._leaves.get(rollout_id)
            return Leaves({kind: list(leaves) for kind, leaves in found.kinds.items()}) if found else None

    def keep(self, rollout_id: str, leaves: Leaves) -> None:
        with self._lock:
            if rollout_id not in self._leaves:
                self._leaves[rollout_id] = leaves
                self._total += leaves.size()

    def grow(self, rollout_id: str, entry: Entry) -> None:
        with self._lock:
            leaves = self._leaves.setdefault(rollout_id, Leaves())
            self._leaves.move_to_end(rollout_id)
            self._total -= leaves.size()
            for leaf in entry.grown:
                leaves.add(leaf)
            self._total += leaves.size()
            while self._total > REMEMBERED and len(self._leaves) > 1:
                self._total -= self._leaves.popitem(last=False)[1].size()

    def clear(self) -> None:
        with self._lock:
            self._leaves.clear()
            self._total = 0


# -- rows ----------------------------------------------------------------------------------------------


def write_entry(c: Connection, entry: Entry, call: ModelCall, wire: Mapping[str, bytes]) -> Entry:
    """Inserts a call and its parts; told anew without bases if one of them is gone. Returns what was written."""
    known = set(c.execute(sa.select(parts.c.id).where(parts.c.id.in_(entry.needs))).scalars()) if entry.needs else set()
    if entry.needs - known:
        entry = make_entry(call, wire, Leaves())
    write_parts(c, entry.parts)
    c.execute(sa.insert(calls), entry.row)
    return entry


def write_parts(c: Connection, new: Sequence[Part]) -> None:
    """Those that are there already stay as they are."""
    if not new:
        return
    rows = [asdict(part) for part in new]
    if c.dialect.name == "sqlite":
        c.execute(sqlite.insert(parts).on_conflict_do_nothing(), rows)
    else:
        c.execute(postgresql.insert(parts).on_conflict_do_nothing(), rows)


def load_parts(c: Connection, wanted: sa.Select[Any] | sa.CompoundSelect[Any]) -> dict[bytes, Part]:
    """The parts whose ids `wanted` selects, and all that they are the change of."""
    needed = sa.select(wanted.subquery().c.id).cte("needed", recursive=True)
    above = sa.select(parts.c.base).join(needed, parts.c.id == needed.c.id).where(parts.c.base.is_not(None))
    query = sa.select(parts).where(parts.c.id.in_(sa.select(needed.union(above).c.id)))
    return {row.id: Part(**row._mapping) for row in c.execute(query)}


def load_leaves(c: Connection, rollout_id: str) -> Leaves:
    """As the rollout's last calls leave them: after a restart."""
    rows = c.execute(
        sa.select(calls).where(calls.c.rollout_id == rollout_id).order_by(calls.c.index.desc()).limit(LEAVES)
    ).all()
    names = [getattr(row, kind) for row in rows for kind in PARTS if getattr(row, kind) is not None]
    if not names:
        return Leaves()
    contents = read_contents(load_parts(c, sa.select(parts.c.id).where(parts.c.id.in_(names))))
    leaves = Leaves()
    for row in reversed(rows):
        for kind in PARTS[1:]:
            if (name := getattr(row, kind)) in contents:
                kind = "ids" if kind == "answer" else kind
                leaves.add(make_leaf(kind, name, contents[name], leaves.nearest(kind, contents[name])))
    return leaves


def _load(c: Connection, rollout_ids: Sequence[str]) -> tuple[list[Mapping[str, Any]], dict[bytes, Part]]:
    mine = calls.c.rollout_id.in_(rollout_ids)
    rows = c.execute(sa.select(calls).where(mine).order_by(calls.c.rollout_id, calls.c.index)).mappings().all()
    if not rows:
        return [], {}
    columns = [sa.select(calls.c[kind].label("id")).where(mine, calls.c[kind].is_not(None)) for kind in _MADE_OF]
    return [dict(row) for row in rows], load_parts(c, sa.union(*columns))


def _deliver(c: Connection, where: sa.ColumnElement[bool]) -> None:
    c.execute(sa.update(calls).where(where).values(delivered=True))
