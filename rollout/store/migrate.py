"""Schema version of each database, by alembic: an older home is upgraded, a newer one refused.

A new database gets the tables as they are now; an old one goes through the functions of `REVISIONS`, one for each
version above 1, in one transaction. Several databases may share one file (PostgreSQL), so the version row is named
after the metadata's first table.
"""

from __future__ import annotations

from collections.abc import Callable

import sqlalchemy as sa
from alembic.migration import MigrationContext
from alembic.operations import Operations
from sqlalchemy.engine import Connection, Engine

from rollout.errors import NewerHomeError
from rollout.store.revisions import split_calls

REVISIONS: dict[str, tuple[Callable[[Connection], None], ...]] = {"version_calls": (split_calls,)}
"""The revision to version 2, to version 3, and so on."""


def migrate(engine: Engine, metadata: sa.MetaData) -> None:
    """Brings the database to its newest version. Raises NewerHomeError when it is beyond it."""
    newest = 1 + len(REVISIONS.get(_table(metadata), ()))
    with engine.connect().execution_options(writer=True) as connection, connection.begin():
        found = current_version(connection, metadata)
        if found > newest:
            raise NewerHomeError(
                f"the store {engine.url!s} has schema version {found}, this openforge knows {newest}; "
                "upgrade openforge or use another OPENFORGE_HOME"
            )
        if found == newest:
            return
        _upgrade(connection, metadata, found)
        connection.execute(sa.text(f"DELETE FROM {_table(metadata)}"))
        connection.execute(sa.text(f"INSERT INTO {_table(metadata)} (version_num) VALUES ('{newest}')"))


def current_version(connection: Connection, metadata: sa.MetaData) -> int:
    table = sa.Table(_table(metadata), sa.MetaData(), sa.Column("version_num", sa.String(32), primary_key=True))
    table.create(connection, checkfirst=True)
    value = connection.execute(sa.select(table.c.version_num)).scalar()
    return int(value) if value else 0


def _table(metadata: sa.MetaData) -> str:
    return f"version_{sorted(metadata.tables)[0]}"


def _upgrade(connection: Connection, metadata: sa.MetaData, found: int) -> None:
    if found == 0:
        metadata.create_all(connection)
        return
    context = MigrationContext.configure(connection, opts={"version_table": _table(metadata)})
    with Operations.context(context):
        for revise in REVISIONS[_table(metadata)][found - 1 :]:
            revise(connection)
