"""The wire as golden files: what a client sends, what the model samples, what goes back byte for byte.

`golden/chat` goes through a whole proxy. `golden/wire` has one file for each sample request of a real harness.

`UPDATE_GOLDEN=1 python -m pytest tests/rollout/test_proxy_golden.py` writes the files again; read the diff.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from dialect_fakes import DIALECTS, HEAD, streamed
from proxy_fakes import TOOLS, Reply, Stage, call_text

from rollout.proxy.dialects.base import Answer, CallRequest, Dialect
from rollout.proxy.messages import Message, ToolCall, without_ids

GOLDEN = Path(__file__).parent.parent / "golden" / "chat"
USER = {"role": "user", "content": "Close ticket 7 ✓"}
CALL = {"id": "call_0_0", "type": "function", "function": {"name": "get_ticket", "arguments": '{"id": 7}'}}
TOOL_LOOP = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "Close ticket 7 ✓"}]},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "call_0_0", "content": '{"id":7,"now":9}'},
]
CASES: dict[str, tuple[dict[str, Any], str]] = {
    "text": ({"messages": [USER]}, "Done ✓<|im_end|>"),
    "call": ({"messages": [USER], "tools": TOOLS}, f"Let me see.\n{call_text('get_ticket', {'id': 7})}<|im_end|>"),
    "parallel": (
        {"messages": [USER], "tools": TOOLS},
        f"{call_text('get_ticket', {'id': 7})}\n{call_text('get_ticket', {'id': 9})}<|im_end|>",
    ),
    "loop": ({"messages": TOOL_LOOP, "tools": TOOLS, "max_tokens": 32000}, "Done.<|im_end|>"),
    "thinking": ({"messages": [USER]}, "<think>\nhm\n</think>\n\nDone.<|im_end|>"),
    "half": ({"messages": [USER], "tools": TOOLS}, '<tool_call>\n{"name": "get_'),
    "refused": ({"messages": [USER], "n": 3}, ""),
}


async def exchange(stage: Stage, name: str, body: dict[str, Any], text: str) -> dict[str, Any]:
    """Status and bytes of one request; what differs between runs is made plain."""
    stage.add(name)
    finish = "stop" if text.endswith("<|im_end|>") else "length"
    stage.engine.queue = [Reply(tuple(stage.codec.encode(text)), finish=finish)]
    async with stage.post(name, body) as response:
        raw = (await response.read()).decode()
        raw = re.sub(r'"created":\d+', '"created":0', raw).replace(str(stage.folder), "MODEL")
        calls = stage.store.calls.of(name)
        return {
            "status": response.status,
            "type": response.headers["content-type"],
            "body": raw.split("\n\n"),
            "prompt": stage.codec.decode(calls[0].prompt_ids) if calls else "",
        }


@pytest.mark.parametrize("name", CASES)
def test_chat_wire(proxy_stage: Any, name: str) -> None:
    body, text = CASES[name]
    options = {"stream": True, "stream_options": {"include_usage": True}}

    async def main() -> dict[str, Any]:
        async with proxy_stage() as stage:
            unary = await exchange(stage, "unary", body, text)
            streamed = await exchange(stage, "streamed", {**body, **options}, text)
            return {"request": body, "sampled": text, "unary": unary, "streamed": streamed}

    found = asyncio.run(main())
    compare(GOLDEN / f"{name}.json", found)


def compare(file: Path, found: dict[str, Any]) -> None:
    if os.environ.get("UPDATE_GOLDEN"):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(found, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
    assert found == json.loads(file.read_text(encoding="utf-8"))


# -- what harnesses send -------------------------------------------------------------------------------

WIRE = Path(os.environ.get("OPENFORGE_SHARED") or Path(__file__).parents[3] / "shared") / "wire"
SAMPLES = (
    "claude_agent_sdk_0.2.189_turn2",
    "claude_code_2.1.332_lean_thinking_mcp_turn2",
    "claude_code_2.1.332_messages_turn2",
    "codex_0.171.0_compaction",
    "codex_0.171.0_known_model_freeform",
    "codex_0.171.0_lean_reasoning_mcp",
    "codex_0.171.0_mcp_namespace_turn2",
    "codex_0.171.0_responses_turn1",
    "codex_0.171.0_responses_turn2",
    "hermes_agent_0.19.0_chat",
    "mini_swe_agent_2.4.6_chat",
    "openclaw_2026.9.6_anthropic_turn2",
    "openclaw_2026.9.6_chat_turn2",
    "openclaw_2026.9.6_responses_reasoning_turn2",
    "opencode_1.18.33_chat",
    "openhands_sdk_1.58.2_chat",
    "qwen_code_0.24.4_chat",
)
SHOWN = 60


def sample(name: str) -> dict[str, Any]:
    file = WIRE / f"{name}.json"
    if not file.exists():
        pytest.skip(
            f"the wire samples are not here: {file.parent} has no {file.name}; OPENFORGE_SHARED names their folder"
        )
    return dict(json.loads(file.read_text(encoding="utf-8")))


def parsed(found: dict[str, Any]) -> tuple[Dialect, CallRequest]:
    dialect = DIALECTS[found["wire"]]
    return dialect, dialect.parse(json.dumps(found["body"], ensure_ascii=False).encode())


def brief(text: str) -> str:
    """A long text by its length and digest: golden files hold none of another project's prompts."""
    return text if len(text) <= SHOWN else f"{len(text)} characters, {hashlib.sha256(text.encode()).hexdigest()[:16]}"


def brief_message(message: Message) -> dict[str, Any]:
    row = message.dump()
    return {name: brief(value) if isinstance(value, str) else value for name, value in row.items()}


def canonical(request: CallRequest) -> dict[str, Any]:
    return {
        "messages": [brief_message(message) for message in request.messages],
        "tools": [tool["function"]["name"] for tool in request.tools],
        "forms": {name: [form.namespace, form.name, form.custom] for name, form in request.forms.items()},
        "max_tokens": request.max_tokens,
        "stream": request.stream,
        "include_usage": request.include_usage,
        "sealed_reasoning": request.sealed_reasoning,
        "left_out": list(request.left_out),
        "rules": list(request.rules),
    }


def an_answer(request: CallRequest) -> Answer:
    """Reasoning, text, and a call of the first tool and of each tool that has a form of its own."""
    names = dict.fromkeys([*(t["function"]["name"] for t in request.tools[:1]), *request.forms])
    custom = {name for name, form in request.forms.items() if form.custom}
    told = {name: {"input": "*** Begin Patch"} if name in custom else {"n": 7} for name in list(names)[:4]}
    calls = tuple(ToolCall(f"call_3_{i}", name, arguments) for i, (name, arguments) in enumerate(told.items()))
    return Answer("On it ✓", "First look.", calls, False, "tool_calls" if calls else "stop", 21, 13)


@pytest.mark.parametrize("name", SAMPLES)
def test_harness_wire(name: str) -> None:
    """Both directions: what is read from the harness's request, and what it gets back, whole and as events."""
    dialect, request = parsed(sample(name))
    answer = an_answer(request)
    found = {
        "dialect": dialect.name,
        "read": canonical(request),
        "unary": json.loads(dialect.whole(HEAD, request, answer)),
        "streamed": streamed(dialect, request, answer).decode().split("\n\n"),
    }
    compare(GOLDEN.parent / "wire" / f"{name}.json", found)


@pytest.mark.parametrize("name", SAMPLES)
def test_a_harness_that_sends_its_answer_back_extends_its_history(name: str) -> None:
    """The answer, put behind the request in the form that the client got it, is read as the message it was."""
    found = sample(name)
    dialect, request = parsed(found)
    answer = an_answer(request)
    whole, body = json.loads(dialect.whole(HEAD, request, answer)), found["body"]
    user = {"role": "user", "content": "go on"}
    if dialect.name == "responses":
        body["input"] += [*whole["output"], user]
    elif dialect.name == "messages":
        body["messages"] += [{"role": "assistant", "content": whole["content"]}, user]
    else:
        body["messages"] += [whole["choices"][0]["message"], user]
    _, again = parsed(found)
    assert again.tools == request.tools
    assert len(again.messages) == len(request.messages) + 2
    assert without_ids(again.messages[-2]) == without_ids(answer.message())
    floating = "floating-context" in request.rules
    assert floating or again.messages[: len(request.messages)] == request.messages


def test_codex_sends_the_first_call_as_a_prefix_of_the_second() -> None:
    (_, first), (_, second) = (parsed(sample(f"codex_0.171.0_responses_turn{i}")) for i in (1, 2))
    assert first.tools == second.tools
    assert second.messages[: len(first.messages)] == first.messages


def test_every_sample_has_a_golden_file() -> None:
    if not WIRE.exists():
        pytest.skip(f"no wire samples: {WIRE} is missing; OPENFORGE_SHARED names the folder that holds wire/")
    assert {file.stem for file in WIRE.glob("*.json")} == set(SAMPLES)
    assert {file.stem for file in (GOLDEN.parent / "wire").glob("*.json")} == set(SAMPLES)
