"""Canonicalisation rules: each fires on the habit it is for, on nothing else, and at most once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from dialect_fakes import DIALECTS, body_of, conversations
from hypothesis import given, settings

from rollout.proxy.dialects.noise import BODY_RULES, MESSAGE_RULES, clean_body, clean_messages, rule_names
from rollout.proxy.messages import Message, ToolCall

CONTEXT = "<<<BEGIN_OPENCLAW_INTERNAL_CONTEXT>>>\nidle\n<<<END_OPENCLAW_INTERNAL_CONTEXT>>>"
UUID = "3f2504e0-4f89-41d3-9a0c-0305e82c3301"
ZEROS = "00000000-0000-0000-0000-000000000000"
USER = Message("user", "go")
ANSWER = Message("assistant", "", "", (ToolCall("call_0_0", "f", {}),))
RESULT = Message("tool", "ok", tool_call_id="call_0_0")


def cleaned(*messages: Message) -> tuple[tuple[Message, ...], tuple[str, ...]]:
    return clean_messages(messages)


def test_every_rule_has_a_name_and_the_facts_it_rests_on() -> None:
    names = rule_names()
    assert len(names) == len(BODY_RULES) + len(MESSAGE_RULES)
    assert all(len(facts) > 20 for facts in names.values())
    page = (Path(__file__).parents[2] / "docs" / "design" / "dialects.md").read_text(encoding="utf-8")
    assert [line.split("`")[1] for line in page.splitlines() if line.startswith("| `")] == list(names)


@given(messages=conversations())
@settings(max_examples=80, deadline=None)
def test_rules_take_their_own_result_as_it_is(messages: tuple[Message, ...]) -> None:
    once, _ = clean_messages(messages)
    assert clean_messages(once) == (once, ())
    for name in DIALECTS:
        body, _ = clean_body(body_of(name, messages))
        assert clean_body(body) == (body, ())


def test_billing_line_goes_and_the_rest_of_the_block_stays() -> None:
    line = "x-anthropic-billing-header: cc_version=2.1; cch=0a1b2;"
    assert cleaned(Message("system", f"{line}\nBe brief."), USER) == (
        (Message("system", "Be brief."), USER),
        ("billing-line",),
    )
    assert cleaned(Message("system", line), USER) == ((USER,), ("billing-line",))
    assert cleaned(Message("user", line)) == ((Message("user", line),), ())
    late = (USER, Message("system", line))
    assert cleaned(*late) == (late, ())


@pytest.mark.parametrize(
    ("text", "plain"),
    [
        ("[Mon 2026-11-30 21:10 UTC] Write", "[Mon 2026-11-30 UTC] Write"),
        ("[2026-11-30 21:10:05 CET] Write", "[2026-11-30 CET] Write"),
        ("[2026-11-30] Write", "[2026-11-30] Write"),
        ("at [Mon 2026-11-30 21:10 UTC] Write", "at [Mon 2026-11-30 21:10 UTC] Write"),
        ("[Mon 2026-11-30 21:10 UTC]", "[Mon 2026-11-30 21:10 UTC]"),
    ],
)
def test_clock(text: str, plain: str) -> None:
    found, fired = cleaned(Message("user", text))
    assert (found[0].content, fired) == (plain, ("clock",) if text != plain else ())
    for role in ("system", "tool", "assistant"):
        other = Message(role, text)  # type: ignore[arg-type]
        assert cleaned(other) == ((other,), ())


def test_session_ids_of_the_runtime_line_alone() -> None:
    line = f"Runtime: agent=main | session=agent:main:explicit:{UUID} | sessionId={UUID} | os=Linux"
    found, fired = cleaned(Message("user", f"see {UUID}\n\n{line}"))
    assert found[0].content == f"see {UUID}\n\n{line.replace(UUID, ZEROS)}"
    assert fired == ("session-id",)


def test_floating_context_is_pinned_where_the_first_call_had_it() -> None:
    system, context = Message("system", "s"), Message("user", CONTEXT)
    first = cleaned(system, USER, context)
    later = cleaned(system, USER, ANSWER, RESULT, context)
    assert first == ((system, USER, context), ())
    assert later == ((system, USER, context, ANSWER, RESULT), ("floating-context",))
    assert cleaned(context) == ((context,), ())
    mixed = Message("user", f"{CONTEXT}\nand now?")
    assert cleaned(USER, ANSWER, RESULT, mixed)[0][-1] == mixed


def test_calls_are_numbered_by_place() -> None:
    calls = (ToolCall("call415fc57d", "f", {}), ToolCall("toolu_9", "g", {}))
    history = (
        USER,
        Message("assistant", "", "", calls),
        Message("tool", "2", tool_call_id="toolu_9"),
        Message("tool", "1", tool_call_id="call415fc57d"),
        Message("assistant", "", "", calls[:1]),
        Message("tool", "3", tool_call_id="lost"),
    )
    found, fired = cleaned(*history)
    assert [c.id for c in found[1].tool_calls] == ["call_0_0", "call_0_1"]
    assert [m.tool_call_id for m in found if m.role == "tool"] == ["call_0_1", "call_0_0", "call_1_0"]
    assert fired == ("call-ids",)


def test_an_id_given_twice_answers_both_calls_in_order() -> None:
    calls = (ToolCall("x", "f", {"a": 1}), ToolCall("x", "f", {"a": 2}))
    results = (Message("tool", "1", tool_call_id="x"), Message("tool", "2", tool_call_id="x"))
    found, _ = cleaned(USER, Message("assistant", "", "", calls), *results)
    assert [m.tool_call_id for m in found[2:]] == ["call_0_0", "call_0_1"]


# -- body rules ----------------------------------------------------------------------------------------


def rules_of(dialect: str, body: dict[str, Any]) -> tuple[str, ...]:
    return DIALECTS[dialect].parse(json.dumps(body).encode()).rules


def test_cache_marks_go_but_a_parameter_of_that_name_stays() -> None:
    mark = {"cache_control": {"type": "ephemeral"}}
    schema = {"type": "object", "properties": {"cache_control": {"type": "string"}}}
    use = {"type": "tool_use", "id": "t", "name": "f", "input": {"cache_control": "keep"}}
    result = {"type": "tool_result", "tool_use_id": "t", "content": [{"type": "text", "text": "x", **mark}], **mark}
    body = {
        "system": [{"type": "text", "text": "s", **mark}],
        "tools": [{"name": "f", "input_schema": schema, **mark}],
        "messages": [{"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}],
    }
    found, fired = clean_body(body)
    assert json.dumps(found).count("cache_control") == 2
    assert "cache-control" in fired
    read = DIALECTS["messages"].parse(json.dumps(body).encode())
    assert read.tools[0]["function"]["parameters"] == schema
    assert read.messages[1].tool_calls[0].arguments == {"cache_control": "keep"}


@pytest.mark.parametrize("dialect", ["chat", "responses", "messages"])
def test_text_is_the_same_as_a_string_and_as_one_part(dialect: str) -> None:
    key = "input" if dialect == "responses" else "messages"
    part = {"type": "input_text" if dialect == "responses" else "text", "text": "go"}
    plain = {key: [{"role": "user", "content": "go"}]}
    listed = {key: [{"role": "user", "content": [part]}]}
    read = [DIALECTS[dialect].parse(json.dumps(body).encode()) for body in (plain, listed)]
    assert read[0].messages == read[1].messages
    assert (read[0].rules, read[1].rules) == ((), ("single-text",))


def test_spacing_of_arguments_is_told_and_key_order_kept() -> None:
    def body(told: str) -> dict[str, Any]:
        return {"input": [{"type": "function_call", "call_id": "call_0_0", "name": "f", "arguments": told}]}

    assert rules_of("responses", body('{"b": 1, "a": "ö"}')) == ()
    assert rules_of("responses", body('{"b":1,"a":"ö"}')) == ("arguments",)
    assert rules_of("responses", body('{"b": 1')) == ()
    read = DIALECTS["responses"].parse(json.dumps(body('{"b":1,"a":2}')).encode())
    assert list(read.messages[0].tool_calls[0].arguments) == ["b", "a"]
