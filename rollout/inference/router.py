"""Which engine a rollout talks to: the engine table for weights, this process for scripted teachers.

The table is read again whenever an engine cannot be reached, so that one that was killed and started again, on
whatever port, is found by calls that wait for it.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Collection
from functools import partial

from rollout.inference.base import Engine
from rollout.inference.launch import read_key
from rollout.inference.scripted import OracleEngine, PlayCodec, is_scripted, read_scripted
from rollout.inference.vllm import EngineAddress, VllmEngine
from rollout.store import Store
from rollout.types import EngineRecord, Purpose, Rollout

FRESH_S = 1.0
ON_POLICY = frozenset({Purpose.TRAIN, Purpose.VALIDATE})
"""Rollouts that must see the weights in training: they wait for the run's own engine, a shared one never stands in."""


class EngineRouter:
    """Engines by (model, run, whether only the run's own will do), made once. Close it when the process ends."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._engines: dict[tuple[str, str, bool], VllmEngine] = {}

    def engine_for(self, rollout: Rollout, codec: PlayCodec) -> Engine:
        """Never waits: an engine that is not there yet is waited for by its first call.

        Raises ConfigError for a scripted teacher's name that cannot be read.
        """
        if is_scripted(rollout.model.name):
            return OracleEngine(read_scripted(rollout.model.name), codec)
        key = (rollout.model.name, rollout.run, rollout.purpose in ON_POLICY)
        if key not in self._engines:
            name, run, exclusive_only = key
            self._engines[key] = VllmEngine(Route(self._store, name, run, exclusive_only=exclusive_only))
        return self._engines[key]

    async def close(self) -> None:
        for engine in self._engines.values():
            await engine.close()
        self._engines.clear()


class Route:
    """The address of an engine that serves `model` to `run` now, or None; looked up at most once a second.

    Of several replicas each rollout has its own, whose cache then holds the rollout's prefix; when that one cannot be
    reached, its rollouts go to the others and the rest stay where they are (rendezvous hashing).
    """

    def __init__(
        self,
        store: Store,
        model: str,
        run: str,
        *,
        exclusive_only: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._look = partial(store.engines.routes, model, run, exclusive_only=exclusive_only)
        self._home = store.home
        self._clock = clock
        self._found: list[tuple[str, EngineAddress]] = []
        self._read_at = float("-inf")

    def __call__(
        self, rollout_id: str = "", *, fresh: bool = False, avoid: Collection[str] = ()
    ) -> EngineAddress | None:
        now = self._clock()
        if fresh or not self._found or now - self._read_at > FRESH_S:
            self._found = [(record.id, self._address(record)) for record in self._look()]
            self._read_at = now
        usable = [pair for pair in self._found if pair[1].url not in avoid] or self._found
        return max(usable, key=lambda pair: _weight(rollout_id, pair[0]), default=("", None))[1]

    def _address(self, record: EngineRecord) -> EngineAddress:
        return EngineAddress(record.url, record.version, read_key(self._home, record.id))


def _weight(rollout_id: str, engine_id: str) -> bytes:
    return hashlib.sha256(f"{rollout_id}|{engine_id}".encode()).digest()
