"""The contract of an engine: token ids in, a stream of sampled ids with their log-probabilities out."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from rollout.types import Sampling


@dataclass(frozen=True)
class Chunk:
    """Consecutive sampled ids. `finish_reason` (`stop` or `length`) is set on the last chunk only."""

    ids: tuple[int, ...]
    logprobs: tuple[float, ...] | None
    version: int
    finish_reason: str = ""


@dataclass(frozen=True)
class CallContext:
    """What an engine may know of the caller: routing and caching, never the prompt's meaning."""

    rollout_id: str
    task_bundle: str
    call_index: int
    seed: int
    """The rollout's, the same for all of its calls: call k samples with seed + k."""
    schema: Mapping[str, Any] | None = None
    """JSON schema that the text must fit; only engines with `structured_outputs` are given one."""


class Engine(Protocol):
    @property
    def structured_outputs(self) -> bool:
        """Whether it can hold an answer to a JSON schema."""
        ...

    def generate(
        self, ids: tuple[int, ...], sampling: Sampling, stop_ids: tuple[int, ...], context: CallContext
    ) -> AsyncIterator[Chunk]:
        """Streams a completion; the stop id itself is part of the ids. Closing the iterator aborts the generation.

        Raises EngineError.
        """
        ...

    async def update(self, path: str, version: int) -> None:
        """Serves the weights in folder `path` as `version`; running streams go on under the new weights."""
        ...

    async def close(self) -> None: ...
