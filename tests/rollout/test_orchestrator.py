"""The orchestrator beside a store that fails, sandboxes that break, and engines that nobody needs any more."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from proxy_fakes import until

from rollout.bundle import write_bundle
from rollout.bundle.spec import BundleSpec
from rollout.config import open_home
from rollout.errors import FailureClass, InfrastructureError, SandboxError
from rollout.lifecycle import Context, run_rollout, uninterrupted
from rollout.orchestrator.loop import Orchestrator
from rollout.sandbox.base import Command, Completed, SandboxSpec
from rollout.services import ServiceHost
from rollout.store import Store, open_store
from rollout.types import EngineRecord, ModelRef, Purpose, Rollout, RolloutState, Sampling, TaskSpec

DONE = Completed(0, b"", b"", truncated=False, timed_out=False, seconds=0.1)


class FakeSandbox:
    """Implements `Sandbox`: its command runs until `gate` is set; `broken` names the calls that raise."""

    def __init__(self, gate: asyncio.Event, broken: Sequence[str] = ()) -> None:
        self.gate, self.broken = gate, broken
        self.stopped = False

    async def start(self, spec: SandboxSpec) -> None:
        self._raise("start")

    async def run(self, command: Command) -> Completed:
        await self.gate.wait()
        self._raise("run")
        return DONE

    async def get(self, path: str, max_bytes: int) -> bytes | None:
        return b"1" if path.endswith(".txt") else None

    async def export(self, paths: Sequence[str], max_bytes: int) -> bytes:
        return b""

    async def stop(self) -> None:
        self.stopped = True
        self._raise("stop")

    def _raise(self, call: str) -> None:
        if call in self.broken:
            raise SandboxError(f"{call} is broken")


class FullDisk:
    """While `on`, writes of a database fail whose SQL starts with one of `statements`, as on a full disk."""

    def __init__(self, store: Store, *statements: str) -> None:
        self.on, self.hits = False, 0
        self._statements = statements
        sa.event.listen(store.databases[0].engine, "before_cursor_execute", self._before)

    def _before(self, _c: Any, _cursor: Any, statement: str, parameters: Any, *_: Any) -> None:
        if self.on and statement.startswith(self._statements):
            self.hits += 1
            raise sa.exc.OperationalError(statement, parameters, Exception("database or disk is full"))


class Stand:
    """An orchestrator's surroundings."""

    def __init__(self, store: Store, broken: Sequence[str] = ()) -> None:
        self.store, self.services = store, ServiceHost()
        self.gate = asyncio.Event()
        self.sandboxes: list[FakeSandbox] = []
        self.forgotten: list[str] = []
        self.broken = broken
        self.ctx = Context(store, self.services, self._sandbox, self.forgotten.append)

    def _sandbox(self) -> FakeSandbox:
        self.sandboxes.append(FakeSandbox(self.gate, self.broken))
        return self.sandboxes[-1]

    def state(self, rollout_id: str) -> RolloutState | None:
        found = self.store.rollouts.get(rollout_id)
        return found.state if found else None

    @asynccontextmanager
    async def running(self, concurrency: int = 4) -> AsyncIterator[Orchestrator]:
        orchestrator = Orchestrator(self.ctx, concurrency)
        loop = asyncio.create_task(orchestrator.run())
        try:
            yield orchestrator
        finally:
            await orchestrator.stop()
            await asyncio.wait_for(loop, 5)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    opened = open_store(open_home(tmp_path / "home", min_free_mb=1))
    yield opened
    opened.close()


def a_task(store: Store, **changes: Any) -> TaskSpec:
    parts = {"id": "t", "instruction": "x", "test": "true", "solve": "true", "services": {"helpdesk": {}}, **changes}
    return write_bundle(BundleSpec(**parts), store.home.tasks / "t")


def rollout(store: Store, name: str, **changes: Any) -> Rollout:
    base = Rollout(
        id=name,
        run="r",
        task_id="t",
        group_id="g",
        harness="solution:solve",
        model=ModelRef(name="m"),
        purpose=Purpose.RUN,
        task=changes.pop("task", None) or a_task(store),
    )
    return base.model_copy(update=changes)


@pytest.mark.parametrize("statement", ["UPDATE rollouts", "SELECT rollouts"])
def test_a_store_that_fails_is_waited_for(store: Store, statement: str, caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        stand, disk = Stand(store), FullDisk(store, statement)
        store.rollouts.enqueue([rollout(store, "a")])
        disk.on = True
        async with stand.running():
            await until(lambda: disk.hits >= 2, 10)
            disk.on = False
            await until(lambda: stand.state("a") is RolloutState.RUNNING, 10)
            stand.gate.set()
            await until(lambda: stand.state("a") is RolloutState.SUCCEEDED, 10)

    asyncio.run(main())
    assert "disk is full" in caplog.text


def test_a_rollout_whose_end_is_not_recorded_is_ended_and_tried_again(store: Store) -> None:
    async def main() -> None:
        stand, disk = Stand(store, broken=("run",)), FullDisk(store, "UPDATE rollouts")
        store.rollouts.enqueue([rollout(store, "a")])
        async with stand.running(1) as orchestrator:
            await until(lambda: stand.state("a") is RolloutState.RUNNING, 10)
            disk.on = True
            stand.gate.set()
            await until(lambda: "a" in orchestrator._broken and disk.hits >= 2, 10)
            assert stand.sandboxes[0].stopped
            assert stand.state("a") is RolloutState.RUNNING
            stand.gate.clear()
            disk.on = False
            await until(lambda: stand.state("a.r1") is RolloutState.RUNNING, 20)
        first = store.rollouts.get("a")
        assert first
        assert first.failure
        assert (first.state, first.failure.kind) == (RolloutState.FAILED, FailureClass.INFRASTRUCTURE)
        assert "disk is full" in first.failure.message

    asyncio.run(main())


def test_stopping_ends_what_runs_for_the_next_owner(store: Store) -> None:
    async def main() -> None:
        stand = Stand(store)
        store.rollouts.enqueue([rollout(store, "a")])
        async with stand.running():
            await until(lambda: stand.state("a") is RolloutState.RUNNING, 10)
        assert store.rollouts.states(["a"]) == {"a": RolloutState.QUEUED}
        assert [s.stopped for s in stand.sandboxes] == [True]

    asyncio.run(main())


def test_stopping_before_the_start_is_safe(store: Store) -> None:
    asyncio.run(Orchestrator(Context(store, ServiceHost(), lambda: FakeSandbox(asyncio.Event()), print), 1).stop())


def test_engines_that_died_are_reaped(store: Store) -> None:
    async def main() -> None:
        dead = EngineRecord(id="e", model="m", path="/m", url="u", pid=2**22 - 3, process_started=1.0, lease_until=9e9)
        store.engines.put(dead)
        async with Stand(store).running():
            await until(lambda: store.engines.all() == [], 10)

    asyncio.run(main())


@pytest.mark.parametrize("broken", [("run",), ("run", "stop")])
def test_every_step_of_cleaning_up_is_done(store: Store, broken: tuple[str, ...]) -> None:
    async def main() -> None:
        stand = Stand(store, broken)
        stand.gate.set()
        order: list[bool] = []

        def forget(_: str) -> None:
            order.append(stand.sandboxes[0].stopped)
            raise SandboxError("forget is broken")

        stand.ctx = replace(stand.ctx, forget=forget)
        store.rollouts.enqueue([rollout(store, "a")])
        (claimed,) = store.rollouts.claim("me", 1, 60)
        ended = await run_rollout(claimed, stand.ctx)
        assert ended.state is RolloutState.FAILED
        assert order == [True], "the sandbox is stopped first"
        assert _live_keys(store) == 0
        with pytest.raises(InfrastructureError, match="not open"):
            stand.services.final("a")

    asyncio.run(main())


def _live_keys(store: Store) -> int:
    query = sa.text("SELECT count(*) FROM keys WHERE NOT revoked")
    return int(store.databases[0].read(lambda c: c.execute(query).scalar_one()))


def test_no_write_of_a_rollout_waits_in_the_event_loop(store: Store) -> None:
    """A writer that hangs must not hold up the proxy, which lives in the same loop."""

    async def main() -> None:
        stand, free = Stand(store), threading.Event()
        store.rollouts.enqueue([rollout(store, "a")])
        async with stand.running():
            await until(lambda: stand.state("a") is RolloutState.RUNNING, 10)
            store.databases[0].submit(lambda c: free.wait(10))
            stand.gate.set()
            turns = 0
            for _ in range(30):
                await asyncio.sleep(0.01)
                turns += 1
            assert (turns, free.is_set()) == (30, False)
            assert stand.state("a") is RolloutState.RUNNING
            free.set()
            await until(lambda: stand.state("a") is RolloutState.SUCCEEDED, 10)

    began = time.monotonic()
    asyncio.run(main())
    assert time.monotonic() - began < 9


def test_work_that_must_end_is_not_cut_by_a_cancellation() -> None:
    async def main() -> None:
        done: list[str] = []

        async def work() -> str:
            await asyncio.sleep(0.05)
            done.append("x")
            return "x"

        task = asyncio.create_task(uninterrupted(work()))
        await asyncio.sleep(0.01)
        task.cancel(InfrastructureError("why"))
        with suppress(asyncio.CancelledError):
            await task
        assert (done, task.cancelled()) == (["x"], True)
        assert await uninterrupted(work()) == "x"

    asyncio.run(main())


@pytest.mark.parametrize(("harness", "statuses"), [("react", {429, 503}), ("solution:solve", {200})])
def test_services_fail_at_the_tasks_rate_for_agents_only(store: Store, harness: str, statuses: set[int]) -> None:
    """A solution is a check of the task: it would only find out that scripts do not try again."""

    async def main() -> list[int]:
        stand = Stand(store)
        task = a_task(store, error_rate=0.99, services={"mail": {}})
        store.rollouts.enqueue([rollout(store, "a", harness=harness, task=task, sampling=Sampling(seed=7))])
        async with stand.running():
            await until(lambda: stand.state("a") is RolloutState.RUNNING, 10)
            return [stand.services.call("a", "mail", "list_mails", {}).status for _ in range(40)]

    seen = asyncio.run(main())
    assert set(seen) >= statuses
    assert (seen.count(200) == 40) == (harness != "react")
