"""A home whose calls.db an earlier version wrote is upgraded on opening; a newer one is refused."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import sqlalchemy as sa
import zstandard

from rollout.blobs import Blobs
from rollout.config import Home, open_home
from rollout.errors import NewerHomeError, StoreError
from rollout.store import open_store
from rollout.types import ModelCall, VersionSpan

SCHEMA = (
    "CREATE TABLE version_calls (version_num VARCHAR(32) NOT NULL PRIMARY KEY)",
    "INSERT INTO version_calls VALUES ('1')",
    'CREATE TABLE calls (rollout_id VARCHAR NOT NULL, "index" INTEGER NOT NULL, delivered BOOLEAN NOT NULL, '
    'failed BOOLEAN NOT NULL, tokens INTEGER NOT NULL, body BLOB NOT NULL, PRIMARY KEY (rollout_id, "index"))',
)


def session(rollout: str, blobs: Blobs) -> list[ModelCall]:
    prompt, messages, out = tuple(range(900)), [{"role": "user", "content": "Grüß Zoë " * 50}], []
    for index in range(5):
        messages = [*messages, {"role": "assistant", "content": f"answer {index} of {rollout}"}]
        out.append(
            ModelCall(
                rollout_id=rollout,
                index=index,
                request=blobs.put(f"request {index} of {rollout}".encode()),
                response=blobs.put(f"response {index} of {rollout}".encode()),
                messages=tuple(messages),
                tools=({"type": "function"},),
                prompt_ids=prompt,
                completion_ids=(1, 2, index),
                logprobs=(-0.5, -0.1, -0.251) if index else None,
                versions=(VersionSpan(version=3, tokens=3),),
                delivered=index < 4,
            )
        )
        prompt += (1, 2, index, 77)
    return out


def write_version_1(home: Home, calls: list[ModelCall], *, damaged: bool = False) -> None:
    engine = sa.create_engine(home.database_url("calls"))
    insert = sa.text("INSERT INTO calls VALUES (:rollout, :index, :delivered, 0, :tokens, :body)")
    with engine.begin() as connection:
        for statement in SCHEMA:
            connection.execute(sa.text(statement))
        for call in calls:
            text = call.model_copy(update={"delivered": False}).model_dump_json().encode()
            row = {"rollout": call.rollout_id, "index": call.index, "delivered": call.delivered}
            body = b"no zstd" if damaged and call is calls[-1] else zstandard.compress(text, 3)
            connection.execute(insert, {**row, "tokens": len(call.completion_ids), "body": body})
    engine.dispose()


def test_an_earlier_homes_calls_are_upgraded_and_go_on(tmp_path: Path) -> None:
    home = open_home(tmp_path)
    calls = session("a", Blobs(home.blobs)) + session("b", Blobs(home.blobs))
    write_version_1(home, calls)
    for _ in range(2):
        store = open_store(home)
        assert store.calls.of_many(["a", "b"]) == {"a": calls[:5], "b": calls[5:]}
        assert store.blobs.get(calls[7].request) == b"request 2 of b"
        store.close()
    store = open_store(home)
    more = calls[4].model_copy(update={"index": 5, "prompt_ids": (*calls[4].prompt_ids, 5), "delivered": False})
    back = asyncio.run(store.calls.append(more, b"request 5 of a", b"response 5 of a"))
    assert store.calls.of("a") == [*calls[:5], back]
    assert store.calls.size(["a"]) < 4000
    store.close()


def test_a_home_that_cannot_be_upgraded_stays_as_it_was(tmp_path: Path) -> None:
    home = open_home(tmp_path)
    write_version_1(home, session("a", Blobs(home.blobs)), damaged=True)
    with pytest.raises(StoreError, match="call 4 of a"):
        open_store(home)
    engine = sa.create_engine(home.database_url("calls"))
    with engine.connect() as connection:
        assert connection.execute(sa.text("SELECT version_num FROM version_calls")).scalar() == "1"
        assert "parts" not in sa.inspect(connection).get_table_names()
        assert len(sa.inspect(connection).get_columns("calls")) == 6
    engine.dispose()


def test_a_newer_calls_db_is_refused(tmp_path: Path) -> None:
    home = open_home(tmp_path)
    open_store(home).close()
    engine = sa.create_engine(home.database_url("calls"))
    with engine.begin() as connection:
        connection.execute(sa.text("UPDATE version_calls SET version_num = '3'"))
    engine.dispose()
    with pytest.raises(NewerHomeError, match="schema version 3, this openforge knows 2"):
        open_store(home)
