"""The user's Prefect profile: the password reaches it, and no command line ever shows it."""

from __future__ import annotations

import threading
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from cli import deploy, prefect_server
from rollout.config import Home, open_home

URL = "http://127.0.0.1:4999"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Home:
    monkeypatch.setenv("PREFECT_HOME", str(tmp_path / "user"))
    monkeypatch.delenv("PREFECT_PROFILES_PATH", raising=False)
    return open_home(tmp_path / "home")


@contextmanager
def command_lines() -> Iterator[set[str]]:
    """Those of all processes below this one while the block runs."""
    seen: set[str] = set()
    stop = threading.Event()

    def sample() -> None:
        while not stop.wait(0.02):
            for process in psutil.Process().children(recursive=True):
                try:
                    seen.add(" ".join(process.cmdline()))
                except psutil.NoSuchProcess:
                    continue

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        yield seen
    finally:
        stop.set()
        thread.join()


def ours() -> dict[str, str]:
    return dict(tomllib.loads(deploy.profiles_path().read_text())["profiles"][deploy.PROFILE])


@pytest.mark.prefect
def test_the_password_is_in_the_profile_and_on_no_command_line(home: Home) -> None:
    secret = prefect_server.write_auth(home)
    with command_lines() as seen, deploy.Profile(home, URL) as profile:
        profile.use()
    assert any("config set" in line for line in seen)
    assert not [line for line in seen if secret.partition(":")[2] in line]
    assert ours() == {"PREFECT_API_URL": f"{URL}/api", "PREFECT_API_AUTH_STRING": secret}
    assert deploy.profiles_path().stat().st_mode & 0o077 == 0
    assert deploy.active_profile() == deploy.PROFILE

    prefect_server.auth_file(home).unlink()
    with deploy.Profile(home, URL):
        pass
    assert ours() == {"PREFECT_API_URL": f"{URL}/api"}
    deploy.restore_profile(home)
    assert deploy.active_profile() == "ephemeral"


def test_the_server_and_its_clients_get_the_password_by_environment(home: Home) -> None:
    secret = prefect_server.write_auth(home)
    assert prefect_server.auth_file(home).stat().st_mode & 0o077 == 0
    environment = prefect_server.environment(home, URL)
    assert environment["PREFECT_SERVER_API_AUTH_STRING"] == environment["PREFECT_API_AUTH_STRING"] == secret
