"""One rollout as the proxy sees it: identity, caps, recorded calls and the calls that run now.

    key -> Sessions.identify -> (rollout, phase)         Sessions.session -> Session, rebuilt from calls.db when needed
    request -> Session.prompt (perhaps in a thread)      -> Session.admit -> Admission (index, prompt, bounds) | Refused

`admit` runs on the event loop and never awaits, so that indexes and caps need no lock. The calls of one agent thread
extend, replay and prove each other; those of another thread never do.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from rollout.errors import ConfigError, FailureClass, InfrastructureError
from rollout.inference.base import CallContext, Engine
from rollout.proxy.attribution import Adapters, StopStyle, Tagged, Tagger, main_alone
from rollout.proxy.codecs import Codecs
from rollout.proxy.dialects.base import CallRequest, Refused
from rollout.proxy.history import REACH, Prompt, Recorded, make_prompt
from rollout.proxy.messages import load_message, without_ids
from rollout.proxy.render import Codec
from rollout.store import Store
from rollout.store.rollouts import hash_key
from rollout.types import CallTag, ModelCall, Rollout, Sampling

log = logging.getLogger(__name__)
KEY_FRESH_S = 2.0
"""A revoked key is refused after at most this long, at once after `forget`."""
IDLE_S = 3600.0
IDENTITIES = 4096
CAPS = ("call_cap", "token_cap", "context_cap", "time_cap")
THREADS = 64
"""Agent threads of one rollout whose calls are kept in memory; the one that was idle for longest goes first."""


class EngineSource(Protocol):
    def engine_for(self, rollout: Rollout, codec: Any) -> Engine: ...


@dataclass(frozen=True)
class Admission:
    """What a call may do: its index, its prompt, how it samples, and for how many seconds."""

    index: int
    prompt: Prompt
    sampling: Sampling
    answered: tuple[Recorded, ...]
    """Earlier calls that this request shows to have been delivered."""
    tagged: Tagged
    seconds: float


@dataclass(frozen=True)
class Manner:
    """How this rollout's harness is treated."""

    tagger: Tagger
    stop: StopStyle
    body_max: int
    """Bytes."""


class Session:
    """State of one rollout's model calls. `threads` holds the last `REACH` complete calls of each, in order."""

    def __init__(
        self, rollout: Rollout, codec: Codec, engine: Engine, past: Sequence[ModelCall], manner: Manner
    ) -> None:
        self.rollout = rollout
        self.codec = codec
        self.engine = engine
        self.manner = manner
        self.running: dict[tuple[str, str], Any] = {}
        """Calls that run now, by thread and digest of their request."""
        self.touched = time.monotonic()
        self.threads: dict[str, list[Recorded]] = {}
        for call in past:
            if call.failure is None:
                self._keep(call)
        self._next = max((call.index for call in past), default=-1) + 1
        self._used_calls = sum(1 for call in past if _counts(call))
        self._used_tokens = sum(len(call.completion_ids) for call in past)
        self._began = min((call.started for call in past), default=0.0)
        self._over = rollout.end_reason if rollout.end_reason in CAPS else ""

    def calls(self, thread: str) -> list[Recorded]:
        return self.threads.get(thread, [])

    def prompt(self, request: CallRequest, tagged: Tagged) -> Prompt:
        """What the call would read; nothing is taken. Raises Refused for a history that cannot be rendered."""
        answered = self._answered(request, tagged.thread)
        arrived = [c for c in self.calls(tagged.thread) if c.delivered or any(c is a for a in answered)]
        return make_prompt(self.codec, request, arrived, self.rollout.history, tagged.tag)

    def admit(self, request: CallRequest, prompt: Prompt, tagged: Tagged) -> Admission:
        """Takes the next index. Raises Refused with one of `CAPS`; the first cap ends the session for good."""
        try:
            left = self.check_caps()
            room = self._room(prompt)
        except Refused as refused:
            if tagged.tag is not CallTag.UNATTRIBUTED:
                self._over = refused.code
            raise
        sampling = self.rollout.sampling
        most = min(sampling.max_tokens, request.max_tokens or sampling.max_tokens, left, room)
        answered = self._answered(request, tagged.thread)
        index, self._next = self._next, self._next + 1
        self._used_calls += 1
        self._began = self._began or time.time()
        sampling = sampling.model_copy(update={"max_tokens": most})
        return Admission(index, prompt, sampling, answered, tagged, self._seconds())

    def check_caps(self) -> int:
        """Tokens that may still be sampled. Raises Refused: `call_cap`, `token_cap`, `time_cap`."""
        limits = self.rollout.limits
        if self._over:
            raise Refused(400, self._over, f"this rollout's session has ended: {self._over}")
        if self._used_calls >= limits.calls:
            raise Refused(400, "call_cap", f"this rollout has had its {limits.calls} model calls")
        if self._used_tokens >= limits.tokens:
            raise Refused(400, "token_cap", f"this rollout has sampled its {limits.tokens} tokens")
        if self._seconds() <= 0:
            raise time_cap(limits.seconds)
        return limits.tokens - self._used_tokens

    def _room(self, prompt: Prompt) -> int:
        most, size = self.rollout.limits.context, len(prompt.ids)
        if size >= most:
            raise Refused(400, "context_cap", f"a prompt of {size} tokens fills the {most} there are")
        return most - size

    def _seconds(self) -> float:
        """Wall clock that is left."""
        limit = self.rollout.limits.seconds
        if not limit:
            return math.inf
        return limit - (time.time() - self._began) if self._began else limit

    def context(self, index: int) -> CallContext:
        rollout = self.rollout
        return CallContext(rollout.id, rollout.task.bundle, index, rollout.sampling.seed)

    def committed(self, call: ModelCall) -> None:
        """Counts a call that has been recorded, and keeps it for later ones to extend."""
        self._used_tokens += len(call.completion_ids)
        if not _counts(call):
            self._used_calls -= 1
        if call.failure is None:
            self._keep(call)

    def replayable(self, thread: str, digest: str, *, retried: bool) -> Recorded | None:
        """The thread's last call, if this request repeats it and its answer did not arrive (or the client says so)."""
        calls = self.calls(thread)
        last = calls[-1] if calls else None
        again = last is not None and last.request == digest and (retried or not last.delivered)
        return last if again else None

    def find(self, index: int) -> Recorded | None:
        return next((call for calls in self.threads.values() for call in calls if call.index == index), None)

    def _keep(self, call: ModelCall) -> None:
        calls = self.threads.pop(call.thread, [])
        self.threads[call.thread] = [*calls, recorded(call)][-REACH:]
        if len(self.threads) > THREADS:
            del self.threads[next(name for name in self.threads if name != "main")]

    def _answered(self, request: CallRequest, thread: str) -> tuple[Recorded, ...]:
        waiting = [call for call in self.calls(thread) if not call.delivered]
        if not waiting:
            return ()
        shown = [without_ids(message) for message in request.messages if message.role == "assistant"]
        return tuple(call for call in waiting if without_ids(call.messages[-1]) in shown)


def time_cap(seconds: float) -> Refused:
    return Refused(400, "time_cap", f"this rollout has had its {seconds:g} s")


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
        tag=call.tag,
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

    def __init__(
        self,
        store: Store,
        engines: EngineSource,
        adapters: Adapters | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`adapters` None: every call is the agent's own, and a 400 ends a session."""
        self.store = store
        self._engines = engines
        self._adapters = adapters or main_alone()
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
        return Session(rollout, codec, engine, self.store.calls.of(rollout_id), self._manner(rollout))

    def _manner(self, rollout: Rollout) -> Manner:
        adapters, name = self._adapters, rollout.harness
        return Manner(adapters.tagger_of(name), adapters.stop_style(name), rollout.limits.body_mb * 2**20)

    def _drop_idle(self) -> None:
        """A session that nobody used for an hour is rebuilt from the store if it is asked for again."""
        now = self._clock()
        for rollout_id, task in list(self._opening.items()):
            if not task.done() or task.cancelled() or task.exception():
                continue
            session = task.result()
            if not session.running and now - session.touched > IDLE_S:
                del self._opening[rollout_id]
