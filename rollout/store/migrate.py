"""Schema version of each database, by alembic: an older home is upgraded, a newer one refused.

Revisions are the functions in `REVISIONS`, one for each version above 0; several databases may share one file
(PostgreSQL), so the version row is named after the metadata's first table.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic.migration import MigrationContext
from alembic.operations import Operations
from sqlalchemy.engine import Connection, Engine

from rollout.errors import NewerHomeError

VERSION = 1


def migrate(engine: Engine, metadata: sa.MetaData) -> None:
    """Brings the database to `VERSION`. Raises NewerHomeError when it is beyond it."""
    with engine.connect().execution_options(writer=True) as connection, connection.begin():
        found = current_version(connection, metadata)
        if found > VERSION:
            raise NewerHomeError(
                f"the store {engine.url!s} has schema version {found}, this openforge knows {VERSION}; "
                "upgrade openforge or use another OPENFORGE_HOME"
            )
        if found == VERSION:
            return
        context = MigrationContext.configure(connection, opts={"version_table": _table(metadata)})
        with Operations.context(context):
            for version in range(found + 1, VERSION + 1):
                _upgrade(version, connection, metadata)
        connection.execute(sa.text(f"DELETE FROM {_table(metadata)}"))
        connection.execute(sa.text(f"INSERT INTO {_table(metadata)} (version_num) VALUES ('{VERSION}')"))


def current_version(connection: Connection, metadata: sa.MetaData) -> int:
    table = sa.Table(_table(metadata), sa.MetaData(), sa.Column("version_num", sa.String(32), primary_key=True))
    table.create(connection, checkfirst=True)
    value = connection.execute(sa.select(table.c.version_num)).scalar()
    return int(value) if value else 0


def _table(metadata: sa.MetaData) -> str:
    return f"version_{sorted(metadata.tables)[0]}"


def _upgrade(version: int, connection: Connection, metadata: sa.MetaData) -> None:
    """Version 1 is the first schema. A later one alters through `alembic.op` here."""
    if version == 1:
        metadata.create_all(connection)
