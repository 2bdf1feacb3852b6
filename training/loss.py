"""Losses over trained tokens. Serves the SFT and RL steps.

Only the positions that predict a trained token go through the output layer: with a vocabulary of 49,152 and one
trained token in ten, full logits would cost more than the rest of a small model.

The policy gradient of one token, with A its advantage (PPO's clipped surrogate, truncated importance correction):

    ratio = exp(logp - old)                         old: the trainer's log-probability before the update
    trust = min(exp(old - recorded), cap)           recorded: the engine's log-probability when it sampled
    loss  = -trust * min(ratio * A, clip(ratio, 1 - low, 1 + high) * A) + kl * k3 - entropy_coefficient * entropy
    k3    = exp(ref - logp) - (ref - logp) - 1

Aggregation (paper section 1, our reading): the mean over all tokens of the batch by their weights, so neither
micro-batches nor the merging of calls into rows change the gradient.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from training.config import LossConfig
from training.packing import PackedRows


@dataclass(frozen=True)
class TokenScores:
    """Of each trained token, in the order of the packed rows."""

    logprobs: torch.Tensor
    """(N,) float32."""
    entropy: torch.Tensor | None = None
    """(N,) float32, of the whole distribution at that position."""


@dataclass(frozen=True)
class TokenTargets:
    """What the loss needs of each trained token besides the model's score; all (N,) float32."""

    recorded: torch.Tensor
    advantage: torch.Tensor
    weight: torch.Tensor
    old: torch.Tensor | None = None
    """The trainer's log-probabilities before the update; None takes the current ones (one step a batch)."""
    reference: torch.Tensor | None = None


@dataclass(frozen=True)
class TokenSums:
    """Weighted sums over tokens, to be divided by the batch's whole weight; only `loss` carries a gradient."""

    loss: torch.Tensor
    clipped: float
    kl: float
    entropy: float
    mismatch: float
    """Sum of |trainer - engine| log-probabilities before the update."""


def score_tokens(model: Any, packed: PackedRows, *, temperature: float = 1.0, entropy: bool = False) -> TokenScores:
    """Log-probabilities of the trained tokens under a Hugging Face causal language model."""
    logits = (
        model(
            input_ids=packed.input_ids,
            position_ids=packed.position_ids,
            attention_mask=packed.attention_mask,
            use_cache=False,
            logits_to_keep=packed.sources,
        )
        .logits[0]
        .float()
        / temperature
    )
    logprobs = -torch.nn.functional.cross_entropy(logits, packed.targets, reduction="none")
    if not entropy:
        return TokenScores(logprobs)
    log_softmax = logits.log_softmax(-1)
    return TokenScores(logprobs, -(log_softmax.exp() * log_softmax).sum(-1))


def policy_loss(scores: TokenScores, targets: TokenTargets, config: LossConfig) -> TokenSums:
    """The weighted sums of the module's formula."""
    logp, weight = scores.logprobs, targets.weight
    old = logp.detach() if targets.old is None else targets.old
    trust = (old - targets.recorded).exp().clamp(max=config.importance_cap)
    ratio = (logp - old).exp()
    free = ratio * targets.advantage
    bound = ratio.clamp(1 - config.clip_low, 1 + config.clip_high) * targets.advantage
    token_loss = -trust * torch.minimum(free, bound)
    kl = torch.zeros_like(logp)
    if targets.reference is not None:
        gap = targets.reference - logp
        kl = gap.exp() - gap - 1
        token_loss = token_loss + config.kl * kl
    if scores.entropy is not None:
        token_loss = token_loss - config.entropy * scores.entropy
    loss = (token_loss * weight).sum()
    with torch.no_grad():
        return TokenSums(
            loss=loss,
            clipped=float(((bound < free) * weight).sum()),
            kl=float((kl * weight).sum()),
            entropy=float((scores.entropy * weight).sum()) if scores.entropy is not None else 0.0,
            mismatch=float(((old - targets.recorded).abs() * weight).sum()),
        )
