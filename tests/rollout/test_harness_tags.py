"""What each harness's calls are taken for, by the recorded requests of the real programs."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
from harness_stub import Asked

from rollout.harness import stop_style, tagger_of
from rollout.types import CallTag

SHARED = Path(os.environ.get("OPENFORGE_SHARED") or Path(__file__).resolve().parents[3] / "shared")
MAIN = (CallTag.MAIN, "main")
UNATTRIBUTED = (CallTag.UNATTRIBUTED, "main")


def sample(name: str) -> Asked:
    """One recorded request as the proxy sees it: headers by lower-case name."""
    path = SHARED / "wire" / f"{name}.json"
    if not path.exists():
        pytest.skip(f"no recorded requests in {path.parent}")
    data = json.loads(path.read_text())
    headers = {key.lower(): value for key, value in data["headers"].items()}
    return Asked(data["path"].partition("?")[0], headers, data["body"])


@pytest.mark.parametrize(
    ("harness", "name"),
    [
        ("codex", "codex_0.171.0_responses_turn1"),
        ("codex", "codex_0.171.0_lean_reasoning_mcp"),
        ("codex", "codex_0.171.0_known_model_freeform"),
        ("claude-code", "claude_code_2.1.332_messages_turn2"),
        ("claude-code", "claude_code_2.1.332_lean_thinking_mcp_turn2"),
        ("claude-code", "claude_agent_sdk_0.2.189_turn2"),
        ("openclaw", "openclaw_2026.9.6_chat_turn2"),
        ("mini-swe-agent", "mini_swe_agent_2.4.6_chat"),
        ("react", "opencode_1.18.33_chat"),
    ],
)
def test_the_agents_own_calls_are_main(harness: str, name: str) -> None:
    assert tagger_of(harness)(sample(name)) == MAIN


def test_codex_names_its_compaction_in_the_turns_metadata() -> None:
    call = sample("codex_0.171.0_compaction")
    assert tagger_of("codex")(call) == (CallTag.COMPACTION, "main")
    broken = replace(call, headers={**call.headers, "x-codex-turn-metadata": '{"request_kind": "compaction'})
    assert tagger_of("codex")(broken) == MAIN


def test_a_codex_subagent_is_a_thread_of_its_own() -> None:
    call = sample("codex_0.171.0_responses_turn1")
    child = replace(call, headers={**call.headers, "thread-id": "t2", "x-openai-subagent": "collab_spawn"})
    assert tagger_of("codex")(child) == (CallTag.SUBAGENT, "t2")
    unnamed = replace(call, headers={**call.headers, "thread-id": "t3"})
    assert tagger_of("codex")(unnamed) == (CallTag.SUBAGENT, "t3"), "the session is the root's"
    metadata = json.dumps({"request_kind": "compaction"})
    compacting = replace(child, headers={**child.headers, "x-codex-turn-metadata": metadata})
    assert tagger_of("codex")(compacting) == (CallTag.COMPACTION, "t2")


def test_claude_codes_subagent_compaction_and_count_are_told_apart() -> None:
    call = sample("claude_code_2.1.332_lean_thinking_mcp_turn2")
    tag = tagger_of("claude-code")
    assert tag(replace(call, headers={**call.headers, "x-claude-code-agent-id": "a1"})) == (CallTag.SUBAGENT, "a1")
    block = {"type": "text", "text": "CRITICAL: Respond with TEXT ONLY. Do not call tools."}
    last = {"role": "user", "content": [*call.body["messages"][-1]["content"], block]}
    body = {**call.body, "messages": [*call.body["messages"][:-1], last]}
    assert tag(replace(call, body=body)) == (CallTag.COMPACTION, "main")
    assert tag(replace(call, path=call.path + "/count_tokens")) == (CallTag.PROBE, "main")


@pytest.mark.parametrize(
    ("harness", "name"),
    [
        ("codex", "mini_swe_agent_2.4.6_chat"),
        ("claude-code", "openclaw_2026.9.6_anthropic_turn2"),
        ("openclaw", "mini_swe_agent_2.4.6_chat"),
        ("mini-swe-agent", "openclaw_2026.9.6_chat_turn2"),
        ("zeroclaw", "codex_0.171.0_responses_turn1"),
    ],
)
def test_a_call_that_the_harness_would_not_make_is_unattributed(harness: str, name: str) -> None:
    """The agent's shell can read the key: what it asks the model is no turn of the policy."""
    assert tagger_of(harness)(sample(name)) == UNATTRIBUTED


def test_openclaw_without_tools_is_summarising() -> None:
    call = sample("openclaw_2026.9.6_chat_turn2")
    body = {key: value for key, value in call.body.items() if key != "tools"}
    assert tagger_of("openclaw")(replace(call, body=body)) == (CallTag.COMPACTION, "main")


@pytest.mark.parametrize(
    ("harness", "style"),
    [("codex", "refuse"), ("openclaw", "refuse"), ("claude-code", "end_turn"), ("react", "refuse")],
)
def test_each_harness_is_stopped_in_the_way_it_takes_well(harness: str, style: str) -> None:
    assert stop_style(harness) == style
