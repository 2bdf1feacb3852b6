"""A printed trajectory shows each message once, and the verdict."""

from __future__ import annotations

import io

from rich.console import Console

from cli.table import print_rows
from cli.trajectory import print_trajectory
from rollout.types import ModelCall, ModelRef, Purpose, Rollout, RolloutState, TaskSpec, Trajectory, Verdict


def _text(trajectory: Trajectory) -> str:
    out = io.StringIO()
    print_trajectory(Console(file=out, width=120), trajectory)
    return out.getvalue()


def _trajectory() -> Trajectory:
    task = TaskSpec(id="t", instruction="Grüß [bold] Zoë", bundle="/nowhere", digest="d")
    verdict = Verdict(reward=0.5, passed=False, explanation="half", criteria={"sent": 1.0})
    rollout = Rollout(
        id="r-t-0",
        run="r",
        task_id="t",
        group_id="r-t",
        model=ModelRef(name="m"),
        purpose=Purpose.RUN,
        task=task,
        state=RolloutState.SUCCEEDED,
        verdict=verdict,
    )
    user = {"role": "user", "content": task.instruction}
    ask = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "get_ticket", "arguments": "{}"}}]}
    tool = {"role": "tool", "content": '{"id": 1}'}
    calls = (
        ModelCall(rollout_id="r-t-0", index=0, messages=(user, ask), delivered=True),
        ModelCall(rollout_id="r-t-0", index=1, messages=(user, ask, tool, {"role": "assistant", "content": "done"})),
    )
    return Trajectory(rollout=rollout, calls=calls)


def test_each_message_is_printed_once() -> None:
    text = _text(_trajectory())
    assert text.count("Grüß [bold] Zoë") == 1
    assert text.count("get_ticket({})") == 1
    assert text.count("done") == 1


def test_verdict_and_delivery_are_told() -> None:
    text = _text(_trajectory())
    assert "reward 0.5" in text
    assert "sent" in text
    assert text.count("not delivered") == 1


def test_rows_are_never_cut() -> None:
    out = io.StringIO()
    print_rows(Console(file=out, width=40), ("id", "n"), [("x" * 90, 1), ("[red]y", 22)])
    lines = out.getvalue().splitlines()
    assert lines[1].startswith("x" * 90)
    assert lines[2].startswith("[red]y")
