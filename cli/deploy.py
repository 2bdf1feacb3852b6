"""Registers the flows with the home's Prefect server and points the user's `prefect` command at it.

The deployments come from `prefect.yaml`; the watchdog marks runs whose heartbeats stopped as crashed; the profile
`openforge` is what lets `prefect deployment run synth/claw` work in any shell with nothing set.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import threading
import time
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cli import prefect_server
from rollout.config import CODE_ROOT, Home
from rollout.errors import InfrastructureError

PROFILE = "openforge"
PASSWORD = "PREFECT_API_AUTH_STRING"
WATCHDOG = "openforge-heartbeat-watchdog"
WATCHDOG_WITHIN_S = 90
"""Three missed heartbeats."""
COMMAND_S = 180.0


def _call(argv: list[str], env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        argv, env=env, cwd=CODE_ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=COMMAND_S
    )


def wait_pool(home: Home, url: str, pool: str, timeout_s: float) -> None:
    """Waits until the worker has made its work pool. Raises InfrastructureError."""
    end = time.monotonic() + timeout_s
    with prefect_server.api(home, url) as client:
        while client.get(f"/work_pools/{pool}").status_code != 200:
            if time.monotonic() > end:
                raise InfrastructureError(
                    f"the worker made no work pool {pool!r} within {timeout_s:.0f} s; see {home.logs / 'worker.log'}"
                )
            time.sleep(0.3)


def deploy_all(home: Home, url: str) -> None:
    """`prefect deploy --all`, unless this server has these very files already. Raises InfrastructureError."""
    stamp = home.root / "prefect" / "deployed"
    digest = _sources_digest(home)
    if stamp.exists() and stamp.read_text() == digest and _has_deployments(home, url):
        return
    done = _call(prefect_server.prefect("--no-prompt", "deploy", "--all"), prefect_server.environment(home, url))
    if done.returncode:
        raise InfrastructureError(f"prefect deploy --all failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    stamp.write_text(digest)


def _sources_digest(home: Home) -> str:
    digest = hashlib.sha256(f"{CODE_ROOT}|{home.root}".encode())
    for path in [CODE_ROOT / "prefect.yaml", *sorted((CODE_ROOT / "flows").glob("*.py"))]:
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _has_deployments(home: Home, url: str) -> bool:
    with prefect_server.api(home, url) as client:
        return int(client.post("/deployments/count", json={}).raise_for_status().json()) > 0


def watchdog() -> dict[str, Any]:
    """The automation: a run that sent a heartbeat and then neither another nor an end is marked crashed."""
    ends = [f"prefect.flow-run.{state}" for state in ("Completed", "Failed", "Cancelled", "Crashed")]
    return {
        "name": WATCHDOG,
        "description": "Marks flow runs whose heartbeats stopped (killed worker or machine) as crashed.",
        "enabled": True,
        "trigger": {
            "type": "event",
            "posture": "Proactive",
            "match": {"prefect.resource.id": ["prefect.flow-run.*"]},
            "after": ["prefect.flow-run.heartbeat"],
            "expect": ["prefect.flow-run.heartbeat", *ends],
            "for_each": ["prefect.resource.id"],
            "threshold": 1,
            "within": WATCHDOG_WITHIN_S,
        },
        "actions": [{"type": "change-flow-run-state", "state": "CRASHED", "message": "heartbeats stopped"}],
    }


def install_watchdog(home: Home, url: str) -> None:
    """Installs the watchdog once: an earlier one of that name is deleted first."""
    with prefect_server.api(home, url) as client:
        found = client.post("/automations/filter", json={"automations": {"name": {"any_": [WATCHDOG]}}})
        for old in found.raise_for_status().json():
            client.delete(f"/automations/{old['id']}").raise_for_status()
        client.post("/automations/", json=watchdog()).raise_for_status()


# -- the user's profile --------------------------------------------------------------------------------


def profiles_path() -> Path:
    root = os.environ.get("PREFECT_HOME")
    return Path(os.environ.get("PREFECT_PROFILES_PATH") or Path(root or Path.home() / ".prefect") / "profiles.toml")


def active_profile() -> str:
    """Name of the user's active profile; empty when none was ever chosen."""
    try:
        return str(tomllib.loads(profiles_path().read_text()).get("active") or "")
    except (FileNotFoundError, tomllib.TOMLDecodeError):
        return ""


def _earlier_file(home: Home) -> Path:
    return home.run / "profile.json"


def _user_environment() -> dict[str, str]:
    """The user's own environment, without what would turn the profile commands towards a server."""
    hidden = ("PREFECT_API_URL", "PREFECT_PROFILE")
    return {k: v for k, v in os.environ.items() if k not in hidden} | {"DO_NOT_TRACK": "1"}


@dataclass
class Profile:
    """Writes the profile `openforge` while the server starts (each prefect command takes seconds)."""

    home: Home
    url: str
    _thread: threading.Thread = field(init=False)

    def __enter__(self) -> Profile:
        earlier = active_profile()
        if earlier != PROFILE:
            _earlier_file(self.home).write_text(json.dumps({"active": earlier}))
        self._thread = threading.Thread(target=self._write, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.join(COMMAND_S)

    def _write(self) -> None:
        env = _user_environment()
        _call(prefect_server.prefect("profile", "create", PROFILE), env)
        setting = f"PREFECT_API_URL={self.url}/api"
        _call(prefect_server.prefect("--profile", PROFILE, "config", "set", setting), env)
        _set_password(prefect_server.read_auth(self.home))

    def use(self) -> str:
        """Makes the profile the active one; returns what the user should know."""
        self._thread.join(COMMAND_S)
        if active_profile() != PROFILE:
            _call(prefect_server.prefect("profile", "use", PROFILE), _user_environment())
        told = f"prefect profile: {PROFILE!r} in {profiles_path()} is active and points at {self.url}/api"
        if active_profile() != PROFILE:
            told = f"prefect profile: not written; run: export PREFECT_API_URL={self.url}/api"
        if other := os.environ.get("PREFECT_API_URL"):
            told += f"\nPREFECT_API_URL={other} in your environment wins over it: unset it to use this server"
        return told


def _set_password(auth: str) -> None:
    """Puts the API's user and password into our profile; never by a command, whose arguments everybody may read."""
    path = profiles_path()
    if not path.exists():
        return
    path.chmod(0o600)
    blocks = re.split(r"(?m)^(?=\[)", path.read_text())
    path.write_text("".join(_with_password(block, auth) for block in blocks))


def _with_password(block: str, auth: str) -> str:
    head, *settings = block.splitlines(keepends=True) or [""]
    if head.strip() != f"[profiles.{PROFILE}]":
        return block
    kept = [line for line in settings if not line.startswith(PASSWORD)]
    return "".join([head, *([f"{PASSWORD} = {json.dumps(auth)}\n"] * bool(auth)), *kept])


def restore_profile(home: Home) -> None:
    """Makes the user's earlier profile active again and removes ours; leaves it alone if the user chose another."""
    path = _earlier_file(home)
    if not path.exists():
        return
    earlier = str(json.loads(path.read_text())["active"]) or "ephemeral"
    if active_profile() == PROFILE:
        _call(prefect_server.prefect("profile", "use", earlier), _user_environment())
        _call(prefect_server.prefect("--no-prompt", "profile", "delete", PROFILE), _user_environment())
    path.unlink()
