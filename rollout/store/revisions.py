"""Changes of the schema, each from one version to the next. They run inside alembic's operations context.

Tables are described here as the version has them, so that later changes of tables.py do not change what is done.
"""

from __future__ import annotations

import sqlalchemy as sa
import zstandard
from alembic import op
from pydantic import ValidationError
from sqlalchemy.engine import Connection

from rollout.errors import StoreError
from rollout.store.parts import Leaves, Part, make_entry
from rollout.types import ModelCall

_NAMES = ("prompt", "answer", "messages", "tools", "request", "response")


def split_calls(connection: Connection) -> None:
    """calls.db, 1 -> 2: a call was one JSON text; its long fields become parts. Its wire bytes stay blobs."""
    for name in ("logprobs", *_NAMES):
        op.add_column("calls", sa.Column(name, sa.LargeBinary))
    parts = op.create_table(
        "parts",
        sa.Column("id", sa.LargeBinary, primary_key=True),
        sa.Column("base", sa.LargeBinary),
        sa.Column("head", sa.Integer, nullable=False),
        sa.Column("tail", sa.Integer, nullable=False),
        sa.Column("ids", sa.Boolean, nullable=False),
        sa.Column("holes", sa.Text, nullable=False),
        sa.Column("data", sa.LargeBinary, nullable=False),
    )
    calls = sa.table("calls", *(sa.column(n) for n in ("rollout_id", "index", "body", "logprobs", *_NAMES)))
    order = sa.select(calls.c.rollout_id, calls.c.index).order_by(calls.c.rollout_id, calls.c.index)
    last, leaves = "", Leaves()
    for rollout_id, index in connection.execute(order).all():
        if rollout_id != last:
            last, leaves = rollout_id, Leaves()
        where = (calls.c.rollout_id == rollout_id) & (calls.c.index == index)
        try:
            _split(connection, calls, parts, where, leaves)
        except (zstandard.ZstdError, ValidationError) as error:
            raise StoreError(
                f"call {index} of {rollout_id} cannot be read, so calls.db stays as it was: {error}"
            ) from error


def _split(
    connection: Connection, calls: sa.TableClause, parts: sa.Table, where: sa.ColumnElement[bool], leaves: Leaves
) -> None:
    body = connection.execute(sa.select(calls.c.body).where(where)).scalar_one()
    entry = make_entry(ModelCall.model_validate_json(zstandard.decompress(body)), {}, leaves)
    for part in entry.parts:
        if connection.execute(sa.select(parts.c.id).where(parts.c.id == part.id)).first() is None:
            connection.execute(sa.insert(parts), _row(part))
    values = {name: entry.row[name] for name in ("body", "logprobs", *_NAMES)}
    connection.execute(sa.update(calls).where(where).values(values))
    for leaf in entry.grown:
        leaves.add(leaf)


def _row(part: Part) -> dict[str, object]:
    names = ("id", "base", "head", "tail", "ids", "holes", "data")
    return {name: getattr(part, name) for name in names}
