"""The orchestrator: claims queued rollouts, runs each through the lifecycle, cancels, and picks up what others lost.

It meets the proxy only through the store. A lease names the owner of every running rollout; when an owner dies,
its rollouts fail as infrastructure and their next attempts are enqueued in the same transaction. A store that
fails (a full disk, a locked database) is waited for: running rollouts go on meanwhile.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
from contextlib import suppress
from dataclasses import dataclass

from sqlalchemy.exc import SQLAlchemyError

from rollout.errors import Cancelled, FailureClass, InfrastructureError, StoreError
from rollout.inference.launch import reap_engines
from rollout.lifecycle import Context, run_rollout
from rollout.processes import alive, started
from rollout.types import Failure, Rollout, RolloutState

log = logging.getLogger(__name__)
LEASE_S = 60.0
RENEW_S = 10.0
POLL_S = 0.1
SWEEP_S = 2.0
REAP_S = 30.0
STOP_S = 30.0
BACKOFF_S = (0.5, 15.0)
"""First and longest pause after a tick that the store broke; each doubles the one before."""


@dataclass(frozen=True)
class Owner:
    """host:pid:start time, so that a recycled pid is never taken for the owner."""

    host: str
    pid: int
    started: float

    @classmethod
    def mine(cls) -> Owner:
        return cls(socket.gethostname(), os.getpid(), started(os.getpid()))

    def __str__(self) -> str:
        return f"{self.host}:{self.pid}:{self.started:.2f}"


class Every:
    """Due at once, then every `seconds`."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._at = 0.0

    def due(self) -> bool:
        now = time.monotonic()
        if now < self._at:
            return False
        self._at = now + self._seconds
        return True


class Orchestrator:
    """Runs at most `concurrency` rollouts at once until `stop` is called."""

    def __init__(self, ctx: Context, concurrency: int) -> None:
        self._ctx = ctx
        self._store = ctx.store.rollouts
        self._slots = concurrency
        self._owner = Owner.mine()
        self._running: dict[str, asyncio.Task[Rollout]] = {}
        self._broken: dict[str, str] = {}
        """Rollouts whose end was not recorded, and why; each tick tries to."""
        self._stopping = asyncio.Event()
        self._ticking = asyncio.Lock()  # held by a tick, so that `stop` sees every rollout that was claimed
        self._recovered = False
        self._renewal, self._sweeping, self._reaping = Every(RENEW_S), Every(SWEEP_S), Every(REAP_S)
        self._reaper: asyncio.Task[None] | None = None
        self.idle_since = time.monotonic()

    async def run(self) -> None:
        """Ticks until it is stopped. What breaks a tick in the store is logged and tried again."""
        pause = POLL_S
        while not self._stopping.is_set():
            try:
                async with self._ticking:
                    await self._tick()
                pause = POLL_S
            except (StoreError, SQLAlchemyError) as error:
                pause = min(max(2 * pause, BACKOFF_S[0]), BACKOFF_S[1])
                log.warning("the store failed, trying again in %.1f s: %s", pause, error)
            with suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), pause)

    async def stop(self) -> None:
        """Ends running rollouts as infrastructure failures, so that they are tried again by the next owner."""
        self._stopping.set()
        with suppress(TimeoutError):
            async with asyncio.timeout(STOP_S), self._ticking:
                pass
        for task in self._running.values():
            _cancel(task, InfrastructureError("openforge serve was stopped"))
        waited = [*self._running.values(), *([self._reaper] if self._reaper else [])]
        if waited:
            await asyncio.wait(waited, timeout=STOP_S)
        await asyncio.sleep(0)  # the callbacks of the last ended tasks
        try:
            await self._record_broken()
        except (StoreError, SQLAlchemyError) as error:
            log.warning("left to the next owner, the store failed: %s", error)

    async def _tick(self) -> None:
        if self._stopping.is_set():
            return
        if not self._recovered:
            await asyncio.to_thread(self._recover_host)
            self._recovered = True
        await self._record_broken()
        await self._claim()
        await self._sweep()
        if self._running:
            self.idle_since = time.monotonic()

    async def _claim(self) -> None:
        free = self._slots - len(self._running)
        if free <= 0:
            return
        for rollout in await asyncio.to_thread(self._store.claim, str(self._owner), free, LEASE_S):
            task = asyncio.create_task(run_rollout(rollout, self._ctx), name=rollout.id)
            self._running[rollout.id] = task
            task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[Rollout]) -> None:
        self._running.pop(task.get_name(), None)
        error = asyncio.CancelledError("it was cancelled") if task.cancelled() else task.exception()
        if error:
            log.error("rollout %s broke the lifecycle: %r", task.get_name(), error)
            self._broken[task.get_name()] = f"its end was not recorded: {error!r}"

    async def _record_broken(self) -> None:
        for rollout_id, why in list(self._broken.items()):
            if rollout := await asyncio.to_thread(self._store.get, rollout_id):
                await asyncio.to_thread(self._retry, [rollout], why)
            del self._broken[rollout_id]

    async def _sweep(self) -> None:
        if self._renewal.due():
            if self._running:
                await asyncio.to_thread(self._store.renew, str(self._owner), tuple(self._running), LEASE_S)
            orphans = await asyncio.to_thread(self._store.orphans)
            await asyncio.to_thread(self._retry, orphans, "the lease of its owner ran out")
        if self._sweeping.due():
            await self._cancel_marked()
        if self._reaping.due() and (self._reaper is None or self._reaper.done()):
            self._reaper = asyncio.create_task(self._reap())

    async def _cancel_marked(self) -> None:
        for rollout_id in await asyncio.to_thread(self._store.to_cancel):
            if task := self._running.get(rollout_id):
                _cancel(task, Cancelled("cancelled through the store"))
            else:
                await asyncio.to_thread(self._cancel_queued, rollout_id)

    def _cancel_queued(self, rollout_id: str) -> None:
        rollout = self._store.get(rollout_id)
        if rollout and rollout.state is RolloutState.QUEUED:
            failure = Failure(kind=FailureClass.CANCELLED, phase="queued", message="cancelled through the store")
            self._store.finish(rollout, RolloutState.CANCELLED, failure)

    async def _reap(self) -> None:
        """Engines that died or whose lease ran out; in a thread, since ending one takes seconds."""
        try:
            for engine_id in await asyncio.to_thread(reap_engines, self._ctx.store):
                log.info("engine %s is gone: it died or its lease ran out", engine_id)
        except Exception:  # an engine that cannot be ended must not end what runs beside it
            log.exception("engines could not be reaped")

    def _recover_host(self) -> None:
        """Rollouts of this host's dead processes need not wait for their leases."""
        for owner, rollouts in self._store.owned(f"{self._owner.host}:").items():
            host, pid, start = owner.rsplit(":", 2)
            if not alive(int(pid), float(start)):
                self._retry(rollouts, f"its owner {host}:{pid} died")

    def _retry(self, rollouts: list[Rollout], why: str) -> None:
        for rollout in rollouts:
            if rollout.id not in self._running:
                failure = Failure(kind=FailureClass.INFRASTRUCTURE, phase=rollout.state.value, message=why)
                self._store.finish(rollout, RolloutState.FAILED, failure, retry=True)
                self._store.revoke_keys(rollout.id)


def _cancel(task: asyncio.Task[Rollout], cause: Exception) -> None:
    """Once only: a second one would interrupt the cleaning up after the first."""
    if not task.cancelling():
        task.cancel(cause)
