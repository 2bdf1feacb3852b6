"""`rl/claw`: RL inside the harness, from the SFT checkpoint."""

from __future__ import annotations

from prefect import flow

from rollout.types import StageRecord
from tasks import training
from tasks.hooks import release
from tasks.params import StageParams


@flow(
    name="rl",
    description="Trains with RL inside the harness, from the SFT checkpoint",
    on_cancellation=[release],
    on_crashed=[release],
    on_failure=[release],
)
def rl(params: StageParams = StageParams()) -> StageRecord:
    """Trains with RL inside the harness, from the SFT checkpoint."""
    return training.rl(params)
