"""Real harness programs, installed by the suite, in the real sandbox: a file, a service, an answer, every call seen.

OPENFORGE_TEST_HARNESSES names a folder to install into; without it the suite uses one of its own, for this run.
"""

from __future__ import annotations

import asyncio
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock
from harness_stage import BY_SHELL, DIALECTS, SHOWN, SUBMIT, SUBMIT_TEXT, play, ready, through_proxy
from harness_stub import BASE, Step

from rollout.config import Home
from rollout.errors import HarnessError, PolicyEnd
from rollout.harness import ADAPTERS, make_harness, tagger_of
from rollout.types import CallTag

REFUSED = (400, {"error": {"code": "call_cap", "message": "this rollout has had its calls", "type": "invalid_request"}})
DONE = Step(text="fertig ✓")
BY_MCP = {
    "codex": Step("", "close_ticket", {"id": 7}, "mcp__services"),
    "claude-code": Step("", "mcp__services__close_ticket", {"id": 7}),
    "openclaw": Step("", "services__close_ticket", {"id": 7}),
}
CASES = [*((name, "mcp") for name in BY_MCP), *((name, "skill") for name in BY_SHELL)]
pytestmark = [pytest.mark.harness, pytest.mark.sandbox, pytest.mark.timeout(900)]


@pytest.fixture
def home(harness_home: Home) -> Home:
    return harness_home


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


@pytest.mark.parametrize("name", list(SHOWN))
def test_a_session_through_the_proxy_closes_the_ticket_and_is_recorded(
    home: Home, name: str, proxy_folder: Path
) -> None:
    ready(home, name)
    with FileLock(home.harnesses / ".test.lock", timeout=600):
        call = json.dumps({"name": SHOWN[name][0], "arguments": SHOWN[name][1]})
        ends = f"<tool_call>\n{SUBMIT_TEXT}\n</tool_call>" if name == "mini-swe-agent" else "fertig ✓"
        texts = [f"<tool_call>\n{call}\n</tool_call>", ends]
        completed, state, calls = asyncio.run(through_proxy(home, name, proxy_folder, texts))
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
