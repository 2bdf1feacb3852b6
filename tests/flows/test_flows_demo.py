"""`openforge demo` loses its Prefect server, then is killed itself: begun again it ends like a run left in peace."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest

from rollout.processes import read_pid_file

if TYPE_CHECKING:
    from conftest import Up

pytestmark = [
    pytest.mark.prefect,
    pytest.mark.kill,
    pytest.mark.chaos,
    pytest.mark.sandbox,
    pytest.mark.model,
    pytest.mark.timeout(900),
]


def _begin(demo: Up) -> subprocess.Popen[bytes]:
    env = {**demo.env, "OPENFORGE_HOME": str(demo.home)}
    argv = [sys.executable, "-m", "cli.app", "demo", "--preset", "smoke"]
    with (demo.home / "demo.log").open("ab") as log:
        return subprocess.Popen(argv, env=env, cwd=Path(__file__).parents[2], stdout=log, stderr=log)


def _is_flow(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):
        return "flows" in process.cmdline()
    return False


def test_a_demo_goes_on_after_the_end_of_its_server_and_after_its_own(up: Up, tmp_path: Path) -> None:
    assert up.ended(up.start("pipeline/claw"), 400) == "COMPLETED"
    total = up.recorded_calls()
    demo = type(up)(tmp_path / "home", up.env)
    demo.home.mkdir()
    process = _begin(demo)
    try:
        demo.until(lambda: demo.recorded_calls() > total * 0.1, 240)
        server = read_pid_file(demo.home / "run" / "prefect.json")
        assert server
        os.kill(server["pid"], signal.SIGKILL)
        demo.until(lambda: "goes on with a new one" in (demo.home / "demo.log").read_text(), 240)
        demo.until(lambda: demo.recorded_calls() > total * 0.4, 240)
        flows = [p for p in psutil.Process(process.pid).children() if _is_flow(p)]
        process.kill()
        process.wait(10)
        demo.until(lambda: not any(p.is_running() for p in flows), 10)
        process = _begin(demo)
        assert process.wait(400) == 0, (demo.home / "demo.log").read_text()[-3000:]
        assert demo.tables() == up.tables()
        assert demo.damage() == []
        assert read_pid_file(demo.home / "run" / "prefect.json") is None
    finally:
        with suppress(ProcessLookupError):
            process.kill()
        process.wait(10)
        demo.client.close()
        assert demo.openforge("down").returncode == 0
