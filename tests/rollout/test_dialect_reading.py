"""What clients ask for besides text: tools in every form, choices, schemas, pictures; what is refused, and by name."""

from __future__ import annotations

import json
from typing import Any

import pytest
from dialect_fakes import DIALECTS, HEAD, PNG, streamed

from rollout.proxy.dialects.base import Answer, CallRequest, Refused
from rollout.proxy.dialects.responses_items import seal
from rollout.proxy.messages import Message, ToolCall

USER = {"role": "user", "content": "go"}
FUNCTION = {"name": "f", "description": "d", "parameters": {"type": "object", "properties": {}}}
GRAMMAR = {"type": "grammar", "syntax": "lark", "definition": 'start: "x"'}
PATCH = {"type": "custom", "name": "apply_patch", "description": "Patch", "format": GRAMMAR}
LOOKUP = {"type": "function", "name": "lookup", "strict": False, "parameters": {}}
ECHO = {"type": "namespace", "name": "mcp__echo", "description": "d", "tools": [LOOKUP]}
MINIMAL: dict[str, dict[str, Any]] = {
    "chat": {"messages": [USER]},
    "responses": {"input": [USER]},
    "messages": {"messages": [USER], "max_tokens": 9},
}
TOOLS: dict[str, list[dict[str, Any]]] = {
    "chat": [{"type": "function", "function": FUNCTION}],
    "responses": [{"type": "function", "strict": True, **FUNCTION}],
    "messages": [{"name": "f", "description": "d", "input_schema": FUNCTION["parameters"]}],
}


def parse(name: str, **fields: Any) -> CallRequest:
    return DIALECTS[name].parse(json.dumps({**MINIMAL[name], **fields}).encode())


def refused(name: str, **fields: Any) -> Refused:
    with pytest.raises(Refused) as caught:
        parse(name, **fields)
    assert caught.value.status == 400
    assert not caught.value.field or caught.value.field in str(caught.value)
    return caught.value


@pytest.mark.parametrize("name", DIALECTS)
def test_a_function_looks_the_same_to_the_model(name: str) -> None:
    assert parse(name, tools=TOOLS[name]).tools == ({"type": "function", "function": FUNCTION},)


def test_a_namespace_is_flattened_and_given_back() -> None:
    request = parse("responses", tools=[ECHO])
    assert [t["function"]["name"] for t in request.tools] == ["mcp__echo__lookup"]
    answer = Answer("", "", (ToolCall("call_0_0", "mcp__echo__lookup", {"a": 1}),), False, "tool_calls", 1, 1)
    (item,) = json.loads(DIALECTS["responses"].whole(HEAD, request, answer))["output"]
    assert (item["type"], item["namespace"], item["name"]) == ("function_call", "mcp__echo", "lookup")
    result = {"type": "function_call_output", "call_id": "call_0_0", "output": [{"type": "input_text", "text": "3"}]}
    again = parse("responses", tools=[ECHO], input=[USER, item, result])
    assert again.messages[1] == answer.message()
    assert again.messages[2] == Message("tool", "3", tool_call_id="call_0_0")


def test_two_tools_of_one_flat_name_are_refused() -> None:
    twin = {"type": "function", "name": "mcp__echo__lookup"}
    assert refused("responses", tools=[twin, ECHO]).field == "tools[1].tools[0]"
    assert refused("messages", tools=TOOLS["messages"] * 2).field == "tools[1]"


@pytest.mark.parametrize("name", ["chat", "responses"])
def test_a_custom_tool_is_a_function_of_one_text_and_comes_back(name: str) -> None:
    inner = {k: v for k, v in PATCH.items() if k != "type"}
    tool = {"type": "custom", "custom": inner} if name == "chat" else PATCH
    request = parse(name, tools=[tool])
    function = request.tools[0]["function"]
    assert function["parameters"]["required"] == ["input"]
    assert 'lark grammar:\nstart: "x"' in function["description"]
    call = ToolCall("call_0_0", "apply_patch", {"input": "*** ü"})
    answer = Answer("", "", (call,), False, "tool_calls", 1, 1)
    whole = json.loads(DIALECTS[name].whole(HEAD, request, answer))
    if name == "chat":
        (sent,) = whole["choices"][0]["message"]["tool_calls"]
        assert sent == {"id": "call_0_0", "type": "custom", "custom": {"name": "apply_patch", "input": "*** ü"}}
        again = parse(name, messages=[USER, whole["choices"][0]["message"]])
    else:
        (item,) = whole["output"]
        assert (item["type"], item["input"]) == ("custom_tool_call", "*** ü")
        raw = streamed(DIALECTS[name], request, answer).decode()
        assert "event: response.custom_tool_call_input.delta" in raw
        assert "event: response.custom_tool_call_input.done" in raw
        output = {"type": "custom_tool_call_output", "call_id": "call_0_0", "output": "ok"}
        again = parse(name, input=[USER, item, output], tools=[PATCH])
    assert again.messages[1] == answer.message()


def test_hosted_and_deferred_tools_are_left_out_with_a_note() -> None:
    hosted = [{"type": "web_search"}, {"type": "tool_search", "execution": "client"}, {"type": "computer_use_preview"}]
    request = parse("responses", tools=[*hosted, {**LOOKUP, "defer_loading": True}, LOOKUP])
    assert [t["function"]["name"] for t in request.tools] == ["lookup"]
    assert request.left_out == (
        "tools[0]: web_search",
        "tools[1]: tool_search",
        "tools[2]: computer_use_preview",
        "tools[3]: lookup (deferred)",
    )


def test_a_deferred_tool_is_shown_once_a_result_has_loaded_it() -> None:
    tools = [{"name": "late", "input_schema": {}, "defer_loading": True}, {"type": "web_search_20250305", "name": "w"}]
    assert parse("messages", tools=tools).left_out == ("tools[0]: late (deferred)", "tools[1]: web_search_20250305")
    reference = {"type": "tool_reference", "tool_name": "late"}
    rows = [
        USER,
        {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "ToolSearch", "input": {}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": [reference]}]},
    ]
    request = parse("messages", tools=tools, messages=rows)
    assert [t["function"]["name"] for t in request.tools] == ["late"]
    assert "late" in request.messages[-1].content


@pytest.mark.parametrize(
    ("name", "choice"),
    [
        ("chat", "required"),
        ("chat", {"type": "function", "function": {"name": "f"}}),
        ("responses", "required"),
        ("responses", {"type": "function", "name": "f"}),
        ("responses", {"type": "allowed_tools", "mode": "auto", "tools": []}),
        ("messages", {"type": "any"}),
        ("messages", {"type": "tool", "name": "f"}),
    ],
)
def test_a_forced_call_is_refused_by_name(name: str, choice: Any) -> None:
    assert refused(name, tools=TOOLS[name], tool_choice=choice).field == "tool_choice"


@pytest.mark.parametrize("name", DIALECTS)
def test_choices_that_can_be_honoured(name: str) -> None:
    def said(kind: str) -> Any:
        return {"type": kind} if name == "messages" else kind

    assert len(parse(name, tools=TOOLS[name], tool_choice=said("auto")).tools) == 1
    assert parse(name, tools=TOOLS[name], tool_choice=said("none")).tools == ()


def test_one_call_at_a_time_is_refused_unless_there_are_no_tools() -> None:
    for name in ("chat", "responses"):
        assert refused(name, tools=TOOLS[name], parallel_tool_calls=False).field == "parallel_tool_calls"
        assert parse(name, tools=[], parallel_tool_calls=False).tools == ()
    choice = {"type": "auto", "disable_parallel_tool_use": True}
    assert refused("messages", tools=TOOLS["messages"], tool_choice=choice).field.startswith("tool_choice")


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


@pytest.mark.parametrize(
    ("name", "fields", "named"),
    [
        ("chat", {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}}, "response_format"),
        ("responses", {"text": {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}}}, "text.format"),
        (
            "messages",
            {"output_config": {"effort": "high", "format": {"type": "json_schema", "schema": SCHEMA}}},
            "output_config.format",
        ),
        ("messages", {"output_format": {"type": "json_schema", "schema": SCHEMA}}, "output_format"),
    ],
)
def test_a_schema_is_passed_on(name: str, fields: dict[str, Any], named: str) -> None:
    found = parse(name, **fields).schema
    assert found
    assert (found.json, found.field) == (SCHEMA, named)


def test_text_formats_that_ask_for_nothing_or_for_something_unknown() -> None:
    assert parse("chat", response_format={"type": "text"}).schema is None
    assert parse("responses", text={"verbosity": "low"}).schema is None
    found = parse("chat", response_format={"type": "json_object"}).schema
    assert found
    assert found.json == {"type": "object"}
    assert refused("responses", text={"format": {"type": "grammar"}}).field == "text.format"


# -- content -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "part", "at"),
    [
        ("chat", {"type": "image_url", "image_url": {"url": "https://example.org/a.png"}}, "messages[0].content[0]"),
        ("chat", {"type": "image_url", "image_url": {"url": "data:image/png;base64,%%"}}, "messages[0].content[0]"),
        ("chat", {"type": "input_audio", "input_audio": {}}, "messages[0].content[0]"),
        ("responses", {"type": "input_image", "file_id": "f"}, "input[0].content[0]"),
        ("responses", {"type": "input_file", "file_id": "f"}, "input[0].content[0]"),
        ("messages", {"type": "image", "source": {"type": "url", "url": "x"}}, "messages[0].content[0]"),
        ("messages", {"type": "document", "source": {"type": "base64", "data": PNG}}, "messages[0].content[0]"),
        ("messages", "text", "messages[0].content[0]"),
    ],
)
def test_parts_that_cannot_be_shown_are_refused_by_place(name: str, part: Any, at: str) -> None:
    key = "input" if name == "responses" else "messages"
    assert refused(name, **{key: [{"role": "user", "content": [part]}]}).field == at


def test_a_picture_keeps_its_digest_and_place() -> None:
    source = {"type": "base64", "media_type": "image/png", "data": PNG}
    result = {"type": "tool_result", "tool_use_id": "t", "content": [{"type": "image", "source": source}]}
    message = parse("messages", messages=[{"role": "user", "content": [result]}]).messages[0]
    (image,) = message.images
    assert message.content == image.placeholder == f"<image {image.sha256[:16]}>"
    assert (image.at, image.url) == ("messages[0].content[0].content[0]", f"data:image/png;base64,{PNG}")
    assert PNG not in json.dumps(message.dump())


def test_system_and_developer_turns_stay_where_the_client_put_them() -> None:
    rows = [{"role": "system", "content": "a"}, USER, {"role": "developer", "content": "b"}, USER]
    want = ["system", "user", "system", "user"]
    assert [m.role for m in parse("chat", messages=rows).messages] == want
    assert [m.role for m in parse("responses", input=rows[1:], instructions="a").messages] == want
    rows[2]["role"] = "system"
    assert [m.role for m in parse("messages", messages=rows[1:], system="a").messages] == want


def test_results_and_text_of_one_turn_keep_their_order() -> None:
    result = {"type": "tool_result", "tool_use_id": "t", "content": "r", "is_error": False}
    failed = {"type": "tool_result", "tool_use_id": "t", "content": [], "is_error": True}
    text = {"type": "text", "text": "and"}
    messages = parse("messages", messages=[{"role": "user", "content": [result, failed, text, text]}]).messages
    assert [(m.role, m.content) for m in messages] == [("tool", "r"), ("tool", "error"), ("user", "and\nand")]


def test_sealed_reasoning_comes_back_where_a_client_drops_the_text() -> None:
    mine = {"type": "reasoning", "id": "rs", "summary": [], "encrypted_content": seal("hm 😀")}
    foreign = {"type": "reasoning", "id": "rs", "summary": [], "encrypted_content": "gAAAA"}
    said = {"role": "assistant", "content": "a"}
    assert parse("responses", input=[USER, mine, said]).messages[1] == Message("assistant", "a", "hm 😀")
    assert parse("responses", input=[USER, foreign, said]).messages[1] == Message("assistant", "a")
    answer = Answer("a", "hm", (), False, "stop", 1, 1)
    plain, sealed = parse("responses"), parse("responses", include=["reasoning.encrypted_content"])
    items = [json.loads(DIALECTS["responses"].whole(HEAD, r, answer))["output"][0] for r in (plain, sealed)]
    assert "encrypted_content" not in items[0]
    assert items[1]["encrypted_content"] == seal("hm")


def test_two_answers_in_a_row_stay_two() -> None:
    said = {"role": "assistant", "content": "a"}
    thought = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "t"}]}
    messages = parse("responses", input=[USER, said, said, thought, said]).messages
    assert messages[1:] == (Message("assistant", "a"),) * 2 + (Message("assistant", "a", "t"),)


@pytest.mark.parametrize(
    ("name", "fields", "named"),
    [
        ("responses", {"previous_response_id": "resp_1"}, "previous_response_id"),
        ("responses", {"background": True}, "background"),
        ("responses", {"conversation": "c"}, "conversation"),
        ("responses", {"include": ["message.output_text.logprobs"]}, "include"),
        ("responses", {"input": []}, "input"),
        ("responses", {"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        ("responses", {"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]}, "input[0].call_id"),
        ("responses", {"tools": [{"type": "function"}]}, "tools[0].name"),
        ("responses", {"max_output_tokens": 0}, "max_output_tokens"),
        ("responses", {"input": [{"role": "robot", "content": "x"}]}, "input[0].role"),
        ("messages", {"stop_sequences": ["x"]}, "stop_sequences"),
        ("messages", {"messages": []}, "messages"),
        ("messages", {"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ("messages", {"messages": [USER, {"role": "assistant", "content": "Once"}]}, "messages[1]"),
        ("messages", {"mcp_servers": [{"url": "x"}]}, "mcp_servers"),
        ("messages", {"tools": [{"input_schema": {}}]}, "tools[0].name"),
        ("messages", {"max_tokens": "many"}, "max_tokens"),
        ("chat", {"stop": ["x"]}, "stop"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(name: str, fields: dict[str, Any], named: str) -> None:
    assert refused(name, **fields).field == named


@pytest.mark.parametrize("name", DIALECTS)
def test_a_name_that_stands_twice_in_the_body_is_refused(name: str) -> None:
    raw = json.dumps(MINIMAL[name])[:-1] + ', "stream": true, "stream": false}'
    with pytest.raises(Refused, match="stands twice"):
        DIALECTS[name].parse(raw.encode())


@pytest.mark.parametrize("name", DIALECTS)
def test_a_body_too_deep_to_be_recorded_is_refused(name: str) -> None:
    deep: Any = {}
    for _ in range(300):
        deep = {"properties": deep}
    with pytest.raises(Refused, match="deep"):
        DIALECTS[name].parse(json.dumps({**MINIMAL[name], "tools": [deep]}).encode())
