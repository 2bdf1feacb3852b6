"""Starting, finding and ending inference servers: the rows of the engine table and the processes behind them.

An engine is a process of its own, in its own session, that outlives whoever started it. Its id follows from what it
serves and to whom, so that one that died is started again under the same id; a file lock keeps two processes from
starting it twice. A pid counts only together with the process's start time. Its row is written when it serves the
weights that the row names: calls look for an engine in the table alone.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import re
import secrets
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
from filelock import FileLock, Timeout

from rollout.config import CODE_ROOT, Home
from rollout.errors import EngineError
from rollout.inference import backends
from rollout.inference.backends import Backend
from rollout.inference.vllm import EngineAddress, VllmEngine
from rollout.processes import alive, read_pid_file, started, write_pid_file
from rollout.store import Store
from rollout.types import EngineRecord

KEY_VARIABLE = "OPENFORGE_ENGINE_KEY"
LEASE_S = 4 * 3600.0
HEALTH_S = 5.0
HEALTH_TRIES = 4
STOP_S = 10.0
LOCK_S = 60.0
POLL_S = 0.1


@dataclass(frozen=True)
class EngineOptions:
    """How an engine is started, where none runs yet."""

    slots: int = 32
    """Requests that run at once."""
    max_len: int = 0
    """Longest prompt + completion in tokens; 0 is the model's own limit."""
    start_s: float = 300.0
    """Deadline for the start, seconds."""
    progress: Callable[[str, int, int], None] | None = None
    """Called with (label, seconds so far, start_s) while an engine starts."""
    backend: Backend | None = None
    """None: as the engine of this id was started before, else $OPENFORGE_ENGINE, else embedded."""
    program: tuple[str, ...] = ()
    """Command in the place of the backend's own."""


def ensure_engine(
    store: Store,
    model: str,
    path: str | Path,
    *,
    version: int = 0,
    exclusive: str = "",
    replica: int = 0,
    lease_s: float = LEASE_S,
    options: EngineOptions | None = None,
) -> EngineRecord:
    """The engine that serves the weights in `path` as `model`, started on them if none lives; its lease grows.

    `exclusive` names the run that alone may use it; such an engine takes other weights while it runs, a shared one
    is started again for them. Engines that died, and those whose lease ran out, are removed on the way. Raises
    EngineError when it does not come up; the message ends with the tail of its log.
    """
    wanted = EngineRecord(
        id=engine_name(model, exclusive, replica),
        replica=replica,
        model=model,
        path=str(path),
        url="",
        pid=0,
        process_started=0.0,
        version=version,
        exclusive=exclusive,
    )
    options = options or EngineOptions()
    reap_engines(store, keep=wanted.id)
    with _locked(store.home, wanted.id, options.start_s + LOCK_S):
        found = _serving(store, wanted, options)
        record = found.model_copy(update={"lease_until": max(found.lease_until, time.time() + lease_s)})
        store.engines.put(record)
        _starting_file(store.home, wanted.id).unlink(missing_ok=True)
        return record


def stop_engine(store: Store, engine_id: str) -> bool:
    """Ends the engine's process (SIGTERM, then SIGKILL) and forgets it. False if there was none of that id.

    Raises EngineError when another process is busy with it for longer than `LOCK_S`.
    """
    with _locked(store.home, engine_id, LOCK_S):
        record = _find(store, engine_id)
        if record:
            _drop(store, record)
        return record is not None


def stop_engines(store: Store) -> None:
    """Ends every engine of the home, those that nobody waits for any more included. Raises EngineError."""
    for engine_id in {e.id for e in store.engines.all()}:
        stop_engine(store, engine_id)
    _end_unborn(store.home)


def list_engines(store: Store) -> list[EngineRecord]:
    """Engines whose process lives."""
    return [e for e in store.engines.all() if alive(e.pid, e.process_started)]


def reap_engines(store: Store, keep: str = "") -> list[str]:
    """Removes engines that died and stops those whose lease ran out, except `keep`; returns their ids."""
    gone: list[str] = []
    for engine_id in [e.id for e in store.engines.all() if e.id != keep and _is_over(e)]:
        try:
            with _locked(store.home, engine_id, 0.0):
                record = _find(store, engine_id)
                if record and _is_over(record):
                    _drop(store, record)
                    gone.append(engine_id)
        except EngineError:  # somebody starts or ends it at this moment
            continue
    _end_unborn(store.home)
    return gone


def update_engine(store: Store, record: EngineRecord, path: str | Path, version: int) -> EngineRecord:
    """Makes the engine serve the weights in `path` as `version`, and notes it. Raises EngineError.

    Not to be called inside an event loop.
    """
    address = EngineAddress(record.url, record.version, read_key(store.home, record.id))

    async def update() -> None:
        engine = VllmEngine(lambda *_, **__: address)
        try:
            await engine.update(str(path), version)
        finally:
            await engine.close()

    asyncio.run(update())
    updated = (_find(store, record.id) or record).model_copy(update={"path": str(path), "version": version})
    store.engines.put(updated)
    return updated


def healthy(url: str, timeout_s: float = HEALTH_S) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=timeout_s) as response:
            return bool(response.status == 200)
    except OSError:
        return False


def engine_name(model: str, exclusive: str = "", replica: int = 0) -> str:
    """Id of the engine that serves `model` (to the run `exclusive` alone, if it is set)."""
    more = f"-r{replica}" if replica else ""
    label = re.sub(r"[^a-zA-Z0-9]+", "-", Path(model).name).strip("-").lower()[:40] or "model"
    return f"{label}-{hashlib.sha256(f'{model}|{exclusive}'.encode()).hexdigest()[:8]}{more}"


def read_key(home: Home, engine_id: str) -> str:
    """The engine's key for weight updates; empty where this home has none (an engine that was not started here)."""
    file = _folder(home) / f"{engine_id}.key"
    return file.read_text().strip() if file.exists() else ""


# -- inside --------------------------------------------------------------------------------------------


def _folder(home: Home) -> Path:
    folder = home.run / "engines"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@contextmanager
def _locked(home: Home, engine_id: str, seconds: float) -> Iterator[None]:
    """One process at a time looks at, starts or ends this engine. Raises EngineError after `seconds`."""
    lock = FileLock(_folder(home) / f"{engine_id}.lock", timeout=seconds)
    try:
        lock.acquire()
    except Timeout as error:
        raise EngineError(f"another process has been busy with engine {engine_id} for {seconds:.0f} s") from error
    try:
        yield
    finally:
        lock.release()


def _find(store: Store, engine_id: str) -> EngineRecord | None:
    return next((e for e in store.engines.all() if e.id == engine_id), None)


def _is_over(record: EngineRecord) -> bool:
    return not alive(record.pid, record.process_started) or record.lease_until < time.time()


def _drop(store: Store, record: EngineRecord) -> None:
    _end(record.pid, record.process_started)
    store.engines.remove(record.id)


def _serving(store: Store, wanted: EngineRecord, options: EngineOptions) -> EngineRecord:
    """A live engine on the wanted weights: the one that is there, brought to them if need be, or a new one."""
    found = _find(store, wanted.id)
    if found and _answers(found):
        if (found.path, found.version) == (wanted.path, wanted.version):
            return found
        if wanted.exclusive:
            return update_engine(store, found, wanted.path, wanted.version)
    if found:
        _drop(store, found)
    backend = options.backend or (found.backend if found else backends.default_backend())
    return _start(store.home, wanted.model_copy(update={"backend": backend}), options)


def _starting_file(home: Home, engine_id: str) -> Path:
    """Names a process that is no row yet: whoever started it may be killed before it serves."""
    return _folder(home) / f"{engine_id}.starting.json"


def _end_unborn(home: Home) -> None:
    """Ends processes whose starter is gone."""
    for file in sorted(_folder(home).glob("*.starting.json")):
        try:
            with _locked(home, file.name.removesuffix(".starting.json"), 0.0):
                _end_starting(file)
        except EngineError:  # its starter lives
            continue


def _end_starting(file: Path) -> None:
    if facts := read_pid_file(file):
        _end(int(facts["pid"]), float(facts["started"]))
    file.unlink(missing_ok=True)


def _answers(record: EngineRecord) -> bool:
    """A busy engine answers slowly: it is given up only when it is dead or stays silent."""
    return any(alive(record.pid, record.process_started) and healthy(record.url) for _ in range(HEALTH_TRIES))


def _make_key(home: Home, engine_id: str) -> str:
    file = _folder(home) / f"{engine_id}.key"
    if not file.exists():
        part = file.with_suffix(f".{os.getpid()}")
        part.touch(mode=0o600)
        part.write_text(secrets.token_urlsafe(32))
        part.replace(file)
    return read_key(home, engine_id)


def _start(home: Home, wanted: EngineRecord, options: EngineOptions) -> EngineRecord:
    starting = _starting_file(home, wanted.id)
    _end_starting(starting)
    port_file = _folder(home) / f"{wanted.id}.port"
    port_file.unlink(missing_ok=True)
    arguments = ["--model", wanted.path, "--version", str(wanted.version), "--port", "0", "--port-file", str(port_file)]
    arguments += ["--slots", str(options.slots), "--max-len", str(options.max_len)]
    log = home.logs / f"engine-{wanted.id}.log"
    with log.open("ab") as out:
        process = subprocess.Popen(
            [*(options.program or backends.program(wanted.backend)), *arguments],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            start_new_session=True,
            cwd=CODE_ROOT,
            env={**os.environ, KEY_VARIABLE: _make_key(home, wanted.id)},
        )
    try:
        record = wanted.model_copy(update={"pid": process.pid, "process_started": started(process.pid)})
        write_pid_file(starting, process.pid)
        return record.model_copy(update={"url": _await_health(process, port_file, options)})
    except (EngineError, psutil.NoSuchProcess) as error:
        process.kill()
        process.wait(STOP_S)
        starting.unlink(missing_ok=True)
        raise EngineError(
            f"the engine for {wanted.model} did not start: {error}; {log} ends with:\n{_tail(log)}"
        ) from error


def _await_health(process: subprocess.Popen[bytes], port_file: Path, options: EngineOptions) -> str:
    began = time.monotonic()
    told = 0.0
    while (passed := time.monotonic() - began) < options.start_s:
        if process.poll() is not None:
            raise EngineError(f"its process ended with {process.returncode}")
        if port_file.exists() and healthy(url := f"http://127.0.0.1:{int(port_file.read_text())}"):
            return url
        if options.progress and passed - told >= 1.0:
            told = passed
            options.progress("engine", int(passed), int(options.start_s))
        time.sleep(POLL_S)
    raise EngineError(f"it was not healthy within {options.start_s:.0f} s")


def _end(pid: int, process_started: float) -> None:
    if not alive(pid, process_started):
        return
    try:
        process = psutil.Process(pid)
        process.terminate()
        try:
            process.wait(STOP_S)
        except psutil.TimeoutExpired:
            process.kill()
            process.wait(STOP_S)
    except psutil.NoSuchProcess:
        return


def _tail(log: Path) -> str:
    return log.read_bytes()[-1500:].decode(errors="replace").strip()
