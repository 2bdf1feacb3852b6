"""The check before RL: what it measures, what it lets through, and that it refuses another policy."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest

from rollout.config import open_home
from rollout.errors import EngineError, InfrastructureError
from rollout.inference.base import CallContext, Chunk
from rollout.inference.launch import EngineOptions, ensure_engine, stop_engines
from rollout.inference.vllm import EngineAddress, VllmEngine
from rollout.proxy.codecs import load_codec
from rollout.proxy.messages import Message
from rollout.store import open_store
from rollout.types import Sampling, TrainingSample
from training import parity
from training.config import TrainerConfig
from training.models import ModelEntry
from training.trainer.reference import ReferenceTrainer

PROMPTS = [[1, 2, 3], [4, 5]]


class Fake:
    """Samples numbers whose log-probability is a tenth of them, in pieces."""

    structured_outputs = False

    def __init__(self, logprobs: bool = True, length: int = parity.ANSWER) -> None:
        self.seeds: list[int] = []
        self.closed = False
        self._logprobs, self._length = logprobs, length

    async def generate(
        self, ids: tuple[int, ...], sampling: Sampling, stop_ids: tuple[int, ...], context: CallContext
    ) -> AsyncIterator[Chunk]:
        self.seeds.append(context.seed + context.call_index)
        drawn = random.Random(self.seeds[-1]).choices(range(1, 20), k=self._length)
        for at in range(0, len(drawn), 7):
            part = tuple(drawn[at : at + 7])
            await asyncio.sleep(0)
            yield Chunk(part, tuple(-i / 10 for i in part) if self._logprobs else None, 0)

    async def update(self, path: str, version: int) -> None: ...

    async def close(self) -> None:
        self.closed = True


class Off:
    """A trainer that is `by` off everywhere, and `once` more on one token."""

    def __init__(self, by: float, once: float = 0.0) -> None:
        self.by, self.once = by, once

    def logprobs(self, samples: Sequence[TrainingSample]) -> list[list[float]]:
        found = [[-i / 10 + self.by for i in s.token_ids[s.mask.index(True) :]] for s in samples]
        found[0][3] += self.once
        return found


def test_it_compares_the_sampled_tokens_of_prompts_and_seeds_that_are_all_different() -> None:
    engine = Fake()
    found = parity.measure(engine, Off(0.01, once=0.5), PROMPTS, (7,), 1.0)
    assert found.tokens == parity.TOKENS
    assert found.mean == pytest.approx(0.01 + 0.5 / parity.TOKENS)
    assert found.largest == pytest.approx(0.51)
    assert len(set(engine.seeds)) == len(engine.seeds)
    assert engine.closed


def test_short_answers_end_it_all_the_same() -> None:
    engine = Fake(length=5)
    assert parity.measure(engine, Off(0.0), PROMPTS, (7,), 1.0).tokens == parity.ROUNDS * len(PROMPTS) * 5


def test_an_engine_without_logprobs_is_refused() -> None:
    with pytest.raises(EngineError, match="no log-probabilities"):
        parity.measure(Fake(logprobs=False), Off(0.0), PROMPTS, (7,), 1.0)


@pytest.mark.parametrize(("mean", "largest", "refused"), [(0.01, 0.1, False), (0.06, 0.1, True), (0.01, 3.0, True)])
def test_bounds(mean: float, largest: float, refused: bool) -> None:
    found = parity.Parity(512, mean, largest)
    if not refused:
        parity.check(found, 0.05, 2.0)
        return
    with pytest.raises(InfrastructureError, match=r"512 tokens.*parity_mean"):
        parity.check(found, 0.05, 2.0)


@pytest.mark.timeout(300)
def test_the_embedded_engine_is_within_the_bounds_and_another_temperature_is_not(
    tmp_path: Path, tiny_model: ModelEntry
) -> None:
    store = open_store(open_home(tmp_path / "home"))
    record = ensure_engine(store, tiny_model.name, tiny_model.path, options=EngineOptions(slots=8))
    folder = Path(tiny_model.path)
    codec = load_codec(folder, tiny_model.renderer)
    prompts = [codec.render([Message("user", text)], ()) for text in parity.PROMPTS]

    def measured(temperature: float) -> parity.Parity:
        trainer = ReferenceTrainer(folder, TrainerConfig(), temperature=temperature)
        engine = VllmEngine(lambda *_, **__: EngineAddress(record.url, 0))
        return parity.measure(engine, trainer, prompts, codec.stop_ids, 1.0)

    try:
        parity.check(measured(1.0), 0.05, 2.0)
        with pytest.raises(InfrastructureError):
            parity.check(measured(0.05), 0.05, 2.0)
    finally:
        stop_engines(store)
        store.close()
