"""What a launch shows to a harness, and how its end is judged: nothing runs here."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
from harness_stage import ENDPOINT, a_rollout, a_task
from harness_stub import KEY

from rollout.config import Home, open_home
from rollout.errors import ConfigError, HarnessError, PhaseTimeout, PolicyEnd
from rollout.harness import ADAPTERS, exposure, make_harness
from rollout.harness.base import Harness, Launch, Tagging
from rollout.harness.claude_code import NO_SUMMARY
from rollout.harness.install import MARKER, Installed, folder_of
from rollout.harness.wrapping import PORT
from rollout.sandbox.base import Completed
from rollout.services.catalog import catalog
from rollout.types import Limits, Resources

URL = f"http://127.0.0.1:{PORT}/rollouts/r1"
NAMES = sorted(ADAPTERS)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Home:
    """A home where every harness says that it is installed, and a zeroclaw on PATH."""
    home = open_home(tmp_path / "home", min_free_mb=1)
    for adapter in ADAPTERS.values():
        if adapter.recipe:
            folder = folder_of(home, adapter.recipe)
            (folder / "lib/python3.11/site-packages/minisweagent/config").mkdir(parents=True)
            (folder / "lib/python3.11/site-packages/minisweagent/config/mini.yaml").touch()
            marker = Installed(name=adapter.recipe.name, version=adapter.recipe.version, program="bin/program")
            (folder / MARKER).write_text(marker.model_dump_json())
    binary = tmp_path / "zeroclaw"
    binary.write_text("")
    binary.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    return home


def launched(home: Home, name: str, route: Any = None, **changes: Any) -> Launch:
    task = a_task(**changes)
    harness = ADAPTERS[name](home, route) if route else ADAPTERS[name](home)
    return harness.launch(a_rollout(task), task, ENDPOINT)


@pytest.mark.parametrize("name", NAMES)
def test_every_adapter_keeps_the_contract(home: Home, name: str) -> None:
    harness = make_harness(name, home)
    assert isinstance(harness, Harness)
    assert isinstance(harness, Tagging)
    assert harness.name == name
    launch = launched(home, name)
    assert launch.argv[:5] == ("/usr/bin/python3", "-I", "-S", "/opt/openforge/forwarder.py", launch.argv[4])
    assert str(PORT) in launch.argv
    assert any("Schließe Ticket 7 ✓" in argument for argument in launch.argv)
    assert all(path.startswith(("/harness/", "/workspace/skills/")) for path in launch.files)
    assert all(mount.source.exists() for mount in launch.mounts)
    assert KEY not in " ".join(launch.argv)


@pytest.mark.parametrize("name", [name for name in NAMES if name != "zeroclaw"])
def test_the_key_stands_in_the_environment_alone(home: Home, name: str) -> None:
    launch = launched(home, name)
    assert KEY in launch.env.values()
    assert all(KEY.encode() not in data for data in launch.files.values())


@pytest.mark.parametrize("name", NAMES)
def test_limits_are_the_larger_of_the_tasks_and_the_harnesss(home: Home, name: str) -> None:
    needs = ADAPTERS[name].needs
    small = launched(home, name, resources=Resources(memory_mb=64, pids=16)).resources
    assert small
    assert (small.memory_mb, small.pids) == (needs.memory_mb, needs.pids)
    large = launched(home, name, resources=Resources(memory_mb=9000, pids=16, cpus=3.0)).resources
    assert large
    assert (large.memory_mb, large.pids, large.cpus) == (9000, needs.pids, 3.0)


@pytest.mark.parametrize("name", NAMES)
def test_a_task_without_tools_registers_none(home: Home, name: str) -> None:
    launch = launched(home, name, services=())
    assert exposure.TOOLS not in launch.files
    assert {mount.target for mount in launch.mounts} <= {
        "/opt/openforge/forwarder.py",
        "/opt/harness",
        "/opt/harness/zeroclaw",
    }


@pytest.mark.parametrize("name", [name for name in NAMES if ADAPTERS[name].recipe])
def test_what_is_not_installed_says_how_to_install_it(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=f"openforge harness install {name}"):
        launched(open_home(tmp_path / "empty", min_free_mb=1), name)


def test_zeroclaw_without_a_binary_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="no zeroclaw on PATH"):
        launched(open_home(tmp_path / "home", min_free_mb=1), "zeroclaw")


def test_an_instruction_too_long_for_an_argument_is_refused(home: Home) -> None:
    with pytest.raises(ConfigError, match="longer than 120000 bytes"):
        launched(home, "codex", instruction="ß" * 60_001)


def test_codex_is_given_the_rollouts_address_and_context(home: Home) -> None:
    config = tomllib.loads(launched(home, "codex").files["/harness/config.toml"].decode())
    provider = config["model_providers"]["proxy"]
    assert (provider["base_url"], provider["wire_api"]) == (f"{URL}/v1", "responses")
    assert config["model_context_window"] == 32768
    assert config["model_auto_compact_token_limit"] == 27852
    assert config["mcp_servers"]["services"]["args"][-1] == exposure.TOOLS
    by_skill = launched(home, "codex", "skill")
    assert "mcp_servers" not in tomllib.loads(by_skill.files["/harness/config.toml"].decode())
    assert b"close_ticket" in by_skill.files["/harness/skills/helpdesk/SKILL.md"]


def test_claude_codes_base_has_no_version_and_its_turns_are_the_call_cap(home: Home) -> None:
    launch = launched(home, "claude-code")
    assert launch.env["ANTHROPIC_BASE_URL"] == URL
    assert launch.argv[launch.argv.index("--max-turns") + 1] == "4"
    servers = json.loads(launch.files["/harness/mcp.json"])["mcpServers"]
    assert servers["services"]["env"]["OPENFORGE_KEY"] == "${OPENFORGE_KEY}"


def test_openclaw_allows_the_tasks_tools_by_name(home: Home) -> None:
    config = json.loads(launched(home, "openclaw", tools=("close_ticket",)).files["/harness/openclaw.json"])
    assert config["tools"]["allow"] == ["exec", "read", "write", "edit", "services__close_ticket"]
    assert config["models"]["providers"]["proxy"]["baseUrl"] == f"{URL}/v1"


def test_mini_swe_agent_gets_the_manual_in_its_prompt(home: Home) -> None:
    launch = launched(home, "mini-swe-agent")
    assert "tool.py helpdesk <tool>" in launch.argv[-1]
    config = json.loads(launch.files["/harness/openforge.yaml"])
    assert config["agent"]["step_limit"] == 4


def test_zeroclaws_configuration_is_of_its_documented_form(home: Home) -> None:
    """Keys and command as its documentation of schema version 3 has them."""
    launch = launched(home, "zeroclaw")
    assert launch.argv[-7:-1] == ("--config-dir", "/harness/zeroclaw", "agent", "-a", "rl", "-m")
    config = tomllib.loads(launch.files["/harness/zeroclaw/config.toml"].decode())
    assert config["schema_version"] == 3
    assert config["providers"]["models"]["custom"]["proxy"]["uri"] == f"{URL}/v1"
    agent = config["agents"]["rl"]
    assert (agent["model_provider"], agent["risk_profile"]) == ("custom.proxy", "rl")
    assert config["risk_profiles"]["rl"]["level"] == "full"
    assert config["runtime_profiles"]["rl"]["max_tool_iterations"] == 4
    assert config["runtime_profiles"]["rl"]["max_actions_per_hour"] > 20
    assert config["mcp"]["servers"][0]["name"] in config["mcp_bundles"]["services"]["servers"]
    assert "services__close_ticket" in config["risk_profiles"]["rl"]["allowed_tools"]


def test_a_skill_names_every_tool_with_its_arguments() -> None:
    text = exposure.skills(catalog(("helpdesk",), ("close_ticket", "assign_ticket")))["helpdesk"]
    assert text.startswith("---\nname: helpdesk\ndescription: ")
    assert '- `assign_ticket` {"id": "integer", "contact": "integer"}: ' in text
    assert "python3 -I -S /opt/openforge/tool.py helpdesk <tool> '<json arguments>'" in text


# -- ends ----------------------------------------------------------------------------------------------


def ended(code: int | None, stdout: str = "", stderr: str = "") -> Completed:
    return Completed(code, stdout.encode(), stderr.encode(), truncated=False, timed_out=code is None, seconds=1.0)


def result(**fields: Any) -> str:
    return json.dumps({"type": "result", "subtype": "success", "is_error": False, **fields})


EXIT = '{\n  "messages": [{\n   "extra": {\n        "exit_status": "%s",\n "submission": ""}}]}'
GOOD = {
    "codex": ended(0, '{"type":"turn.completed"}\n'),
    "claude-code": ended(0, result(terminal_reason="completed")),
    "openclaw": ended(0, '{\n  "ok": true,\n  "status": "ok"\n}\n'),
    "zeroclaw": ended(0, "done"),
    "mini-swe-agent": ended(0, EXIT % "Submitted"),
}
UNREACHED = json.dumps({"ok": False, "status": "timeout", "error": {"message": "network connection error."}})
BAD = [
    ("codex", ended(1, '{"type":"turn.failed","error":{"message":"bad key"}}'), HarnessError, "with 1: bad key"),
    ("codex", ended(1, "", "config.toml: no such key"), HarnessError, "no such key"),
    ("codex", ended(139), HarnessError, "with 139"),
    ("claude-code", ended(1, result(is_error=True, terminal_reason="api_error", result="500")), HarnessError, "500"),
    ("claude-code", ended(1, result(is_error=True, terminal_reason="max_turns")), PolicyEnd, "max_turns"),
    ("claude-code", ended(1, result(is_error=True, result=f"too long: {NO_SUMMARY}")), PolicyEnd, "compaction"),
    ("claude-code", ended(0, '{"type":"assistant"}\n{"type":'), HarnessError, "ended with 0"),
    ("openclaw", ended(1, '{\n "ok": false,\n "error": {\n  "message": "400 no"\n }\n}'), HarnessError, "400 no"),
    ("openclaw", ended(0, '{"ok": false, "status": "error"}'), HarnessError, "ended with 0"),
    ("openclaw", ended(2, '{"ok": false, "status": "timeout"}'), PhaseTimeout, "deadline"),
    ("openclaw", ended(2, UNREACHED), HarnessError, "network connection error"),
    ("zeroclaw", ended(1, "", "no model"), HarnessError, "no model"),
    ("mini-swe-agent", ended(0, EXIT % "LimitsExceeded"), PolicyEnd, "limits_exceeded"),
    ("mini-swe-agent", ended(0, EXIT % "RepeatedFormatError"), PolicyEnd, "repeated_format_error"),
    ("mini-swe-agent", ended(0, '"exit_status": "Submitted"'), HarnessError, "no trajectory"),
    ("mini-swe-agent", ended(1, EXIT % "APIError", "APIError: gone"), HarnessError, "APIError: gone"),
]


@pytest.mark.parametrize("name", NAMES)
def test_a_normal_end_and_what_ends_every_harness(home: Home, name: str) -> None:
    harness = make_harness(name, home)
    harness.check(GOOD[name], "")
    for completed in (GOOD[name], ended(1), ended(None)):
        with pytest.raises(PolicyEnd, match="token_cap"):
            harness.check(completed, "token_cap")
    with pytest.raises(PolicyEnd, match="killed"):
        harness.check(ended(137), "")
    with pytest.raises(PhaseTimeout):
        harness.check(ended(None), "")


@pytest.mark.parametrize(("name", "completed", "error", "message"), BAD)
def test_each_harnesss_own_words_for_its_end(
    home: Home, name: str, completed: Completed, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        make_harness(name, home).check(completed, "")


def test_a_small_context_still_gives_codex_room(home: Home) -> None:
    task = a_task()
    launch = make_harness("codex", home).launch(a_rollout(task, limits=Limits(context=1000)), task, ENDPOINT)
    assert b"model_auto_compact_token_limit = 850" in launch.files["/harness/config.toml"]


@pytest.mark.parametrize("name", ["no.such.module:Thing", "rollout.types:Nothing", "rollout.types:Limits"])
def test_a_harness_of_the_users_own_that_cannot_be_made_says_why(name: str) -> None:
    with pytest.raises(ConfigError, match=f"harness '{name}'"):
        make_harness(name)
