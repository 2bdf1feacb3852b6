"""Which engine a rollout talks to: the engine table for weights, this process for scripted teachers.

The table is read again whenever an engine cannot be reached, so that one that was killed and started again, on
whatever port, is found by calls that wait for it.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from rollout.inference.base import Engine
from rollout.inference.launch import read_key
from rollout.inference.scripted import OracleEngine, PlayCodec, is_scripted, read_scripted
from rollout.inference.vllm import EngineAddress, VllmEngine
from rollout.store import Store
from rollout.types import EngineRecord, Rollout

FRESH_S = 1.0


class EngineRouter:
    """Engines by (model, run), made once. Close it when the process ends."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._engines: dict[tuple[str, str], VllmEngine] = {}

    def engine_for(self, rollout: Rollout, codec: PlayCodec) -> Engine:
        """Never waits: an engine that is not there yet is waited for by its first call.

        Raises ConfigError for a scripted teacher's name that cannot be read.
        """
        if is_scripted(rollout.model.name):
            return OracleEngine(read_scripted(rollout.model.name), codec)
        key = (rollout.model.name, rollout.run)
        if key not in self._engines:
            self._engines[key] = VllmEngine(Route(self._store, *key))
        return self._engines[key]

    async def close(self) -> None:
        for engine in self._engines.values():
            await engine.close()
        self._engines.clear()


class Route:
    """The address of the engine that serves `model` to `run` now, or None; looked up at most once a second."""

    def __init__(self, store: Store, model: str, run: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._store = store
        self._model = model
        self._run = run
        self._clock = clock
        self._found: EngineAddress | None = None
        self._read_at = float("-inf")

    def __call__(self, *, fresh: bool = False) -> EngineAddress | None:
        now = self._clock()
        if fresh or self._found is None or now - self._read_at > FRESH_S:
            record = self._store.engines.route(self._model, self._run)
            self._found = self._address(record) if record else None
            self._read_at = now
        return self._found

    def _address(self, record: EngineRecord) -> EngineAddress:
        return EngineAddress(record.url, record.version, read_key(self._store.home, record.id))
