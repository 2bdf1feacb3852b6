"""Pass rates against the vectors of Claw-Eval's scoring, and the laws that any pass rate obeys."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evaluation.metrics import (
    bootstrap_mean,
    by_family,
    formula_pass_at_k,
    formula_pass_hat_k,
    outcomes,
    paired_difference,
    pass_at_1,
    pass_at_k,
    pass_hat_k,
    scores,
    wilson,
)

K = 3
rows = st.dictionaries(
    st.text("abcdef", min_size=1, max_size=4),
    st.lists(st.integers(0, 1), min_size=K, max_size=K),
    min_size=1,
    max_size=12,
)
counted = st.integers(1, 12).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n), st.integers(1, n)))


def test_claw_eval_vector_pass_pass_fail() -> None:
    one = {"t": [1, 1, 0]}
    assert pass_hat_k(one, 3) == 0
    assert pass_at_k(one, 3) == 1
    assert pass_at_1(one) == pytest.approx(0.667, abs=5e-4)
    assert formula_pass_hat_k(3, 2, 3) == pytest.approx(0.2963, abs=5e-5)


def test_a_missing_third_trial_counts_zero() -> None:
    padded = outcomes({"t": [1.0, 1.0]}, expected=3)
    assert padded == {"t": [1, 1, 0]}
    assert pass_at_1(padded) == pytest.approx(2 / 3)
    assert pass_hat_k({"t": [1, 1]}, 3) == 0
    assert pass_at_k({"t": [0, 1]}, 3) == 1


def test_a_reward_passes_from_the_threshold_on() -> None:
    assert outcomes({"t": [0.7499, 0.75, 1.0]}, 0.75) == {"t": [0, 1, 1]}
    assert outcomes({"t": [0.1 * 3 / 0.3, 0.999]}) == {"t": [1, 0]}


@given(counted)
def test_formula_pass_at_k_is_the_share_of_draws_with_a_pass(sizes: tuple[int, int, int]) -> None:
    n, c, k = sizes
    n = min(n, 7)
    c, k = min(c, n), min(k, n)
    draws = list(itertools.combinations([1] * c + [0] * (n - c), k))
    assert formula_pass_at_k(n, c, k) == pytest.approx(sum(map(any, draws)) / len(draws))


@given(counted)
def test_formulas_are_bounded_and_meet_at_k_1(sizes: tuple[int, int, int]) -> None:
    n, c, k = sizes
    assert 0 <= formula_pass_hat_k(n, c, k) <= c / n + 1e-12
    assert c / n - 1e-12 <= formula_pass_at_k(n, c, k) <= 1
    assert formula_pass_at_k(n, c, 1) == pytest.approx(formula_pass_hat_k(n, c, 1)) == pytest.approx(c / n)
    if k < n:
        assert formula_pass_at_k(n, c, k) <= formula_pass_at_k(n, c, k + 1) + 1e-12
        assert formula_pass_hat_k(n, c, k) >= formula_pass_hat_k(n, c, k + 1) - 1e-12


@pytest.mark.parametrize("sizes", [(3, 4, 1), (3, -1, 1), (3, 1, 4), (3, 1, 0), (0, 0, 1)])
def test_formulas_refuse_impossible_counts(sizes: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="needs 0 <= c <= n"):
        formula_pass_at_k(*sizes)


@given(rows)
def test_headline_rates_are_ordered_and_monotonic_in_k(table: dict[str, list[int]]) -> None:
    assert 0 <= pass_hat_k(table, K) <= pass_at_1(table) + 1e-12
    assert pass_at_1(table) <= pass_at_k(table, K) + 1e-12 <= 1 + 1e-12
    for k in range(1, K):
        assert pass_at_k(table, k) <= pass_at_k(table, k + 1)
        assert pass_hat_k(table, k) >= pass_hat_k(table, k + 1)
    assert pass_at_k(table, 1) == pass_hat_k(table, 1)


@settings(max_examples=25, deadline=None)
@given(rows)
def test_headline_equals_the_formula_at_n_equal_k(table: dict[str, list[int]]) -> None:
    found = scores(table, K)
    assert found.pass_at_k == pytest.approx(sum(formula_pass_at_k(K, sum(r), K) for r in table.values()) / len(table))
    assert found.n_tasks == len(table)
    assert found.n_trials == K * len(table)
    assert found.interval.low <= found.pass_at_1 <= found.interval.high


@settings(max_examples=25, deadline=None)
@given(st.lists(st.floats(0, 1), min_size=1, max_size=30), st.integers(0, 5))
def test_interval_holds_the_mean_inside_the_range_and_repeats(values: list[float], seed: int) -> None:
    found = bootstrap_mean(values, seed=seed, resamples=400)
    mean = sum(values) / len(values)
    assert min(values) - 1e-9 <= found.low <= mean + 1e-9
    assert mean - 1e-9 <= found.high <= max(values) + 1e-9
    assert found == bootstrap_mean(values, seed=seed, resamples=400)


def test_interval_has_the_width_of_theory_and_narrows_with_tasks() -> None:
    small, large = bootstrap_mean([0.0, 1.0] * 50), bootstrap_mean([0.0, 1.0] * 800)
    for found, n in ((small, 100), (large, 1600)):
        assert (found.high - found.low) / 2 == pytest.approx(1.96 * 0.5 / math.sqrt(n), rel=0.08)


def test_interval_covers_the_truth_about_as_often_as_it_says() -> None:
    import numpy as np

    rng = np.random.default_rng(1)
    hits = 0
    for seed in range(150):
        found = bootstrap_mean(rng.binomial(3, 0.6, size=48) / 3, seed=seed, resamples=500)
        hits += found.low <= 0.6 <= found.high
    assert 0.87 <= hits / 150 <= 1.0


def test_paired_difference_sees_what_separate_intervals_hide() -> None:
    """Tasks of very different difficulty, each a little better: the difference is clear, the intervals overlap."""
    before = {f"t{i}": [1] * (i % 3) + [0] * (3 - i % 3) for i in range(48)}
    after = {
        t: [*sorted(row, reverse=True)[:-1], 1] if i % 3 == 0 else row for i, (t, row) in enumerate(before.items())
    }
    found = paired_difference(before, after)
    assert found.clear
    assert found.mean == pytest.approx(pass_at_1(after) - pass_at_1(before))
    assert scores(before, 3).interval.high > scores(after, 3).interval.low


def test_paired_difference_pairs_by_task_not_by_place() -> None:
    before = {"a": [1, 1, 1], "b": [0, 0, 0]}
    same = paired_difference(before, {"b": [0, 0, 0], "a": [1, 1, 1]})
    assert (same.mean, same.interval.low, same.interval.high) == (0, 0, 0)
    assert not same.clear


@settings(max_examples=20, deadline=None)
@given(rows)
def test_paired_difference_is_antisymmetric(table: dict[str, list[int]]) -> None:
    other = {task: [1 - row[0], *row[1:]] for task, row in table.items()}
    assert paired_difference(table, other).mean == pytest.approx(-paired_difference(other, table).mean)


def test_paired_difference_refuses_other_tasks() -> None:
    with pytest.raises(ValueError, match=r"not the same tasks: 2 .* 'a'"):
        paired_difference({"a": [1]}, {"b": [1]})


def test_no_tasks_is_an_error_and_no_trials_count_zero() -> None:
    for rate in (
        lambda: pass_at_1({}),
        lambda: pass_at_k({}, 1),
        lambda: pass_hat_k({}, 1),
        lambda: bootstrap_mean([]),
    ):
        with pytest.raises(ValueError, match="no "):
            rate()
    assert pass_at_1({"t": []}) == 0
    assert pass_hat_k({"t": []}, 3) == 0


def test_families_partition_the_tasks() -> None:
    table = {"a": [1, 1, 1], "b": [0, 0, 0], "c": [1, 0, 0]}
    found = by_family(table, {"a": "x", "b": "y", "c": "x"}, 3)
    assert list(found) == ["x", "y"]
    assert found["x"].pass_at_1 == pytest.approx(2 / 3)
    assert found["y"].pass_at_1 == 0
    assert sum(f.n_tasks for f in found.values()) == 3


@given(st.floats(0, 1), st.integers(1, 500))
def test_wilson_holds_the_mean_within_bounds(mean: float, n: int) -> None:
    found = wilson(mean, n)
    assert 0 <= found.low <= mean <= found.high <= 1
    assert found.high - found.low > 0


def test_wilson_vector() -> None:
    found = wilson(0.5, 100)
    assert (found.low, found.high) == (pytest.approx(0.4038, abs=1e-4), pytest.approx(0.5962, abs=1e-4))
    assert wilson(0.0, 0).high == 1.0
