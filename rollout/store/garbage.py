"""What goes with the calls of some rollouts: their rows, and the parts and pictures that no other call needs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from rollout.store.parts import pictures_of
from rollout.store.tables import PARTS, calls, parts

T = TypeVar("T")
AT_ONCE = 400
"""Values of one statement."""


@dataclass(frozen=True)
class Garbage:
    parts: frozenset[bytes]
    pictures: frozenset[str]
    """sha256 of blobs."""
    bytes: int
    """Of rows and parts; pictures not counted."""


def find_garbage(c: Connection, rollout_ids: Sequence[str]) -> Garbage:
    """A part stays while a call of another rollout names it or what is the change of it."""
    gone = set(rollout_ids)
    sizes = sa.select(
        calls.c.rollout_id,
        sa.func.length(calls.c.body) + sa.func.coalesce(sa.func.length(calls.c.logprobs), 0),
        *(calls.c[kind] for kind in PARTS),
    )
    rows = c.execute(sizes).all()
    graph = {
        row.id: row
        for row in c.execute(
            sa.select(parts.c.id, parts.c.base, sa.func.length(parts.c.data).label("size"), parts.c.holes)
        )
    }
    bases = {name: row.base for name, row in graph.items()}
    kept = _reached(bases, (name for row in rows if row[0] not in gone for name in row[2:]))
    free = _reached(bases, (name for row in rows if row[0] in gone for name in row[2:])) - kept
    size = sum(row[1] for row in rows if row[0] in gone) + sum(graph[name].size for name in free)
    pictures = pictures_of(graph[n].holes for n in free) - pictures_of(graph[n].holes for n in graph.keys() - free)
    return Garbage(frozenset(free), frozenset(pictures), size)


def remove_garbage(c: Connection, rollout_ids: Sequence[str]) -> Garbage:
    """Deletes the rows; the pictures of what it returns are left to the caller."""
    found = find_garbage(c, rollout_ids)
    for some in _slices(list(rollout_ids)):
        c.execute(sa.delete(calls).where(calls.c.rollout_id.in_(some)))
    for names in _slices(sorted(found.parts)):
        c.execute(sa.delete(parts).where(parts.c.id.in_(names)))
    return found


def _reached(bases: dict[bytes, bytes | None], names: Iterable[bytes | None]) -> set[bytes]:
    """Those of `names` that are parts, their bases, and so on."""
    out: set[bytes] = set()
    for name in names:
        at = name
        while at is not None and at in bases and at not in out:
            out.add(at)
            at = bases[at]
    return out


def _slices(values: Sequence[T]) -> list[Sequence[T]]:
    return [values[at : at + AT_ONCE] for at in range(0, len(values), AT_ONCE)]
