"""`openforge engine start|list|stop`: inference servers of this home."""

from __future__ import annotations

import time

from cyclopts import App
from rich.console import Console

from cli.table import print_rows
from rollout.config import open_home
from rollout.errors import ConfigError
from rollout.processes import alive

app = App(name="engine", help="Starts, lists and stops inference servers.")
console = Console(highlight=False, soft_wrap=True)


@app.command
def start(model: str, /, *, lease_hours: float = 12.0) -> int:
    """Starts an engine for a model, or finds the one that runs.

    Parameters
    ----------
    model
        A name of `openforge models list`, or a checkpoint folder.
    lease_hours
        It ends by itself when nobody renewed its lease for so long.
    """
    from cli.models import model_folder
    from rollout.inference.launch import ensure_engine
    from rollout.store import open_store

    home = open_home()
    store = open_store(home)
    try:
        record = ensure_engine(store, model, str(model_folder(home, model)), lease_s=lease_hours * 3600)
    finally:
        store.close()
    console.print(f"{record.id}  {record.model}  {record.url}  pid {record.pid}")
    return 0


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
        rows.append((e.id, e.model, e.url, e.pid, e.version, e.exclusive or "-", lease))
    print_rows(console, ("id", "model", "url", "pid", "version", "exclusive to", "lease"), rows)
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
