"""Claude Code: Messages API, streamed always; tools by MCP, or as skills used with its shell.

Its configuration is lean: four built-in tools, no betas, no deferred tools, no billing line, one address. A 400 would
start a ladder of changed requests, so the proxy ends its session with a normal end of turn.
"""

from __future__ import annotations

import json
from typing import Any

from rollout.config import Home
from rollout.errors import PolicyEnd
from rollout.harness.base import CallFacts, Endpoint, Launch, StopStyle, Tagged, ToolRoute
from rollout.harness.exposure import ENDPOINT, SERVER, Exposure, by_mcp, by_skill
from rollout.harness.install import Recipe, require
from rollout.harness.wrapping import MODEL, PROGRAM, STATE, at_least, base_url, failed, objects, settle, wrapped
from rollout.sandbox.base import Completed
from rollout.services.catalog import catalog
from rollout.types import CallTag, Resources, Rollout, TaskSpec

SYSTEM = "You are an agent in a sandbox. Do the user's task with the tools you have, then answer."
COMPACTION = "CRITICAL: Respond with TEXT ONLY"
"""How the last text block of a compaction call begins: nothing else marks it."""
NO_SUMMARY = "summarization produced empty response"
"""In its result when the policy was to summarise a full context and wrote no text: its own end."""
SWITCHES = {
    "IS_SANDBOX": "1",
    "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    "CLAUDE_CODE_DISABLE_EXPERIMENTAL_BETAS": "1",
    "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",
    "CLAUDE_CODE_MAX_RETRIES": "2",
    "DISABLE_TELEMETRY": "1",
    "DISABLE_ERROR_REPORTING": "1",
    "DISABLE_AUTOUPDATER": "1",
    "DISABLE_PROMPT_CACHING": "1",
    "ENABLE_TOOL_SEARCH": "false",
}


class ClaudeCodeHarness:
    name = "claude-code"
    recipe = Recipe(
        name="claude-code",
        version="2.1.332",
        packages=("@anthropic-ai/claude-code@2.1.332",),
        program="node_modules/@anthropic-ai/claude-code-linux-{arch}/claude",
    )
    routes: tuple[ToolRoute, ...] = ("mcp", "skill")
    needs = Resources(memory_mb=768, pids=256, disk_mb=256)
    stop: StopStyle = "end_turn"

    def __init__(self, home: Home, route: ToolRoute = "mcp") -> None:
        self._home = home
        self._route = route

    def launch(self, rollout: Rollout, task: TaskSpec, endpoint: Endpoint) -> Launch:
        """Raises ConfigError when it is not installed, or for a service or tool that is not there."""
        folder, program = require(self._home, self.recipe)
        tools = catalog(task.services, task.tools)
        state = f"{STATE}/.claude"
        shown = by_mcp(tools) if self._route == "mcp" else by_skill(tools, f"{state}/skills")
        started = Launch(
            argv=(f"{PROGRAM}/{program}", *self._flags(rollout, bool(tools)), "--", task.instruction),
            env={
                **SWITCHES,
                "CLAUDE_CONFIG_DIR": state,
                "ANTHROPIC_BASE_URL": base_url(endpoint.base_path),
                "ANTHROPIC_API_KEY": endpoint.key,
                "CLAUDE_CODE_MAX_OUTPUT_TOKENS": str(rollout.sampling.max_tokens),
                "CLAUDE_CODE_MAX_CONTEXT_TOKENS": str(rollout.limits.context),
            },
            files={f"{STATE}/mcp.json": json.dumps(_servers(shown)).encode(), **shown.files},
            mounts=shown.mounts,
            resources=at_least(task, self.needs),
        )
        return wrapped(started, endpoint, folder)

    def _flags(self, rollout: Rollout, tools: bool) -> tuple[str, ...]:
        builtin = "Bash,Read,Write,Edit" + (",Skill" if tools and self._route == "skill" else "")
        turns = str(rollout.limits.calls)
        return (
            *("-p", "--model", MODEL, "--output-format", "stream-json", "--verbose", "--dangerously-skip-permissions"),
            *("--system-prompt", SYSTEM, "--tools", builtin, "--max-turns", turns),
            *("--mcp-config", f"{STATE}/mcp.json", "--strict-mcp-config"),
        )

    def check(self, completed: Completed, end_reason: str) -> None:
        """By `is_error` and `terminal_reason` of the result line; its `subtype` says success for API errors too."""
        settle(completed, end_reason)
        results = [line for line in objects(completed.stdout) if line.get("type") == "result"]
        if not results:
            raise failed(self.name, completed)
        result: dict[str, Any] = results[-1]
        if result.get("terminal_reason") == "max_turns":
            raise PolicyEnd("max_turns")
        if NO_SUMMARY in str(result.get("result")):
            raise PolicyEnd("compaction")
        if result.get("is_error") or completed.returncode != 0:
            raise failed(self.name, completed, result.get("result") or result.get("terminal_reason") or "")

    @staticmethod
    def tag(call: CallFacts) -> Tagged:
        """By the agent headers; compaction by its text alone."""
        if call.dialect != "messages" or "x-claude-code-session-id" not in call.headers:
            return CallTag.UNATTRIBUTED, "main"
        agent = call.headers.get("x-claude-code-agent-id", "")
        if call.path.endswith("/count_tokens"):
            return CallTag.PROBE, agent or "main"
        if call.user.lstrip().startswith(COMPACTION):
            return CallTag.COMPACTION, agent or "main"
        return (CallTag.SUBAGENT, agent) if agent else (CallTag.MAIN, "main")


def _servers(shown: Exposure) -> dict[str, Any]:
    if not shown.server:
        return {"mcpServers": {}}
    command, *arguments = shown.server
    env = {name: f"${{{name}}}" for name in ENDPOINT}
    return {"mcpServers": {SERVER: {"type": "stdio", "command": command, "args": arguments, "env": env}}}
