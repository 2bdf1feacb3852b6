"""What happens when `rl` or the pipeline around it is cancelled, crashes or fails: the engine of its RL run ends.

No other flow has anything of its own to end: training processes die with their flow, while `serve`, its rollouts and
shared engines belong to the store and go on. Prefect calls a hook by keyword, after a cancellation in another process.
"""

from __future__ import annotations

from typing import Any

from filelock import Timeout

from rollout.config import open_home
from rollout.inference.launch import stop_engine
from rollout.store import open_store
from tasks.checkpoints import stage_run
from tasks.context import stage_lock
from tasks.params import StageParams

END_S = 5.0
"""How long the stage of a flow that has just been killed may still hold its lock."""


def release(flow: Any, flow_run: Any, state: Any) -> None:
    """Stops the exclusive engine of the flow's RL run, unless another flow trains the same run."""
    run = StageParams.model_validate(flow_run.parameters.get("params") or {}).run_name
    home = open_home()
    try:
        with stage_lock(home, run, "rl").acquire(timeout=END_S):
            store = open_store(home)
            try:
                for engine in store.engines.all():
                    if engine.exclusive == stage_run(run, "rl"):
                        stop_engine(store, engine.id)
            finally:
                store.close()
    except Timeout:  # another flow is in the stage: the engine is its own
        return
