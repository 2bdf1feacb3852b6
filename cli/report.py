"""`openforge report`: one self-contained HTML file of what a run did."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from rollout.config import open_home
from rollout.errors import ConfigError

console = Console(highlight=False, soft_wrap=True)


def report(*, run: tuple[str, ...] = (), out: str = "") -> int:
    """Writes the report of one or several runs and prints where it lies.

    Parameters
    ----------
    run
        Run names, each with its SFT and RL; default: the run `demo`. May be repeated.
    out
        File to write; default: reports/<run>.html in the home.
    """
    from evaluation.report import write_report
    from rollout.store import open_store
    from rollout.types import StageRecord
    from tasks.checkpoints import stage_runs

    home = open_home()
    runs = list(run) or ["demo"]
    path = Path(out) if out else home.reports / f"{'+'.join(runs)}.html"
    store = open_store(home)
    try:
        known = sorted({r.run for r in store.records.all(StageRecord)})
        if absent := [name for name in runs if name not in known]:
            raise ConfigError(f"no run {', '.join(absent)}; there are: {', '.join(known) or 'none'}")
        parts = dict.fromkeys(part for name in runs for part in stage_runs(name))
        console.print(str(write_report(store, runs=list(parts), out=path)))
    finally:
        store.close()
    return 0
