"""Advantages: paper section 1, with values worked out by hand."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout.types import TrainingSample
from training.advantage import Scored, by_group, group_advantages, mixed, trajectory_return, with_advantages


def sample(rollout: str, group: str = "g") -> TrainingSample:
    return TrainingSample(
        token_ids=(1, 2),
        mask=(False, True),
        logprobs=(0.0, -1.0),
        weight=(0.0, 1.0),
        rollout_id=rollout,
        group_id=group,
    )


def scored(rollout: str, reward: float, calls: int = 1, group: str = "g") -> Scored:
    return Scored(group, reward, calls, tuple(sample(rollout, group) for _ in range(calls)))


def test_one_success_of_four() -> None:
    deviation = math.sqrt(((0.75**2) + 3 * 0.25**2) / 3)
    found = group_advantages([1.0, 0.0, 0.0, 0.0])
    assert found == pytest.approx([0.75 / (deviation + 1e-6)] + [-0.25 / (deviation + 1e-6)] * 3)


def test_without_the_division() -> None:
    assert group_advantages([1.0, 0.0], std=False) == [0.5, -0.5]


@pytest.mark.parametrize("returns", [[], [0.3], [1.0, 1.0, 1.0], [0.1 + 0.2, 0.3]])
def test_equal_rewards_and_groups_of_one_give_zero(returns: list[float]) -> None:
    assert group_advantages(returns) == [0.0] * len(returns)


def test_return_is_the_mean_of_discounted_rewards() -> None:
    assert trajectory_return(1.0, 3) == 1.0
    assert trajectory_return(0.5, 3, gamma=0.5) == pytest.approx(0.5 * (1 + 0.5 + 0.25) / 3)
    with pytest.raises(ValueError, match="without samples"):
        trajectory_return(1.0, 0)


def test_a_trajectory_with_many_calls_weighs_no_more_in_the_baseline() -> None:
    groups = by_group([scored("long", 1.0, calls=9), scored("short", 0.0)])
    found = {s.rollout_id: s.advantage for s in with_advantages(groups)}
    assert found["long"] == pytest.approx(-found["short"])
    assert len(with_advantages(groups)) == 10


def test_bug_61_dropped_members_leave_a_smaller_group() -> None:
    rewards = [1.0, 0.0, 0.0, 1.0, 0.0, 0.0]
    six = with_advantages(by_group(scored(f"r{k}", r) for k, r in enumerate(rewards)))
    assert [s.advantage for s in six] == pytest.approx(group_advantages(rewards))
    of_eight = group_advantages([*rewards, 0.0, 0.0])
    assert six[0].advantage != pytest.approx(of_eight[0])


def test_only_mixed_groups_are_trained() -> None:
    groups = by_group([scored("a", 1.0), scored("b", 1.0), scored("c", 1.0, group="h"), scored("d", 0.0, group="h")])
    assert {s.rollout_id for s in with_advantages(groups)} == {"c", "d"}
    assert [mixed(g) for g in groups.values()] == [False, True]


@given(st.lists(st.floats(0, 1), min_size=2, max_size=16), st.booleans())
def test_advantages_are_finite_and_centred(returns: list[float], std: bool) -> None:
    found = group_advantages(returns, std=std)
    assert all(math.isfinite(a) for a in found)
    assert sum(found) == pytest.approx(0.0, abs=1e-4)
