"""A bundle's own scripts as a harness: `solution:solve`, `solution:wrong/<name>` and `solution:idle`.

Checks of a task run its oracle and its wrong solutions through the one lifecycle, sandbox, gateway and verifier
that rollouts use. The model is never called: the key's phase is `solution`.
"""

from __future__ import annotations

from pathlib import Path

from rollout.errors import ConfigError, HarnessError
from rollout.harness.base import Endpoint, Launch
from rollout.sandbox.base import Completed, Mount
from rollout.types import Rollout, TaskSpec

PREFIX = "solution:"
TOOL = Path(__file__).with_name("openforge_tool.py")


class SolutionHarness:
    def __init__(self, name: str) -> None:
        self.name = name
        self.script = name.removeprefix(PREFIX)

    def launch(self, rollout: Rollout, task: TaskSpec, endpoint: Endpoint) -> Launch:
        """Raises ConfigError when the bundle has no such script."""
        env = {
            "OPENFORGE_SOCKET": endpoint.socket,
            "OPENFORGE_BASE": endpoint.base_path,
            "OPENFORGE_KEY": endpoint.key,
        }
        if self.script == "idle":
            return Launch(argv=("true",), env=env)
        path = Path(task.bundle) / "solution" / f"{self.script}.sh"
        if not path.is_file():
            raise ConfigError(f"task {task.id} has no {path.relative_to(task.bundle)}")
        return Launch(
            argv=("bash", "/solution/run.sh"),
            env=env,
            files={"/solution/run.sh": path.read_bytes()},
            mounts=(Mount(TOOL, "/opt/openforge/tool.py"),),
        )

    def check(self, completed: Completed, end_reason: str) -> None:
        if completed.returncode != 0 and self.script == "solve":
            tail = completed.stderr.decode(errors="replace")[-500:]
            raise HarnessError(f"solution/solve.sh ended with {completed.returncode}: {tail}")
