"""Draws follow the processed distribution, and the log-probability that is reported is the drawn entry's own."""

from __future__ import annotations

import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from training.engine.sampling import BLOCK, Draw, sample


def processed(logits: torch.Tensor, temperature: float, top_p: float) -> torch.Tensor:
    """The textbook definition: softmax at the temperature, then the smallest set whose mass reaches top_p."""
    p = torch.softmax(logits.double() / temperature, -1)
    if top_p == 1.0:
        return p
    order = p.argsort(descending=True)
    kept = p[order].cumsum(0) - p[order] < top_p - 1e-12
    out = torch.zeros_like(p)
    out[order[kept]] = p[order[kept]]
    return out / out.sum()


@given(
    seed=st.integers(0, 10**6),
    size=st.sampled_from([3, BLOCK, BLOCK + 1, 700]),
    temperature=st.floats(0.3, 2.0),
    top_p=st.sampled_from([1.0, 0.95, 0.5, 0.01]),
    uniform=st.floats(0, 1, exclude_max=True),
)
@settings(max_examples=200, deadline=None)
def test_reported_logprob_is_that_of_the_processed_distribution(
    seed: int, size: int, temperature: float, top_p: float, uniform: float
) -> None:
    logits = 3 * torch.randn(1, size, generator=torch.Generator().manual_seed(seed))
    [token], [logprob] = sample(logits, [Draw(temperature, top_p, uniform)])
    p = processed(logits[0], temperature, top_p)
    assert p[token] > 0
    assert math.isclose(logprob, math.log(p[token]), abs_tol=2e-4)


def test_draws_have_the_right_frequencies() -> None:
    logits = torch.tensor([[0.0, 1.0, -1.0, 2.0] + [-100.0] * 600])
    n = 4000
    tokens, _ = sample(logits.expand(n, -1), [Draw(0.7, 1.0, (k + 0.5) / n) for k in range(n)])
    p = torch.softmax(logits[0] / 0.7, -1)
    for token in range(4):
        assert abs(tokens.count(token) / n - float(p[token])) < 2 / n
    assert max(tokens) < 4


def test_ends_of_the_uniform_interval_draw_possible_entries() -> None:
    logits = torch.full((2, 600), float("-inf"))
    logits[:, 5] = 0.0
    logits[:, 590] = 0.0
    tokens, logprobs = sample(logits, [Draw(1.0, 1.0, 0.0), Draw(1.0, 1.0, 1 - 2**-53)])
    assert tokens == [5, 590]
    assert all(math.isclose(p, math.log(0.5), abs_tol=1e-6) for p in logprobs)


def test_greedy_takes_the_largest_and_mixed_rows_keep_to_themselves() -> None:
    logits = torch.randn(3, 500, generator=torch.Generator().manual_seed(0))
    draws = [Draw(0.0, 1.0, 0.99), Draw(1.0, 0.9, 0.3), Draw(2.0, 1.0, 0.3)]
    together = sample(logits, draws)
    alone = [sample(logits[k : k + 1], [d]) for k, d in enumerate(draws)]
    assert together[0] == [t[0] for t, _ in alone]
    assert together[0][0] == int(logits[0].argmax())
    assert math.isclose(together[1][0], float(torch.log_softmax(logits[0], -1).max()), abs_tol=1e-5)
