"""Engine processes: started once, found again, replaced when dead, updated with their key, ended with their lease."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from filelock import FileLock

from rollout.config import open_home
from rollout.errors import ConfigError, EngineError
from rollout.inference.launch import (
    EngineOptions,
    engine_name,
    ensure_engine,
    healthy,
    list_engines,
    read_key,
    reap_engines,
    stop_engine,
    stop_engines,
    update_engine,
)
from rollout.processes import alive
from rollout.store import Store, open_store
from rollout.types import EngineRecord

PROGRAM = """
import argparse, http.server, json, os, pathlib, sys
p = argparse.ArgumentParser()
for name in ("--model", "--version", "--port", "--port-file", "--slots", "--max-len"):
    p.add_argument(name)
a = p.parse_args()
if a.model.endswith("broken"):
    print("no weights here")
    sys.exit(3)
class H(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.reply(200)
    def do_POST(self):
        body = self.rfile.read(int(self.headers["content-length"]))
        ok = self.headers.get("authorization") == "Bearer " + os.environ["OPENFORGE_ENGINE_KEY"]
        pathlib.Path(a.model + ".update").write_bytes(body)
        self.reply(200 if ok else 401)
    def reply(self, status):
        self.send_response(status); self.send_header("content-length", "2"); self.end_headers(); self.wfile.write(b"{}")
    def log_message(self, *_):
        pass
s = http.server.ThreadingHTTPServer(("127.0.0.1", 0), H)
pathlib.Path(a.port_file + ".version").write_text(a.version)
pathlib.Path(a.port_file).write_text(str(s.server_address[1]))
s.serve_forever()
"""


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    opened = open_store(open_home(tmp_path / "home"))
    yield opened
    for engine in opened.engines.all():
        stop_engine(opened, engine.id)
    opened.close()


@pytest.fixture
def options(tmp_path: Path) -> EngineOptions:
    (tmp_path / "engine.py").write_text(PROGRAM)
    return EngineOptions(start_s=20, program=(sys.executable, str(tmp_path / "engine.py")))


def test_an_engine_is_started_once_and_found_again(store: Store, options: EngineOptions) -> None:
    one = ensure_engine(store, "m", "/models/m", options=options)
    assert healthy(one.url)
    assert alive(one.pid, one.process_started)
    assert os.getsid(one.pid) == one.pid, "it lives on when its starter's session ends"
    two = ensure_engine(store, "m", "/models/m", lease_s=50, options=options)
    assert two == one, "a shorter lease takes nothing from the one that stands"
    three = ensure_engine(store, "m", "/models/m", lease_s=10**6, options=options)
    assert three.lease_until > two.lease_until
    two = three
    assert list_engines(store) == [two]
    assert store.engines.routes("m", "any") == [two]


def test_two_starters_at_once_start_one(store: Store, options: EngineOptions) -> None:
    found: list[int] = []
    threads = [
        threading.Thread(target=lambda: found.append(ensure_engine(store, "m", "/models/m", options=options).pid))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(found) == 4
    assert len(set(found)) == 1


def test_a_killed_engine_is_started_again_under_its_id(store: Store, options: EngineOptions) -> None:
    one = ensure_engine(store, "m", "/models/m", options=options)
    psutil.Process(one.pid).kill()
    two = ensure_engine(store, "m", "/models/m", options=options)
    assert two.id == one.id
    assert two.pid != one.pid
    assert read_key(store.home, one.id) == read_key(store.home, two.id) != ""


def test_a_recycled_pid_is_not_the_engine(store: Store, options: EngineOptions) -> None:
    one = ensure_engine(store, "m", "/models/m", options=options)
    store.engines.put(one.model_copy(update={"pid": os.getpid()}))
    assert list_engines(store) == []
    assert stop_engine(store, one.id), "and this process was not ended in its place"
    psutil.Process(one.pid).kill()


def test_another_folder_under_the_name_replaces_it(store: Store, options: EngineOptions) -> None:
    one = ensure_engine(store, "m", "/models/m", options=options)
    two = ensure_engine(store, "m", "/models/other", options=options)
    assert two.id == one.id
    assert two.path == "/models/other"
    assert not alive(one.pid, one.process_started)


def test_an_exclusive_engine_is_another_one(store: Store, options: EngineOptions) -> None:
    shared = ensure_engine(store, "m", "/models/m", options=options)
    mine = ensure_engine(store, "m", "/models/m", exclusive="rl-1", options=options)
    assert mine.id != shared.id
    assert store.engines.routes("m", "rl-1") == [mine]
    assert store.engines.routes("m", "eval") == [shared]


def test_an_exclusive_engine_takes_other_weights_while_it_runs(
    store: Store, options: EngineOptions, tmp_path: Path
) -> None:
    one = ensure_engine(store, "m", tmp_path / "m", exclusive="rl-1", options=options)
    two = ensure_engine(store, "m", "/weights/3", version=3, exclusive="rl-1", options=options)
    assert (two.pid, two.path, two.version) == (one.pid, "/weights/3", 3)
    assert (tmp_path / "m.update").read_text() == '{"path": "/weights/3", "version": 3}'
    assert store.engines.all() == [two]


def test_a_killed_exclusive_engine_comes_back_on_the_current_weights_alone(
    store: Store, options: EngineOptions, tmp_path: Path
) -> None:
    """No reader of the table ever sees it with earlier weights, and none is sent elsewhere meanwhile."""
    ensure_engine(store, "m", "/models/m", options=options)
    one = ensure_engine(store, "m", tmp_path / "m", exclusive="rl-1", options=options)
    one = ensure_engine(store, "m", tmp_path / "v3", version=3, exclusive="rl-1", options=options)
    psutil.Process(one.pid).kill()
    seen: list[EngineRecord | None] = []
    done = threading.Event()

    def watch() -> None:
        while not done.wait(0.002):
            seen.extend(store.engines.routes("m", "rl-1", exclusive_only=True) or [None])

    thread = threading.Thread(target=watch)
    thread.start()
    two = ensure_engine(store, "m", tmp_path / "v3", version=3, exclusive="rl-1", options=options)
    done.set()
    thread.join(10)
    assert two.pid != one.pid
    assert (two.path, two.version) == (str(tmp_path / "v3"), 3)
    assert (store.home.run / "engines" / f"{two.id}.port.version").read_text() == "3"
    assert {(e.pid, e.version) for e in seen if e} <= {(one.pid, 3), (two.pid, 3)}
    assert None in seen
    assert not (tmp_path / "v3.update").exists(), "it started on them: nothing was there to update"


def test_an_engine_that_does_not_start_shows_its_log(store: Store, options: EngineOptions) -> None:
    with pytest.raises(EngineError, match=r"(?s)ended with 3.*no weights here"):
        ensure_engine(store, "m", "/models/broken", options=options)
    assert store.engines.all() == []


def test_the_key_is_private_and_lets_weights_be_updated(store: Store, options: EngineOptions, tmp_path: Path) -> None:
    record = ensure_engine(store, "m", tmp_path / "m", options=options)
    file = store.home.run / "engines" / f"{record.id}.key"
    assert file.stat().st_mode & 0o777 == 0o600
    updated = update_engine(store, record, "/weights/3", 3)
    assert (updated.version, store.engines.all()[0].version) == (3, 3)
    assert (tmp_path / "m.update").read_text() == '{"path": "/weights/3", "version": 3}'
    file.write_text("wrong")
    with pytest.raises(EngineError, match="401"):
        update_engine(store, record, "/weights/4", 4)
    assert store.engines.all()[0].version == 3


def test_ended_and_expired_engines_are_reaped(store: Store, options: EngineOptions) -> None:
    expired = ensure_engine(store, "old", "/models/old", lease_s=0.0, options=options)
    dead = ensure_engine(store, "dead", "/models/dead", options=options)
    assert not alive(expired.pid, expired.process_started), "making another one reaps it"
    psutil.Process(dead.pid).kill()
    time.sleep(0.2)
    assert reap_engines(store) == [dead.id]
    assert store.engines.all() == []


def test_an_engine_that_somebody_is_busy_with_is_not_reaped(store: Store, options: EngineOptions) -> None:
    record = ensure_engine(store, "m", "/models/m", lease_s=0.0, options=options)
    with FileLock(store.home.run / "engines" / f"{record.id}.lock"):
        assert reap_engines(store) == []
        assert alive(record.pid, record.process_started)
    assert reap_engines(store) == [record.id]


STARTER = """
import sys
from rollout.config import open_home
from rollout.inference.launch import EngineOptions, ensure_engine
from rollout.store import open_store
program = (sys.executable, "-c", "import time; time.sleep(60)")
ensure_engine(open_store(open_home(sys.argv[1])), "m", "/models/m", options=EngineOptions(program=program))
"""


@pytest.mark.parametrize("end", [reap_engines, stop_engines])
def test_an_engine_whose_starter_was_killed_before_it_served_is_ended(
    store: Store, end: Callable[[Store], Any]
) -> None:
    starter = subprocess.Popen([sys.executable, "-c", STARTER, str(store.home.root)])
    file = store.home.run / "engines" / f"{engine_name('m')}.starting.json"
    try:
        while not file.exists():
            assert starter.poll() is None
            time.sleep(0.05)
        facts = json.loads(file.read_text())
        end(store)
        assert alive(facts["pid"], facts["started"]), "its starter lives"
    finally:
        starter.kill()
        starter.wait(10)
    end(store)
    assert not alive(facts["pid"], facts["started"])
    assert not file.exists()


def test_stopping_twice_is_safe(store: Store, options: EngineOptions) -> None:
    record = ensure_engine(store, "m", "/models/m", options=options)
    assert stop_engine(store, record.id)
    assert not stop_engine(store, record.id)
    assert not alive(record.pid, record.process_started)


def test_names_are_stable_and_apart() -> None:
    assert engine_name("smollm2") == engine_name("smollm2")
    assert len({engine_name("a/m"), engine_name("b/m"), engine_name("a/m", "x")}) == 3


def test_replicas_are_engines_of_their_own(store: Store, options: EngineOptions) -> None:
    found = [ensure_engine(store, "m", "/models/m", replica=k, options=options) for k in range(2)]
    assert found[0].pid != found[1].pid
    assert [e.replica for e in store.engines.routes("m", "any")] == [0, 1]
    assert ensure_engine(store, "m", "/models/m", replica=1, options=options).pid == found[1].pid


def test_an_engine_comes_back_on_the_backend_that_it_was_started_on(
    store: Store, options: EngineOptions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The interpreter of vLLM's environment is a script here that runs the fake engine."""
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nshift 2\nexec {sys.executable} {tmp_path / "engine.py"} "$@"\n')
    python.chmod(0o755)
    monkeypatch.setenv("OPENFORGE_VLLM_PYTHON", str(python))
    one = ensure_engine(store, "m", "/models/m", options=EngineOptions(start_s=20, backend="vllm"))
    assert one.backend == "vllm"
    psutil.Process(one.pid).kill()
    two = ensure_engine(store, "m", "/models/m", options=EngineOptions(start_s=20))
    assert (two.backend, two.pid != one.pid) == ("vllm", True)


def test_a_missing_environment_says_how_it_is_made(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENFORGE_VLLM_PYTHON", str(tmp_path / "none"))
    with pytest.raises(ConfigError, match="make vllm-env"):
        ensure_engine(store, "m", "/models/m", options=EngineOptions(backend="vllm"))
    monkeypatch.setenv("OPENFORGE_ENGINE", "vlm")
    with pytest.raises(ConfigError, match="embedded, vllm"):
        ensure_engine(store, "m", "/models/m")
