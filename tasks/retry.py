"""When Prefect tries a stage again: only after our own infrastructure failed. The store makes a second try cheap."""

from __future__ import annotations

from typing import Any

from rollout.errors import InfrastructureError

RETRIES = 2
DELAYS_S = [5.0, 30.0]
DAY_S = 24 * 3600.0


def after_infrastructure(task: Any, task_run: Any, state: Any) -> bool:
    """Prefect's retry condition: true when the stage ended in an InfrastructureError."""
    return isinstance(state.result(raise_on_failure=False), InfrastructureError)
