"""What all harnesses that are foreign programs share: how they are started, what they need, how an end is judged.

launch   python3 forwarder.py PORT program ...     the installed folder at /opt/harness, state below /harness
end      the proxy's reason, then the deadline, then a kill, then what the program itself reported
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rollout.errors import ConfigError, HarnessError, PhaseTimeout, PolicyEnd
from rollout.harness.base import Endpoint, Launch
from rollout.harness.react import PYTHON, endpoint_env
from rollout.sandbox.base import Completed, Mount
from rollout.types import Resources, TaskSpec

PORT = 39217
"""Of the sandbox's own loopback: nobody else can hold it when the harness starts."""
MODEL = "policy"
"""The model's name in the harness's own configuration: unknown to every catalogue; the proxy goes by the key."""
STATE = "/harness"
"""Home and state directory of the harness inside the sandbox."""
PROGRAM = "/opt/harness"
ARGUMENT_MAX = 120_000
"""Bytes; Linux takes 128 KiB in one argument."""
KILLED = (137, 143)
FORWARDER = Mount(Path(__file__).with_name("forwarder.py"), "/opt/openforge/forwarder.py")


def base_url(base_path: str) -> str:
    """Of the rollout, as the harness sees it; dialect routes hang below `/v1`."""
    return f"http://127.0.0.1:{PORT}{base_path}"


def wrapped(program: Launch, endpoint: Endpoint, folder: Path | None, report: str = "") -> Launch:
    """`program` behind the forwarder, with `folder` mounted at PROGRAM.

    `report`: a file whose end `check` reads in place of stdout's. Raises ConfigError for an argument too long.
    """
    if any(len(argument.encode()) > ARGUMENT_MAX for argument in program.argv):
        raise ConfigError(f"the instruction is longer than {ARGUMENT_MAX} bytes; this harness takes it as an argument")
    options = ("--report", report) if report else ()
    installed = (Mount(folder, PROGRAM),) if folder else ()
    return Launch(
        argv=(*PYTHON, FORWARDER.target, *options, str(PORT), *program.argv),
        env={"HOME": STATE, **endpoint_env(endpoint), **program.env},
        files=program.files,
        mounts=(FORWARDER, *installed, *program.mounts),
        resources=program.resources,
    )


def at_least(task: TaskSpec, needs: Resources) -> Resources:
    """The larger of the task's limits and the harness's own, each by itself.

    A task's limits bound the work that it asks for; how much the harness weighs is no property of the task.
    """
    mine, theirs = task.resources.model_dump(), needs.model_dump()
    return Resources(**{name: max(value, theirs[name]) for name, value in mine.items()})


def settle(completed: Completed, end_reason: str) -> None:
    """What ends every harness alike. Raises PolicyEnd with the proxy's reason or for a kill, PhaseTimeout."""
    if end_reason:
        raise PolicyEnd(end_reason)
    if completed.timed_out:
        raise PhaseTimeout(f"the harness was still running after {completed.seconds:.0f} s")
    if completed.returncode in KILLED:
        raise PolicyEnd("killed")


def failed(name: str, completed: Completed, said: object = "") -> HarnessError:
    """The error for an end that is the harness's own; `said` is its message, else the end of its output is quoted."""
    text = str(said) or (completed.stderr or completed.stdout).decode(errors="replace").strip()
    return HarnessError(f"{name} ended with {completed.returncode}: {text[-500:]}")


def objects(data: bytes) -> Iterator[dict[str, Any]]:
    """The JSON objects among the lines of a program's output."""
    for line in data.splitlines():
        if line.lstrip().startswith(b"{"):
            try:
                value = json.loads(line)
            except ValueError:
                continue
            if isinstance(value, dict):
                yield value
