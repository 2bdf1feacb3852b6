"""A task's tools as files for a harness: an MCP server, or a SKILL.md for each service.

Both are written from the catalogue alone, so that every harness shows the same names, texts and schemas.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rollout.harness.react import PYTHON
from rollout.sandbox.base import Mount
from rollout.services.base import ToolSpec

SERVER = "services"
"""Name of the MCP server: `mcp__services__<tool>` in Claude Code, the namespace `mcp__services` in Codex."""
ENDPOINT = ("OPENFORGE_SOCKET", "OPENFORGE_BASE", "OPENFORGE_KEY")
"""Environment that the programs of this package need: a harness passes it on to its MCP servers by name."""
TOOLS = "/harness/tools.json"
MCP = Mount(Path(__file__).with_name("mcp_program.py"), "/opt/openforge/mcp.py")
TOOL = Mount(Path(__file__).with_name("openforge_tool.py"), "/opt/openforge/tool.py")
MCP_ARGV = (*PYTHON, MCP.target, TOOLS)
TOOL_COMMAND = f"python3 -I -S {TOOL.target}"


@dataclass(frozen=True)
class Exposure:
    """What a launch adds for the task's tools."""

    files: dict[str, bytes] = field(default_factory=dict)
    mounts: tuple[Mount, ...] = ()
    server: tuple[str, ...] = ()
    """Command of the MCP server; empty: there is none to register."""


def by_mcp(tools: Sequence[ToolSpec]) -> Exposure:
    """Nothing for a task without tools."""
    if not tools:
        return Exposure()
    config = {
        "tools": [{"name": t.name, "description": t.description, "inputSchema": t.parameters} for t in tools],
        "services": {tool.name: tool.service for tool in tools},
    }
    return Exposure({TOOLS: json.dumps(config, ensure_ascii=False).encode()}, (MCP,), MCP_ARGV)


def by_skill(tools: Sequence[ToolSpec], folder: str) -> Exposure:
    """`<folder>/<service>/SKILL.md` for each service."""
    if not tools:
        return Exposure()
    files = {f"{folder}/{name}/SKILL.md": text.encode() for name, text in skills(tools).items()}
    return Exposure(files, (TOOL,))


def skills(tools: Sequence[ToolSpec]) -> dict[str, str]:
    """Service -> text of its SKILL.md: front matter and manual."""
    return {
        service: f"---\nname: {service}\ndescription: {_description(service, group)}\n---\n{manual(service, group)}"
        for service, group in _by_service(tools).items()
    }


def manuals(tools: Sequence[ToolSpec]) -> list[str]:
    """The manuals alone, for a harness that takes no skills: they go into its prompt."""
    return [manual(service, group) for service, group in _by_service(tools).items()]


def manual(service: str, tools: Sequence[ToolSpec]) -> str:
    """How a service is used from a shell: the command, and a row for each tool."""
    rows = "\n".join(f"- `{tool.name}` {_arguments(tool.parameters)}: {tool.description}" for tool in tools)
    return f"""Call a tool of {service} with its arguments as one JSON object:

    {TOOL_COMMAND} {service} <tool> '<json arguments>'

It prints the result as JSON and ends with 0. When the service refuses, it prints the error and ends with 1.

{rows}
"""


def _by_service(tools: Sequence[ToolSpec]) -> dict[str, list[ToolSpec]]:
    groups: dict[str, list[ToolSpec]] = {}
    for tool in tools:
        groups.setdefault(tool.service, []).append(tool)
    return groups


def _description(service: str, tools: Sequence[ToolSpec]) -> str:
    return f"Use the service {service} from the shell ({', '.join(tool.name for tool in tools)})."


def _arguments(schema: dict[str, Any]) -> str:
    properties = schema.get("properties", {})
    return json.dumps({name: spec.get("type", "any") for name, spec in properties.items()})
