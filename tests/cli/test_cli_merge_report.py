"""`openforge rollouts merge-report`: by run, by rollout, as JSON, and for names that are neither."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path

from rollout.config import open_home
from rollout.store import open_store
from rollout.types import ModelCall, ModelRef, Purpose, Rollout, TaskSpec

ROOT = Path(__file__).resolve().parents[2]


def report(home: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "OPENFORGE_HOME": str(home), "COLUMNS": "160"}
    argv = [sys.executable, "-m", "cli.app", "rollouts", "merge-report", *arguments]
    return subprocess.run(argv, env=env, cwd=ROOT, capture_output=True, text=True, timeout=60)


def fill(home: Path) -> None:
    store = open_store(open_home(home))
    try:
        task = TaskSpec(id="t", instruction="x", bundle="/nowhere", digest="d")
        shared = {"run": "run", "task_id": "t", "group_id": "g", "purpose": Purpose.RUN, "task": task}
        store.rollouts.enqueue([Rollout(id="r1", harness="codex", model=ModelRef(name="gone"), **shared)])
        reasons = ["", "", "client edit at token 2"]
        prompts = [(1,), (1, 2, 3), (1, 9)]
        for index, (prompt, reason) in enumerate(zip(prompts, reasons, strict=True)):
            call = ModelCall(
                rollout_id="r1",
                index=index,
                prompt_ids=prompt,
                completion_ids=(2,),
                fork_reason=reason,
                delivered=True,
            )
            asyncio.run(store.calls.append(call))
    finally:
        store.close()


def test_rows_and_reasons_by_run_and_rollout(tmp_path: Path) -> None:
    fill(tmp_path)
    for name in ("run", "r1"):
        done = report(tmp_path, name)
        assert done.returncode == 0, done.stderr
        assert "codex: 1 x client edit" in done.stdout
        assert "no texts for gone" in done.stderr
    whole = json.loads(report(tmp_path, "--json").stdout)
    (harness,) = whole["harnesses"]
    assert (harness["sessions"], harness["calls"], harness["rows"]) == (1, 3, 2)
    (fork,) = whole["sessions"][0]["forks"]
    assert (fork["index"], fork["earlier"], fork["token"]) == (2, 1, 1)


def test_a_name_that_is_neither_is_told(tmp_path: Path) -> None:
    done = report(tmp_path, "nothing")
    assert done.returncode == 2
    assert "neither a rollout nor a run" in done.stderr
