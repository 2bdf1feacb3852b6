"""The one rollout loop: STARTING -> RUNNING -> VERIFYING -> SUCCEEDED, and what happens when it breaks.

    STARTING   services seeded, key issued, sandbox made from the harness's launch
    RUNNING    the harness runs until it ends, is stopped by a cap, or passes the task's deadline
    VERIFYING  keys revoked, final state of the services, the task's verifier in a fresh sandbox

A policy's own end (cap, malformed call, a limit hit by its own processes) is verified as it stands. Everything
else that breaks ends the rollout with a typed failure and gives no reward.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from rollout.config import Home
from rollout.errors import (
    Cancelled,
    FailureClass,
    HarnessError,
    InfrastructureError,
    PhaseTimeout,
    PolicyEnd,
    RolloutError,
    classify,
)
from rollout.harness import make_harness
from rollout.harness.base import Endpoint, Harness, Launch
from rollout.harness.solution import PREFIX
from rollout.sandbox.base import Command, Completed, Sandbox, SandboxSpec
from rollout.services.host import ServiceHost
from rollout.store import Store
from rollout.types import Failure, Rollout, RolloutState, TaskSpec
from rollout.verifier import verify

P = ParamSpec("P")
T = TypeVar("T")
log = logging.getLogger(__name__)
SOCKET = "/run/proxy/proxy.sock"
GRACE_S = 30.0
"""Added to a phase's own deadline for the transport around it."""


@dataclass(frozen=True)
class Context:
    store: Store
    services: ServiceHost
    make_sandbox: Callable[[], Sandbox]
    forget: Callable[[str], None]
    """Tells the proxy beside us that a rollout's session is over."""

    @property
    def home(self) -> Home:
        return self.store.home


async def run_rollout(rollout: Rollout, ctx: Context) -> Rollout:
    """Takes a STARTING rollout to its end and returns it. Never raises for what a rollout can do wrong.

    Raises StoreError or SQLAlchemyError when its end cannot be recorded: the caller must.
    """
    run = _Run(rollout, ctx)
    try:
        await run.start()
        completed = await run.harness_phase()
        await run.verify_phase(completed)
    except asyncio.CancelledError as error:
        cause = error.args[0] if error.args and isinstance(error.args[0], Exception) else Cancelled("cancelled")
        await uninterrupted(run.fail(cause))
    except Exception as error:  # the one place that turns any failure into a recorded one
        await uninterrupted(run.fail(error))
    finally:
        await uninterrupted(run.clean())
    return run.rollout


class _Run:
    def __init__(self, rollout: Rollout, ctx: Context) -> None:
        self.rollout = rollout
        self.ctx = ctx
        self.task: TaskSpec = rollout.task
        self.phase = "setup"
        self.sandbox: Sandbox | None = None
        self.harness: Harness | None = None
        self.launch: Launch | None = None

    async def start(self) -> None:
        rollout, task = self.rollout, self.task
        self.harness = make_harness(rollout.harness, self.ctx.home)
        phase = "solution" if rollout.harness.startswith(PREFIX) else "agent"
        self.ctx.services.open(
            rollout.id,
            read_seeds(task),
            error_rate=task.error_rate if phase == "agent" else 0.0,
            error_seed=rollout.sampling.seed,
            tools=task.tools,
        )
        key = await written(self.ctx.store.rollouts.issue_key, rollout.id, phase)
        self.launch = self.harness.launch(rollout, task, Endpoint(SOCKET, f"/rollouts/{rollout.id}", key))
        spec = SandboxSpec(
            id=rollout.id,
            resources=self.launch.resources or task.resources,
            mounts=self.launch.mounts,
            proxy=self.ctx.home.run / "proxy",
            files={**workspace_files(task), **self.launch.files},
            needs_image=task.needs_image,
        )
        self.sandbox = self.ctx.make_sandbox()
        await deadline(self.sandbox.start(spec), task.timeouts.setup, "setup")
        await self._advance(RolloutState.RUNNING)

    async def harness_phase(self) -> Completed:
        assert self.sandbox
        assert self.launch
        assert self.harness
        self.phase = "agent"
        limit = self.task.timeouts.agent
        command = Command(self.launch.argv, timeout=limit, env=self.launch.env)
        completed = await deadline(self.sandbox.run(command), limit + GRACE_S, "agent")
        if completed.timed_out:
            raise PhaseTimeout(f"the harness was still running after {limit:.0f} s")
        if not completed.limit:
            stored = self.ctx.store.rollouts.get(self.rollout.id)
            try:
                self.harness.check(completed, stored.end_reason if stored else "")
            except PolicyEnd as end:
                await self._note(str(end))
            except HarnessError as error:
                raise self._cause(error) from error
        else:
            await self._note(completed.limit)
        return completed

    async def verify_phase(self, completed: Completed) -> None:
        assert self.sandbox
        self.phase = "verify"
        await self._advance(RolloutState.VERIFYING)
        await written(self.ctx.store.rollouts.revoke_keys, self.rollout.id)
        state = await deadline(
            self.sandbox.export(self.task.verifier.state, self.task.resources.disk_mb * 2**20), GRACE_S, "verify"
        )
        final = json.dumps(self.ctx.services.final(self.rollout.id), ensure_ascii=False).encode()
        limit = self.task.timeouts.verify
        work = verify(self.task, f"{self.rollout.id}.verify", self.ctx.make_sandbox, final, state)
        verdict = await deadline(work, limit + GRACE_S, "verify")
        await self._advance(RolloutState.SUCCEEDED, verdict=verdict, ended=time.time())

    async def fail(self, error: BaseException) -> None:
        kind = classify(error)
        failure = Failure(kind=kind, phase=self.phase, message=str(error)[:2000] or type(error).__name__)
        states = {FailureClass.TIMEOUT: RolloutState.TIMED_OUT, FailureClass.CANCELLED: RolloutState.CANCELLED}
        state, retry = states.get(kind, RolloutState.FAILED), kind is FailureClass.INFRASTRUCTURE
        ended = await written(self.ctx.store.rollouts.finish, self.rollout, state, failure, retry=retry)
        self.rollout = ended or self.rollout

    async def clean(self) -> None:
        """The sandbox first: nothing runs on without its proxy and services. A failing step skips no other."""
        rollout_id = self.rollout.id
        with _step(rollout_id, "stop its sandbox"):
            if self.sandbox:
                await self.sandbox.stop()
        with _step(rollout_id, "revoke its keys"):
            await written(self.ctx.store.rollouts.revoke_keys, rollout_id)
        with _step(rollout_id, "forget its session"):
            self.ctx.forget(rollout_id)
        with _step(rollout_id, "close its services"):
            self.ctx.services.close(rollout_id)

    def _cause(self, error: HarnessError) -> RolloutError:
        """A harness that gave up on our own broken model call is no harness failure."""
        calls = self.ctx.store.calls.of(self.rollout.id)
        last = calls[-1].failure if calls else None
        if last is not None and last.kind is FailureClass.INFRASTRUCTURE:
            return InfrastructureError(f"a model call failed: {last.message}")
        return error

    async def _note(self, reason: str) -> None:
        await written(self.ctx.store.rollouts.note_end, self.rollout.id, reason)

    async def _advance(self, state: RolloutState, **changes: object) -> None:
        new = await written(self.ctx.store.rollouts.advance, self.rollout, state=state, **changes)
        if new is None:
            raise InfrastructureError(f"{self.rollout.id} was taken from this process while it ran")
        self.rollout = new


@contextmanager
def _step(rollout_id: str, what: str) -> Iterator[None]:
    """One step of cleaning up: its failure is logged, what it leaves is found again (leases, reaping)."""
    try:
        yield
    except Exception:
        log.exception("rollout %s: could not %s", rollout_id, what)


async def written(write: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """A write to the store, in a thread; a cancellation waits until it is committed, so that none comes late."""
    return await uninterrupted(asyncio.to_thread(write, *args, **kwargs))


async def uninterrupted(work: Coroutine[Any, Any, T]) -> T:
    """Runs `work` to its end; a cancellation that came meanwhile is raised after it."""
    task = asyncio.ensure_future(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError as error:
            cancelled = error
    result = task.result()
    if cancelled:
        raise cancelled
    return result


async def deadline(work: Awaitable[T], seconds: float, phase: str) -> T:
    """Awaits `work`; raises PhaseTimeout that names the phase once `seconds` have passed."""
    try:
        async with asyncio.timeout(seconds):
            return await work
    except TimeoutError as error:
        raise PhaseTimeout(f"phase {phase} did not end within {seconds:.0f} s") from error


def read_seeds(task: TaskSpec) -> dict[str, object]:
    """Seed state of each mock service of a bundle; empty when it uses none."""
    file = Path(task.bundle) / "environment" / "services.json"
    return dict(json.loads(file.read_text(encoding="utf-8"))) if file.exists() else {}


def workspace_files(task: TaskSpec) -> dict[str, bytes]:
    root = Path(task.bundle) / "environment" / "files"
    return {
        f"/workspace/{path.relative_to(root).as_posix()}": path.read_bytes()
        for path in sorted(root.rglob("*"))
        if path.is_file() and not path.is_symlink()
    }
