"""`distill/claw`: teacher rollouts, rejection sampling, the SFT dataset."""

from __future__ import annotations

from prefect import flow

from rollout.types import StageRecord
from tasks import training
from tasks.params import StageParams


@flow(
    name="distill",
    description="Rolls the teacher out, keeps its successes, writes the SFT dataset",
)
def distill(params: StageParams = StageParams()) -> StageRecord:
    """Rolls the teacher out, keeps its successes, writes the SFT dataset."""
    return training.distill(params)
