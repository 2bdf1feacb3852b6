"""All five stages in their order, for one batch."""

from __future__ import annotations

from collections.abc import Callable

from rollout.store import Store
from rollout.types import StageRecord
from synthesis.build import build
from synthesis.config import SynthConfig
from synthesis.ledger import Ledger
from synthesis.propose import propose
from synthesis.prune import prune
from synthesis.refine import refine
from synthesis.stage import Progress
from synthesis.trial import trial
from synthesis.types import Stage

StageFunction = Callable[[Store, Ledger, SynthConfig, str, Progress], StageRecord]
STAGES: dict[Stage, StageFunction] = {
    Stage.PROPOSE: propose,
    Stage.PRUNE: prune,
    Stage.BUILD: build,
    Stage.TRIAL: trial,
    Stage.REFINE: refine,
}


def synthesise(store: Store, ledger: Ledger, config: SynthConfig, run: str, progress: Progress) -> list[StageRecord]:
    """Propose, prune, build, trial, refine; afterwards `tasks/<batch>` in the home holds the accepted tasks."""
    return [stage(store, ledger, config, run, progress) for stage in STAGES.values()]
