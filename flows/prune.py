"""`prune/claw`: selects the best and most diverse proposals, discards the rest."""

from __future__ import annotations

from prefect import flow

from rollout.types import StageRecord
from tasks import synthesis
from tasks.params import StageParams


@flow(
    name="prune",
    description="Selects the best and most diverse proposals and discards the others",
)
def prune(params: StageParams = StageParams()) -> StageRecord:
    """Selects the best and most diverse proposals and discards the others."""
    return synthesis.prune(params)
