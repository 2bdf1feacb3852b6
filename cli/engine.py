"""`openforge engine start|list|stop`: inference servers of this home."""

from __future__ import annotations

import time
from typing import Literal

from cyclopts import App
from rich.console import Console

from cli.table import print_rows
from rollout.config import open_home
from rollout.errors import ConfigError
from rollout.processes import alive

app = App(name="engine", help="Starts, lists and stops inference servers.")
console = Console(highlight=False, soft_wrap=True)


@app.command
def start(
    model: str,
    /,
    *,
    lease_hours: float = 12.0,
    backend: Literal["embedded", "vllm"] | None = None,
    replicas: int = 1,
    slots: int = 32,
    max_len: int = 0,
) -> int:
    """Starts an engine for a model, or finds the one that runs.

    Parameters
    ----------
    model
        A name of `openforge models list`, or a checkpoint folder.
    lease_hours
        It ends by itself when nobody renewed its lease for so long.
    backend
        The embedded engine, or vLLM, whose environment is built first if it is missing; default: $OPENFORGE_ENGINE.
    replicas
        How many serve the model; each rollout keeps to one of them.
    slots
        Requests that run at once in one engine.
    max_len
        Longest prompt + completion in tokens; 0 is the model's own limit.
    """
    from cli.models import model_folder
    from rollout.inference.backends import default_backend, make_environment
    from rollout.inference.launch import EngineOptions, ensure_engine
    from rollout.store import open_store

    if replicas < 1:
        raise ConfigError(f"--replicas {replicas}: at least 1")
    home = open_home()
    store = open_store(home)
    try:
        folder = str(model_folder(home, model))
        make_environment(backend or default_backend())
        options = EngineOptions(slots=slots, max_len=max_len, backend=backend, progress=_progress)
        for replica in range(replicas):
            record = ensure_engine(store, model, folder, replica=replica, lease_s=lease_hours * 3600, options=options)
            console.print(f"{record.id}  {record.model}  {record.backend}  {record.url}  pid {record.pid}")
    finally:
        store.close()
    return 0


def _progress(label: str, seconds: int, deadline: int) -> None:
    if seconds % 5 == 0:
        console.print(f"{label}: {seconds} s of at most {deadline} s")


@app.command(name="list")
def list_engines() -> int:
    """Lists the engines that are registered in this home."""
    from rollout.store import open_store

    store = open_store(open_home())
    try:
        engines = store.engines.all()
    finally:
        store.close()
    rows = []
    for e in engines:
        living = alive(e.pid, e.process_started)
        lease = f"{max(0.0, e.lease_until - time.time()):.0f} s" if living else "gone"
        rows.append((e.id, e.model, e.backend, e.url, e.pid, e.version, e.exclusive or "-", lease))
    print_rows(console, ("id", "model", "backend", "url", "pid", "version", "exclusive to", "lease"), rows)
    return 0


@app.command
def stop(model: str, /) -> int:
    """Stops an engine.

    Parameters
    ----------
    model
        Model name or engine id.
    """
    from rollout.inference.launch import stop_engine
    from rollout.store import open_store

    store = open_store(open_home())
    try:
        found = [e for e in store.engines.all() if model in (e.id, e.model)]
        if not found:
            raise ConfigError(f"no engine serves {model!r}; `openforge engine list` shows them")
        for engine in found:
            stop_engine(store, engine.id)
            console.print(f"stopped {engine.id}")
    finally:
        store.close()
    return 0
