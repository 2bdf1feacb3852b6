"""Options that several commands share, and how a preset with `--set` pairs is checked before anything starts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from cyclopts import Parameter

from rollout.config import parse_set, validate
from rollout.errors import ConfigError


@Parameter(name="*")
@dataclass(frozen=True)
class StageOptions:
    """What every stage takes."""

    tasks: str = ""
    """Folder of task bundles, read (synth: written); default: the tasks of the run."""
    model: str = ""
    """Name of `openforge models list` or a checkpoint folder; default: what the stage before made."""
    preset: str = "demo"
    """Name of a file in configs/, or a path to a TOML file."""
    set: Annotated[tuple[str, ...], Parameter(negative="")] = ()
    """section.key=value; overrides one key of the preset, may be repeated."""
    run: str = ""
    """Name of the run, under which everything is kept; default: the preset's name."""

    def params(self) -> dict[str, Any]:
        """The flow's parameters as JSON. Raises ConfigError for a preset that does not validate."""
        from tasks.params import StageParams

        if self.model.startswith("scripted:"):
            raise ConfigError(
                f"--model {self.model}: a stage trains or measures a real model; "
                "give a name of `openforge models list` or a folder (a scripted teacher: --set distill.teacher=...)"
            )
        body = {"preset": self.preset, "overrides": parse_set(self.set), "run": self.run}
        body |= {"tasks": _absolute(self.tasks), "model": self.model}
        validate(StageParams, body, source="options").load()
        return body


def _absolute(folder: str) -> str:
    from pathlib import Path

    return str(Path(folder).expanduser().absolute()) if folder else ""
