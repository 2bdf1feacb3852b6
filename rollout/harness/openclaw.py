"""OpenClaw, as one isolated headless turn (`openclaw agent exec`): Chat Completions, streamed; tools by MCP or skills.

Only shell and file tools are allowed besides the task's: then its history is append-only. It brings its own Node.js,
whose compile cache is filled when it is installed. It has no limit of turns; a 400 ends it at once.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollout.config import Home
from rollout.errors import ConfigError, PhaseTimeout
from rollout.harness.base import CallFacts, Endpoint, Launch, StopStyle, Tagged, ToolRoute
from rollout.harness.exposure import ENDPOINT, SERVER, Exposure, by_mcp, by_skill
from rollout.harness.install import NODE, Recipe, expand, require
from rollout.harness.warming import run_refused
from rollout.harness.wrapping import MODEL, PROGRAM, STATE, at_least, base_url, failed, objects, settle, wrapped
from rollout.sandbox.base import Completed
from rollout.services.base import ToolSpec
from rollout.services.catalog import catalog
from rollout.types import CallTag, Resources, Rollout, TaskSpec

NODE_PROGRAM = "node_modules/node-linux-{arch}/bin/node"
ENTRY = "node_modules/openclaw/openclaw.mjs"
CACHE = "compile-cache"
CONFIG = f"{STATE}/openclaw.json"
UNREACHABLE = "connection error"
BUILTIN = ("exec", "read", "write", "edit")


@dataclass(frozen=True)
class Size:
    """In tokens."""

    context: int
    answer: int


def warm(folder: Path) -> None:
    """Fills the compile cache. Raises ConfigError when none came of it."""
    (folder / CACHE).mkdir()
    files = {CONFIG: json.dumps(config("", Size(32768, 256), Exposure(), [])).encode()}
    run_refused(folder, (*command(60.0), "hello"), environment(), files)
    if not any((folder / CACHE).iterdir()):
        raise ConfigError(
            "openclaw was run once and filled no compile cache; does bubblewrap work here? openforge doctor"
        )


class OpenClawHarness:
    name = "openclaw"
    recipe = Recipe(
        name="openclaw",
        version="2026.9.6",
        packages=("openclaw@2026.9.6", f"node-linux-{{arch}}@{NODE}"),
        program=NODE_PROGRAM,
        check=("{program}", "{folder}/" + ENTRY, "--version"),
        warm=warm,
    )
    routes: tuple[ToolRoute, ...] = ("mcp", "skill")
    needs = Resources(memory_mb=2048, pids=256, disk_mb=512)
    stop: StopStyle = "refuse"

    def __init__(self, home: Home, route: ToolRoute = "mcp") -> None:
        self._home = home
        self._route = route

    def launch(self, rollout: Rollout, task: TaskSpec, endpoint: Endpoint) -> Launch:
        """Raises ConfigError when it is not installed, or for a service or tool that is not there."""
        folder, _ = require(self._home, self.recipe)
        tools = catalog(task.services, task.tools)
        shown = by_mcp(tools) if self._route == "mcp" else by_skill(tools, "/workspace/skills")
        size = Size(rollout.limits.context, rollout.sampling.max_tokens)
        settings = config(endpoint.base_path, size, shown, tools)
        started = Launch(
            argv=(*command(task.timeouts.agent), task.instruction),
            env=environment(),
            files={CONFIG: json.dumps(settings, indent=1).encode(), **shown.files},
            mounts=shown.mounts,
            resources=at_least(task, self.needs),
        )
        return wrapped(started, endpoint, folder)

    def check(self, completed: Completed, end_reason: str) -> None:
        """By `ok` and `status` of its JSON. A model that it cannot reach has the status of its deadline, `timeout`."""
        settle(completed, end_reason)
        result = envelope(completed.stdout)
        said = str((result.get("error") or {}).get("message", ""))
        late = completed.returncode == 2 or result.get("status") == "timeout"
        if late and UNREACHABLE not in said:
            raise PhaseTimeout("openclaw passed its own deadline")
        if completed.returncode != 0 or result.get("ok") is False:
            raise failed(self.name, completed, said)

    @staticmethod
    def tag(call: CallFacts) -> Tagged:
        """`agent exec` makes the agent's calls alone, always with tools; without any it summarises its history."""
        if call.dialect != "chat" or "traceparent" not in call.headers:
            return CallTag.UNATTRIBUTED, "main"
        return (CallTag.MAIN if call.tools else CallTag.COMPACTION), "main"


def envelope(stdout: bytes) -> dict[str, Any]:
    """The JSON object that ends its output, on one line or on several; empty when there is none."""
    lines = stdout.decode(errors="replace").splitlines()
    for start in range(len(lines) - 1, -1, -1):
        if lines[start].startswith("{"):
            return next(objects(" ".join(lines[start:]).encode()), {})
    return {}


def command(timeout: float) -> tuple[str, ...]:
    """All but the instruction. `timeout` in seconds."""
    flags = ("--json", "--config", CONFIG, "--cwd", "/workspace", "--timeout", str(int(timeout) + 1))
    lean = ("--local-model-lean", "--code-mode", "direct", "--thinking", "off")
    return (f"{PROGRAM}/{expand(NODE_PROGRAM)}", f"{PROGRAM}/{ENTRY}", "agent", "exec", *flags, *lean, "--")


def environment() -> dict[str, str]:
    """The key is added by the launch."""
    return {
        "PATH": f"{PROGRAM}/{expand(NODE_PROGRAM).rpartition('/')[0]}:/usr/local/bin:/usr/bin:/bin",
        "HOME": STATE,
        "DO_NOT_TRACK": "1",
        "NODE_COMPILE_CACHE": f"{PROGRAM}/{CACHE}",
    }


def config(base_path: str, size: Size, shown: Exposure, tools: list[ToolSpec]) -> dict[str, Any]:
    """Its configuration file. The key stays in the environment."""
    model = {
        "id": MODEL,
        "name": MODEL,
        "reasoning": False,
        "input": ["text"],
        "cost": {"input": 0, "output": 0, "cacheRead": 0, "cacheWrite": 0},
        "contextWindow": size.context,
        "maxTokens": size.answer,
    }
    provider = {
        "baseUrl": f"{base_url(base_path)}/v1",
        "apiKey": "${OPENFORGE_KEY}",
        "api": "openai-completions",
        "models": [model],
    }
    servers: dict[str, Any] = {}
    if shown.server:
        env = {name: f"${{{name}}}" for name in ENDPOINT}
        servers[SERVER] = {"command": shown.server[0], "args": list(shown.server[1:]), "env": env}
    allowed = [*BUILTIN, *(f"{SERVER}__{tool.name}" for tool in tools if shown.server)]
    return {
        "models": {"mode": "replace", "providers": {"proxy": provider}},
        "agents": {"defaults": {"model": {"primary": f"proxy/{MODEL}"}}},
        "plugins": {"enabled": False},
        "update": {"checkOnStart": False},
        "skills": {"allowBundled": []},
        "tools": {"allow": allowed, "toolSearch": False, "codeMode": False},
        "mcp": {"servers": servers},
    }
