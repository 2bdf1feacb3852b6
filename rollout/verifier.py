"""Fresh verification: the task's own script in a sandbox that the agent never saw.

    state of the agent's sandbox -> /workspace          services' final state -> /logs/artifacts/services.json
    the bundle's tests           -> /tests              bash /tests/test.sh   -> /logs/verifier/reward.{json,txt}

Only what the verifier wrote there counts: the agent's /logs is not carried over. As in Harbor the script's exit
code is ignored when it wrote a reward. Anything but one finite number in [0, 1] is a verifier failure, never a
reward of 0 (design "Failures are data").
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rollout.errors import VerifierError
from rollout.sandbox.base import Command, Completed, Sandbox, SandboxSpec
from rollout.types import Resources, TaskSpec, Verdict, VerificationMode

REWARD_MAX = 65536
"""Bytes of a reward file."""
EXPLAIN = 2000
FULL = 1.0 - 1e-9


async def verify(
    task: TaskSpec, sandbox_id: str, make_sandbox: Callable[[], Sandbox], services: bytes, state: bytes
) -> Verdict:
    """The verdict over `state` (from `Sandbox.export`) and `services` (services.json).

    Raises VerifierError when the verifier gives no reward, SandboxError when its sandbox fails.
    """
    if task.verifier.mode is not VerificationMode.FRESH:
        raise VerifierError(f"{task.id}: verification mode {task.verifier.mode} is not offered here; use `fresh`")
    if not all(path == "/workspace" or path.startswith("/workspace/") for path in task.verifier.state):
        raise VerifierError(f"{task.id}: only paths below /workspace are carried to the verifier")
    spec = SandboxSpec(
        id=sandbox_id,
        resources=_room(task.resources, len(services)),
        files={**_tests(task), "/logs/artifacts/services.json": services},
        needs_image=task.needs_image,
        state=state,
    )
    sandbox = make_sandbox()
    try:
        await sandbox.start(spec)
        completed = await sandbox.run(Command(("bash", "/tests/test.sh"), timeout=task.timeouts.verify))
        _check(task, completed)
        found = await _reward(sandbox, task, completed)
    finally:
        await sandbox.stop()
    reward, criteria = found
    return Verdict(
        reward=reward,
        passed=reward >= FULL,
        criteria=criteria,
        explanation=_tail(completed.stdout),
        mode=VerificationMode.FRESH,
    )


def _room(resources: Resources, services: int) -> Resources:
    """Twice the disk and the services' bytes: what the agent filled up must not stop the verifier."""
    return resources.model_copy(update={"disk_mb": 2 * resources.disk_mb + 16 + services // 2**20 + 1})


def _tests(task: TaskSpec) -> dict[str, bytes]:
    root = Path(task.bundle) / "tests"
    try:
        return {
            f"/tests/{path.relative_to(root).as_posix()}": path.read_bytes()
            for path in sorted(root.rglob("*"))
            if path.is_file() and not path.is_symlink()
        }
    except OSError as error:
        raise VerifierError(f"{task.id}: the bundle's tests cannot be read: {error}") from error


def _check(task: TaskSpec, completed: Completed) -> None:
    if completed.timed_out:
        raise VerifierError(f"{task.id}: the verifier was still running after {task.timeouts.verify:.0f} s")
    if completed.limit:
        raise VerifierError(f"{task.id}: the verifier ran into its {completed.limit} limit")
    if completed.returncode is not None and completed.returncode >= 128:
        raise VerifierError(f"{task.id}: the verifier was killed ({completed.returncode}): {_tail(completed.stderr)}")


async def _reward(sandbox: Sandbox, task: TaskSpec, completed: Completed) -> tuple[float, dict[str, float]]:
    for name, parse in (("reward.json", parse_json), ("reward.txt", parse_text)):
        data = await sandbox.get(f"/logs/verifier/{name}", REWARD_MAX + 1)
        if data is None:
            continue
        if len(data) > REWARD_MAX:
            raise VerifierError(f"{task.id}: {name} is larger than {REWARD_MAX} bytes")
        try:
            return parse(data)
        except ValueError as error:
            raise VerifierError(f"{task.id}: {name} {error}") from error
    ended = f"it ended with {completed.returncode}"
    if said := _tail(completed.stderr) or _tail(completed.stdout):
        ended += f", saying: {said}"
    raise VerifierError(f"{task.id}: the verifier wrote no /logs/verifier/reward.txt or reward.json; {ended}")


def parse_text(data: bytes) -> tuple[float, dict[str, float]]:
    """reward.txt: one number. Raises ValueError that reads on after the file's name."""
    text = data.decode("utf-8", "replace").strip()
    try:
        value = float(text)
    except ValueError as error:
        raise ValueError(f"holds {text[:80]!r}, not one number") from error
    return _in_range(value), {}


def parse_json(data: bytes) -> tuple[float, dict[str, float]]:
    """reward.json: an object of finite numbers. `reward` is the reward, or else the mean of all; the rest are criteria.

    Raises ValueError that reads on after the file's name.
    """
    try:
        body: Any = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"is no JSON ({error})") from error
    if not isinstance(body, dict) or not body:
        raise ValueError("must be an object of at least one number")
    for key, value in body.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not _finite(value):
            raise ValueError(f"has {key}={value!r}, not a finite number")
    criteria = {key: float(value) for key, value in body.items()}
    if "reward" in criteria:
        return _in_range(criteria.pop("reward")), criteria
    return _in_range(sum(criteria.values()) / len(criteria)), criteria


def _finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer beyond any float
        return False


def _in_range(value: float) -> float:
    if not 0.0 <= value <= 1.0:  # false for nan too
        raise ValueError(f"gives {value!r}, not a number in [0, 1]")
    return value


def _tail(data: bytes) -> str:
    return data.decode("utf-8", "replace").strip()[-EXPLAIN:]
