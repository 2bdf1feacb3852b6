"""mini-swe-agent: Chat Completions, not streamed, one tool `bash`; a task's tools come as skills in its prompt.

It has no place for skills, so that their text follows the instruction. It insists on a tool call in every
answer and repeats a refused call, therefore its own step limit stands at the rollout's call cap, and what is refused
all the same is tried once more and then ends it.
"""

from __future__ import annotations

import json
import re

from rollout.config import Home
from rollout.errors import PolicyEnd
from rollout.harness.base import CallFacts, Endpoint, Launch, StopStyle, Tagged, ToolRoute
from rollout.harness.exposure import TOOL, manuals
from rollout.harness.install import Recipe, require
from rollout.harness.wrapping import MODEL, PROGRAM, STATE, at_least, base_url, failed, settle, wrapped
from rollout.sandbox.base import Completed
from rollout.services.base import ToolSpec
from rollout.services.catalog import catalog
from rollout.types import CallTag, Resources, Rollout, TaskSpec

TRAJECTORY = "/logs/agent/trajectory.json"
CONFIG = f"{STATE}/openforge.yaml"
DEFAULTS = "lib/python3*/site-packages/minisweagent/config/mini.yaml"
EXIT = re.compile(rb'\n\s+"exit_status": "(\w+)"')
"""In the trajectory's last message; inside a text the quotes would be escaped."""
SUBMITTED = "Submitted"
TRIES = 2
QUIET = {"MSWEA_SILENT_STARTUP": "1", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
ENV = {
    **QUIET,
    "MSWEA_CONFIGURED": "true",
    "MSWEA_COST_TRACKING": "ignore_errors",
    "MSWEA_MODEL_RETRY_STOP_AFTER_ATTEMPT": str(TRIES),
    "MSWEA_GLOBAL_CONFIG_DIR": f"{STATE}/mini",
    "PYTHONDONTWRITEBYTECODE": "1",
}


class MiniSweAgentHarness:
    name = "mini-swe-agent"
    recipe = Recipe(
        name="mini-swe-agent",
        version="2.4.6",
        packages=("mini-swe-agent==2.4.6",),
        program="bin/python",
        check=("{program}", "-c", "import minisweagent.run.mini as m, minisweagent; print(minisweagent.__version__)"),
        env=QUIET,
        python=True,
    )
    routes: tuple[ToolRoute, ...] = ("skill",)
    needs = Resources(memory_mb=512, pids=128, disk_mb=128)
    stop: StopStyle = "refuse"

    def __init__(self, home: Home, route: ToolRoute = "skill") -> None:
        self._home = home

    def launch(self, rollout: Rollout, task: TaskSpec, endpoint: Endpoint) -> Launch:
        """Raises ConfigError when it is not installed, or for a service or tool that is not there."""
        folder, program = require(self._home, self.recipe)
        tools = catalog(task.services, task.tools)
        defaults = next(folder.glob(DEFAULTS)).relative_to(folder)
        mini = (f"{PROGRAM}/{program}", "-m", "minisweagent.run.mini", "--yolo", "--exit-immediately")
        flags = ("-m", f"openai/{MODEL}", "-c", f"{PROGRAM}/{defaults}", "-c", CONFIG, "-o", TRAJECTORY)
        started = Launch(
            argv=(*mini, *flags, "-t", prompt(task, tools)),
            env={**ENV, "OPENAI_API_KEY": endpoint.key},
            files={CONFIG: json.dumps(config(rollout, endpoint)).encode()},
            mounts=(TOOL,) if tools else (),
            resources=at_least(task, self.needs),
        )
        return wrapped(started, endpoint, folder, report=TRAJECTORY)

    def check(self, completed: Completed, end_reason: str) -> None:
        """By the trajectory's exit status; any but a submission and an error is a limit that the policy ran into."""
        settle(completed, end_reason)
        if completed.returncode != 0:
            raise failed(self.name, completed, " ".join(completed.stderr.decode(errors="replace").split()))
        status = EXIT.findall(completed.stdout)
        if not status:
            raise failed(self.name, completed, "it left no trajectory with an exit status")
        if (name := status[-1].decode()) != SUBMITTED:
            raise PolicyEnd(re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower())

    @staticmethod
    def tag(call: CallFacts) -> Tagged:
        """It makes the agent's calls alone, all with its one tool."""
        own = call.dialect == "chat" and call.tools == ("bash",)
        return (CallTag.MAIN if own else CallTag.UNATTRIBUTED), "main"


def prompt(task: TaskSpec, tools: list[ToolSpec]) -> str:
    """The instruction, and the services' manuals below it."""
    return "\n\n".join([task.instruction, *manuals(tools)])


def config(rollout: Rollout, endpoint: Endpoint) -> dict[str, object]:
    """What is laid over its own configuration `mini.yaml`, as JSON, which is YAML too."""
    model = {"model_kwargs": {"api_base": f"{base_url(endpoint.base_path)}/v1"}}
    return {"agent": {"step_limit": rollout.limits.calls, "cost_limit": 0}, "model": model}
