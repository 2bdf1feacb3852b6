"""How many training rows a session yields in history mode `template`, by its request bodies and the texts on the
engine's side alone: a second opinion that uses no code of the proxy.
"""

from __future__ import annotations

import json
from typing import Any


def rows_from_the_wire(dialect: str, bodies: list[dict[str, Any]], sampled: list[str]) -> int:
    prompts = [text_of(turns(dialect, body), json.dumps(body.get("tools"))) for body in bodies]
    tips: list[str] = []
    for prompt, said in zip(prompts, sampled, strict=True):
        fitting = [i for i, tip in enumerate(tips) if prompt.startswith(tip)]
        whole = f"{prompt}{said}<|im_end|>"
        if fitting:
            tips[max(fitting, key=lambda i: len(tips[i]))] = whole
        else:
            tips.append(whole)
    return len(tips)


def flat(content: Any) -> str:
    """Text of a string, a list of parts, or nothing."""
    if isinstance(content, list):
        return "".join(flat(part.get("text") or part.get("content")) for part in content)
    return content or ""


def turns(dialect: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """[{role, text, think, calls}] of a request; an answer's items are put together again."""
    out: list[dict[str, Any]] = []

    def answer() -> dict[str, Any]:
        if not out or out[-1]["role"] != "assistant":
            out.append({"role": "assistant", "text": "", "think": "", "calls": []})
        return out[-1]

    if first := body.get("system") or body.get("instructions"):
        out.append({"role": "system", "text": flat(first)})
    for row in body.get("messages") or body["input"]:
        if dialect == "messages" and isinstance(row["content"], list):
            for block in row["content"]:
                if block["type"] == "text" and row["role"] != "assistant":
                    out.append({"role": row["role"], "text": block["text"]})
                elif block["type"] == "text":
                    answer()["text"] += block["text"]
                elif block["type"] == "thinking":
                    answer()["think"] += block["thinking"]
                elif block["type"] == "tool_use":
                    answer()["calls"].append((block["name"], block["input"]))
                else:
                    out.append({"role": "tool", "text": flat(block["content"])})
        elif row.get("type") == "reasoning":
            answer()["think"] += flat(row.get("content")) or flat(row.get("summary"))
        elif row.get("type") == "function_call":
            answer()["calls"].append((row["name"], json.loads(row["arguments"])))
        elif row.get("type") == "function_call_output":
            out.append({"role": "tool", "text": flat(row["output"])})
        elif row["role"] == "assistant":
            answer()["text"] += flat(row["content"])
            answer()["think"] += row.get("reasoning_content") or row.get("reasoning") or ""
            for call in row.get("tool_calls") or ():
                answer()["calls"].append((call["function"]["name"], json.loads(call["function"]["arguments"])))
        else:
            out.append({"role": row["role"], "text": flat(row["content"])})
    return out


def text_of(rows: list[dict[str, Any]], tools: str) -> str:
    """Qwen3's chat template without thinking, as far as these sessions need it."""
    asked = max(i for i, row in enumerate(rows) if row["role"] == "user")
    out = f"[{tools}]"
    for i, row in enumerate(rows):
        if row["role"] == "assistant":
            think = row["think"] if i > asked else ""
            calls = [
                f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(given)}}}\n</tool_call>'
                for name, given in row["calls"]
            ]
            said = "\n".join([*([row["text"]] if row["text"] else []), *calls])
            out += f"<|im_start|>assistant\n<think>\n{think}\n</think>\n\n{said}<|im_end|>\n"
        else:
            text = f"<tool_response>\n{row['text']}\n</tool_response>" if row["role"] == "tool" else row["text"]
            out += f"<|im_start|>{row['role']}\n{text}<|im_end|>\n"
    return out + "<|im_start|>assistant\n<think>\n\n</think>\n\n"
