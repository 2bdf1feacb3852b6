"""One database: connection settings, schema version, and the single writer.

Every write of a process goes through one thread, which takes whatever has queued up and commits it in one
`BEGIN IMMEDIATE` transaction (group commit); a failing write rolls back its own savepoint only. Readers use
their own connections and never wait for writers (SQLite in WAL mode).
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

import sqlalchemy as sa
from sqlalchemy.engine import Connection, Engine

from rollout.errors import NewerHomeError, StoreError

T = TypeVar("T")
GROUP = 256
_MENDS = {
    "not a database": "the file is damaged: move it away, or restore it from a copy",
    "malformed": "the file is damaged: move it away, or restore it from a copy",
    "is full": "free some disk space (`openforge gc`) and start again: what was committed is kept",
    "unable to open": "OPENFORGE_HOME must be a folder that you may write to",
    "readonly": "OPENFORGE_HOME must be a folder that you may write to",
}
_STOP = object()


def connect(url: str, synchronous: str = "NORMAL") -> Engine:
    """An engine with the pragmas of design "Store"; SQLite transactions are opened by us, not by the driver."""
    if not url.startswith("sqlite"):
        return sa.create_engine(url, pool_pre_ping=True)
    engine = sa.create_engine(url, connect_args={"timeout": 60, "check_same_thread": False})

    @sa.event.listens_for(engine, "connect")
    def _pragmas(connection: Any, _: Any) -> None:
        connection.isolation_level = None
        for pragma in ("journal_mode=WAL", f"synchronous={synchronous}", "busy_timeout=60000", "foreign_keys=ON"):
            connection.execute(f"PRAGMA {pragma}")

    @sa.event.listens_for(engine, "begin")
    def _begin(connection: Connection) -> None:
        immediate = connection.get_execution_options().get("writer", False)
        connection.exec_driver_sql("BEGIN IMMEDIATE" if immediate else "BEGIN")

    return engine


def told(engine: Engine, error: Exception) -> StoreError:
    """A database's error in one line, with what to do where that is known."""
    said = str(getattr(error, "orig", None) or error).splitlines()[0]
    name = engine.url.database if engine.url.get_backend_name() == "sqlite" else str(engine.url)
    mend = next((text for words, text in _MENDS.items() if words in said), "")
    return StoreError(f"the store {name} failed: {said}{mend and '; ' + mend}")


class Database:
    """Opens `url`, makes or checks the tables of `metadata`, and serialises writes. Close it when done.

    SQLite's `synchronous`: with NORMAL a commit outlives the process, with FULL a power cut, too.
    """

    def __init__(self, url: str, metadata: sa.MetaData, synchronous: str = "NORMAL") -> None:
        self.engine = connect(url, synchronous)
        self._queue: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._lock = threading.Lock()  # guards _closed, so that nothing is queued behind the writer's last batch
        self._closed = False
        self._migrate(metadata)
        self._writer = threading.Thread(target=self._run, name="store-writer", daemon=True)
        self._writer.start()

    def _migrate(self, metadata: sa.MetaData) -> None:
        from rollout.store.migrate import migrate

        try:
            migrate(self.engine, metadata)
        except NewerHomeError:
            raise
        except sa.exc.SQLAlchemyError as error:
            self.engine.dispose()
            raise told(self.engine, error) from error

    def read(self, query: Callable[[Connection], T]) -> T:
        """Runs `query` on a connection of its own, in one snapshot. Raises StoreError."""
        try:
            with self.engine.connect() as connection:
                return query(connection)
        except (sa.exc.OperationalError, sa.exc.DatabaseError) as error:
            raise told(self.engine, error) from error

    def submit(self, change: Callable[[Connection], T]) -> Future[T]:
        """Queues `change`; the future resolves after its transaction has been committed.

        Raises StoreError once the database is closed.
        """
        future: Future[T] = Future()
        with self._lock:
            if self._closed:
                raise StoreError(f"the store {self.engine.url!s} is closed")
            self._queue.put((change, future))
        return future

    def write(self, change: Callable[[Connection], T]) -> T:
        """`submit` and wait: committed when it returns. Raises what `change` raised, or StoreError."""
        return self.submit(change).result()

    async def awrite(self, change: Callable[[Connection], T]) -> T:
        return await asyncio.wrap_future(self.submit(change))

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._queue.put(_STOP)
        self._writer.join(timeout=30)
        self.engine.dispose()

    def _run(self) -> None:
        stop = False
        while not stop:
            batch = [self._queue.get()]
            while len(batch) < GROUP and not self._queue.empty():
                batch.append(self._queue.get())
            stop = _STOP in batch
            asked = [item for item in batch if item is not _STOP]
            self._commit([(change, future) for change, future in asked if future.set_running_or_notify_cancel()])

    def _commit(self, batch: list[tuple[Callable[[Connection], Any], Future[Any]]]) -> None:
        if not batch:
            return
        done: list[tuple[Future[Any], Any]] = []
        try:
            with self.engine.connect().execution_options(writer=True) as connection, connection.begin():
                for change, future in batch:
                    try:
                        with connection.begin_nested():
                            done.append((future, change(connection)))
                    except Exception as error:  # handed to the caller that asked for the change
                        future.set_exception(error)
        except Exception as error:
            for _, future in batch:
                if not future.done():
                    future.set_exception(told(self.engine, error))
            return
        for future, value in done:
            future.set_result(value)
