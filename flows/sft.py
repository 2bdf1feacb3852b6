"""`sft/claw`: fine-tunes the student on the dataset."""

from __future__ import annotations

from prefect import flow

from rollout.types import StageRecord
from tasks import training
from tasks.params import StageParams


@flow(
    name="sft",
    description="Fine-tunes the student on the recorded tokens of the teacher's successes",
)
def sft(params: StageParams = StageParams()) -> StageRecord:
    """Fine-tunes the student on the recorded tokens of the teacher's successes."""
    return training.sft(params)
