"""One rollout as the proxy sees it: identity, caps, recorded calls and the calls that run now.

    key -> Sessions.identify -> (rollout, phase)         Sessions.session -> Session, rebuilt from calls.db when needed
    request -> Session.admit -> Admission (index, prompt, bound) | Refused (a cap)

Everything here runs on one event loop and `admit` never awaits, so that indexes and caps need no lock.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from rollout.errors import ConfigError, FailureClass, InfrastructureError
from rollout.inference.base import CallContext, Engine
from rollout.proxy.codecs import Codecs
from rollout.proxy.dialects.base import CallRequest, Refused
from rollout.proxy.history import REACH, Prompt, Recorded, make_prompt
from rollout.proxy.messages import load_message, without_ids
from rollout.proxy.render import Codec
from rollout.store import Store
from rollout.store.rollouts import hash_key
from rollout.types import ModelCall, Rollout, Sampling

log = logging.getLogger(__name__)
KEY_FRESH_S = 2.0
"""A revoked key is refused after at most this long, at once after `forget`."""
IDLE_S = 3600.0
IDENTITIES = 4096


class Running(Protocol):
    """A call that runs now."""

    def abandon(self) -> None: ...


class EngineSource(Protocol):
    def engine_for(self, rollout: Rollout, codec: Any) -> Engine: ...


@dataclass(frozen=True)
class Admission:
    """What a call may do: its index, its prompt, and how it samples."""

    index: int
    prompt: Prompt
    sampling: Sampling
    answered: tuple[Recorded, ...]
    """Earlier calls that this request shows to have been delivered."""


class Session:
    """State of one rollout's model calls. `calls` are the complete ones of the last `REACH`, in order."""

    def __init__(self, rollout: Rollout, codec: Codec, engine: Engine, past: Sequence[ModelCall]) -> None:
        self.rollout = rollout
        self.codec = codec
        self.engine = engine
        self.running: dict[str, Any] = {}
        """Calls that run now, by digest of their request."""
        self.touched = time.monotonic()
        self.calls = [recorded(call) for call in past if call.failure is None][-REACH:]
        self._next = max((call.index for call in past), default=-1) + 1
        self._used_calls = sum(1 for call in past if _counts(call))
        self._used_tokens = sum(len(call.completion_ids) for call in past)

    def admit(self, request: CallRequest) -> Admission:
        """Takes the next index. Raises Refused: `call_cap`, `token_cap`, `context_cap`, or an unrenderable history."""
        limits, sampling = self.rollout.limits, self.rollout.sampling
        if self._used_calls >= limits.calls:
            raise Refused(400, "call_cap", f"this rollout has had its {limits.calls} model calls")
        left = limits.tokens - self._used_tokens
        if left <= 0:
            raise Refused(400, "token_cap", f"this rollout has sampled its {limits.tokens} tokens")
        answered = self._answered(request)
        arrived = [c for c in self.calls if c.delivered or any(c is a for a in answered)]
        prompt = make_prompt(self.codec, request, arrived, self.rollout.history)
        room = limits.context - len(prompt.ids)
        if room <= 0:
            raise Refused(
                400, "context_cap", f"a prompt of {len(prompt.ids)} tokens fills the {limits.context} there are"
            )
        most = min(sampling.max_tokens, request.max_tokens or sampling.max_tokens, left, room)
        index, self._next = self._next, self._next + 1
        self._used_calls += 1
        return Admission(index, prompt, sampling.model_copy(update={"max_tokens": most}), answered)

    def context(self, index: int) -> CallContext:
        rollout = self.rollout
        return CallContext(rollout.id, rollout.task.bundle, index, rollout.sampling.seed)

    def committed(self, call: ModelCall) -> None:
        """Counts a call that has been recorded, and keeps it for later ones to extend."""
        self._used_tokens += len(call.completion_ids)
        if not _counts(call):
            self._used_calls -= 1
        if call.failure is None:
            self.calls = [*self.calls, recorded(call)][-REACH:]

    def replayable(self, digest: str, *, retried: bool) -> Recorded | None:
        """The last call, if this request repeats it and its answer did not arrive (or the client says: a retry)."""
        last = self.calls[-1] if self.calls else None
        again = last is not None and last.request == digest and (retried or not last.delivered)
        return last if again else None

    def find(self, index: int) -> Recorded | None:
        return next((call for call in self.calls if call.index == index), None)

    def _answered(self, request: CallRequest) -> tuple[Recorded, ...]:
        waiting = [call for call in self.calls if not call.delivered]
        if not waiting:
            return ()
        shown = [without_ids(message) for message in request.messages if message.role == "assistant"]
        return tuple(call for call in waiting if without_ids(call.messages[-1]) in shown)


def recorded(call: ModelCall) -> Recorded:
    return Recorded(
        index=call.index,
        prompt=call.prompt_ids,
        completion=call.completion_ids,
        messages=tuple(load_message(row) for row in call.messages),
        tools=call.tools,
        request=call.request,
        response=call.response,
        delivered=call.delivered,
    )


def _counts(call: ModelCall) -> bool:
    """What broke on our side costs the policy none of its calls."""
    return call.failure is None or call.failure.kind is not FailureClass.INFRASTRUCTURE


# -- who calls -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Identity:
    rollout_id: str
    phase: str
    read_at: float


class Sessions:
    """All sessions of this process. `forget` ends one at once."""

    def __init__(self, store: Store, engines: EngineSource, clock: Callable[[], float] = time.monotonic) -> None:
        self.store = store
        self._engines = engines
        self._codecs = Codecs(store.home)
        self._clock = clock
        self._identities: dict[str, Identity] = {}
        self._opening: dict[str, asyncio.Task[Session]] = {}

    def identify(self, key: str, rollout_id: str) -> str:
        """Phase of a live key of this rollout. Raises Refused (401): who calls follows from the key alone."""
        digest = hash_key(key)
        known = self._identities.get(digest)
        if known is None or self._clock() - known.read_at > KEY_FRESH_S:
            self._identities.pop(digest, None)
            found = self.store.rollouts.rollout_of_key(key) if key else None
            if found is None:
                raise Refused(401, "unknown_key", "this key is unknown or revoked")
            if len(self._identities) >= IDENTITIES:
                self._identities.clear()
            known = self._identities[digest] = Identity(*found, self._clock())
        if known.rollout_id != rollout_id:
            raise Refused(401, "unknown_key", f"this key does not belong to rollout {rollout_id}")
        return known.phase

    async def session(self, rollout_id: str) -> Session:
        """Raises Refused (503) when the rollout's model cannot be used."""
        task = self._opening.get(rollout_id)
        if task is None or (task.done() and (task.cancelled() or task.exception())):
            self._drop_idle()
            task = self._opening[rollout_id] = asyncio.create_task(self._open(rollout_id))
        try:
            session = await asyncio.shield(task)
        except (ConfigError, InfrastructureError) as error:
            raise Refused(503, "no_model", str(error)) from error
        session.touched = self._clock()
        return session

    def forget(self, rollout_id: str) -> None:
        """The rollout is over: its keys count no longer and its running calls are abandoned."""
        self._identities = {d: i for d, i in self._identities.items() if i.rollout_id != rollout_id}
        task = self._opening.pop(rollout_id, None)
        if task is None:
            return
        if not task.done():
            task.cancel()
        elif not task.cancelled() and task.exception() is None:
            for turn in list(task.result().running.values()):
                turn.abandon()

    async def _open(self, rollout_id: str) -> Session:
        rollout = self.store.rollouts.get(rollout_id)
        if rollout is None:
            raise InfrastructureError(f"rollout {rollout_id} is not in the store")
        codec = await self._codecs.of(rollout.model.name)
        engine = self._engines.engine_for(rollout, codec)
        return Session(rollout, codec, engine, self.store.calls.of(rollout_id))

    def _drop_idle(self) -> None:
        """A session that nobody used for an hour is rebuilt from the store if it is asked for again."""
        now = self._clock()
        for rollout_id, task in list(self._opening.items()):
            if not task.done() or task.cancelled() or task.exception():
                continue
            session = task.result()
            if not session.running and now - session.touched > IDLE_S:
                del self._opening[rollout_id]
