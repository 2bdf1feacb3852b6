"""What a user does first: `openforge up --detach`, then `prefect` with nothing set."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import yaml

if TYPE_CHECKING:
    from conftest import Up

ROOT = Path(__file__).resolve().parents[2]
STAGES = ("synth", "propose", "prune", "build", "trial", "refine", "distill", "sft", "rl", "eval", "pipeline")
WATCH = ("deployment", "run", "--watch", "--params", '{"params": {"preset": "smoke"}}')

pytestmark = [pytest.mark.prefect, pytest.mark.timeout(420)]


def test_every_flow_is_in_prefect_yaml_under_its_name() -> None:
    body = yaml.safe_load((ROOT / "prefect.yaml").read_text())
    names = {f"{d['entrypoint'].split(':')[1]}/{d['name']}" for d in body["deployments"]}
    assert names == {f"{stage}/claw" for stage in STAGES} | {"eval/nightly"}
    for deployment in body["deployments"]:
        path, function = deployment["entrypoint"].split(":")
        assert f"def {function}(" in (ROOT / path).read_text()


def test_ls_shows_every_stage_and_nightly_is_active(up: Up) -> None:
    listed = up.prefect("deployment", "ls").stdout
    for stage in STAGES:
        assert f"{stage}/claw" in listed
    nightly = up.client.get(f"{up.url}/api/deployments/name/eval/nightly").json()
    assert [(s["active"], s["schedule"]["cron"]) for s in nightly["schedules"]] == [(True, "0 3 * * *")]
    assert nightly["parameters"]["params"]["daily"] is True
    test_stage = up.client.get(f"{up.url}/api/deployments/name/trial/claw").json()
    assert "paper: Test" in test_stage["tags"]
    assert "Test stage" in test_stage["description"]


def test_forms_show_typed_parameters(up: Up) -> None:
    schema = up.client.get(f"{up.url}/api/deployments/name/eval/claw").json()["parameter_openapi_schema"]
    fields = schema["definitions"]["EvalParams"]["properties"]
    assert fields["label"]["enum"] == ["base", "sft", "rl", "latest"]
    assert fields["preset"]["default"] == "demo"
    deployment = up.client.get(f"{up.url}/api/deployments/name/eval/claw").json()["id"]
    refused = up.client.post(
        f"{up.url}/api/deployments/{deployment}/create_flow_run", json={"parameters": {"params": {"label": "nope"}}}
    )
    assert refused.status_code == 409


def test_the_watchdog_is_installed_once(up: Up) -> None:
    listed = up.client.post(f"{up.url}/api/automations/filter", json={}).json()
    assert [a["name"] for a in listed] == ["openforge-heartbeat-watchdog"]
    assert listed[0]["trigger"]["within"] == 90


@pytest.mark.sandbox
@pytest.mark.model
def test_synth_gives_accepted_tasks_and_then_does_nothing_twice(up: Up) -> None:
    done = up.prefect(*WATCH[:2], "synth/claw", *WATCH[2:], timeout=400)
    assert done.returncode == 0, done
    accepted = sorted(p.parent.name for p in (up.home / "tasks" / "smoke").glob("*/task.toml"))
    assert len(accepted) >= 13
    before = _rows(up)
    assert up.prefect(*WATCH[:2], "synth/claw", *WATCH[2:], timeout=400).returncode == 0
    assert _rows(up) == before
    assert sorted(p.parent.name for p in (up.home / "tasks" / "smoke").glob("*/task.toml")) == accepted


def test_bad_input_fails_the_run_with_its_message(up: Up) -> None:
    run_id = up.start("propose/claw", {"params": {"preset": "smoke", "overrides": {"synth.seeed": 1}}})
    assert up.ended(run_id) == "FAILED"
    message = up.client.get(f"{up.url}/api/flow_runs/{run_id}").json()["state"]["message"]
    assert "did you mean 'synth.seed'" in message


def test_up_again_says_that_it_is_up(up: Up) -> None:
    assert up.url in up.openforge("up").stdout
    assert up.url in up.openforge("status").stdout


def _rows(up: Up) -> list[tuple[object, ...]]:
    found: list[tuple[object, ...]] = []
    for file, query in (
        ("rollouts.db", "select id, state from rollouts order by id"),
        ("ledger.db", "select id, state from proposals order by id"),
        ("calls.db", "select rollout_id, [index] from calls order by 1, 2"),
    ):
        with sqlite3.connect(f"file:{up.home / file}?mode=ro", uri=True) as db:
            found += db.execute(query).fetchall()
        db.close()
    return found
