"""Do engine and trainer hold the same policy? Checked before RL, over 512 tokens sampled for fixed prompts and seeds.

The importance correction assumes that the engine's log-probabilities differ from the trainer's by rounding only. A
wrong folder, temperature, position code or stop rule shows here as whole nats, long before a reward curve bends. The
bounds are set by measurement (docs/design/training.md, `benchmarks/parity.py`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Protocol

from rollout.errors import EngineError, InfrastructureError
from rollout.inference.base import CallContext, Engine
from rollout.types import Sampling, TrainingSample

TOKENS = 512
ANSWER = 64
ROUNDS = 8
TIMEOUT_S = 300.0
PROMPTS = (
    "Name three rivers of Europe and the seas that they reach.",
    "What is 17 times 23? Show the steps.",
    "Write a short note to a colleague who missed the meeting.",
    "Explain to a child why the sky is blue.",
    'Give {"name": "Ada", "born": 1815} as a sentence.',
    "Übersetze ins Englische: Der Termin wurde verschoben.",
    "List five things that belong into a bug report.",
    "Continue: the parcel arrived, but nobody had ordered it, so",
)
"""What users of a chat model write; rendered by the policy's own template."""


class Scores(Protocol):
    """The part of a trainer that is asked here."""

    def logprobs(self, samples: Sequence[TrainingSample]) -> list[list[float]]: ...


@dataclass(frozen=True)
class Parity:
    """|engine - trainer| of sampled tokens' log-probabilities, in nats."""

    tokens: int
    mean: float
    largest: float


def measure(
    engine: Engine, trainer: Scores, prompts: Sequence[Sequence[int]], stop_ids: Sequence[int], temperature: float
) -> Parity:
    """Samples until there are `TOKENS` tokens. Not to be called inside an event loop. Raises EngineError."""
    samples = asyncio.run(asyncio.wait_for(_sampled(engine, prompts, stop_ids, temperature), TIMEOUT_S))
    found = trainer.logprobs(samples)
    gaps = [
        abs(own - recorded)
        for sample, scores in zip(samples, found, strict=True)
        for own, recorded in zip(scores, _trained(sample), strict=True)
    ]
    return Parity(len(gaps), sum(gaps) / len(gaps), max(gaps))


def check(parity: Parity, mean: float, largest: float) -> None:
    """Raises InfrastructureError, with what to look at, beyond a bound."""
    if parity.mean <= mean and parity.largest <= largest:
        return
    raise InfrastructureError(
        f"engine and trainer disagree on {parity.tokens} tokens: {parity.mean:.3f} nats on average (bound {mean}), "
        f"{parity.largest:.3f} at most (bound {largest}). They do not hold the same weights, or not the same sampling; "
        "if the engine only computes less precisely, measure it (benchmarks/parity.py) and set rl.parity_mean and "
        "rl.parity_max"
    )


async def _sampled(
    engine: Engine, prompts: Sequence[Sequence[int]], stop_ids: Sequence[int], temperature: float
) -> list[TrainingSample]:
    samples: list[TrainingSample] = []
    try:
        for seed in range(ROUNDS):
            if sum(sum(s.mask) for s in samples) >= TOKENS:
                break
            calls = (_answer(engine, p, stop_ids, temperature, seed, i) for i, p in enumerate(prompts))
            samples += await asyncio.gather(*calls)
    finally:
        await engine.close()
    return samples


async def _answer(
    engine: Engine, prompt: Sequence[int], stop_ids: Sequence[int], temperature: float, seed: int, index: int
) -> TrainingSample:
    context = CallContext(f"parity-{index}", "", seed, 1000 * index)
    sampling = Sampling(temperature=temperature, max_tokens=ANSWER)
    ids: list[int] = []
    logprobs: list[float] = []
    async with aclosing(engine.generate(tuple(prompt), sampling, tuple(stop_ids), context)) as chunks:  # type: ignore[type-var]
        async for chunk in chunks:
            if chunk.logprobs is None:
                raise EngineError("the engine gives no log-probabilities: it cannot be trained with")
            ids += chunk.ids
            logprobs += chunk.logprobs
    before = len(prompt)
    return TrainingSample(
        token_ids=(*prompt, *ids),
        mask=(False,) * before + (True,) * len(ids),
        logprobs=(0.0,) * before + tuple(logprobs),
        weight=(1.0,) * (before + len(ids)),
        rollout_id=context.rollout_id,
        group_id="parity",
    )


def _trained(sample: TrainingSample) -> list[float]:
    return [value for value, trained in zip(sample.logprobs, sample.mask, strict=True) if trained]
