"""Continuous batching: every step feeds one token of each decoding slot and a budget of prompt tokens of the others.

    submitted -> waiting -> (placed in a slot) reading its prompt -> decoding -> finished | cancelled
    new weights: every placed request goes back to waiting with the ids it has, under the new version

Not thread-safe; `EngineWorker` owns one.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from rollout.errors import ConfigError
from training.engine.attention import Batch, Chunk, SlotCache
from training.engine.model import SlotModel
from training.engine.sampling import Draw, sample
from training.engine.slots import Array, Layout, SlotTable, lay_out, read_runs, read_shared

PROMPT_BUDGET = 256
"""Prompt tokens of one step while other rows decode: about as long as two steps of 64 decoding rows."""


@dataclass(frozen=True)
class Request:
    """One completion. `seed` fixes the sequence of uniform numbers that its tokens are drawn with."""

    id: str
    prompt: tuple[int, ...]
    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    seed: int | None = None
    stop_ids: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Event:
    """One sampled id of a request, or its failure (`error` set, no id)."""

    request: str
    token: int = -1
    logprob: float = 0.0
    version: int = 0
    finish: str = ""
    """`stop` or `length` on the last one."""
    error: str = ""


@dataclass
class Counters:
    """Since the start."""

    steps: int = 0
    sampled: int = 0
    prompt_tokens: int = 0
    """Ids of prompts that were placed, counted again after an update."""
    reused_tokens: int = 0
    """Those that were cached already."""
    requests: int = 0
    cancelled: int = 0
    updates: int = 0


@dataclass(eq=False)
class _Live:
    request: Request
    stream: random.Random
    ids: Array
    """Prompt and sampled ids, as far as known when it was last placed."""
    sampled: list[int] = field(default_factory=list)


class Batcher:
    """Slots of one model. `step` does one forward pass and returns what it sampled."""

    def __init__(
        self, path: str | Path, *, slots: int, max_len: int, dtype: torch.dtype | None = None, version: int = 0
    ) -> None:
        """`dtype` None: bf16 where the processor has bf16 units, else f32. `path` is `version`. Raises ConfigError."""
        self._cache = SlotCache(slots, max_len)
        self.model = SlotModel(path, self._cache, dtype)
        self.table = SlotTable(slots, max_len)
        self.version = version
        self.counters = Counters()
        self._waiting: deque[_Live] = deque()
        self._live: dict[int, _Live] = {}
        self._layout = Layout((), (), ())

    @property
    def idle(self) -> bool:
        return not self._waiting and not self._live

    @property
    def running(self) -> int:
        return len(self._live)

    @property
    def queued(self) -> int:
        return len(self._waiting)

    def check(self, request: Request) -> None:
        """Raises ConfigError for a request that can never run."""
        if not request.prompt:
            raise ConfigError("the prompt is empty; send at least one token id")
        if len(request.prompt) >= self.table.max_len:
            raise ConfigError(
                f"the prompt has {len(request.prompt)} tokens, this engine's context is {self.table.max_len} "
                "with room for at least one new token; shorten the prompt or start the engine with a larger --max-len"
            )
        if not 0 <= min(request.prompt) <= max(request.prompt) < self.model.vocabulary:
            raise ConfigError(f"token ids must lie in 0..{self.model.vocabulary - 1}")

    def submit(self, request: Request) -> None:
        self.check(request)
        self.counters.requests += 1
        stream = random.Random(request.seed)
        self._waiting.append(_Live(request, stream, np.array(request.prompt, dtype=np.int64)))

    def cancel(self, request_id: str) -> None:
        """Frees its slot; unknown ids (finished already) are ignored."""
        for live in list(self._waiting):
            if live.request.id == request_id:
                self._waiting.remove(live)
                self.counters.cancelled += 1
        for slot, live in list(self._live.items()):
            if live.request.id == request_id:
                self._free(slot)
                self.counters.cancelled += 1

    def update(self, path: str | Path, version: int) -> None:
        """New weights for every token from now on; nothing cached survives, running requests keep their ids.

        Raises ConfigError, leaving everything as it was, when the weights do not fit.
        """
        self.model.load(path)
        for slot in sorted(self._live, reverse=True):
            live = self._live[slot]
            live.ids = self.table.ids[slot, : self.table.length[slot]].copy()
            self._waiting.appendleft(live)
        self._live.clear()
        self.table.clear()
        self._layout = Layout((), (), ())
        self.version = version
        self.counters.updates += 1

    def drop_all(self) -> list[str]:
        """Forgets every request; returns their ids."""
        gone = [live.request.id for live in (*self._live.values(), *self._waiting)]
        self._live.clear()
        self._waiting.clear()
        self.table.clear()
        return gone

    @torch.inference_mode()
    def step(self) -> list[Event]:
        self._admit()
        if not self._live:
            return []
        batch, ready, fed = self._gather()
        logits = self.model.forward(batch)
        self.counters.steps += 1
        self.table.filled[list(fed)] += list(fed.values())
        return self._sample(logits, ready)

    def _admit(self) -> None:
        left: deque[_Live] = deque()
        while self._waiting and len(self._live) < len(self.table.busy):
            live = self._waiting.popleft()
            place = self.table.place(live.ids)
            if place is None:
                left.append(live)
                continue
            if place.reuse and place.slot != place.source:
                self._cache.copy_prefix(place.source, place.slot, place.reuse)
            self.table.take(place, live.ids)
            self._live[place.slot] = live
            self.counters.prompt_tokens += len(live.ids)
            self.counters.reused_tokens += place.reuse
        self._waiting.extendleft(reversed(left))

    def _gather(self) -> tuple[Batch, list[int], dict[int, int]]:
        """The step's batch, the slots whose next id is sampled, and how many tokens each slot is fed."""
        todo = {slot: int(self.table.length[slot] - self.table.filled[slot]) for slot in self._live}
        decoding = sorted(slot for slot, n in todo.items() if n == 1)
        fed = dict.fromkeys(decoding, 1)
        ready = list(decoding)
        heads = list(range(len(decoding)))
        chunks: list[Chunk] = []
        total, budget = len(decoding), PROMPT_BUDGET if decoding else 2 * PROMPT_BUDGET
        for slot, n in todo.items():
            take = min(n, budget)
            if n == 1 or take < 1:
                continue
            chunks.append(Chunk(total, total + take, slot, int(self.table.filled[slot])))
            fed[slot] = take
            total, budget = total + take, budget - take
            if take == n:
                ready.append(slot)
                heads.append(total - 1)
        if self._layout.slots != tuple(decoding):
            self._layout = lay_out(self.table, decoding)
        slots = np.repeat(list(fed), list(fed.values()))
        positions = np.concatenate([np.arange(self.table.filled[s], self.table.filled[s] + n) for s, n in fed.items()])
        batch = Batch(
            ids=torch.from_numpy(self.table.ids[slots, positions]),
            slots=torch.from_numpy(slots),
            positions=torch.from_numpy(positions),
            runs=read_runs(self.table, self._layout, self.model.dtype),
            shared=read_shared(self._layout),
            chunks=chunks,
            heads=torch.tensor(heads, dtype=torch.long),
        )
        return batch, ready, fed

    def _sample(self, logits: torch.Tensor, ready: Sequence[int]) -> list[Event]:
        if not ready:
            return []
        lives = [self._live[slot] for slot in ready]
        draws = [Draw(v.request.temperature, v.request.top_p, v.stream.random()) for v in lives]
        events = []
        for slot, live, token, logprob in zip(ready, lives, *sample(logits, draws), strict=True):
            live.sampled.append(token)
            self.counters.sampled += 1
            finish = self._finish(live, slot, token)
            events.append(Event(live.request.id, token, logprob, self.version, finish))
            if finish:
                self._free(slot)
            else:
                self.table.append(slot, token)
        return events

    def _finish(self, live: _Live, slot: int, token: int) -> str:
        if token in live.request.stop_ids:
            return "stop"
        full = self.table.length[slot] + 1 >= self.table.max_len
        return "length" if full or len(live.sampled) >= live.request.max_tokens else ""

    def _free(self, slot: int) -> None:
        del self._live[slot]
        self.table.release(slot)
