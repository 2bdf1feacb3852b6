"""What a flow is asked for: a preset, overrides, a run name. The same models are the forms of the Prefect UI.

Defaults are literals, so that the forms show them; everything else stands once, in the preset.
"""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from rollout.config import load_preset
from tasks.preset import Preset

Override = str | int | float | bool
Label = Literal["base", "sft", "rl"]
RUN_LENGTH = 32


class StageParams(BaseModel):
    """Parameters of one stage. The same run asked again goes on where it stopped, or returns at once."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    preset: str = Field("demo", title="Preset", description="A file of configs/ without .toml, or a path to one")
    overrides: dict[str, Override] = Field({}, title="Overrides", description='For example {"rl.steps": 4}')
    run: str = Field(
        "",
        title="Run",
        description="Everything is kept under this name; empty: the preset's name",
        pattern=r"^([a-z0-9][a-z0-9._-]{0,31})?$",
    )
    tasks: str = Field("", title="Tasks", description="Folder of task bundles; empty: the tasks of the run")
    model: str = Field("", title="Model", description="Model name or checkpoint folder; empty: the stage before's")

    def load(self) -> Preset:
        """Raises ConfigError for an unknown preset or key, or a value out of bounds."""
        return load_preset(Preset, self.preset, dict(self.overrides))

    @property
    def task_run(self) -> str:
        """Name of the run whose tasks are meant: it depends on preset and overrides alone."""
        return self.run or _name(self.preset, self.overrides)

    @property
    def run_name(self) -> str:
        """Name under which this stage is kept: other tasks or another model give another one."""
        return self.run or _name(self.preset, self.overrides, self.tasks, self.model)

    def evaluate(self, label: Label) -> EvalParams:
        """Parameters for the evaluation of one of this run's models on the same tasks."""
        shared = self.model_dump(exclude={"run", "model"})
        model = self.model if label == "base" else ""
        return EvalParams(**shared, run=self.run_name, model=model, label=label)


class EvalParams(StageParams):
    """Parameters of an evaluation."""

    label: Literal["base", "sft", "rl", "latest"] = Field(
        "latest", title="Which model", description="`latest`: the given model, else what the run has trained last"
    )
    daily: bool = Field(False, title="Daily", description="One evaluation a day, each kept under its date")

    @property
    def run_name(self) -> str:
        return self.run or _name(self.preset, self.overrides, self.tasks)


def _name(preset: str, overrides: dict[str, Override], *others: str) -> str:
    """The preset's name, with a digest of whatever else was asked for."""
    stem = re.sub(r"[^a-z0-9._-]+", "-", Path(preset).stem.lower()).strip("-._") or "run"
    if not overrides and not any(others):
        return stem[:RUN_LENGTH]
    text = json.dumps([overrides, *others], sort_keys=True)
    return f"{stem[: RUN_LENGTH - 7]}-{hashlib.sha256(text.encode()).hexdigest()[:6]}"
