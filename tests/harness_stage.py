"""One launch of a harness in a real local sandbox, against the scripted model of `harness_stub`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from harness_stub import BASE, KEY, Stub
from rollout_servers import hosted

from rollout.config import Home
from rollout.harness.base import Endpoint, Harness
from rollout.sandbox.base import Command, Completed, SandboxSpec
from rollout.types import Limits, ModelRef, Purpose, Resources, Rollout, TaskSpec

ENDPOINT = Endpoint("/run/proxy/proxy.sock", BASE, KEY)


def a_task(**changes: Any) -> TaskSpec:
    """Of default demo size: less than a foreign harness needs."""
    base = {"id": "t", "instruction": "Schließe Ticket 7 ✓", "bundle": "/x", "digest": "d", "services": ("helpdesk",)}
    return TaskSpec(**{**base, "resources": Resources(memory_mb=256, pids=32), **changes})


def a_rollout(task: TaskSpec, **changes: Any) -> Rollout:
    model = ModelRef(name="m")
    base = {"id": "r1", "run": "run", "task_id": "t", "group_id": "g", "model": model, "purpose": Purpose.RUN}
    return Rollout(**{**base, "task": task, "limits": Limits(calls=4, context=32768), **changes})


@dataclass(frozen=True)
class Played:
    completed: Completed
    stub: Stub
    files: dict[str, bytes | None] = field(default_factory=dict)


async def play(home: Home, harness: Harness, steps: list[Any], *, look: tuple[str, ...] = ()) -> Played:
    """Runs the harness to its end; `look`: files to read afterwards."""
    task = a_task()
    stub = Stub(home, steps)
    launch = harness.launch(a_rollout(task), task, ENDPOINT)
    await stub.server.start()
    try:
        async with hosted(home) as host:
            spec = SandboxSpec(
                id="r1",
                resources=launch.resources or task.resources,
                mounts=launch.mounts,
                proxy=home.run / "proxy",
                files=launch.files,
            )
            async with host.sandbox(spec) as sandbox:
                completed = await sandbox.run(Command(launch.argv, 150, launch.env))
                files = {path: await sandbox.get(path, 65536) for path in look}
    finally:
        await stub.server.stop()
    return Played(completed, stub, files)
