"""The chat wire as golden files: what a client sends, what the model samples, what goes back byte for byte.

`UPDATE_GOLDEN=1 python -m pytest tests/rollout/test_proxy_golden.py` writes the files again; read the diff.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from proxy_fakes import TOOLS, Reply, Stage, call_text

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
    file = GOLDEN / f"{name}.json"
    if os.environ.get("UPDATE_GOLDEN"):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(found, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
    assert found == json.loads(file.read_text(encoding="utf-8"))
