"""The two programs beside a harness in the sandbox: the forwarder with its port, and the MCP server."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from harness_stage import ENDPOINT, a_task
from harness_stub import BASE, KEY, Step, Stub
from rollout_servers import hosted

from rollout.config import Home, open_home
from rollout.harness import exposure
from rollout.harness.base import Launch
from rollout.harness.wrapping import PORT, wrapped
from rollout.sandbox.base import Command, Completed, SandboxSpec
from rollout.services.catalog import catalog

PROGRAMS = Path(__file__).resolve().parents[2] / "rollout" / "harness"
ASK = f"""
import json, sys, urllib.request
body = json.dumps({{"messages": [{{"role": "user", "content": "hi"}}]}}).encode()
headers = {{"Authorization": "Bearer {KEY}", "Content-Type": "application/json"}}
request = urllib.request.Request("http://127.0.0.1:{PORT}{BASE}/v1/chat/completions", body, headers)
for _ in range(int(sys.argv[1])):
    print(json.load(urllib.request.urlopen(request, timeout=60))["choices"][0]["message"]["content"])
"""


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return open_home(tmp_path / "home", min_free_mb=1)


def run(home: Home, argv: tuple[str, ...], *, report: str = "", late: float = 0.0) -> tuple[Completed, Stub]:
    """`argv` behind the forwarder; the proxy comes up `late` seconds after it."""
    launch = wrapped(Launch(argv), ENDPOINT, None, report)
    stub = Stub(home, [Step(text="one"), Step(text="two")])
    (home.run / "proxy").mkdir(exist_ok=True)

    async def main() -> Completed:
        async with hosted(home) as host:
            place = SandboxSpec(
                id="r1",
                resources=a_task().resources,
                mounts=launch.mounts,
                proxy=home.run / "proxy",
                files={"/harness/ask.py": ASK.encode()},
            )
            async with host.sandbox(place) as sandbox:
                running = asyncio.create_task(sandbox.run(Command(launch.argv, 40, launch.env)))
                await asyncio.sleep(late)
                await stub.server.start()
                try:
                    return await running
                finally:
                    await stub.server.stop()

    return asyncio.run(main()), stub


@pytest.mark.sandbox
@pytest.mark.parametrize("late", [0.0, 2.0], ids=["there", "late"])
def test_a_program_that_speaks_tcp_reaches_the_proxy(home: Home, late: float) -> None:
    done, stub = run(home, ("python3", "/harness/ask.py", "2"), late=late)
    assert (done.returncode, done.stdout) == (0, b"one\ntwo\n"), done.stderr
    assert len(stub.calls) == 2


@pytest.mark.sandbox
@pytest.mark.parametrize(
    ("script", "code"), [("exit 3", 3), ("kill -9 $$", 137), ("kill -9 $PPID; sleep 9", 137), ("cat", 0)]
)
def test_it_ends_with_the_programs_code_and_gives_it_no_input(home: Home, script: str, code: int) -> None:
    done, _ = run(home, ("bash", "-c", script))
    assert (done.returncode, done.timed_out) == (code, False)


@pytest.mark.sandbox
def test_the_end_of_long_output_is_shown_and_a_report_in_its_place(home: Home) -> None:
    script = "for i in {1..30000}; do echo line $i; done; echo wrong >&2; echo '{\"end\": 1}'"
    done, _ = run(home, ("bash", "-c", script))
    lines = done.stdout.decode().splitlines()
    assert lines[-1] == '{"end": 1}'
    assert lines[0].startswith("line ")
    assert 60000 < len(done.stdout) <= 65536
    assert not done.truncated
    assert done.stderr == b"wrong\n"
    done, _ = run(home, ("bash", "-c", "echo no; echo yes > /logs/agent/report"), report="/logs/agent/report")
    assert done.stdout == b"yes\n"


# -- the MCP server ------------------------------------------------------------------------------------


@contextmanager
def server(home: Home, folder: Path, key: str = KEY) -> Iterator[subprocess.Popen[bytes]]:
    tools = catalog(("helpdesk",), ("close_ticket", "get_ticket"))
    (folder / "tools.json").write_bytes(exposure.by_mcp(tools).files[exposure.TOOLS])
    names = {"OPENFORGE_SOCKET": str(home.run / "proxy" / "proxy.sock"), "OPENFORGE_BASE": BASE, "OPENFORGE_KEY": key}
    argv = [sys.executable, "-I", "-S", str(PROGRAMS / "mcp_program.py"), str(folder / "tools.json")]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={**os.environ, **names}) as process:
        yield process
        process.stdin.close()  # type: ignore[union-attr]
        assert process.wait(10) == 0


def talk(home: Home, folder: Path, messages: list[Any], **options: Any) -> tuple[list[dict[str, Any]], Stub]:
    stub = Stub(home, [Step()])

    async def main() -> list[dict[str, Any]]:
        await stub.server.start()
        try:
            with server(home, folder, **options) as process:
                lines = b"".join((m if isinstance(m, bytes) else json.dumps(m).encode()) + b"\n" for m in messages)
                return await asyncio.to_thread(exchange, process, lines)
        finally:
            await stub.server.stop()

    return asyncio.run(main()), stub


def exchange(process: subprocess.Popen[bytes], lines: bytes) -> list[dict[str, Any]]:
    assert process.stdin
    assert process.stdout
    process.stdin.write(lines)
    process.stdin.close()
    return [json.loads(line) for line in process.stdout]


def ask(method: str, number: int = 1, **params: Any) -> dict[str, Any]:
    return {"jsonrpc": "2.0", "id": number, "method": method, "params": params}


def test_the_server_shows_the_tasks_tools_and_takes_the_clients_protocol(home: Home, tmp_path: Path) -> None:
    replies, _ = talk(
        home,
        tmp_path,
        [
            ask("initialize", protocolVersion="2024-11-05"),
            {"jsonrpc": "2.0", "method": "notifications/initialized"},
            ask("tools/list", 2),
            ask("ping", 3),
        ],
    )
    assert [reply["id"] for reply in replies] == [1, 2, 3]
    assert replies[0]["result"]["protocolVersion"] == "2024-11-05"
    tools = replies[1]["result"]["tools"]
    assert [tool["name"] for tool in tools] == ["close_ticket", "get_ticket"]
    assert tools[0]["inputSchema"]["properties"] == {"id": {"type": "integer"}}


def test_a_call_goes_to_the_gateway_and_comes_back_as_compact_json(home: Home, tmp_path: Path) -> None:
    replies, stub = talk(home, tmp_path, [ask("tools/call", name="close_ticket", arguments={"id": 7})])
    assert stub.tools == [("helpdesk/close_ticket", {"id": 7})]
    text = '{"ok":"helpdesk/close_ticket","got":{"id":7}}'
    assert replies[0]["result"] == {"content": [{"type": "text", "text": text}], "isError": False}


def test_what_a_service_refuses_and_what_cannot_be_done_is_an_error_to_read(home: Home, tmp_path: Path) -> None:
    garbage = [b"{", b"[]", b'{"id": 9}', ask("resources/list", 2), ask("tools/call", 3, name="fly")]
    replies, stub = talk(home, tmp_path, [*garbage, ask("tools/call", 4, name="get_ticket", arguments={"id": 404})])
    assert [reply.get("error", {}).get("code") for reply in replies] == [-32700, -32601, -32601, None, None]
    errors = [json.loads(reply["result"]["content"][0]["text"])["error"] for reply in replies[3:]]
    assert errors == ["unknown tool fly", {"code": "unknown_id", "message": "no ticket 404"}]
    assert all(reply["result"]["isError"] for reply in replies[3:])
    assert len(stub.tools) == 1


def test_a_refused_key_is_an_error_result(home: Home, tmp_path: Path) -> None:
    replies, stub = talk(home, tmp_path, [ask("tools/call", name="get_ticket", arguments={"id": 1})], key="other")
    assert replies[0]["result"]["isError"]
    assert "401" in replies[0]["result"]["content"][0]["text"]
    assert stub.tools == []
