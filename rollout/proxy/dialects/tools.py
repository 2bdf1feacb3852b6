"""Tool lists of all dialects -> the plain functions that a chat template shows, and the way back for calls.

function                      the function itself
namespace of functions        `namespace__name` each; a call gets its namespace back
custom (free text, grammar)   a function with the one argument `input`; a call becomes free text again
deferred                      left out until a tool result has loaded it
hosted (web search, ...)      left out: there is nobody here to run it
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rollout.proxy.dialects.base import ToolForm
from rollout.proxy.dialects.reading import a_list, an_object, bad, show, text_of


@dataclass
class Toolbox:
    """Collects a request's tools. `functions` are in OpenAI's Chat form."""

    functions: list[dict[str, Any]] = field(default_factory=list)
    forms: dict[str, ToolForm] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)

    def add(self, at: str, function: Mapping[str, Any], form: ToolForm | None = None) -> None:
        """Raises Refused for a second tool of the same name."""
        name = function["name"]
        if any(known["function"]["name"] == name for known in self.functions):
            raise bad(at, f"{at}: a tool named {name} is there already")
        self.functions.append({"type": "function", "function": dict(function)})
        if form:
            self.forms[name] = form

    def leave_out(self, at: str, what: Any) -> None:
        self.left_out.append(f"{at}: {what}")


def flat_name(namespace: Any, name: str) -> str:
    return f"{namespace}__{name}" if isinstance(namespace, str) and namespace else name


def form_of(forms: Mapping[str, ToolForm], name: str) -> ToolForm:
    return forms.get(name) or ToolForm(name)


def custom_function(name: str, description: Any, format_: Any) -> dict[str, Any]:
    """The function that stands for a tool of free text; a grammar is told in words, for nothing enforces it."""
    text = description if isinstance(description, str) else ""
    grammar = format_.get("grammar", format_) if isinstance(format_, dict) else {}
    if isinstance(grammar, dict) and isinstance(grammar.get("definition"), str):
        text += f"\n\n`input` must fit this {grammar.get('syntax', 'formal')} grammar:\n{grammar['definition']}"
    return {"name": name, "description": text.strip(), "parameters": CUSTOM_PARAMETERS}


CUSTOM_PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {"input": {"type": "string"}},
    "required": ["input"],
}


def chosen(functions: Sequence[dict[str, Any]], choice: Any) -> tuple[dict[str, Any], ...]:
    """The functions to show under a `tool_choice` of auto, none or nothing. Raises Refused for what forces a call.

    Without tools there is nothing to choose from, whatever the choice says (compaction calls say it).
    """
    kind = choice.get("type") if isinstance(choice, dict) else choice
    if functions and kind not in (None, "auto", "none"):
        raise bad("tool_choice", f"tool_choice={show(choice)} cannot be honoured here; use auto or none")
    return () if kind == "none" else tuple(functions)


def refuse_single(functions: Sequence[Any], name: str, single: bool) -> None:
    """Raises Refused where the client allows one call at a time: the model is not held to it."""
    if functions and single:
        raise bad(name, f"{name} cannot be honoured here: an answer may hold several calls; leave it out")


# -- the three lists -----------------------------------------------------------------------------------


def chat_tools(rows: Any) -> Toolbox:
    """Functions are passed on as the client wrote them, duplicates included."""
    box = Toolbox()
    for i, tool in enumerate(a_list(rows, "tools")):
        at, kind = f"tools[{i}]", tool.get("type") if isinstance(tool, dict) else None
        inner = tool.get(kind) if isinstance(tool, dict) and kind in ("function", "custom") else None
        if not isinstance(inner, dict):
            raise bad(at, f"{at} must be a function or custom tool")
        if not isinstance(inner.get("name"), str) or not inner["name"]:
            raise bad(f"{at}.{kind}.name", f"{at}.{kind} has no name")
        if tool.get("defer_loading") or inner.get("defer_loading"):
            box.leave_out(at, f"{inner['name']} (deferred)")
        elif kind == "function":
            box.functions.append(tool)
        else:
            function = custom_function(inner["name"], inner.get("description"), inner.get("format"))
            box.add(at, function, ToolForm(inner["name"], custom=True))
    return box


def responses_tools(rows: Any) -> Toolbox:
    box = Toolbox()
    for i, tool in enumerate(a_list(rows, "tools")):
        at = f"tools[{i}]"
        if not isinstance(tool, dict) or not isinstance(tool.get("type"), str):
            raise bad(at, f"{at} must be an object with a type")
        if tool["type"] == "namespace":
            namespace = text_of(tool, "name", at)
            for j, inner in enumerate(a_list(tool.get("tools"), f"{at}.tools")):
                _responses_tool(box, inner, f"{at}.tools[{j}]", namespace)
        else:
            _responses_tool(box, tool, at, "")
    return box


def _responses_tool(box: Toolbox, tool: Any, at: str, namespace: str) -> None:
    kind = an_object(tool, at).get("type")
    if kind not in ("function", "custom"):
        box.leave_out(at, kind)
        return
    name = text_of(tool, "name", at)
    flat = flat_name(namespace, name)
    if tool.get("defer_loading"):
        box.leave_out(at, f"{flat} (deferred)")
    elif kind == "custom":
        function = custom_function(flat, tool.get("description"), tool.get("format"))
        box.add(at, function, ToolForm(name, namespace, custom=True))
    else:
        function = {"name": flat, **_known(tool, "description"), "parameters": tool.get("parameters") or {}}
        box.add(at, function, ToolForm(name, namespace) if namespace else None)


def messages_tools(rows: Any, loaded: frozenset[str]) -> Toolbox:
    """`loaded` names the deferred tools that the history has called for. Typed tools are the vendor's own."""
    box = Toolbox()
    for i, tool in enumerate(a_list(rows, "tools")):
        at = f"tools[{i}]"
        kind = an_object(tool, at).get("type")
        if kind not in (None, "custom"):
            box.leave_out(at, kind)
            continue
        name = text_of(tool, "name", at)
        if tool.get("defer_loading") and name not in loaded:
            box.leave_out(at, f"{name} (deferred)")
        else:
            parameters = an_object(tool.get("input_schema"), f"{at}.input_schema")
            box.add(at, {"name": name, **_known(tool, "description"), "parameters": parameters})
    return box


def _known(tool: Mapping[str, Any], name: str) -> dict[str, Any]:
    return {name: tool[name]} if isinstance(tool.get(name), str) else {}
