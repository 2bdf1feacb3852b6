"""`synth/claw`: task synthesis, the five stages in a row. Each also has a deployment of its own."""

from __future__ import annotations

from prefect import flow

from flows.build import build
from flows.propose import propose
from flows.prune import prune
from flows.refine import refine
from flows.trial import trial
from rollout.types import StageRecord
from tasks.params import StageParams


@flow(
    name="synth",
    description="Synthesises tasks: propose, prune, build, trial, refine",
)
def synth(params: StageParams = StageParams()) -> StageRecord:
    """propose -> prune -> build -> trial -> refine; returns what `refine` accepted."""
    propose(params)
    prune(params)
    build(params)
    trial(params)
    return refine(params)
