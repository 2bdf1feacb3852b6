"""Cleaning rules: each drops what it names, counts it once, and the browser rules are off by default."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from rollout.errors import FailureClass
from rollout.types import (
    Failure,
    ModelCall,
    ModelRef,
    Purpose,
    Rollout,
    RolloutState,
    TaskSpec,
    Trajectory,
    Verdict,
)
from training.clean import actions_of, clean
from training.config import CleanConfig


def acting(index: int, name: str, arguments: Any) -> ModelCall:
    answer = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": name, "arguments": arguments}}]}
    return ModelCall(rollout_id="r", index=index, messages=({"role": "user", "content": "go"}, answer))


def saying(index: int, text: str) -> ModelCall:
    return ModelCall(rollout_id="r", index=index, messages=({"role": "assistant", "content": text},))


def trajectory(calls: Sequence[ModelCall], task: str = "t", reward: float = 1.0, **changes: Any) -> Trajectory:
    rollout = Rollout(
        id="r",
        run="run",
        task_id=task,
        group_id="g",
        model=ModelRef(name="m"),
        purpose=Purpose.TEACHER,
        task=TaskSpec(id=task, instruction="do it", bundle="/b", digest="d"),
        state=RolloutState.SUCCEEDED,
        verdict=Verdict(reward=reward, passed=reward == 1.0),
    )
    return Trajectory(rollout=rollout.model_copy(update=changes), calls=tuple(calls))


GOOD = [acting(0, "get_ticket", {"id": 4}), acting(1, "close_ticket", {"id": 5}), saying(2, "Done.")]
REPEATED = [acting(k, "click", {"x": 1, "y": 2}) for k in range(6)]


def test_a_clean_success_is_kept_unchanged() -> None:
    found = clean([trajectory(GOOD)], CleanConfig())
    assert found.kept == (trajectory(GOOD),)
    assert not found.dropped


@pytest.mark.parametrize(
    ("bad", "rule"),
    [
        (trajectory(GOOD, reward=0.5), "below_reward"),
        (trajectory(GOOD, verdict=None), "not_finished"),
        (
            trajectory(GOOD, state=RolloutState.FAILED, failure=Failure(kind=FailureClass.HARNESS)),
            "not_finished",
        ),
        (trajectory(GOOD, end_reason="call_cap"), "policy_end"),
        (trajectory([GOOD[0].model_copy(update={"malformed": True})]), "malformed"),
        (trajectory([GOOD[0].model_copy(update={"finish_reason": "length"})]), "cut_answer"),
    ],
)
def test_each_rule_drops_what_it_names(bad: Trajectory, rule: str) -> None:
    found = clean([bad, trajectory(GOOD)], CleanConfig())
    assert len(found.kept) == 1
    assert found.dropped == {rule: 1}


def test_bug_73_more_than_five_identical_actions_drop_the_trajectory() -> None:
    config = CleanConfig(drop_identical_over=5)
    assert clean([trajectory(REPEATED)], config).dropped == {"identical_actions": 1}
    assert len(clean([trajectory(REPEATED[:5])], config).kept) == 1
    assert len(clean([trajectory(REPEATED)], CleanConfig()).kept) == 1


def test_identical_means_consecutive_same_name_and_same_arguments() -> None:
    config = CleanConfig(drop_identical_over=2)
    broken = [
        *REPEATED[:2],
        saying(2, "hm"),
        *(c.model_copy(update={"index": 3 + k}) for k, c in enumerate(REPEATED[:2])),
    ]
    other = [acting(0, "click", {"x": 1}), acting(1, "click", {"x": 2}), acting(2, "click", {"x": 3})]
    spelt = [
        acting(0, "click", '{"y": 2, "x": 1}'),
        acting(1, "click", {"x": 1, "y": 2}),
        acting(2, "click", '{"x":1,"y":2}'),
    ]
    assert len(clean([trajectory(broken), trajectory(other)], config).kept) == 2
    assert clean([trajectory(spelt)], config).dropped == {"identical_actions": 1}


def test_a_long_run_keeps_only_its_last_turn_as_sample() -> None:
    config = CleanConfig(squash_identical_over=3)
    [kept] = clean([trajectory([*REPEATED[:4], saying(4, "done")])], config).kept
    assert [c.index for c in kept.calls] == [3, 4]
    [short] = clean([trajectory(REPEATED[:3])], config).kept
    assert len(short.calls) == 3


def test_the_removal_rule_sees_the_raw_trajectory() -> None:
    config = CleanConfig(squash_identical_over=3, drop_identical_over=5)
    assert clean([trajectory(REPEATED)], config).dropped == {"identical_actions": 1}


def test_the_shortest_success_of_a_task_stays() -> None:
    batch = [trajectory(GOOD), trajectory(GOOD[:2]), trajectory(GOOD, task="u")]
    found = clean(batch, CleanConfig(shortest_per_task=True))
    assert [(t.rollout.task_id, len(t.calls)) for t in found.kept] == [("t", 2), ("u", 3)]
    assert found.dropped == {"longer_success": 1}


def test_a_malformed_payload_is_compared_as_text() -> None:
    assert actions_of(acting(0, "click", '{"x": 1')) == (("click", '"{\\"x\\": 1"'),)
