"""ZeroClaw 0.8.4, one message and an end: Chat Completions, not streamed; tools by MCP or as skills.

No package index carries its binary, so that the one on PATH is used. Configuration and command follow its
documentation. What would make calls of its own (memory, reflection) is off; its limits of actions are lifted, the
proxy's caps count.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from rollout.config import Home
from rollout.errors import ConfigError
from rollout.harness.base import CallFacts, Endpoint, Launch, StopStyle, Tagged, ToolRoute
from rollout.harness.exposure import SERVER, Exposure, by_mcp, by_skill
from rollout.harness.install import Recipe
from rollout.harness.wrapping import MODEL, PROGRAM, STATE, at_least, base_url, failed, settle, wrapped
from rollout.sandbox.base import Completed, Mount
from rollout.services.catalog import catalog
from rollout.types import CallTag, Resources, Rollout, TaskSpec

AGENT = "rl"
FOLDER = f"{STATE}/zeroclaw"
BINARY = f"{PROGRAM}/zeroclaw"
BUILTIN = ("shell", "file_read", "file_write", "file_edit")
UNLIMITED = 4294967295
"""Actions an hour; its default is 20, and 0 blocks everything."""


class ZeroClawHarness:
    name = "zeroclaw"
    recipe: Recipe | None = None
    """It is not installed here."""
    routes: tuple[ToolRoute, ...] = ("mcp", "skill")
    needs = Resources(memory_mb=512, pids=128, disk_mb=128)
    stop: StopStyle = "refuse"

    def __init__(self, home: Home, route: ToolRoute = "mcp") -> None:
        self._route = route

    def launch(self, rollout: Rollout, task: TaskSpec, endpoint: Endpoint) -> Launch:
        """Raises ConfigError without a binary on PATH, or for a service or tool that is not there."""
        binary = shutil.which("zeroclaw")
        if not binary:
            raise ConfigError("no zeroclaw on PATH: build zeroclaw 0.8.4 from its source and put its binary there")
        tools = catalog(task.services, task.tools)
        place = f"{FOLDER}/agents/{AGENT}/workspace/skills"
        shown = by_mcp(tools) if self._route == "mcp" else by_skill(tools, place)
        allowed = [*BUILTIN, *(f"{SERVER}__{tool.name}" for tool in tools if shown.server)]
        started = Launch(
            argv=(BINARY, "--config-dir", FOLDER, "agent", "-a", AGENT, "-m", task.instruction),
            env={"ZEROCLAW_CONFIG_DIR": FOLDER},
            files={f"{FOLDER}/config.toml": config(rollout, endpoint, shown, allowed).encode(), **shown.files},
            mounts=(Mount(Path(binary).resolve(), BINARY), *shown.mounts),
            resources=at_least(task, self.needs),
        )
        return wrapped(started, endpoint, None)

    def check(self, completed: Completed, end_reason: str) -> None:
        """Code 0 with the final text on stdout is a normal end."""
        settle(completed, end_reason)
        if completed.returncode != 0:
            raise failed(self.name, completed)

    @staticmethod
    def tag(call: CallFacts) -> Tagged:
        """Its calls of other purposes are switched off."""
        return (CallTag.MAIN if call.dialect == "chat" else CallTag.UNATTRIBUTED), "main"


def config(rollout: Rollout, endpoint: Endpoint, shown: Exposure, allowed: list[str]) -> str:
    """config.toml, schema version 3."""
    text = f"""schema_version = 3
[providers.models.custom.proxy]
uri = "{base_url(endpoint.base_path)}/v1"
api_key = "{endpoint.key}"
model = "{MODEL}"
max_tokens = {rollout.sampling.max_tokens}
context_window = {rollout.limits.context}
[agents.{AGENT}]
enabled = true
model_provider = "custom.proxy"
risk_profile = "{AGENT}"
runtime_profile = "{AGENT}"
mcp_bundles = {json.dumps([SERVER] if shown.server else [])}
[agents.{AGENT}.workspace]
path = "/workspace"
[risk_profiles.{AGENT}]
level = "full"
workspace_only = false
allowed_tools = {json.dumps(allowed)}
block_high_risk_commands = false
[runtime_profiles.{AGENT}]
agentic = true
max_tool_iterations = {rollout.limits.calls}
max_actions_per_hour = {UNLIMITED}
max_context_tokens = {rollout.limits.context}
[memory]
backend = "sqlite"
auto_save = false
"""
    if shown.server:
        text += f"""[[mcp.servers]]
name = "{SERVER}"
command = "{shown.server[0]}"
args = {json.dumps(list(shown.server[1:]))}
[mcp_bundles.{SERVER}]
servers = ["{SERVER}"]
"""
    return text
