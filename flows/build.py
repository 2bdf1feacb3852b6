"""`build/claw`: writes a task bundle for each selected proposal."""

from __future__ import annotations

from prefect import flow

from rollout.types import StageRecord
from tasks import synthesis
from tasks.params import StageParams


@flow(
    name="build",
    description="Writes each selected proposal as a task bundle: instruction, services, verifier, solutions",
)
def build(params: StageParams = StageParams()) -> StageRecord:
    """Writes each selected proposal as a task bundle: instruction, services, verifier, solutions."""
    return synthesis.build(params)
