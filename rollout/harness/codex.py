"""Codex CLI: Responses API, streamed always; tools by an MCP namespace, or as skills read with its shell.

Its configuration is lean: no catalogue model, no web search, no sub-agents, no plugins, so that one rollout is one
thread of model calls to one address. It has no limit of turns: the proxy's caps end it with a 400, which it takes at
once (exit code 1).
"""

from __future__ import annotations

import json

from rollout.config import Home
from rollout.errors import PolicyEnd
from rollout.harness.base import CallFacts, Endpoint, Launch, StopStyle, Tagged, ToolRoute
from rollout.harness.exposure import ENDPOINT, SERVER, Exposure, by_mcp, by_skill
from rollout.harness.install import Recipe, require
from rollout.harness.wrapping import MODEL, PROGRAM, STATE, at_least, base_url, failed, objects, settle, wrapped
from rollout.sandbox.base import Completed
from rollout.services.catalog import catalog
from rollout.types import CallTag, Resources, Rollout, TaskSpec

INSTRUCTIONS = "You are an agent in a sandbox. Do the user's task with the tools you have, then answer."
COMPACT_AT = 0.85
"""Share of the context at which Codex summarises its history."""


class CodexHarness:
    name = "codex"
    recipe = Recipe(
        name="codex",
        version="0.171.0",
        packages=("@openai/codex@0.171.0",),
        program="node_modules/@openai/codex-linux-{arch}/vendor/*/bin/codex",
    )
    routes: tuple[ToolRoute, ...] = ("mcp", "skill")
    needs = Resources(memory_mb=512, pids=256, disk_mb=256)
    stop: StopStyle = "refuse"

    def __init__(self, home: Home, route: ToolRoute = "mcp") -> None:
        self._home = home
        self._route = route

    def launch(self, rollout: Rollout, task: TaskSpec, endpoint: Endpoint) -> Launch:
        """Raises ConfigError when it is not installed, or for a service or tool that is not there."""
        folder, program = require(self._home, self.recipe)
        tools = catalog(task.services, task.tools)
        shown = by_mcp(tools) if self._route == "mcp" else by_skill(tools, f"{STATE}/skills")
        flags = ("exec", "--json", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox")
        started = Launch(
            argv=(f"{PROGRAM}/{program}", *flags, "--", task.instruction),
            env={"CODEX_HOME": STATE},
            files={
                f"{STATE}/config.toml": config(rollout, endpoint, shown).encode(),
                f"{STATE}/system.md": INSTRUCTIONS.encode(),
                **shown.files,
            },
            mounts=shown.mounts,
            resources=at_least(task, self.needs),
        )
        return wrapped(started, endpoint, folder)

    def check(self, completed: Completed, end_reason: str) -> None:
        """Code 0 is a normal end, also when tools failed; the message of any other is in `turn.failed`."""
        settle(completed, end_reason)
        if completed.returncode != 0:
            said = [event.get("error") for event in objects(completed.stdout) if event.get("type") == "turn.failed"]
            message = said[-1].get("message", "") if said and said[-1] else ""
            if message.endswith("reason: max_output_tokens"):  # an answer that was cut: the model's doing
                raise PolicyEnd("answer_cap")
            raise failed(self.name, completed, message)

    @staticmethod
    def tag(call: CallFacts) -> Tagged:
        """By the thread headers; compaction by `request_kind` in the turn's metadata."""
        thread = call.headers.get("thread-id", "")
        if call.dialect != "responses" or not thread:
            return CallTag.UNATTRIBUTED, "main"
        kind = call.headers.get("x-openai-subagent", "")
        child = bool(kind) or thread != call.headers.get("session-id", thread)
        name = thread if child else "main"
        if kind == "compact" or _metadata(call).get("request_kind") == "compaction":
            return CallTag.COMPACTION, name
        return (CallTag.SUBAGENT if child else CallTag.MAIN), name


def _metadata(call: CallFacts) -> dict[str, object]:
    return next(objects(call.headers.get("x-codex-turn-metadata", "").encode()), {})


def config(rollout: Rollout, endpoint: Endpoint, shown: Exposure) -> str:
    """config.toml. The key stays in the environment."""
    context = rollout.limits.context
    text = f"""model = "{MODEL}"
model_provider = "proxy"
model_context_window = {context}
model_auto_compact_token_limit = {int(context * COMPACT_AT)}
model_instructions_file = "{STATE}/system.md"
check_for_update_on_startup = false
web_search = "disabled"
[analytics]
enabled = false
[features]
goals = false
apps = false
plugins = false
[agents]
enabled = false
[skills]
bundled = {{ enabled = false }}
[model_providers.proxy]
name = "proxy"
base_url = "{base_url(endpoint.base_path)}/v1"
env_key = "OPENFORGE_KEY"
wire_api = "responses"
request_max_retries = 1
stream_max_retries = 1
stream_idle_timeout_ms = 600000
"""
    if shown.server:
        command, *arguments = shown.server
        text += f"""[mcp_servers.{SERVER}]
command = "{command}"
args = {json.dumps(arguments)}
env_vars = {json.dumps(ENDPOINT)}
"""
    return text
