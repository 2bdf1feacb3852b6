"""What an RL run keeps on disk between its steps, so that a killed one goes on where it was.

    <run>.work/weights/v0003/     weights as the engine serves them: the last two versions and the best
    <run>.work/state/0004/        trainer and `loop.json` after four steps: the last two

Folders are renamed into place when they are whole: the newest one under `state/` is where a run resumes.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rollout.types import Record
from training.checkpoint import whole_folder
from training.models import ENTRY, RendererName, write_entry
from training.trainer.base import Trainer

KEPT = 2
LOOP_FILE = "loop.json"


class LoopState(Record):
    """Where the loop stands after a step."""

    step: int = 0
    """Steps done."""
    seconds: float = 0.0
    """Wall clock of all steps and validations, over restarts."""
    best_score: float | None = None
    best_step: int = 0
    best_weights: str = ""
    """Folder of the weights to keep: those of the best validation, or the last ones without any."""
    validated: int = -1
    """Step after which the last validation ran."""
    first_malformed: float | None = None
    """Share of rollouts with a malformed call in the first step."""
    stopped: str = ""
    """`malformed` or `collapse` when a bound ended the run."""


@dataclass(frozen=True)
class RunFolder:
    """The work folder of one run."""

    root: Path
    run: str
    renderer: RendererName

    def weights(self, version: int) -> Path:
        return self.root / "weights" / f"v{version:04d}"

    def has_weights(self, version: int) -> bool:
        return (self.weights(version) / ENTRY).exists()

    def export(self, trainer: Trainer) -> Path:
        """Writes the trainer's weights as a model folder of their version."""
        target = self.weights(trainer.version)
        with whole_folder(target) as part:
            trainer.export(part)
            write_entry(part, name=f"{self.run}-v{trainer.version}", renderer=self.renderer, source=self.run)
        return target

    def checkpoint(self, trainer: Trainer, state: LoopState) -> None:
        """Saves trainer and loop; the two newest stay."""
        with whole_folder(self.root / "state" / f"{state.step:04d}") as part:
            trainer.save(part)
            (part / LOOP_FILE).write_text(state.model_dump_json())
        _keep_last(self._states(), KEPT)

    def resume(self, trainer: Trainer) -> LoopState | None:
        """Loads the newest checkpoint into the trainer; None when there is none."""
        states = self._states()
        if not states:
            return None
        trainer.load(states[-1])
        return LoopState.model_validate_json((states[-1] / LOOP_FILE).read_text())

    def prune(self, version: int, state: LoopState) -> None:
        """Removes weights but for the last two versions up to `version` and the best."""
        found = sorted(p for p in (self.root / "weights").glob("v*") if p <= self.weights(version))
        _keep_last([p for p in found if str(p) != state.best_weights], KEPT)

    def _states(self) -> list[Path]:
        return sorted(p for p in (self.root / "state").glob("[0-9]*") if (p / LOOP_FILE).exists())


def _keep_last(folders: Sequence[Path], count: int) -> None:
    for folder in folders[:-count]:
        shutil.rmtree(folder)
