"""Group advantages: pure. Serves RL, between samples and the trainer step.

Paper section 1: every pair of a trajectory gets `r_t = gamma^(T-t) * r_T`; `R_i` is the mean of them over the
trajectory's samples, so that a trajectory with many calls weighs no more in the baseline;
`A_i = (R_i - mean_j R_j) / (std_j R_j + eps)` over the group's trajectories, and every token of i gets A_i.
Sample standard deviation (n - 1) and eps 1e-6 as veRL; equal rewards or a group of one give 0.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from rollout.types import TrainingSample

EPS = 1e-6


@dataclass(frozen=True)
class Scored:
    """One trajectory that entered its group: its reward, how many calls are trained, and its rows."""

    group_id: str
    reward: float
    calls: int
    samples: tuple[TrainingSample, ...]


def trajectory_return(reward: float, calls: int, gamma: float = 1.0) -> float:
    """Mean of `gamma^(T-t) * reward` over t = 0..T, with `calls` = T + 1 >= 1."""
    if calls < 1:
        raise ValueError("a trajectory without samples has no return")
    return reward * sum(gamma**k for k in range(calls)) / calls


def group_advantages(returns: Sequence[float], *, std: bool = True, eps: float = EPS) -> list[float]:
    """Advantage of each member of one group; `std=False` leaves out the division."""
    if len(returns) < 2 or max(returns) - min(returns) < eps:
        return [0.0] * len(returns)
    mean = statistics.fmean(returns)
    scale = statistics.stdev(returns) + eps if std else 1.0
    return [(r - mean) / scale for r in returns]


def by_group(members: Iterable[Scored]) -> dict[str, list[Scored]]:
    groups: dict[str, list[Scored]] = {}
    for member in members:
        groups.setdefault(member.group_id, []).append(member)
    return groups


def _returns(group: Sequence[Scored], gamma: float) -> list[float]:
    return [trajectory_return(m.reward, m.calls, gamma) for m in group]


def mixed(group: Sequence[Scored], gamma: float = 1.0) -> bool:
    """Whether the members' returns differ, so that the group carries a signal."""
    returns = _returns(group, gamma)
    return max(returns) - min(returns) >= EPS


def with_advantages(
    groups: Mapping[str, Sequence[Scored]], *, gamma: float = 1.0, std: bool = True
) -> list[TrainingSample]:
    """The samples of all mixed groups with their advantage set. A dropped member only makes its group smaller."""
    out: list[TrainingSample] = []
    for group in groups.values():
        if not mixed(group, gamma):
            continue
        advantages = group_advantages(_returns(group, gamma), std=std)
        for member, advantage in zip(group, advantages, strict=True):
            out += [s.model_copy(update={"advantage": advantage}) for s in member.samples]
    return out
