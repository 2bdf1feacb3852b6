"""The file through which a stage tells other processes where it stands.

`<home>/run/progress/<run>.json` maps each stage to its latest line, so that a reader (the demo's bars, a terminal)
needs nothing of Prefect.
"""

from __future__ import annotations

import json
from pathlib import Path

from pydantic import BaseModel

from rollout.config import Home


class Line(BaseModel):
    """Where a stage stands. `total` 0: not known."""

    stage: str
    label: str = ""
    done: int = 0
    total: int = 0
    started: float = 0.0
    """When this label began, unix seconds: what the remaining time is reckoned from."""
    updated: float = 0.0
    ended: bool = False


def progress_file(home: Home, run: str) -> Path:
    return home.run / "progress" / f"{run}.json"


def read_progress(home: Home, run: str) -> dict[str, Line]:
    """Stage -> its latest line, in the order in which the stages began."""
    try:
        body = json.loads(progress_file(home, run).read_text())
    except (FileNotFoundError, ValueError):
        return {}
    return {stage: Line.model_validate(line) for stage, line in body.items()}
