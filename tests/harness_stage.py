"""One launch of a harness in a real local sandbox, against the scripted model of `harness_stub`."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness_stub import BASE, KEY, Step, Stub
from proxy_fakes import staged
from rollout_servers import Listening, hosted

from rollout.config import Home
from rollout.harness import ADAPTERS, make_harness
from rollout.harness.base import Endpoint, Harness
from rollout.harness.install import install
from rollout.sandbox.base import Command, Completed, SandboxSpec
from rollout.store import Store
from rollout.types import Limits, ModelCall, ModelRef, Purpose, Resources, Rollout, TaskSpec

SHELL = "python3 -I -S /opt/openforge/tool.py helpdesk close_ticket '{\"id\": 7}' > said.json"
SUBMIT = Step("ok", "bash", {"command": "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"})
BY_SHELL = {
    "codex": Step("", "exec_command", {"cmd": SHELL}),
    "claude-code": Step("", "Bash", {"command": SHELL}),
    "openclaw": Step("", "exec", {"command": SHELL}),
    "mini-swe-agent": Step("ok", "bash", {"command": SHELL}),
}
DIALECTS = {"codex": "responses", "claude-code": "messages", "openclaw": "chat", "mini-swe-agent": "chat"}
SHOWN = {
    "codex": ("mcp__services__close_ticket", {"id": 7}),
    "claude-code": ("mcp__services__close_ticket", {"id": 7}),
    "openclaw": ("services__close_ticket", {"id": 7}),
    "mini-swe-agent": ("bash", BY_SHELL["mini-swe-agent"].arguments),
}
SUBMIT_TEXT = json.dumps({"name": "bash", "arguments": SUBMIT.arguments})
ENDPOINT = Endpoint("/run/proxy/proxy.sock", BASE, KEY)


def ready(home: Home, name: str) -> None:
    recipe = ADAPTERS[name].recipe
    assert recipe
    install(home, recipe)


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


async def through_proxy(
    home: Home, name: str, folder: Path, texts: list[str], **changes: Any
) -> tuple[Completed, dict[str, Any], list[ModelCall]]:
    """The harness against the proxy itself, whose scripted engine says `texts`: its end, the services, the calls."""
    task = a_task(services=("helpdesk",))
    async with staged(home, folder) as stage, hosted(home) as host:
        limits = Limits(calls=len(texts) + 2, tokens=8192, context=200_000)
        key = stage.add("r1", harness=name, task=task, **{"limits": limits, **changes})
        stage.services.open("r1", {"helpdesk": {"tickets": [{"id": 7}]}})
        stage.engine.queue += [stage.say(text) for text in texts]
        assert stage.app
        completed = await launched(
            home, host, stage.store, Listening(stage.app, home.run / "proxy" / "proxy.sock"), key
        )
        return completed, stage.services.final("r1"), list(stage.store.calls.of("r1"))


async def launched(home: Home, host: Any, store: Store, proxy: Listening, key: str) -> Completed:
    """Runs the rollout `r1`'s harness in its sandbox against the proxy."""
    rollout = store.rollouts.get("r1")
    assert rollout
    await proxy.start()
    try:
        launch = make_harness(rollout.harness, home).launch(
            rollout, rollout.task, Endpoint("/run/proxy/proxy.sock", BASE, key)
        )
        resources = launch.resources or Resources(memory_mb=512, pids=64)
        spec = SandboxSpec("r1", resources, launch.mounts, home.run / "proxy", launch.files)
        async with host.sandbox(spec) as sandbox:
            return await sandbox.run(Command(launch.argv, 280, launch.env))
    finally:
        await proxy.stop()
