"""One `openforge up` for all flow tests: a fresh HOME, a fresh OPENFORGE_HOME, free ports, the real command."""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

ROOT = Path(__file__).resolve().parents[2]
TERMINAL = ("COMPLETED", "FAILED", "CRASHED", "CANCELLED")
SMOKE = {"params": {"preset": "smoke"}}


@dataclass
class Up:
    """A running `openforge up`."""

    home: Path
    env: dict[str, str]
    url: str = ""
    client: httpx.Client = field(default_factory=httpx.Client)

    def command(self, *argv: str, timeout: float = 240.0) -> subprocess.CompletedProcess[str]:
        return subprocess.run(argv, env=self.env, cwd=ROOT, capture_output=True, text=True, timeout=timeout)

    def openforge(self, *arguments: str, timeout: float = 240.0) -> subprocess.CompletedProcess[str]:
        env = {**self.env, "OPENFORGE_HOME": str(self.home)}
        argv = [sys.executable, "-m", "cli.app", *arguments]
        return subprocess.run(argv, env=env, cwd=ROOT, capture_output=True, text=True, timeout=timeout)

    def prefect(self, *arguments: str, timeout: float = 240.0) -> subprocess.CompletedProcess[str]:
        """`prefect` as a user types it after `openforge up`: nothing is set."""
        return self.command(sys.executable, "-m", "prefect", *arguments, timeout=timeout)

    def start(self, deployment: str, parameters: dict[str, Any] = SMOKE) -> str:
        """Starts a run of `flow/name` and returns its id. Asks again on 503, as Prefect's client does."""
        found = self.client.get(f"{self.url}/api/deployments/name/{deployment}").raise_for_status().json()
        body = {"parameters": parameters, "state": {"type": "SCHEDULED"}}
        path = f"{self.url}/api/deployments/{found['id']}/create_flow_run"
        run = self.until(lambda: (r := self.client.post(path, json=body)).status_code != 503 and r)
        return str(run.raise_for_status().json()["id"])

    def state(self, run_id: str) -> str:
        return str(self.client.get(f"{self.url}/api/flow_runs/{run_id}").raise_for_status().json()["state_type"])

    def until(self, what: Callable[[], Any], seconds: float = 120.0) -> Any:
        """The first true value of `what` within `seconds`."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if found := what():
                return found
            time.sleep(0.3)
        raise AssertionError(f"nothing within {seconds} s")

    def ended(self, run_id: str, seconds: float = 240.0) -> str:
        return str(self.until(lambda: (s := self.state(run_id)) in TERMINAL and s, seconds))

    def facts(self, name: str) -> dict[str, Any]:
        return dict(json.loads((self.home / "run" / f"{name}.json").read_text()))

    # -- what the store says

    def sql(self, file: str, query: str) -> list[tuple[Any, ...]]:
        db = sqlite3.connect(f"file:{self.home / file}?mode=ro", uri=True, timeout=30)
        try:
            return db.execute(query).fetchall()
        finally:
            db.close()

    def recorded_calls(self) -> int:
        with suppress(sqlite3.OperationalError):
            return int(self.sql("calls.db", "select count(*) from calls")[0][0])
        return 0

    def tables(self) -> dict[str, list[tuple[Any, ...]]]:
        """What of the run `smoke` must not depend on who was killed when: last attempts, results, stages, steps."""
        mine = "(run = 'smoke' or run like 'smoke-%')"
        last = (
            f"select coalesce(retry_of, id) as root, state, purpose from rollouts r where {mine} and not exists "
            "(select 1 from rollouts n where n.retry_of = coalesce(r.retry_of, r.id) and n.created > r.created) "
            "order by 1"
        )
        kept = f"select kind, run, key from records where {mine} and key != 'demo' order by 1, 2, 3"
        return {
            "accepted": self.sql("ledger.db", "select id, state from proposals where batch = 'smoke' order by id"),
            "rollouts": self.sql("rollouts.db", last),
            "records": self.sql("rollouts.db", kept),
        }

    def damage(self) -> list[tuple[Any, ...]]:
        """Rollouts that succeeded twice, whose call indexes are not 0..n-1, or of whose counted calls one is gone."""
        root = "select coalesce(retry_of, id), count(*) from rollouts where state = 'succeeded' group by 1"
        twice = self.sql("rollouts.db", f"{root} having count(*) > 1")
        span = "select rollout_id, count(*), min([index]), max([index]) from calls group by 1"
        spans = {r: tuple(rest) for r, *rest in self.sql("calls.db", span)}
        gaps = [(r, *s) for r, s in spans.items() if s[1:] != (0, s[0] - 1)]
        counted = self.sql("rollouts.db", "select id, calls from rollouts where state = 'succeeded'")
        return twice + gaps + [(r, n, spans.get(r)) for r, n in counted if spans.get(r, (0,))[0] < n]


@contextmanager
def bring_up(factory: pytest.TempPathFactory) -> Iterator[Up]:
    home, user = factory.mktemp("home"), factory.mktemp("user")
    env = {k: v for k, v in os.environ.items() if not k.startswith(("PREFECT_", "OPENFORGE_"))}
    running = Up(home, {**env, "HOME": str(user), "COLUMNS": "200", "DO_NOT_TRACK": "1"})
    done = running.openforge("up", "--detach", timeout=330.0)
    assert done.returncode == 0, done
    running.url = running.facts("up")["url"]
    try:
        yield running
    finally:
        running.client.close()
        ended = running.openforge("down")
        assert ended.returncode == 0, ended
        assert "openforge" not in (user / ".prefect" / "profiles.toml").read_text()


@pytest.fixture(scope="session")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    with bring_up(tmp_path_factory) as running:
        yield running


@pytest.fixture(scope="session")
def second_up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    """Another home, beside the first."""
    with bring_up(tmp_path_factory) as running:
        yield running
