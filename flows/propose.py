"""`propose/claw`: drafts tasks into the ledger."""

from __future__ import annotations

from prefect import flow

from rollout.types import StageRecord
from tasks import synthesis
from tasks.params import StageParams


@flow(
    name="propose",
    description="Drafts tasks into the ledger, for `prune` to choose from",
)
def propose(params: StageParams = StageParams()) -> StageRecord:
    """Drafts tasks into the ledger, for `prune` to choose from."""
    return synthesis.propose(params)
