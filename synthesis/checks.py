"""The checks of a task, in two tiers.

`inspect` is an early filter in this process: the bundle loads, the instruction names what is graded, the oracle's
plan scores 1, idleness and the plan of each wrong solution 0 by the bundle's own verifier program. `judge` decides:
it reads the outcomes of the bundle's scripts after they ran through the real sandbox, gateway and verification mode.
The oracle must score 1 in every run, idle and each wrong solution that ran 0.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollout.bundle import load_task
from rollout.errors import ConfigError, FailureClass, VerifierError
from rollout.types import TaskSpec
from rollout.verifier import parse_text
from synthesis.config import Checks
from synthesis.families import GradedFact
from synthesis.play import Played, Step, parse_plan, play
from synthesis.types import Outcome

VERIFY_S = 20.0


@dataclass(frozen=True)
class Problem:
    """Why a task cannot be accepted. `patch`: the author may write it anew; else it is rejected at once."""

    reason: str
    detail: str = ""
    patch: bool = True


# -- the early filter


def inspect(folder: Path) -> Problem | None:
    """The first problem that can be seen without a rollout, or None."""
    try:
        task = load_task(folder)
        unnamed = unnamed_facts(task.instruction, graded_facts(folder))
        if unnamed:
            return Problem("instruction", f"the instruction does not name: {'; '.join(unnamed)}")
        services = json.loads((folder / "environment" / "services.json").read_text(encoding="utf-8"))
        plan = json.loads((folder / "solution" / "plan.json").read_text(encoding="utf-8"))
        return _scores(folder, services, parse_plan(plan["oracle"]), _wrong_plans(folder, plan))
    except (ConfigError, OSError, ValueError, KeyError, TypeError) as error:
        return Problem("bundle", f"{type(error).__name__}: {error}", patch=False)


def _wrong_plans(folder: Path, plan: dict[str, Any]) -> dict[str, tuple[Step, ...]]:
    """Script -> steps of each wrong solution. Raises ConfigError when one has no plan, or a plan no script."""
    plans = {f"wrong/{name}": parse_plan(rows) for name, rows in plan["wrong"].items()}
    listed = wrong_scripts(folder)
    if sorted(plans) != listed:
        raise ConfigError(f"solution/plan.json has plans of {sorted(plans)} for the wrong solutions {listed}")
    return plans


def _scores(
    folder: Path, services: dict[str, Any], oracle: Sequence[Step], wrong: dict[str, tuple[Step, ...]]
) -> Problem | None:
    plays = {"oracle": play(services, oracle), "idle": play(services, ())}
    plays |= {script: play(services, steps) for script, steps in wrong.items()}
    try:
        with ThreadPoolExecutor(len(plays)) as pool:
            rewards = list(pool.map(lambda played: run_verifier(folder, played), plays.values()))
    except VerifierError as error:
        return Problem("verifier", str(error), patch=False)
    for script, reward in zip(plays, rewards, strict=True):
        wanted = 1.0 if script == "oracle" else 0.0
        if reward != wanted:
            return Problem(script.partition("/")[0], f"{script} scores {reward:g} instead of {wanted:g} in process")
    return None


def graded_facts(folder: Path) -> list[GradedFact]:
    """`[metadata] graded` of task.toml. Raises ConfigError when it is missing or empty."""
    rows = tomllib.loads((folder / "task.toml").read_text(encoding="utf-8")).get("metadata", {}).get("graded")
    if not rows:
        raise ConfigError(f"{folder.name}: task.toml lists no graded facts; add [[metadata.graded]] fact, any_of")
    return [GradedFact.model_validate({**row, "any_of": tuple(row.get("any_of", ()))}) for row in rows]


def unnamed_facts(instruction: str, facts: Sequence[GradedFact]) -> list[str]:
    """Graded facts of which the instruction holds no word."""
    return [f.fact for f in facts if not any(_holds(instruction, word) for word in f.any_of)]


def _holds(text: str, word: str) -> bool:
    return re.search(rf"(?<!\w){re.escape(word)}(?!\w)", text, re.IGNORECASE) is not None


def run_verifier(folder: Path, played: Played) -> float:
    """Reward of a played plan by tests/verify.py in a process of its own. Raises VerifierError."""
    program = folder / "tests" / "verify.py"
    if not program.is_file():
        raise VerifierError("tests/verify.py is missing")
    with tempfile.TemporaryDirectory(prefix="openforge-check-") as root:
        place(Path(root), played)
        command = [sys.executable, "-I", "-S", str(program), root]
        try:
            done = subprocess.run(command, capture_output=True, timeout=VERIFY_S, check=False)
        except subprocess.TimeoutExpired as error:
            raise VerifierError(f"tests/verify.py did not end within {VERIFY_S:.0f} s") from error
        if done.returncode != 0:
            tail = done.stderr.decode(errors="replace")[-300:]
            raise VerifierError(f"tests/verify.py ended with {done.returncode}: {tail}")
        reward = Path(root) / "logs" / "verifier" / "reward.txt"
        if not reward.is_file():
            raise VerifierError("tests/verify.py wrote no reward.txt")
        try:
            return parse_text(reward.read_bytes())[0]
        except ValueError as error:
            raise VerifierError(f"reward.txt {error}") from error


def place(root: Path, played: Played) -> None:
    """Writes below `root` what a verifier reads."""
    (root / "logs" / "artifacts").mkdir(parents=True)
    (root / "logs" / "artifacts" / "services.json").write_text(json.dumps(played.final))
    (root / "workspace").mkdir()
    if played.answer is not None:
        (root / "workspace" / "answer.txt").write_text(played.answer + "\n", encoding="utf-8")


# -- the decisive checks


def wrong_scripts(folder: Path) -> list[str]:
    return [f"wrong/{file.stem}" for file in sorted((folder / "solution" / "wrong").glob("*.sh"))]


def scripts(task: TaskSpec, checks: Checks, turn: int) -> dict[str, int]:
    """Script -> runs. `turn` chooses which wrong solutions run when not all do."""
    wrong = wrong_scripts(Path(task.bundle))
    n = len(wrong) if checks.wrong == "all" else min(checks.wrong, len(wrong))
    chosen = [wrong[(turn + k) % len(wrong)] for k in range(n)]
    return {"solve": checks.determinism_runs, "idle": 1, **dict.fromkeys(chosen, 1)}


def judge(outcomes: Sequence[Outcome]) -> Problem | None:
    """The first problem that the script runs of one task show, or None."""
    for outcome in outcomes:
        problem = _broken(outcome)
        if problem:
            return problem
    solved = [o.reward for o in outcomes if o.script == "solve"]
    if len(set(solved)) > 1:
        return Problem("nondeterministic", f"the oracle's runs scored {solved}")
    if not solved or solved[0] != 1.0:
        return Problem("oracle", f"the oracle scored {solved}")
    for outcome in outcomes:
        if outcome.script != "solve" and outcome.reward != 0.0:
            return Problem(outcome.script.partition("/")[0], f"{outcome.script} scored {outcome.reward}")
    return None


def _broken(outcome: Outcome) -> Problem | None:
    if not outcome.failure:
        return None
    detail = f"{outcome.script}: {outcome.message}"
    match outcome.failure:
        case FailureClass.VERIFIER:
            return Problem("verifier", detail, patch=False)
        case FailureClass.HARNESS:
            return Problem("oracle", detail)
        case _:
            return Problem(outcome.failure, detail, patch=False)
