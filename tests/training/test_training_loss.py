"""Packing and losses: a pack scores each row as the row alone would, and the loss is its formula."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import Qwen3Config, Qwen3ForCausalLM

from training.config import LossConfig
from training.loss import TokenScores, TokenTargets, policy_loss, score_tokens
from training.packing import micro_batches, pack_rows

VOCAB = 64


@dataclass(frozen=True)
class Row:
    token_ids: tuple[int, ...]
    mask: tuple[bool, ...]


def row(ids: list[int], trained: set[int]) -> Row:
    return Row(tuple(ids), tuple(t in trained for t in range(len(ids))))


@pytest.fixture(scope="module")
def policy() -> Any:
    torch.manual_seed(1)
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        tie_word_embeddings=True,
    )
    model = Qwen3ForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(8.0)
    return model


def alone(model: Any, one: Row) -> list[float]:
    """Log-probabilities of the trained tokens by the plainest forward there is."""
    logits = model(torch.tensor([one.token_ids])).logits[0].log_softmax(-1)
    return [float(logits[t - 1, one.token_ids[t]]) for t, on in enumerate(one.mask) if on]


def test_a_shared_prefix_stands_once() -> None:
    packed = pack_rows([row([1, 2, 3, 4, 5], {3, 4}), row([1, 2, 3, 6, 7], {4})])
    assert packed.input_ids.tolist() == [[1, 2, 3, 4, 6]]
    assert packed.position_ids.tolist() == [[0, 1, 2, 3, 3]]
    assert (packed.sources.tolist(), packed.targets.tolist()) == ([2, 3, 4], [4, 5, 7])
    assert packed.attention_mask is not None
    assert packed.attention_mask[0, 0, 4].tolist() == [True, True, True, False, True]


def test_a_single_row_needs_no_mask() -> None:
    assert pack_rows([row([1, 2, 3], {2})]).attention_mask is None


@pytest.mark.parametrize("bad", [row([1, 2], set()), row([1, 2], {0, 1})])
def test_untrainable_rows_are_refused(bad: Row) -> None:
    with pytest.raises(ValueError, match="trained"):
        pack_rows([bad])


@st.composite
def families(draw: st.DrawFn) -> list[Row]:
    prefixes = draw(st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=6), min_size=1, max_size=2))
    rows = []
    for _ in range(draw(st.integers(1, 6))):
        ids = draw(st.sampled_from(prefixes)) + draw(st.lists(st.integers(0, 3), min_size=1, max_size=8))
        rows.append(row(ids, draw(st.sets(st.integers(1, len(ids) - 1), min_size=1))))
    return rows


@settings(max_examples=40, deadline=None)
@given(rows=families())
def test_a_pack_scores_each_row_as_if_alone(policy: Any, rows: list[Row]) -> None:
    with torch.no_grad():
        found = score_tokens(policy, pack_rows(rows)).logprobs.tolist()
        assert found == pytest.approx([p for one in rows for p in alone(policy, one)], abs=1e-4)


@settings(max_examples=100, deadline=None)
@given(rows=families(), budget=st.integers(4, 40), share=st.booleans())
def test_micro_batches_hold_each_row_once_and_keep_the_budget(rows: list[Row], budget: int, share: bool) -> None:
    packs = micro_batches(rows, budget, share=share)
    assert sorted(i for pack in packs for i in pack) == list(range(len(rows)))
    for pack in packs:
        nodes = {one.token_ids[: t + 1] for one in (rows[i] for i in pack) for t in range(len(one.token_ids))}
        assert len(pack) == 1 or (share and len(nodes) <= budget)


def test_entropy_is_that_of_the_whole_distribution(policy: Any) -> None:
    one = row([1, 2, 3], {2})
    with torch.no_grad():
        found = score_tokens(policy, pack_rows([one]), entropy=True).entropy
        logits = policy(torch.tensor([[1, 2]])).logits[0, -1]
    assert found is not None
    assert found[0] == pytest.approx(float(torch.distributions.Categorical(logits=logits).entropy()), abs=1e-5)


@pytest.mark.bugs
def test_bug_28_scores_are_those_at_the_sampling_temperature(policy: Any) -> None:
    one = row([1, 2, 3], {2})
    with torch.no_grad():
        found = score_tokens(policy, pack_rows([one]), temperature=0.7).logprobs
        logits = policy(torch.tensor([[1, 2]])).logits[0, -1] / 0.7
    assert found[0] == pytest.approx(float(logits.log_softmax(-1)[3]), abs=1e-5)


def loss_of(logp: float, config: LossConfig, **targets: float) -> tuple[float, float]:
    """(loss, d loss / d logp) of one token."""
    score = torch.tensor([logp], requires_grad=True)
    values = {"recorded": logp, "advantage": 1.0, "weight": 1.0, **targets}
    sums = policy_loss(TokenScores(score), TokenTargets(**{k: torch.tensor([v]) for k, v in values.items()}), config)
    sums.loss.backward()  # type: ignore[no-untyped-call]
    assert score.grad is not None
    return sums.loss.item(), score.grad.item()


def test_one_step_a_batch_is_the_plain_policy_gradient() -> None:
    assert loss_of(-1.0, LossConfig(), advantage=0.7) == pytest.approx((-0.7, -0.7))


def test_the_engine_correction_is_truncated() -> None:
    _, gentle = loss_of(-1.0, LossConfig(), recorded=-1.3)
    assert gentle == pytest.approx(-math.exp(0.3))
    _, capped = loss_of(-1.0, LossConfig(importance_cap=2.0), recorded=-4.0)
    assert capped == pytest.approx(-2.0)


@pytest.mark.parametrize(
    ("ratio", "advantage", "gradient"),
    [(1.5, 1.0, 0.0), (1.25, 1.0, -1.25), (0.5, -1.0, 0.0), (0.5, 1.0, -0.5), (1.5, -1.0, 1.5)],
)
def test_asymmetric_ratio_clipping(ratio: float, advantage: float, gradient: float) -> None:
    config = LossConfig(clip_low=0.2, clip_high=0.28)
    old = -1.0
    _, found = loss_of(old + math.log(ratio), config, old=old, recorded=old, advantage=advantage)
    assert found == pytest.approx(gradient, abs=1e-5)


def test_kl_is_the_k3_estimate() -> None:
    config = LossConfig(kl=0.1)
    loss, gradient = loss_of(-1.0, config, advantage=0.0, reference=-1.5)
    assert loss == pytest.approx(0.1 * (math.exp(-0.5) + 0.5 - 1))
    assert gradient == pytest.approx(0.1 * (1 - math.exp(-0.5)))
