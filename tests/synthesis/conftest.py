"""A `serve` for the synthesis tests: claims rollouts from the real store and plays them without a sandbox."""

from __future__ import annotations

import json
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from rollout.config import open_home
from rollout.errors import FailureClass, VerifierError
from rollout.processes import serve_file, write_pid_file
from rollout.services import ServiceHost
from rollout.store import Store, open_store
from rollout.types import Failure, Rollout, RolloutState, Verdict
from synthesis.checks import run_verifier
from synthesis.config import Checks, Counts, SynthConfig
from synthesis.ledger import Ledger
from synthesis.play import Played, parse_plan, play

SHIM = 'printf \'["%s","%s",%s]\\n\' "$1" "$2" "$3" >> "$CALLS"\n'


@dataclass
class FakeServe:
    """Runs `solution:*` scripts with bash against the real services and the bundle's verifier.

    A trial plays the plan that `policy` names; `breaks` maps a rollout to the failure it ends in.
    """

    store: Store
    folder: Path
    policy: str = "shortcut"
    breaks: Callable[[Rollout], FailureClass | None] = lambda rollout: None
    ran: list[str] = field(default_factory=list)
    stop: threading.Event = field(default_factory=threading.Event)

    def loop(self) -> None:
        while not self.stop.is_set():
            claimed = self.store.rollouts.claim("fake", 32, 600.0)
            for rollout in claimed:
                self.ran.append(rollout.id)
                self._end(rollout)
            if not claimed:
                time.sleep(0.02)

    def _end(self, rollout: Rollout) -> None:
        kind = self.breaks(rollout)
        if kind:
            self._fail(rollout, kind, "boom")
            return
        try:
            reward = run_verifier(Path(rollout.task.bundle), self._play(rollout))
        except VerifierError as error:
            self._fail(rollout, FailureClass.VERIFIER, str(error))
            return
        self.store.rollouts.note_call(rollout.id, 7, None)
        for state in (RolloutState.RUNNING, RolloutState.VERIFYING):
            rollout = self._advance(rollout, state=state)
        verdict = Verdict(reward=reward, passed=reward == 1.0)
        self._advance(rollout, state=RolloutState.SUCCEEDED, verdict=verdict, ended=time.time())

    def _fail(self, rollout: Rollout, kind: FailureClass, message: str) -> None:
        failure = Failure(kind=kind, message=message)
        self._advance(rollout, state=RolloutState.FAILED, failure=failure, ended=time.time())

    def _advance(self, rollout: Rollout, **changes: Any) -> Rollout:
        new = self.store.rollouts.advance(rollout, **changes)
        assert new is not None
        return new

    def _play(self, rollout: Rollout) -> Played:
        bundle = Path(rollout.task.bundle)
        seeds = json.loads((bundle / "environment" / "services.json").read_text())
        if not rollout.harness.startswith("solution:"):
            plan = json.loads((bundle / "solution" / "plan.json").read_text())
            return play(seeds, parse_plan(plan[self.policy]))
        name = rollout.harness.removeprefix("solution:")
        if name == "idle":
            return play(seeds, ())
        return self._script(rollout.id, seeds, (bundle / "solution" / f"{name}.sh").read_text(), rollout.task.tools)

    def _script(self, rollout_id: str, seeds: Any, text: str, tools: tuple[str, ...]) -> Played:
        work = self.folder / rollout_id
        work.mkdir(parents=True)
        (work / "tool.sh").write_text(SHIM)
        text = text.replace("python3 -I -S /opt/openforge/tool.py", f"bash {work / 'tool.sh'}")
        text = text.replace("/workspace/", f"{work}/")
        subprocess.run(["bash", "-c", text], check=True, env={"CALLS": str(work / "calls"), "PATH": "/usr/bin:/bin"})
        host = ServiceHost()
        host.open("r", seeds, tools=tools)
        calls = (work / "calls").read_text().splitlines() if (work / "calls").exists() else []
        for line in calls:
            service, tool, arguments = json.loads(line)
            assert host.call("r", service, tool, arguments).ok
        answer = work / "answer.txt"
        return Played(host.final("r"), answer.read_text() if answer.exists() else None, ())


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    opened = open_store(open_home(tmp_path / "home"))
    yield opened
    opened.close()


@pytest.fixture
def ledger(store: Store) -> Iterator[Ledger]:
    opened = Ledger.open(store.home)
    yield opened
    opened.close()


@pytest.fixture
def serve(store: Store, tmp_path: Path) -> Iterator[FakeServe]:
    write_pid_file(serve_file(store.home), url="http://127.0.0.1:0")
    fake = FakeServe(store, tmp_path / "played")
    thread = threading.Thread(target=fake.loop, daemon=True)
    thread.start()
    yield fake
    fake.stop.set()
    thread.join(timeout=10)


@pytest.fixture
def config() -> SynthConfig:
    """Small: 8 + 4 + 4 + 4 + 2 tasks, all checks."""
    return SynthConfig(
        batch="b",
        counts=Counts(sft=8, rl=4, validation=4, heldout=4, heldout_family=2),
        trial_model="scripted:oracle",
        checks=Checks(determinism_runs=2),
        oversample=1.5,
        deadline_s=60.0,
    )


@pytest.fixture
def small(config: SynthConfig) -> SynthConfig:
    """Four RL tasks, one of each family."""
    counts = Counts(sft=0, rl=4, validation=0, heldout=0, heldout_family=0)
    return config.model_copy(update={"counts": counts, "checks": Checks(determinism_runs=1)})
