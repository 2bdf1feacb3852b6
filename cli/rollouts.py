"""`openforge rollouts list|show|cancel`: what ran, what it said, and how to stop it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import App, Parameter
from rich.console import Console

from cli.table import print_rows
from rollout.config import open_home
from rollout.errors import ConfigError

if TYPE_CHECKING:
    from rollout.types import Rollout

app = App(name="rollouts", help="Lists, shows and cancels rollouts.")
console = Console(highlight=False)


@app.command(name="list")
def list_rollouts(*, run: str = "", state: str = "", purpose: str = "", limit: int = 50) -> int:
    """Lists rollouts, the newest last.

    Parameters
    ----------
    run
        Only those of this stage run, e.g. `demo-eval-base`.
    state
        Only those in this state: queued, starting, running, verifying, succeeded, failed, timed_out, cancelled.
    purpose
        Only those for trial, teacher, train, validate, eval or run.
    limit
        At most this many.
    """
    from rollout.store import open_store
    from rollout.types import Purpose, RolloutState

    store = open_store(open_home())
    try:
        found = store.rollouts.query(
            run=run,
            state=_member(RolloutState, state, "state") if state else None,
            purpose=_member(Purpose, purpose, "purpose") if purpose else None,
        )
    finally:
        store.close()
    headers = ("id", "state", "model", "harness", "calls", "tokens", "reward", "end")
    print_rows(console, headers, [_cells(rollout) for rollout in found[-limit:]])
    console.print(f"{len(found)} rollouts" + (f", the last {limit} shown" if len(found) > limit else ""))
    return 0


@app.command
def show(
    rollout_id: str,
    /,
    *,
    json: Annotated[bool, Parameter(negative="")] = False,
    raw: Annotated[bool, Parameter(negative="")] = False,
    call: int | None = None,
    out: Path | None = None,
) -> int:
    """Prints a rollout's trajectory: messages, tool calls, verdict.

    Parameters
    ----------
    rollout_id
        An id of `openforge rollouts list`; the last attempt is shown.
    json
        The record as JSON instead.
    raw
        Requests and answers byte for byte as they crossed the wire, each with a line end behind it.
    call
        Only the call with this index.
    out
        With --raw: a folder for a file of each request and answer, exactly as they were.
    """
    from cli.raw import chosen, write_raw
    from cli.trajectory import print_trajectory
    from rollout.store import open_store
    from rollout.types import Trajectory

    store = open_store(open_home())
    try:
        rollout = store.rollouts.latest([rollout_id]).get(rollout_id) or store.rollouts.get(rollout_id)
        if rollout is None:
            raise ConfigError(f"no rollout {rollout_id!r}; `openforge rollouts list` shows the ids")
        calls = store.calls.of(rollout.id)
        calls = calls if call is None and not raw else chosen(calls, call)
        if raw:
            write_raw(store, calls, out)
            return 0
    finally:
        store.close()
    trajectory = Trajectory(rollout=rollout, calls=tuple(calls))
    if json:
        print(trajectory.model_dump_json(indent=2))
    else:
        print_trajectory(console, trajectory)
    return 0


@app.command
def cancel(*ids: str, run: str = "") -> int:
    """Cancels live rollouts by id or by run; serve ends them.

    Parameters
    ----------
    ids
        Rollout ids.
    run
        All live rollouts of this stage run.
    """
    from rollout.store import open_store

    if not ids and not run:
        raise ConfigError("name rollout ids, or a run with --run")
    store = open_store(open_home())
    try:
        count = store.rollouts.cancel(ids=list(ids), run=run)
    finally:
        store.close()
    console.print(f"{count} marked for cancellation")
    return 0


def _member(kind: type, value: str, what: str):  # type: ignore[no-untyped-def]
    try:
        return kind(value)
    except ValueError as error:
        raise ConfigError(f"no {what} {value!r}; there are: {', '.join(m.value for m in kind)}") from error  # type: ignore[attr-defined]


def _cells(rollout: Rollout) -> tuple[str, ...]:
    reward = f"{rollout.verdict.reward:g}" if rollout.verdict else ""
    end = rollout.end_reason or (rollout.failure.kind.value if rollout.failure else "")
    row = (rollout.id, rollout.state.value, rollout.model.name, rollout.harness, rollout.calls, rollout.tokens)
    return (*(str(cell) for cell in row), reward, end)
