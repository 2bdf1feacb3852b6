"""Failures that users of other proxies reported, by their numbers in the list of bugs, played against ours on each
surface that can have them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import anthropic
import openai
import pytest
from dialect_fakes import DIALECTS, PATHS, ask, body_of, listen, post
from proxy_fakes import Stage, call_text, serving, until

from rollout.errors import FailureClass
from rollout.inference.vllm import EngineAddress, VllmEngine
from rollout.proxy.app import ProxyContext, create_proxy
from rollout.proxy.messages import Message, ToolCall, load_message
from rollout.types import Limits

pytestmark = pytest.mark.bugs

TOOL = {"name": "get_ticket", "description": "d", "parameters": {"type": "object", "properties": {}}}
TOOLS: dict[str, list[dict[str, Any]]] = {
    "chat": [{"type": "function", "function": TOOL}],
    "responses": [{"type": "function", **TOOL}],
    "messages": [{"name": "get_ticket", "description": "d", "input_schema": TOOL["parameters"]}],
}
USER = Message("user", "Close ticket 7")
CALLS = tuple(ToolCall(f"call_0_{i}", "get_ticket", {"id": 7 + i}) for i in range(2))
TWO = "\n".join(call_text(c.name, c.arguments) for c in CALLS)
LOOP = (
    USER,
    Message("assistant", "", "", CALLS),
    Message("tool", "seven", tool_call_id="call_0_0"),
    Message("tool", "eight", tool_call_id="call_0_1"),
)


def body(name: str, *messages: Message, **fields: Any) -> dict[str, Any]:
    return body_of(name, messages or (USER,), tools=TOOLS[name], **fields)


def texts(events: list[dict[str, Any]]) -> str:
    """All that a client would show of a stream: text and reasoning."""
    out = []
    for event in events:
        if str(event.get("type", "")).endswith(("output_text.delta", "reasoning_text.delta")):
            out.append(event["delta"])
        elif event.get("type") == "content_block_delta":
            out.append(event["delta"].get("text") or event["delta"].get("thinking") or "")
        for choice in event.get("choices", ()):
            out.append((choice["delta"].get("content") or "") + choice["delta"].get("reasoning_content", ""))
    return "".join(out)


@pytest.mark.parametrize("name", DIALECTS)
@pytest.mark.parametrize(
    "text",
    [TWO, f"I look.\n{TWO}", f"<think>\nhm\n</think>\n\n{TWO}", f"<think>\nhm {TWO}", f"<think>hm</think>a{TWO}"],
)
def test_bug_04_tool_markup_never_streams_as_text(proxy_stage: Any, name: str, text: str) -> None:
    async def main() -> None:
        async with proxy_stage() as stage:
            stage.add("r")
            stage.engine.queue = [stage.say(text)]
            shown = texts(await listen(stage, "r", name, body(name)))
            assert "tool_call" not in shown
            assert "get_ticket" not in shown
            assert "think>" not in shown
            (call,) = stage.store.calls.of("r")
            assert len(load_message(call.messages[-1]).tool_calls) == 2

    asyncio.run(main())


@pytest.mark.parametrize("name", DIALECTS)
def test_bug_06_a_second_turn_with_results_passes(proxy_stage: Any, name: str) -> None:
    async def main() -> None:
        async with proxy_stage() as stage:
            stage.add("r")
            stage.engine.script = lambda _: stage.say("Done.")
            await ask(stage, "r", name, body(name, *LOOP))
            (call,) = stage.store.calls.of("r")
            prompt = stage.codec.decode(call.prompt_ids)
            assert prompt.count("<tool_call>\n{") == 2 + 1  # the template explains the form once
            assert "<tool_response>\nseven\n</tool_response>\n<tool_response>\neight\n</tool_response>" in prompt

    asyncio.run(main())


@pytest.mark.parametrize("name", DIALECTS)
@pytest.mark.parametrize("told", ['{"a": 1', "[]", "null", "7", '{"a": NaN}', '"x"', "\\", "[" * 50_000])
def test_bug_07_a_malformed_call_in_the_history_does_not_poison_later_turns(
    proxy_stage: Any, name: str, told: str
) -> None:
    """On the Messages surface an input is JSON already: there it is the wrong kind of value."""
    sent = body(name, USER, Message("assistant", "I look.", "", CALLS[:1]), LOOP[2])
    if name == "chat":
        sent["messages"][1]["tool_calls"][0]["function"]["arguments"] = told
    elif name == "responses":
        next(item for item in sent["input"] if item.get("type") == "function_call")["arguments"] = told
    else:
        sent["messages"][1]["content"][-1]["input"] = told

    async def main() -> None:
        async with proxy_stage() as stage:
            stage.add("r", limits=Limits(calls=4, tokens=4096, context=100_000))
            stage.engine.script = lambda _: stage.say("Done.")
            await ask(stage, "r", name, sent)
            (call,) = stage.store.calls.of("r")
            answer = load_message(call.messages[1])
            assert answer.tool_calls == ()
            assert answer.content.startswith("I look.\n")
            assert "get_ticket" in answer.content
            assert told in answer.content
            assert told in stage.codec.decode(call.prompt_ids)

    asyncio.run(main())


@pytest.mark.parametrize("name", DIALECTS)
@pytest.mark.parametrize("stream", [False, True])
def test_bug_08_parallel_calls_keep_their_ids_and_arguments(proxy_stage: Any, name: str, stream: bool) -> None:
    """Read by the official clients."""

    def read(url: str, key: str) -> list[tuple[str, str, Any]]:
        if name == "messages":
            client = anthropic.Anthropic(base_url=url, api_key=key, max_retries=0)
            sent: dict[str, Any] = {"model": "m", "max_tokens": 60, "messages": [{"role": "user", "content": "go"}]}
            sent["tools"] = TOOLS[name]
            if stream:
                with client.messages.stream(**sent) as events:
                    message = events.get_final_message()
            else:
                message = client.messages.create(**sent)
            client.close()
            return [(b.id, b.name, b.input) for b in message.content if b.type == "tool_use"]
        other = openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0)
        try:
            return _openai(other, stream) if name == "chat" else _responses(other, stream)
        finally:
            other.close()

    async def main() -> None:
        async with proxy_stage() as stage:
            key = stage.add("r")
            stage.engine.queue = [stage.say(TWO)]
            found = await asyncio.to_thread(read, f"{stage.url}/rollouts/r", key)
            assert found == [(c.id, c.name, dict(c.arguments)) for c in CALLS]

    asyncio.run(main())


def _openai(client: openai.OpenAI, stream: bool) -> list[tuple[str, str, Any]]:
    sent: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "go"}], "tools": TOOLS["chat"]}
    if stream:
        with client.chat.completions.stream(**sent) as events:
            calls = events.get_final_completion().choices[0].message.tool_calls
    else:
        calls = client.chat.completions.create(**sent).choices[0].message.tool_calls
    return [(c.id, c.function.name, json.loads(c.function.arguments)) for c in calls or ()]


def _responses(client: openai.OpenAI, stream: bool) -> list[tuple[str, str, Any]]:
    sent: dict[str, Any] = {"model": "m", "input": "go", "tools": TOOLS["responses"]}
    if stream:
        with client.responses.stream(**sent) as events:
            output = events.get_final_response().output
    else:
        output = client.responses.create(**sent).output
    return [(i.call_id, i.name, json.loads(i.arguments)) for i in output if i.type == "function_call"]


def test_bug_10_count_tokens_is_answered_and_leaves_no_record(proxy_stage: Any) -> None:
    async def main() -> None:
        async with proxy_stage() as stage:
            stage.add("r")
            stage.engine.script = lambda _: stage.say("Done.")
            sent = body("messages", *LOOP)
            async with post(stage, "r", "messages/count_tokens?beta=true", sent) as response:
                counted = await response.json()
                assert response.status == 200
            assert stage.engine.asked == []
            assert stage.store.calls.of("r") == []
            answer = await ask(stage, "r", "messages", sent)
            assert counted == {"input_tokens": answer["usage"]["input_tokens"]}
            events = await listen(stage, "r", "messages", body("messages", *LOOP, Message("user", "so?")))
            assert events[0]["message"]["usage"]["input_tokens"] > counted["input_tokens"]
            assert events[-2]["usage"]["output_tokens"] == len(stage.say("Done.").ids)

    asyncio.run(main())


@pytest.mark.parametrize("name", DIALECTS)
def test_bug_11_an_answer_of_reasoning_alone(proxy_stage: Any, name: str) -> None:
    """The model thinks until its tokens are used up: no text, the finish reason says so, every id is kept."""

    async def main() -> None:
        async with proxy_stage() as stage:
            stage.add("u")
            stage.add("s")
            stage.engine.script = lambda _: stage.say("<think>\nlet me think", end="", finish="length")
            answer = await ask(stage, "u", name, body(name))
            events = await listen(stage, "s", name, body(name))
            assert texts(events) == "let me think"
            if name == "chat":
                (choice,) = answer["choices"]
                assert (choice["finish_reason"], choice["message"]["content"]) == ("length", "")
                assert choice["message"]["reasoning_content"] == "let me think"
                assert events[-1]["choices"][0]["finish_reason"] == "length"
            elif name == "responses":
                assert (answer["status"], events[-1]["type"]) == ("incomplete", "response.incomplete")
                assert answer["incomplete_details"] == {"reason": "max_output_tokens"}
                assert [item["type"] for item in answer["output"]] == ["reasoning"]
            else:
                assert (answer["stop_reason"], events[-2]["delta"]["stop_reason"]) == ("max_tokens",) * 2
                assert [block["type"] for block in answer["content"]] == ["thinking"]
            for rollout in ("u", "s"):
                (call,) = stage.store.calls.of(rollout)
                assert (call.finish_reason, call.failure) == ("length", None)
                assert stage.codec.decode(call.completion_ids) == "<think>\nlet me think"

    asyncio.run(main())


@pytest.mark.parametrize("fault", ["cut", "line", "error"])
def test_bug_22_a_broken_stream_ends_with_an_event(proxy_stage: Any, fault: str) -> None:
    async def main() -> None:
        async with proxy_stage() as stage:
            for name, last in (("responses", "response.failed"), ("messages", "error")):
                stage.add(name)
                stage.engine.queue = [stage.say("a longer answer", fault=fault, pause=0.01, finish="")]
                events = await listen(stage, name, name, body(name))
                assert events[-1]["type"] == last
                if name == "responses":
                    assert events[-1]["response"]["error"]["code"] == "server_error"
                    assert [event["sequence_number"] for event in events] == list(range(len(events)))
                (call,) = stage.store.calls.of(name)
                assert call.failure
                assert call.failure.kind is FailureClass.INFRASTRUCTURE
                assert not call.delivered

    asyncio.run(main())


def test_bug_23_the_billing_line_does_not_break_the_prefix(proxy_stage: Any) -> None:
    def sent(cch: str, *more: dict[str, Any]) -> dict[str, Any]:
        line = f"x-anthropic-billing-header: cc_version=2.1.332.47d; cc_entrypoint=sdk-cli; cch={cch};"
        system = [{"type": "text", "text": line}, {"type": "text", "text": "Be brief."}]
        rows = [{"role": "user", "content": "go"}, *more]
        return {"system": system, "messages": rows, "max_tokens": 64, "tools": TOOLS["messages"]}

    async def main() -> None:
        async with proxy_stage() as stage:
            stage.add("r")
            stage.engine.queue = [stage.say(call_text("get_ticket", {"id": 7})), stage.say("Done.")]
            answer = await ask(stage, "r", "messages", sent("00001"))
            result = {"type": "tool_result", "tool_use_id": answer["content"][0]["id"], "content": "open"}
            more = ({"role": "assistant", "content": answer["content"]}, {"role": "user", "content": [result]})
            await ask(stage, "r", "messages", sent("9f3ac", *more))
            first, second = stage.store.calls.of("r")
            ids = first.prompt_ids + first.completion_ids
            assert second.prompt_ids[: len(ids)] == ids
            assert second.fork_reason == ""
            assert "billing" not in stage.codec.decode(second.prompt_ids)
            assert b"cch=9f3ac" in stage.store.blobs.get(second.request)

    asyncio.run(main())


@pytest.mark.parametrize(
    ("name", "choice"),
    [
        ("chat", "auto"),
        ("chat", "required"),
        ("responses", "auto"),
        ("messages", {"type": "auto"}),
        ("messages", {"type": "any"}),
        ("messages", {"type": "none"}),
    ],
)
def test_bug_24_a_tool_choice_without_tools_is_accepted(proxy_stage: Any, name: str, choice: Any) -> None:
    async def main() -> None:
        async with proxy_stage() as stage:
            stage.add("r")
            stage.engine.script = lambda _: stage.say("A summary.")
            await ask(stage, "r", name, body_of(name, (USER,), tools=[], tool_choice=choice))
            (call,) = stage.store.calls.of("r")
            assert call.tools == ()
            assert load_message(call.messages[-1]).content == "A summary."

    asyncio.run(main())


@pytest.mark.parametrize("name", DIALECTS)
def test_bug_34_two_results_have_the_shape_of_the_template(proxy_stage: Any, name: str) -> None:
    async def main() -> None:
        async with proxy_stage() as stage:
            stage.add("r")
            stage.engine.script = lambda _: stage.say("Done.")
            sent = body(name, *LOOP)
            await ask(stage, "r", name, sent)
            (call,) = stage.store.calls.of("r")
            assert list(call.prompt_ids) == stage.codec.render(LOOP, TOOLS["chat"])
            assert stage.engine.asked[0]["prompt"] == list(call.prompt_ids)

    asyncio.run(main())


# -- structured output ---------------------------------------------------------------------------------

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
FORMATS: dict[str, dict[str, Any]] = {
    "chat": {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}},
    "responses": {"text": {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}}},
    "messages": {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
}


@dataclass(frozen=True)
class _Structured:
    """An engine that can hold an answer to a schema, as vLLM can."""

    engine: VllmEngine

    def engine_for(self, rollout: Any, codec: Any) -> VllmEngine:
        return self.engine


@asynccontextmanager
async def _structured(stage: Stage) -> AsyncIterator[None]:
    """Puts a proxy with such an engine in the place of the stage's own."""
    async with serving(stage.engine.app()) as engine_url:
        engine = VllmEngine(lambda *_, **__: EngineAddress(engine_url), structured_outputs=True)
        app = create_proxy(ProxyContext(stage.store, stage.services, _Structured(engine)))
        async with serving(app) as url:
            before, stage.url = stage.url, url
            yield
            stage.url = before
        await engine.close()


@pytest.mark.parametrize("name", DIALECTS)
@pytest.mark.parametrize("stream", [False, True])
def test_bug_35_structured_output_keeps_the_ids(proxy_stage: Any, name: str, stream: bool) -> None:
    async def main() -> None:
        async with proxy_stage() as stage:
            stage.add("r")
            reply = stage.say('{"a": 1}')
            stage.engine.queue = [reply]
            sent = body_of(name, (USER,), **FORMATS[name])
            async with _structured(stage):
                await (listen if stream else ask)(stage, "r", name, sent)  # type: ignore[operator]
                await until(lambda: bool(stage.store.calls.of("r")))
            assert stage.engine.asked[0]["structured_outputs"] == {"json": SCHEMA}
            (call,) = stage.store.calls.of("r")
            assert call.completion_ids == reply.ids
            assert len(call.logprobs or ()) == len(reply.ids)
            assert load_message(call.messages[-1]).content == '{"a": 1}'

    asyncio.run(main())


@pytest.mark.parametrize("name", DIALECTS)
def test_bug_35_an_engine_without_it_refuses_by_name(proxy_stage: Any, name: str) -> None:
    fields = {"chat": "response_format", "responses": "text.format", "messages": "output_config.format"}

    async def main() -> None:
        async with proxy_stage() as stage:
            stage.add("r")
            async with post(stage, "r", PATHS[name], body_of(name, (USER,), **FORMATS[name])) as response:
                assert response.status == 400
                assert fields[name] in (await response.json())["error"]["message"]
            assert stage.engine.asked == []
            assert stage.store.calls.of("r") == []

    asyncio.run(main())
