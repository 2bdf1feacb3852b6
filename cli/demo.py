"""`openforge demo`: the whole chain through a real Prefect server, then the table and the report.

Everything is in the store: a demo that was interrupted goes on, and one that is done only says so.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console

from cli import doctor
from cli.flow import FlowCall, prefect_api, run_flow
from cli.lock import only_one
from cli.memory import PeakMemory
from cli.options import StageOptions
from cli.prefect_server import find_server
from cli.summary import DEMO, result_table, stage_lines
from rollout.config import Home, open_home
from rollout.errors import InfrastructureError
from rollout.types import ResultRecord, StageRecord

SIZES = ("demo", "small")
STARTS = 3
"""Times that the flow is started when the Prefect server dies under it."""
SAVE_S = 5.0
"""What the demo took so far is recorded this often, for the case that it is killed."""
console = Console(highlight=False, soft_wrap=True)


def demo(*, preset: str = "", run: str = "") -> int:
    """Runs the whole chain on this machine: synthesis, distillation, SFT, RL, evaluation, report.

    Parameters
    ----------
    preset
        Its size; default: OPENFORGE_DEMO_PRESET, else `demo`, or `small` on a processor without bf16 units.
    run
        Name under which it is kept; default: the preset's.
    """
    home = open_home()
    with only_one(home, "demo"):
        chosen = preset or os.environ.get("OPENFORGE_DEMO_PRESET", "") or _size(home)
        options = StageOptions(preset=chosen, run=run)
        params = options.params()
        name = run or Path(chosen).stem
        record = _record(home, name)
        if record:
            console.print(f"done already under the name {name!r}; what each stage did:")
        else:
            doctor.require()
            record = _work(home, name, params)
        _tell(home, name, record)
    return 0


def _size(home: Home) -> str:
    """The demo's preset for this machine: that of a demo begun before, else by measurement."""
    for name in SIZES:
        if _stage(home, name, DEMO) or _stage(home, name, "propose"):
            return name
    speed = doctor.bf16_speed()
    chosen = doctor.preset_for(1.0 if speed is None else speed)
    if chosen != "demo":
        console.print(f"bf16 runs at {speed:.2f} x the speed of float32 here: the smaller preset {chosen!r} is used")
    return chosen


def _work(home: Home, name: str, params: dict[str, Any]) -> StageRecord:
    """Runs the pipeline to its end and records how long it took and how much memory it needed, in all its lives."""
    done = stage_lines(home, name)
    if done:
        console.print("done already:")
        for line in done:
            console.print(f"  {line}")
    with PeakMemory(home) as peak:
        spent = _Spent(home, _stage(home, name, DEMO) or StageRecord(run=name, stage=DEMO), peak)
        try:
            _run(home, FlowCall("pipeline", params, name), spent.tick)
        except BaseException:
            spent.save(kept=0)
            raise
        return spent.save(kept=1)


def _run(home: Home, call: FlowCall, tick: Callable[[], None]) -> None:
    """Runs the flow; starts it again when the Prefect server died under it, with a new one or the one `up` started."""
    for start in range(1, STARTS + 1):
        with prefect_api(home, "demo", console) as url:
            server = find_server(home)

            def watch(server: dict[str, Any] | None = server) -> None:
                tick()
                if find_server(home) != server:  # the flow itself would notice only at the end of its stage
                    raise InfrastructureError("the Prefect server is gone")

            try:
                run_flow(home, call, url, console, watch)
                return
            except InfrastructureError:
                if start == STARTS or find_server(home) == server:
                    raise
        console.print("the Prefect server is gone; the demo goes on with a new one")


class _Spent:
    """Seconds and memory of the demo: those of its earlier lives and of this one."""

    def __init__(self, home: Home, earlier: StageRecord, peak: PeakMemory) -> None:
        self._home, self._earlier, self._peak = home, earlier, peak
        self._began = self._saved = time.monotonic()

    def tick(self) -> None:
        if time.monotonic() - self._saved > SAVE_S:
            self.save(kept=0)

    def save(self, *, kept: int) -> StageRecord:
        """`kept` is 1 when the demo is done."""
        self._saved = time.monotonic()
        peak = max(self._peak.mib, float(self._earlier.details.get("peak_rss_mib", 0.0)))
        seconds = self._earlier.seconds + self._saved - self._began
        changes = {"kept": kept, "seconds": seconds, "details": {"peak_rss_mib": round(peak, 1)}}
        record = self._earlier.model_copy(update=changes)
        _put(self._home, record)
        return record


def _tell(home: Home, name: str, record: StageRecord) -> None:
    from evaluation.run import demo_json
    from rollout.store import open_store
    from tasks.checkpoints import stage_runs

    for line in stage_lines(home, name):
        console.print(f"  {line}")
    store = open_store(home)
    try:
        results = store.records.all(ResultRecord, run=name)
        records = [r for part in stage_runs(name) for r in store.records.all(StageRecord, run=part)]
        stages = [r for r in records if r.stage != DEMO]
    finally:
        store.close()
    console.print(result_table(results))
    peak = float(record.details["peak_rss_mib"])
    console.print(f"{record.seconds / 60:.1f} minutes, at most {peak:.0f} MiB for all processes together")
    console.print(f"report: {home.reports / f'{name}.html'}")
    if file := os.environ.get("OPENFORGE_DEMO_JSON"):
        body = demo_json(results, stages, record.seconds, peak)
        Path(file).write_text(json.dumps(body, indent=1))
        console.print(f"numbers: {file}")


def _record(home: Home, name: str) -> StageRecord | None:
    """The demo's record once it is done."""
    record = _stage(home, name, DEMO)
    return record if record and record.kept and (home.reports / f"{name}.html").exists() else None


def _stage(home: Home, name: str, stage: str) -> StageRecord | None:
    from rollout.store import open_store

    store = open_store(home)
    try:
        return store.records.get(StageRecord, run=name, key=stage)
    finally:
        store.close()


def _put(home: Home, record: StageRecord) -> None:
    from rollout.store import open_store

    store = open_store(home)
    try:
        store.records.put(record, run=record.run, key=record.stage)
    finally:
        store.close()
