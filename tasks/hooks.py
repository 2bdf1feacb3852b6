"""What happens when a flow run is cancelled or crashes: what it started for itself ends.

That is the engine which RL leases for itself alone; its training process dies with the flow. `serve`, its rollouts
and shared engines go on: they belong to the store. Prefect calls a hook in another process, by keyword.
"""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError

from rollout.config import open_home
from rollout.inference.launch import stop_engine
from rollout.store import open_store
from tasks.params import EvalParams, StageParams


def release(flow: Any, flow_run: Any, state: Any) -> None:
    """Stops the exclusive engines of the flow run's own run."""
    run = _run_of(flow_run.parameters.get("params"))
    if not run:
        return
    store = open_store(open_home())
    try:
        for engine in store.engines.all():
            if engine.exclusive == run or engine.exclusive.startswith(f"{run}-"):
                stop_engine(store, engine.id)
    finally:
        store.close()


def _run_of(params: Any) -> str:
    if isinstance(params, StageParams):
        return params.run_name
    try:
        return StageParams.model_validate(params or {}).run_name
    except ValidationError:
        return EvalParams.model_validate(params or {}).run_name
