"""What a run has done, read from the store: one line a stage, one row a model."""

from __future__ import annotations

from rich.table import Table

from rollout.config import Home
from rollout.types import ResultRecord, StageRecord

DEMO = "demo"
"""Key of the demo's own record: what all its stages took together, in all its lives."""


def stage_records(home: Home, run: str) -> list[StageRecord]:
    """The stages of a run in the order in which they were done, `sft` and `rl` of its parts included."""
    from rollout.store import open_store
    from tasks.checkpoints import stage_runs

    names = stage_runs(run)
    store = open_store(home)
    try:
        return [r for r in store.records.all(StageRecord) if r.run in names and r.stage != DEMO]
    finally:
        store.close()


def stage_lines(home: Home, run: str) -> list[str]:
    lines = []
    for record in stage_records(home, run):
        dropped = ", ".join(f"{n} {reason}" for reason, n in record.dropped.items())
        line = f"{record.stage:<12} kept {record.kept}" + (f", dropped {dropped}" if dropped else "")
        lines.append(f"{line}; {record.seconds:.0f} s, {record.rollouts} rollouts, {record.tokens} tokens")
    return lines


def result_table(results: list[ResultRecord]) -> Table:
    table = Table("model", "tasks", "trials", "pass@1", "95 %", "pass@3", "pass^3", title="held-out tasks")
    for result in results:
        m = result.metrics
        interval = f"{m.get('ci_low', float('nan')):.3f} to {m.get('ci_high', float('nan')):.3f}"
        figures = (f"{m.get(name, float('nan')):.3f}" for name in ("pass_at_1", "pass_at_3", "pass_hat_3"))
        at_1, at_3, hat_3 = figures
        table.add_row(
            result.label, f"{m.get('n_tasks', 0):.0f}", f"{m.get('n_trials', 0):.0f}", at_1, interval, at_3, hat_3
        )
    return table
