"""The orchestrator: claims queued rollouts, runs each through the lifecycle, cancels, and picks up what others lost.

It meets the proxy only through the store. A lease names the owner of every running rollout; when an owner dies,
its rollouts fail as infrastructure and their next attempts are enqueued in the same transaction.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
from dataclasses import dataclass

from rollout.errors import Cancelled, FailureClass, InfrastructureError
from rollout.lifecycle import Context, run_rollout
from rollout.processes import alive, started
from rollout.types import Failure, Rollout, RolloutState

log = logging.getLogger(__name__)
LEASE_S = 60.0
RENEW_S = 10.0
POLL_S = 0.1
SWEEP_S = 2.0


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


class Orchestrator:
    """Runs at most `concurrency` rollouts at once until `stop` is called."""

    def __init__(self, ctx: Context, concurrency: int) -> None:
        self._ctx = ctx
        self._store = ctx.store.rollouts
        self._slots = concurrency
        self._owner = Owner.mine()
        self._running: dict[str, asyncio.Task[Rollout]] = {}
        self._stopping = False
        self._sweep_at = self._renew_at = 0.0
        self.idle_since = time.monotonic()

    async def run(self) -> None:
        self._recover_host()
        while not self._stopping:
            self._claim()
            self._sweep()
            if self._running:
                self.idle_since = time.monotonic()
            await asyncio.sleep(POLL_S)

    async def stop(self) -> None:
        """Ends running rollouts as infrastructure failures, so that they are tried again by the next owner."""
        self._stopping = True
        tasks = list(self._running.values())
        for task in tasks:
            task.cancel(InfrastructureError("openforge serve was stopped"))
        if tasks:
            await asyncio.wait(tasks, timeout=30)

    def _claim(self) -> None:
        free = self._slots - len(self._running)
        if free <= 0:
            return
        for rollout in self._store.claim(str(self._owner), free, LEASE_S):
            task = asyncio.create_task(run_rollout(rollout, self._ctx), name=rollout.id)
            self._running[rollout.id] = task
            task.add_done_callback(lambda t: self._ended(t))

    def _ended(self, task: asyncio.Task[Rollout]) -> None:
        self._running.pop(task.get_name(), None)
        if not task.cancelled() and (error := task.exception()):
            log.error("rollout %s broke the lifecycle: %r", task.get_name(), error)

    def _sweep(self) -> None:
        now = time.monotonic()
        if now >= self._renew_at:
            self._renew_at = now + RENEW_S
            self._store.renew(str(self._owner), LEASE_S)
            self._retry(self._store.orphans(), "the lease of its owner ran out")
        if now >= self._sweep_at:
            self._sweep_at = now + SWEEP_S
            self._cancel_marked()

    def _cancel_marked(self) -> None:
        for rollout_id in self._store.to_cancel():
            task = self._running.get(rollout_id)
            if task:
                task.cancel(Cancelled("cancelled through the store"))
            elif (rollout := self._store.get(rollout_id)) and rollout.state is RolloutState.QUEUED:
                failure = Failure(kind=FailureClass.CANCELLED, phase="queued", message="cancelled through the store")
                self._store.finish(rollout, RolloutState.CANCELLED, failure)

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
