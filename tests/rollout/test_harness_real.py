"""Real harness programs, installed by the suite, in the real sandbox: a file, a service, an answer, every call seen.

OPENFORGE_TEST_HARNESSES names a folder to install into; without it the suite uses one of its own, for this run.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock
from harness_stage import a_task, play
from harness_stub import BASE, Step
from proxy_fakes import staged
from rollout_servers import Listening, hosted

from rollout.config import Home, open_home
from rollout.errors import HarnessError, PolicyEnd
from rollout.harness import ADAPTERS, make_harness, tagger_of
from rollout.harness.base import Endpoint
from rollout.harness.install import install
from rollout.sandbox.base import Command, Completed, SandboxSpec
from rollout.types import CallTag, Limits, ModelCall

SHELL = "python3 -I -S /opt/openforge/tool.py helpdesk close_ticket '{\"id\": 7}' > said.json"
REFUSED = (400, {"error": {"code": "call_cap", "message": "this rollout has had its calls", "type": "invalid_request"}})
DONE = Step(text="fertig ✓")
SUBMIT = Step("ok", "bash", {"command": "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"})
BY_MCP = {
    "codex": Step("", "close_ticket", {"id": 7}, "mcp__services"),
    "claude-code": Step("", "mcp__services__close_ticket", {"id": 7}),
    "openclaw": Step("", "services__close_ticket", {"id": 7}),
}
BY_SHELL = {
    "codex": Step("", "exec_command", {"cmd": SHELL}),
    "claude-code": Step("", "Bash", {"command": SHELL}),
    "openclaw": Step("", "exec", {"command": SHELL}),
    "mini-swe-agent": Step("ok", "bash", {"command": SHELL}),
}
CASES = [*((name, "mcp") for name in BY_MCP), *((name, "skill") for name in BY_SHELL)]
DIALECTS = {"codex": "responses", "claude-code": "messages", "openclaw": "chat", "mini-swe-agent": "chat"}
pytestmark = [pytest.mark.harness, pytest.mark.sandbox, pytest.mark.timeout(900)]


@pytest.fixture(scope="session")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Home:
    where = os.environ.get("OPENFORGE_TEST_HARNESSES")
    return open_home(where or tmp_path_factory.mktemp("harnesses"), min_free_mb=3000)


@pytest.fixture
def home(tmp_path: Path, installed: Home) -> Home:
    """A home of its own that shares the installed programs."""
    home = open_home(tmp_path / "home", min_free_mb=1)
    installed.harnesses.mkdir(exist_ok=True)
    home.harnesses.symlink_to(installed.harnesses)
    return home


def ready(home: Home, name: str) -> None:
    recipe = ADAPTERS[name].recipe
    assert recipe
    install(home, recipe)


def run(home: Home, name: str, steps: list[Any], route: Any = None, look: tuple[str, ...] = ()) -> Any:
    """One harness at a time: some of them take 1.6 GiB."""
    ready(home, name)
    harness = ADAPTERS[name](home, route) if route else ADAPTERS[name](home)
    with FileLock(home.harnesses / ".test.lock", timeout=600):
        return harness, asyncio.run(play(home, harness, steps, look=look))


@pytest.mark.parametrize(("name", "route"), CASES)
def test_a_harness_uses_a_service_and_ends_normally(home: Home, name: str, route: str) -> None:
    tool = BY_MCP[name] if route == "mcp" else BY_SHELL[name]
    last = SUBMIT if name == "mini-swe-agent" else DONE
    harness, played = run(home, name, [tool, last], route, look=("/workspace/said.json",))
    harness.check(played.completed, "")
    stub = played.stub
    assert stub.tools == [("helpdesk/close_ticket", {"id": 7})]
    assert len(stub.calls) == 2
    assert stub.others == [], "calls that are none of the model's"
    assert {call.dialect for call in stub.calls} == {DIALECTS[name]}
    assert [harness.tag(call) for call in stub.calls] == [(CallTag.MAIN, "main")] * 2
    assert "Schließe Ticket 7 ✓" in json.dumps(stub.calls[0].body, ensure_ascii=False)
    assert "close_ticket" in json.dumps(stub.calls[1].body)
    if route == "skill":
        said = json.loads(played.files["/workspace/said.json"])
        assert said == {"ok": "helpdesk/close_ticket", "got": {"id": 7}}


@pytest.mark.parametrize("name", ["codex", "openclaw", "mini-swe-agent"])
def test_a_refusal_ends_it_at_once_and_is_the_proxys_reason_or_a_failure(home: Home, name: str) -> None:
    harness, played = run(home, name, [BY_SHELL[name], REFUSED])
    assert len(played.stub.calls) <= 3, "what is refused is not asked again and again"
    with pytest.raises(PolicyEnd, match="call_cap"):
        harness.check(played.completed, "call_cap")
    with pytest.raises(HarnessError, match="this rollout has had its calls"):
        harness.check(played.completed, "")


@pytest.mark.parametrize("name", ["claude-code", "mini-swe-agent"])
def test_a_limit_of_turns_is_the_policys_end(home: Home, name: str) -> None:
    harness, played = run(home, name, [BY_SHELL[name]])
    with pytest.raises(PolicyEnd, match=r"max_turns|limits_exceeded"):
        harness.check(played.completed, "")
    assert len(played.stub.calls) == 4


@pytest.mark.parametrize(("name", "tries", "said"), [("claude-code", 3, "engine gone"), ("codex", 4, "high demand")])
def test_a_broken_server_is_a_harness_failure(home: Home, name: str, tries: int, said: str) -> None:
    harness, played = run(home, name, [(500, {"error": {"message": "engine gone"}})])
    with pytest.raises(HarnessError, match=said):
        harness.check(played.completed, "")
    assert len(played.stub.calls) == tries
    assert (
        len({json.dumps(call.body["messages" if "messages" in call.body else "input"]) for call in played.stub.calls})
        == 1
    )


@pytest.mark.parametrize("name", ["codex", "claude-code"])
def test_a_compaction_is_tagged_and_the_session_goes_on(home: Home, name: str) -> None:
    full = replace(BY_MCP[name], prompt_tokens=31_000)
    harness, played = run(home, name, [full, Step(text="<summary>7 is closed</summary>"), DONE])
    harness.check(played.completed, "")
    tags = [harness.tag(call)[0] for call in played.stub.calls]
    assert tags == [CallTag.MAIN, CallTag.COMPACTION, CallTag.MAIN]


@pytest.mark.zeroclaw
@pytest.mark.skipif(not shutil.which("zeroclaw"), reason="no zeroclaw on PATH")
def test_zeroclaw_uses_a_service_and_ends_normally(home: Home) -> None:
    harness = make_harness("zeroclaw", home)
    played = asyncio.run(play(home, harness, [Step("", "services__close_ticket", {"id": 7}), DONE]))
    harness.check(played.completed, "")
    assert played.stub.tools == [("helpdesk/close_ticket", {"id": 7})]
    assert {call.path for call in played.stub.calls} == {f"{BASE}/v1/chat/completions"}
    assert {tagger_of("zeroclaw")(call) for call in played.stub.calls} == {(CallTag.MAIN, "main")}


# -- against the proxy itself --------------------------------------------------------------------------

SHOWN = {
    "codex": ("mcp__services__close_ticket", {"id": 7}),
    "claude-code": ("mcp__services__close_ticket", {"id": 7}),
    "openclaw": ("services__close_ticket", {"id": 7}),
    "mini-swe-agent": ("bash", BY_SHELL["mini-swe-agent"].arguments),
}


@pytest.mark.parametrize("name", list(SHOWN))
def test_a_session_through_the_proxy_closes_the_ticket_and_is_recorded(
    home: Home, name: str, proxy_folder: Path
) -> None:
    ready(home, name)
    with FileLock(home.harnesses / ".test.lock", timeout=600):
        completed, state, calls = asyncio.run(session(home, name, proxy_folder))
    ADAPTERS[name](home).check(completed, "")
    assert state["services"]["helpdesk"]["tickets"][0]["status"] == "closed"
    assert [(call.dialect, call.delivered, call.malformed, call.failure) for call in calls] == [
        (DIALECTS[name], True, False, None)
    ] * 2
    assert all(call.completion_ids and call.logprobs for call in calls)
    first, second = calls
    before = first.prompt_ids + first.completion_ids
    assert second.prompt_ids[: len(before)] == before, "one row: the second call extends the first"
    assert second.fork_reason == ""


async def session(home: Home, name: str, folder: Path) -> tuple[Completed, dict[str, Any], list[ModelCall]]:
    """A tool call and an answer, as the model's own text, by the scripted engine."""
    task = a_task(services=("helpdesk",))
    async with staged(home, folder) as stage, hosted(home) as host:
        limits = Limits(calls=4, tokens=4096, context=100_000)
        key = stage.add("r1", harness=name, task=task, limits=limits)
        stage.services.open("r1", {"helpdesk": {"tickets": [{"id": 7}]}})
        tool, arguments = SHOWN[name]
        call = json.dumps({"name": tool, "arguments": arguments})
        last = json.dumps({"name": "bash", "arguments": SUBMIT.arguments})
        ends = f"<tool_call>\n{last}\n</tool_call>" if name == "mini-swe-agent" else "fertig ✓"
        stage.engine.queue += [stage.say(f"<tool_call>\n{call}\n</tool_call>"), stage.say(ends)]
        assert stage.app
        proxy = Listening(stage.app, home.run / "proxy" / "proxy.sock")
        await proxy.start()
        rollout = stage.store.rollouts.get("r1")
        assert rollout
        launch = ADAPTERS[name](home).launch(rollout, task, Endpoint("/run/proxy/proxy.sock", "/rollouts/r1", key))
        assert launch.resources
        spec = SandboxSpec("r1", launch.resources, launch.mounts, home.run / "proxy", launch.files)
        async with host.sandbox(spec) as sandbox:
            completed = await sandbox.run(Command(launch.argv, 150, launch.env))
        await proxy.stop()
        return completed, stage.services.final("r1"), list(stage.store.calls.of("r1"))
