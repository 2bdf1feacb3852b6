"""Progress of a stage: a file that the CLI reads, an artifact in Prefect's UI, and the log; all throttled."""

from __future__ import annotations

import json
import logging
import os
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from filelock import FileLock
from prefect.artifacts import create_markdown_artifact, create_progress_artifact, update_progress_artifact
from prefect.context import FlowRunContext, TaskRunContext
from prefect.logging import get_run_logger

from rollout.config import Home
from rollout.types import StageRecord
from tasks.progress_file import Line, progress_file, read_progress

FILE_S = 0.5
ARTIFACT_S = 5.0
LOG_S = 15.0
LOCK_S = 30.0
"""Longest wait for another stage of the run that writes its line."""


def logger() -> logging.Logger | logging.LoggerAdapter[logging.Logger]:
    """The run's logger inside a Prefect run, a plain one outside."""
    return get_run_logger() if in_run() else logging.getLogger("openforge")


def in_run() -> bool:
    return FlowRunContext.get() is not None or TaskRunContext.get() is not None


@dataclass
class StageProgress:
    """A `Progress`: called with (label, done, total) as often as the stage likes.

    Making one writes the stage's first line; only the holder of the stage's lock may.
    """

    home: Home
    run: str
    stage: str
    _line: Line = field(init=False)
    _artifact: Any = None
    _written: float = 0.0
    _shown: float = 0.0
    _logged: float = 0.0

    def __post_init__(self) -> None:
        self._line = Line(stage=self.stage, started=time.time())
        self._write()

    def __call__(self, label: str, done: int, total: int) -> None:
        now = time.time()
        fresh = label != self._line.label
        started = now if fresh else self._line.started
        self._line = Line(stage=self.stage, label=label, done=done, total=total, started=started, updated=now)
        complete = total > 0 and done >= total
        if fresh or complete or now - self._written > FILE_S:
            self._write()
        if fresh or now - self._shown > ARTIFACT_S:
            self._show()
        if fresh or now - self._logged > LOG_S:
            self._logged = now
            logger().info("%s: %s %d/%d", self.stage, label, done, total)

    def end(self) -> None:
        self._line = self._line.model_copy(update={"ended": True, "updated": time.time()})
        self._write()
        self._show()

    def _write(self) -> None:
        self._written = time.time()
        path = progress_file(self.home, self.run)
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(f".{os.getpid()}.part")
        with FileLock(path.with_suffix(".lock"), timeout=LOCK_S):  # another stage of the run keeps its line
            lines = read_progress(self.home, self.run) | {self.stage: self._line}
            part.write_text(json.dumps({stage: line.model_dump() for stage, line in lines.items()}))
            part.replace(path)

    def _show(self) -> None:
        self._shown = time.time()
        if not in_run():
            return
        line = self._line
        share = 100.0 if line.ended else 100.0 * line.done / line.total if line.total else 0.0
        if self._artifact is None:
            description = f"{self.run}: {self.stage}"
            self._artifact = create_progress_artifact(share, key=_key(self.stage, "progress"), description=description)
        else:
            update_progress_artifact(self._artifact, min(100.0, share))


def publish(record: StageRecord) -> None:
    """A result artifact: what the stage kept and dropped, in how many seconds and tokens."""
    logger().info("%s %s: kept %d, dropped %s", record.run, record.stage, record.kept, dict(record.dropped))
    if in_run():
        create_markdown_artifact(markdown(record), key=_key(record.stage, "result"), description=f"run {record.run}")


def markdown(record: StageRecord) -> str:
    rows: Mapping[str, object] = {
        "run": record.run,
        "kept": record.kept,
        **{f"dropped: {reason}": n for reason, n in record.dropped.items()},
        "seconds": f"{record.seconds:.1f}",
        "rollouts": record.rollouts,
        "tokens": record.tokens,
        **{k: v for k, v in record.details.items() if isinstance(v, str | int | float)},
    }
    table = "\n".join(f"| {name} | {value} |" for name, value in rows.items())
    return f"## {record.stage}\n\n| | |\n|---|---|\n{table}\n"


def _key(*parts: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", "-".join(parts).lower()).strip("-")
