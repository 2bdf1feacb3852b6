"""The proxy killed with SIGKILL at every boundary of a call: nothing delivered is lost, no turn is there twice."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import call_kill_points
import pytest


@pytest.mark.kill
@pytest.mark.timeout(400)
@pytest.mark.parametrize("way", ["stream", "unary"])
def test_a_call_outlives_kill_9_at_every_boundary(tmp_path: Path, proxy_folder: Path, way: str) -> None:
    program = Path(call_kill_points.__file__)
    root = program.parent.parent
    (tmp_path / "homes").mkdir()
    done = subprocess.run(
        [sys.executable, str(program), str(proxy_folder), str(tmp_path / "homes"), way],
        env={**os.environ, "PYTHONPATH": f"{root}{os.pathsep}{program.parent}"},
        capture_output=True,
        timeout=380,
    )
    assert done.returncode == 0, done.stderr.decode()[-3000:]
    trials = [json.loads(line) for line in done.stdout.splitlines()]
    assert sum(trial["killed"] for trial in trials) >= 30
    for trial in trials:
        check(trial)
    assert {len(trial["after_kill"]) for trial in trials} == {0, 1}
    assert {trial["arrived"] for trial in trials if trial["killed"]} == {False, True}


def check(trial: dict[str, Any]) -> None:
    where = f"killed at {trial['point']}: {trial['place']}"
    kept = trial["after_kill"]
    if trial["arrived"]:
        assert len(kept) == 1, f"{where}: an answer that had arrived is lost"
    else:
        assert not any(call["delivered"] for call in kept), f"{where}: flagged as delivered, but it was not"
    assert [call["answer"] for call in kept] == [trial["shown"]] * len(kept), f"{where}: the retry is another turn"
    first, second = trial["calls"]
    assert (first["index"], second["index"]) == (0, 1), where
    assert (first["answer"], second["answer"]) == (trial["shown"], trial["last"]), where
    assert first["delivered"], where
    assert (first["failed"], second["failed"], second["fork_reason"]) == (False, False, ""), where
    assert second["ids"][: len(first["ids"])] == first["ids"], f"{where}: the next prompt does not extend the turn"
