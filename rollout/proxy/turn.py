"""One call from its admission to its record: engine -> capture -> stream -> commit -> terminal event.

Bytes go out as they are known, but what ends the answer goes out only after the record has been committed; a call
that failed, or whose client left, leaves a record too. A turn runs as a task of its own, so that an identical
request can attach to it and a client that leaves does not take the record with it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import aclosing
from dataclasses import dataclass, replace

import sqlalchemy as sa

from rollout.errors import EngineError, FailureClass, OpenForgeError, StoreError
from rollout.proxy.attribution import Tagged
from rollout.proxy.capture import Capture
from rollout.proxy.dialects.base import Answer, CallRequest, Dialect, Head, Piece, Refused
from rollout.proxy.outlet import Outlet
from rollout.proxy.session import Admission, Session, time_cap
from rollout.store import Store
from rollout.types import Failure, ModelCall

log = logging.getLogger(__name__)
COMMIT_S = 10.0


@dataclass(frozen=True)
class Asked:
    """A request as it came: bytes, their digest, and what they mean in which dialect."""

    dialect: Dialect
    body: bytes
    digest: str
    request: CallRequest
    tagged: Tagged

    @property
    def key(self) -> tuple[str, str]:
        """Equal for a repetition: agents of one rollout may ask the same at the same time."""
        return self.tagged.thread, self.digest


class Turn:
    """Runs one admitted call. `outlet` is what its clients follow."""

    def __init__(self, store: Store, session: Session, asked: Asked, admission: Admission) -> None:
        self._store = store
        self._session = session
        self._asked = asked
        self._admission = admission
        self._capture = Capture(
            session.codec, admission.prompt.ids, tools=bool(asked.request.tools), stream=asked.request.stream
        )
        self._started = time.time()
        head = Head(
            f"{session.rollout.id}-{admission.index}",
            session.rollout.model.name,
            int(self._started),
            len(admission.prompt.ids),
        )
        self._head = head
        self._writer = asked.dialect.writer(head, asked.request)
        self._answered = False
        self.outlet = Outlet(stream=asked.request.stream)
        session.running[asked.key] = self
        self._task = asyncio.create_task(self._run(), name=head.id)

    def ping(self) -> bytes:
        """A keep-alive for one client. The first one begins the answer, for all who follow."""
        if not self.outlet.ended:
            self.outlet.write(self._writer.begin())
        return self._writer.ping()

    def abandon(self) -> None:
        """Nobody listens: stops the engine. An answer that is complete is still recorded."""
        if not self._answered:
            self._leave()
            self._task.cancel()

    async def delivered(self) -> None:
        """The last byte was written."""
        call = self._session.find(self._admission.index)
        if call and not call.delivered:
            call.delivered = True
            await flag_delivered(self._store, self._session.rollout.id, call.index)

    async def _run(self) -> None:
        try:
            answer, rest = await self._generate()
            self._answered = True
            await self._finish(answer, rest)
        except asyncio.CancelledError:
            await self._fail(FailureClass.CANCELLED, Refused(499, "client_gone", "the client went away"))
        except TimeoutError:
            await self._fail(FailureClass.TIMEOUT, await self._too_late())
        except EngineError as error:
            await self._fail(FailureClass.INFRASTRUCTURE, Refused(502, "engine_error", str(error)))
        except OpenForgeError as error:
            await self._fail(FailureClass.INFRASTRUCTURE, Refused(503, "infrastructure", str(error)))
        except Exception as error:  # a fault of ours must reach the record and the client, too
            log.exception("call %s broke", self._head.id)
            await self._fail(FailureClass.INFRASTRUCTURE, Refused(500, "internal", repr(error)))
        finally:
            self._leave()

    async def _generate(self) -> tuple[Answer, list[Piece]]:
        session, admission = self._session, self._admission
        schema = self._asked.request.schema
        context = replace(session.context(admission.index), schema=schema.json if schema else None)
        chunks = session.engine.generate(admission.prompt.ids, admission.sampling, session.codec.stop_ids, context)
        seconds = min(session.rollout.task.timeouts.agent, admission.seconds)
        async with asyncio.timeout(seconds), aclosing(chunks):  # type: ignore[type-var]
            async for chunk in chunks:
                pieces = self._capture.feed(chunk)
                if self.outlet.stream:
                    self.outlet.write(self._write(pieces))
        return self._capture.finish(f"call_{admission.index}")

    async def _too_late(self) -> Refused:
        """The rollout's own wall clock is a cap, which ends its session; the task's timeout ends the rollout."""
        rollout = self._session.rollout
        if self._admission.seconds >= rollout.task.timeouts.agent:
            return Refused(504, "timeout", "the answer took longer than the rollout has")
        await asyncio.to_thread(self._store.rollouts.note_end, rollout.id, "time_cap")
        return time_cap(rollout.limits.seconds)

    async def _finish(self, answer: Answer, rest: list[Piece]) -> None:
        if self.outlet.stream:
            last = self._write(rest) + self._writer.finish(answer)
        else:
            last = self._asked.dialect.whole(self._head, self._asked.request, answer)
        call = self._record(answer=answer)
        await self._commit(call, b"".join([*self.outlet.pieces, last]))
        self.outlet.write(last)
        self.outlet.end()

    async def _fail(self, kind: FailureClass, refused: Refused) -> None:
        """Records what there is and tells the client. A store that fails as well is told in its stead."""
        failure = Failure(kind=kind, phase="call", message=str(refused)[:2000])
        try:
            if not self._answered:
                await self._commit(self._record(failure=failure), b"".join(self.outlet.pieces))
        except StoreError as error:
            log.error("call %s failed and could not be recorded: %s", self._head.id, error)
        self.outlet.fail(refused, self._asked.dialect.refusal(refused), self._writer.failure(refused))

    def _record(self, *, answer: Answer | None = None, failure: Failure | None = None) -> ModelCall:
        session, request, capture = self._session, self._asked.request, self._capture
        messages = [*request.messages, answer.message()] if answer else request.messages
        return ModelCall(
            rollout_id=session.rollout.id,
            index=self._admission.index,
            dialect=self._asked.dialect.name,
            tag=self._asked.tagged.tag,
            thread=self._asked.tagged.thread,
            stream=request.stream,
            messages=tuple(message.dump() for message in messages),
            tools=request.tools,
            prompt_ids=self._admission.prompt.ids,
            completion_ids=tuple(capture.ids),
            logprobs=None if capture.logprobs is None else tuple(capture.logprobs),
            finish_reason=answer.finish_reason if answer else capture.finish_reason,
            versions=tuple(capture.versions),
            fork_reason=self._admission.prompt.fork_reason,
            malformed=bool(answer and answer.malformed),
            rules=request.rules,
            left_out=request.left_out,
            started=self._started,
            latency=time.time() - self._started,
            failure=failure,
        )

    async def _commit(self, call: ModelCall, response: bytes) -> None:
        """Raises StoreError when the record is not safe within `COMMIT_S`; it may still land later, undelivered."""
        work = asyncio.create_task(self._store_call(call, response))
        try:
            await asyncio.wait_for(asyncio.shield(work), COMMIT_S)
        except TimeoutError as error:
            work.add_done_callback(_retrieve)
            raise StoreError(f"the record of call {call.index} was not committed within {COMMIT_S:.0f} s") from error
        except (OSError, sa.exc.SQLAlchemyError) as error:
            raise StoreError(f"the record of call {call.index} could not be written: {error}") from error

    async def _store_call(self, call: ModelCall, response: bytes) -> None:
        store, rollout_id = self._store, call.rollout_id
        for earlier in self._admission.answered:
            earlier.delivered = True
        shown = asyncio.gather(*(store.calls.delivered(rollout_id, e.index) for e in self._admission.answered))
        call, _ = await asyncio.gather(store.calls.append(call, self._asked.body, response), shown)
        self._session.committed(call)
        store.rollouts.note_call(
            rollout_id, len(call.completion_ids), call.versions[0].version if call.versions else None
        )

    def _write(self, pieces: list[Piece]) -> bytes:
        return b"".join(self._writer.piece(piece) for piece in pieces)

    def _leave(self) -> None:
        if self._session.running.get(self._asked.key) is self:
            del self._session.running[self._asked.key]


async def flag_delivered(store: Store, rollout_id: str, index: int) -> None:
    try:
        await store.calls.delivered(rollout_id, index)
    except (StoreError, sa.exc.SQLAlchemyError) as error:  # the next call of the thread shows it as well
        log.warning("call %s of %s was delivered but not flagged: %s", index, rollout_id, error)


def _retrieve(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()):
        log.error("a late record was lost: %s", error)
