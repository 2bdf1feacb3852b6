"""From logits to ids: temperature, nucleus, an inverse-CDF draw, and the log-probability under that very distribution.

`torch.multinomial` over 49k entries costs fifty times as much as the draw here, which finds a block of the
vocabulary first and the entry inside it second. The uniform number of token k comes from the request's own stream, so
that a seed gives the same draws whatever else is in the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

BLOCK = 256
NUCLEUS = 256
"""Entries that are sorted first; a row whose nucleus is wider is sorted whole."""


@dataclass(frozen=True)
class Draw:
    """How one row is sampled. Temperature 0 is greedy and reports the log-probability at temperature 1."""

    temperature: float
    top_p: float
    uniform: float


def sample(logits: torch.Tensor, draws: Sequence[Draw]) -> tuple[list[int], list[float]]:
    """logits [n, V] -> n ids and n natural log-probabilities under the processed distribution."""
    count, size = logits.shape
    scores = logits.float()
    hot = torch.tensor([d.temperature or 1.0 for d in draws])
    if bool((hot != 1.0).any()):
        scores = scores / hot[:, None]
    weights = torch.zeros(count, -(-size // BLOCK) * BLOCK)
    torch.exp(scores.sub_(scores.amax(-1, keepdim=True)), out=weights[:, :size])
    for k, draw in enumerate(draws):
        if draw.top_p < 1.0 and draw.temperature > 0:
            _keep_nucleus(weights[k], draw.top_p)
    picked = _invert(weights, torch.tensor([d.uniform for d in draws], dtype=torch.float64))
    greedy = [k for k, d in enumerate(draws) if d.temperature == 0]
    if greedy:
        picked[greedy] = scores[greedy].argmax(-1)
    logprobs = scores.gather(1, picked[:, None])[:, 0] - weights.sum(-1).log()
    return picked.tolist(), logprobs.tolist()


def _keep_nucleus(weights: torch.Tensor, top_p: float) -> None:
    """Zeroes what lies outside the smallest set of entries whose mass reaches `top_p`, in place."""
    wanted = top_p * weights.sum()
    top, where = weights.topk(min(NUCLEUS, len(weights)))
    if top.sum() < wanted:
        top, where = weights.sort(descending=True)
    kept = top.cumsum(0) - top < wanted
    inside = where[kept]
    values = weights[inside]
    weights.zero_()
    weights[inside] = values


def _invert(weights: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """First entry whose cumulated weight passes `uniform` of the total; an entry of weight 0 is never drawn."""
    blocks = weights.view(len(weights), -1, BLOCK)
    ends = blocks.sum(-1, dtype=torch.float64).cumsum(-1)
    target = (uniform * ends[:, -1])[:, None]
    block = torch.searchsorted(ends, target, right=True).clamp_(max=ends.shape[1] - 1)
    block = torch.minimum(block, torch.searchsorted(ends, ends[:, -1:].contiguous()))
    inner = blocks[torch.arange(len(weights)), block[:, 0]].double().cumsum(-1)
    before = torch.where(block > 0, ends.gather(1, (block - 1).clamp_(min=0)), 0.0)
    rest = torch.minimum((target - before).clamp_(min=0.0), inner[:, -1:] * (1 - 1e-12))
    return (block * BLOCK + torch.searchsorted(inner, rest, right=True))[:, 0]
