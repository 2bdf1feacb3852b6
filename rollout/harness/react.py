"""The ReAct harness: a plain loop of model call and tool calls, as a program of its own inside the sandbox.

This side writes its config and judges how it ended; `react_program.py` is what runs.
"""

from __future__ import annotations

import json
from pathlib import Path

from rollout.errors import HarnessError, PolicyEnd
from rollout.harness.base import Endpoint, Launch
from rollout.sandbox.base import Completed, Mount
from rollout.services.catalog import catalog
from rollout.types import Rollout, TaskSpec

PROGRAM = Path(__file__).with_name("react_program.py")
TOOL = Path(__file__).with_name("openforge_tool.py")
CONFIG = "/harness/react.json"
PYTHON = ("/usr/bin/python3", "-I", "-S")
INFRASTRUCTURE = 70
"""Exit code of the program when the proxy or the gateway could not be used."""


class ReactHarness:
    name = "react"

    def __init__(self, system: str = "", stream: bool = False) -> None:
        """`system`: text of the system message, none when empty. `stream`: ask the proxy for streamed answers."""
        self._system = system
        self._stream = stream

    def launch(self, rollout: Rollout, task: TaskSpec, endpoint: Endpoint) -> Launch:
        """Pure. Raises ConfigError for a service or tool that is not there."""
        tools = catalog(task.services, task.tools)
        config = {
            "model": rollout.model.name,
            "system": self._system,
            "instruction": task.instruction,
            "tools": [tool.function() for tool in tools],
            "services": {tool.name: tool.service for tool in tools},
        }
        return Launch(
            argv=(*PYTHON, "/opt/openforge/react.py", CONFIG),
            env={**endpoint_env(endpoint), "OPENFORGE_STREAM": "1" if self._stream else ""},
            files={CONFIG: json.dumps(config, ensure_ascii=False).encode()},
            mounts=(Mount(PROGRAM, "/opt/openforge/react.py"), Mount(TOOL, "/opt/openforge/tool.py")),
        )

    def check(self, completed: Completed, end_reason: str) -> None:
        """Raises PolicyEnd with the proxy's reason or a kill from inside, HarnessError when the program failed."""
        code = completed.returncode
        if end_reason:
            raise PolicyEnd(end_reason)
        if code == 0:
            return
        if code is not None and code >= 128:
            raise PolicyEnd("killed")
        said = completed.stderr.decode(errors="replace").strip()[-500:]
        if code == INFRASTRUCTURE:
            raise HarnessError(f"react could not reach the model or its tools: {said}")
        raise HarnessError(f"react ended with {code}: {said}")


def endpoint_env(endpoint: Endpoint) -> dict[str, str]:
    """How `openforge_tool.py` and the programs beside it find the proxy."""
    return {
        "OPENFORGE_SOCKET": endpoint.socket,
        "OPENFORGE_BASE": endpoint.base_path,
        "OPENFORGE_KEY": endpoint.key,
    }
