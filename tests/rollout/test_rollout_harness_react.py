"""The ReAct program in a real sandbox against a scripted proxy on a real socket, and how its end is judged."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from rollout_servers import FakeProxy, hosted

from rollout.config import Home, open_home
from rollout.errors import ConfigError, HarnessError, PolicyEnd
from rollout.harness import make_harness
from rollout.harness.base import Endpoint
from rollout.harness.react import ReactHarness
from rollout.sandbox.base import Command, Completed, Mount, SandboxSpec
from rollout.types import ModelRef, Purpose, Rollout, TaskSpec

ENDPOINT = Endpoint("/run/proxy/proxy.sock", "/rollouts/r1", "key-1")


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return open_home(tmp_path / "home", min_free_mb=1)


def a_task(**changes: Any) -> TaskSpec:
    base = {"id": "t", "instruction": "Schließe 7 ✓", "bundle": "/x", "digest": "d", "services": ("helpdesk",)}
    return TaskSpec(**{**base, **changes})


def a_rollout(task: TaskSpec) -> Rollout:
    return Rollout(
        id="r1", run="run", task_id="t", group_id="g", model=ModelRef(name="m"), purpose=Purpose.RUN, task=task
    )


def tool_call(name: str, arguments: str, number: int = 1) -> dict[str, Any]:
    return {"id": f"c{number}", "type": "function", "function": {"name": name, "arguments": arguments}}


def asks(*calls: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    return 200, {"role": "assistant", "content": None, "tool_calls": list(calls), "reasoning_content": "hm ü"}


def says(text: str | None) -> tuple[int, dict[str, Any]]:
    return 200, {"role": "assistant", "content": text}


def echo(name: str, arguments: dict[str, Any]) -> tuple[int, Any]:
    return 200, {"tool": name, "got": arguments}


@dataclass
class Session:
    completed: Completed
    answer: bytes | None
    calls: list[dict[str, Any]] = field(default_factory=list)
    tools: list[tuple[str, dict[str, Any]]] = field(default_factory=list)


Tool = Callable[[str, dict[str, Any]], tuple[int, Any]]


@dataclass(frozen=True)
class Play:
    """A session to run: what the model answers, how tools behave, and when the proxy is there."""

    answers: list[Any]
    tool: Tool = echo
    harness: ReactHarness = field(default_factory=ReactHarness)
    endpoint: Endpoint = ENDPOINT
    late: float = 0.0
    timeout: float = 40.0

    async def run(self, home: Home) -> Session:
        task = a_task()
        launch = self.harness.launch(a_rollout(task), task, self.endpoint)
        proxy = FakeProxy(home, list(self.answers), self.tool)
        (home.run / "proxy").mkdir()
        async with hosted(home) as host:
            place = SandboxSpec(
                id="r1", resources=task.resources, mounts=launch.mounts, proxy=home.run / "proxy", files=launch.files
            )
            async with host.sandbox(place) as sandbox:
                running = asyncio.create_task(sandbox.run(Command(launch.argv, self.timeout, launch.env)))
                await asyncio.sleep(self.late)
                await proxy.server.start()
                completed = await running
                await proxy.server.stop()
                return Session(completed, await sandbox.get("/workspace/answer.txt", 10000), proxy.calls, proxy.tools)


def play(home: Home, answers: list[Any], **changes: Any) -> Session:
    return asyncio.run(Play(answers, **changes).run(home))


@pytest.mark.sandbox
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_tools_are_used_and_the_answer_is_written(home: Home, stream: bool) -> None:
    first = asks(tool_call("get_ticket", '{"id": 7}'), tool_call("close_ticket", '{ "id":  8 }', 2))
    session = play(home, [first, says("fertig ✓")], harness=ReactHarness(stream=stream))
    assert session.completed.returncode == 0, session.completed.stderr
    assert session.answer == "fertig ✓".encode()
    assert session.tools == [("helpdesk/get_ticket", {"id": 7}), ("helpdesk/close_ticket", {"id": 8})]
    one, two = session.calls
    assert one["messages"] == [{"role": "user", "content": "Schließe 7 ✓"}]
    assert two["messages"][:1] == one["messages"]
    assistant, *results = two["messages"][1:]
    assert assistant["tool_calls"] == first[1]["tool_calls"], "arguments come back byte for byte"
    assert [(r["role"], r["tool_call_id"]) for r in results] == [("tool", "c1"), ("tool", "c2")]
    assert results[0]["content"] == '{"tool":"get_ticket","got":{"id":7}}'
    assert {t["function"]["name"] for t in one["tools"]} >= {"get_ticket", "close_ticket"}
    assert one["model"] == "m"
    assert one.get("stream", False) is stream


@pytest.mark.sandbox
def test_an_assistant_message_goes_back_exactly_as_it_came(home: Home) -> None:
    first = asks(tool_call("get_ticket", '{"id": 7}'))
    session = play(home, [first, says("x")])
    assert session.calls[1]["messages"][1] == first[1]


@pytest.mark.sandbox
def test_what_a_policy_gets_wrong_becomes_an_error_that_it_can_read(home: Home) -> None:
    def refuse(name: str, arguments: dict[str, Any]) -> tuple[int, Any]:
        if arguments["id"] == 9:
            return 404, {"code": "not_found", "message": "no ticket 9"}
        return arguments["id"], {"code": "busy"}

    calls = asks(tool_call("fly", "{}"), tool_call("get_ticket", "[1", 2), tool_call("get_ticket", '{"id": 9}', 3))
    calls[1]["tool_calls"] += [tool_call("get_ticket", f'{{"id": {status}}}', status) for status in (429, 503)]
    session = play(home, [calls, says("")], tool=refuse)
    contents = [json.loads(m["content"]) for m in session.calls[1]["messages"][2:]]
    assert contents[0] == {"error": "unknown tool fly"}
    assert contents[1] == {"error": "arguments are not a JSON object"}
    assert contents[2] == {"error": {"code": "not_found", "message": "no ticket 9"}}
    assert contents[3:] == [{"error": {"code": "busy"}}] * 2, "a service that fails is the policy's to deal with"
    assert len(session.tools) == 3
    assert session.completed.returncode == 0
    assert session.answer == b""


@pytest.mark.sandbox
@pytest.mark.parametrize("code", ["call_cap", "token_cap", "context_cap"])
def test_a_cap_is_a_normal_end_without_an_answer(home: Home, code: str) -> None:
    session = play(home, [(400, {"error": {"code": code, "message": "enough"}})])
    assert session.completed.returncode == 0
    assert session.answer is None


@pytest.mark.sandbox
def test_another_refusal_and_a_bad_key_end_as_failures(home: Home, tmp_path: Path) -> None:
    session = play(home, [(400, {"error": {"code": "bad_field"}})])
    assert session.completed.returncode == 70
    assert b"bad_field" in session.completed.stderr
    wrong = Endpoint(ENDPOINT.socket, ENDPOINT.base_path, "other")
    session = play(open_home(tmp_path / "second", min_free_mb=1), [], endpoint=wrong)
    assert session.completed.returncode == 70
    assert b"401" in session.completed.stderr


@pytest.mark.sandbox
def test_a_failing_call_is_tried_again_and_given_up_after_four(home: Home, tmp_path: Path) -> None:
    session = play(home, [(500, b"oops"), (503, b"busy"), says("ok")])
    assert (session.completed.returncode, session.answer) == (0, b"ok")
    assert session.calls[0] == session.calls[1] == session.calls[2]
    session = play(open_home(tmp_path / "second", min_free_mb=1), [(500, b"oops")] * 9)
    assert session.completed.returncode == 70
    assert len(session.calls) == 4


@pytest.mark.sandbox
def test_a_proxy_that_comes_up_late_is_waited_for(home: Home) -> None:
    session = play(home, [says("ok")], late=2.0)
    assert session.answer == b"ok"


@pytest.mark.sandbox
@pytest.mark.parametrize("answer", [(200, []), (404, b"<html>")], ids=["no message", "no JSON"])
def test_an_answer_that_is_none_is_a_failure(home: Home, answer: Any) -> None:
    session = play(home, [answer])
    assert session.completed.returncode == 70
    assert b"an answer that is none" in session.completed.stderr


@pytest.mark.sandbox
def test_the_tool_program_calls_the_gateway(home: Home) -> None:
    """What solve.sh and harnesses with a shell use."""

    def tool(name: str, arguments: dict[str, Any]) -> tuple[int, Any]:
        return (200, {"id": 7, "ü": "ß"}) if name == "get_ticket" else (503, {"code": "unavailable"})

    script = b"""
T="python3 -I -S /opt/openforge/tool.py"
$T helpdesk get_ticket '{"id": 7}' || exit 1
$T helpdesk close_ticket '{}'; echo $?
OPENFORGE_KEY=x $T helpdesk close_ticket '{}' >/dev/null; echo $?
$T helpdesk; echo $?
"""
    program = Path(__file__).resolve().parents[2] / "rollout" / "harness" / "openforge_tool.py"
    env = {"OPENFORGE_SOCKET": ENDPOINT.socket, "OPENFORGE_BASE": ENDPOINT.base_path, "OPENFORGE_KEY": ENDPOINT.key}

    async def main() -> Completed:
        proxy = FakeProxy(home, [], tool)
        await proxy.server.start()
        async with hosted(home) as host:
            place = SandboxSpec(
                id="s",
                resources=a_task().resources,
                mounts=(Mount(program, "/opt/openforge/tool.py"),),
                proxy=home.run / "proxy",
                files={"/solution/run.sh": script},
            )
            async with host.sandbox(place) as sandbox:
                done = await sandbox.run(Command(("bash", "/solution/run.sh"), 30, env))
        await proxy.server.stop()
        return done

    done = asyncio.run(main())
    lines = done.stdout.decode().splitlines()
    assert json.loads(lines[0]) == {"id": 7, "ü": "ß"}
    assert json.loads(lines[1]) == {"status": 503, "error": {"code": "unavailable"}}
    assert lines[2:] == ["1", "1", "2"], done.stderr


# -- the host's side -----------------------------------------------------------------------------------


def test_a_launch_shows_only_the_tasks_tools_and_hides_the_key_from_its_files() -> None:
    task = a_task(tools=("close_ticket", "get_ticket"))
    launch = ReactHarness().launch(a_rollout(task), task, ENDPOINT)
    config = json.loads(launch.files["/harness/react.json"])
    assert [t["function"]["name"] for t in config["tools"]] == ["close_ticket", "get_ticket"]
    assert config["services"] == {"close_ticket": "helpdesk", "get_ticket": "helpdesk"}
    assert "key-1" not in launch.files["/harness/react.json"].decode()
    assert launch.argv[0] == "/usr/bin/python3"
    assert all(mount.source.is_file() for mount in launch.mounts)


def completed(code: int | None, stderr: bytes = b"") -> Completed:
    return Completed(code, b"", stderr, truncated=False, timed_out=code is None, seconds=1.0)


def test_an_end_is_judged_by_the_proxys_reason_first_then_by_the_code() -> None:
    harness = ReactHarness()
    harness.check(completed(0), "")
    for code in (0, 70, 1):
        with pytest.raises(PolicyEnd, match="token_cap"):
            harness.check(completed(code), "token_cap")
    with pytest.raises(PolicyEnd, match="killed"):
        harness.check(completed(137), "")
    with pytest.raises(HarnessError, match=r"could not reach.*no connection"):
        harness.check(completed(70, b"react: no connection"), "")
    with pytest.raises(HarnessError, match="ended with 1: Traceback"):
        harness.check(completed(1, b"Traceback"), "")


@pytest.mark.parametrize("name", ["reakt", "", "solution:", "codec"])
def test_an_unknown_harness_names_the_known_ones(name: str) -> None:
    with pytest.raises(ConfigError, match=r"react, codex, .*solution:solve"):
        make_harness(name)


def test_known_harnesses_are_made() -> None:
    assert make_harness("react").name == "react"
    assert make_harness("solution:wrong/off").name == "solution:wrong/off"
