"""Pass rates over tasks and trials, with bootstrap intervals. Pure; the last step before the report.

A task's outcomes are a row of 0 and 1. The *headline* rates are those of Claw-Eval's leaderboard: pass@k counts
the tasks with any pass among k trials, pass^k those whose k trials all pass, and a trial that is missing counts
0. The *formulas* estimate the same from n trials of which c passed. Intervals resample tasks, never trials: the
trials of one task are not independent.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

Outcomes = Mapping[str, Sequence[int]]
"""Task id -> outcomes of its trials, in trial order."""

RESAMPLES = 10_000
LEVEL = 0.95
_BLOCK = 500
_ROUNDING = 1e-9


@dataclass(frozen=True)
class Interval:
    low: float
    high: float


@dataclass(frozen=True)
class Scores:
    """Headline rates in [0, 1]; `interval` is that of pass@1."""

    n_tasks: int
    n_trials: int
    pass_at_1: float
    pass_at_k: float
    pass_hat_k: float
    interval: Interval


@dataclass(frozen=True)
class Difference:
    """pass@1 of one result minus that of another on the same tasks."""

    mean: float
    interval: Interval
    n_tasks: int

    @property
    def clear(self) -> bool:
        """The interval does not hold 0."""
        return self.interval.low > 0 or self.interval.high < 0


def outcomes(
    rewards: Mapping[str, Sequence[float]], pass_reward: float = 1.0, expected: int = 0
) -> dict[str, list[int]]:
    """Rewards as 0 and 1, each row padded with 0 to `expected` trials."""
    return {
        task: [int(r >= pass_reward - _ROUNDING) for r in row] + [0] * max(0, expected - len(row))
        for task, row in rewards.items()
    }


def pass_at_1(rows: Outcomes) -> float:
    """Mean over tasks of c/n. A task without trials counts 0. Raises ValueError without tasks."""
    return float(np.mean(task_means(rows)))


def pass_at_k(rows: Outcomes, k: int) -> float:
    """Share of tasks with any pass among their first k trials."""
    _need(rows)
    return sum(any(row[:k]) for row in rows.values()) / len(rows)


def pass_hat_k(rows: Outcomes, k: int) -> float:
    """Share of tasks that have k trials and passed the first k of them all."""
    _need(rows)
    return sum(len(row) >= k and all(row[:k]) for row in rows.values()) / len(rows)


def formula_pass_at_k(n: int, c: int, k: int) -> float:
    """1 - C(n-c, k) / C(n, k): chance that k of n trials, drawn without replacement, hold one of the c passes."""
    _check(n, c, k)
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)


def formula_pass_hat_k(n: int, c: int, k: int) -> float:
    """(c/n)^k, Claw-Eval's formula."""
    _check(n, c, min(k, n))
    return float((c / n) ** k)


def task_means(rows: Outcomes) -> list[float]:
    """c/n of each task, in order."""
    _need(rows)
    return [sum(row) / len(row) if row else 0.0 for row in rows.values()]


def scores(rows: Outcomes, k: int, *, seed: int = 0) -> Scores:
    return Scores(
        n_tasks=len(rows),
        n_trials=sum(map(len, rows.values())),
        pass_at_1=pass_at_1(rows),
        pass_at_k=pass_at_k(rows, k),
        pass_hat_k=pass_hat_k(rows, k),
        interval=bootstrap_mean(task_means(rows), seed=seed),
    )


def by_family(rows: Outcomes, families: Mapping[str, str], k: int, *, seed: int = 0) -> dict[str, Scores]:
    """Scores of each family, in the order of their names."""
    names = sorted({families[task] for task in rows})
    return {name: scores({t: r for t, r in rows.items() if families[t] == name}, k, seed=seed) for name in names}


def bootstrap_mean(values: Sequence[float], *, seed: int = 0, resamples: int = RESAMPLES) -> Interval:
    """Percentile bootstrap interval (95 %) of the mean; always holds the mean. Raises ValueError without values."""
    if not len(values):
        raise ValueError("no values: an interval needs at least one task")
    data = np.asarray(values, dtype=np.float64)
    rng = np.random.default_rng(seed)
    means = np.concatenate(
        [
            data[rng.integers(0, len(data), size=(min(_BLOCK, resamples - at), len(data)))].mean(axis=1)
            for at in range(0, resamples, _BLOCK)
        ]
    )
    low, high = np.quantile(means, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    mean = float(data.mean())
    return Interval(min(float(low), mean), max(float(high), mean))


def paired_difference(before: Outcomes, after: Outcomes, *, seed: int = 0) -> Difference:
    """pass@1 of `after` minus `before`, resampling tasks in pairs. Raises ValueError unless the tasks are the same."""
    if set(before) != set(after):
        odd = sorted(set(before) ^ set(after))
        raise ValueError(f"not the same tasks: {len(odd)} are in one result only, such as {odd[0]!r}")
    ordered = {task: after[task] for task in before}
    steps = [b - a for a, b in zip(task_means(before), task_means(ordered), strict=True)]
    return Difference(float(np.mean(steps)), bootstrap_mean(steps, seed=seed), len(steps))


def wilson(mean: float, n: int) -> Interval:
    """Wilson's 95 % interval of the mean of n values in [0, 1]; no wider variance is possible for such values."""
    if n <= 0:
        return Interval(0.0, 1.0)
    z = 1.959963984540054
    centre = (mean + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(max(0.0, mean * (1 - mean) / n + z * z / (4 * n * n)))
    return Interval(max(0.0, min(mean, centre - half)), min(1.0, max(mean, centre + half)))


def _need(rows: Outcomes) -> None:
    if not rows:
        raise ValueError("no tasks: a pass rate needs at least one")


def _check(n: int, c: int, k: int) -> None:
    if not (0 <= c <= n and 1 <= k <= n):
        raise ValueError(f"needs 0 <= c <= n and 1 <= k <= n, got n={n}, c={c}, k={k}")
