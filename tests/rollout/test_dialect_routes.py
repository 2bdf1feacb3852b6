"""The three surfaces through a real proxy: answers, records, error shapes, and routes that never reach the model."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import anthropic
import openai
import pytest
from dialect_fakes import DIALECTS, PATHS, PNG, ask, body_of, listen, post
from proxy_fakes import Stage, call_text, until
from websockets.asyncio.client import connect
from websockets.exceptions import InvalidStatus

from rollout.proxy.messages import Message, load_message

TOOL = {"name": "get_ticket", "description": "Look up a ticket", "parameters": {"type": "object", "properties": {}}}
TOOLS: dict[str, list[dict[str, Any]]] = {
    "chat": [{"type": "function", "function": TOOL}],
    "responses": [{"type": "function", **TOOL}],
    "messages": [{"name": "get_ticket", "description": TOOL["description"], "input_schema": TOOL["parameters"]}],
}
USER = Message("user", "Close ticket 7 ✓")
CALL = call_text("get_ticket", {"id": 7})


def body(name: str, *messages: Message, **fields: Any) -> dict[str, Any]:
    return body_of(name, messages or (USER,), tools=TOOLS[name], **fields)


def kinds(events: list[dict[str, Any]]) -> list[str]:
    return [event.get("type", "chunk") for event in events]


def test_each_dialect_shows_the_model_the_same_and_records_itself(proxy_stage: Any) -> None:
    async def main() -> None:
        async with proxy_stage() as stage:
            stage.engine.script = lambda _: stage.say(f"Let me see.\n{CALL}")
            records = []
            for name in DIALECTS:
                stage.add(name)
                await ask(stage, name, name, body(name))
                (call,) = stage.store.calls.of(name)
                assert call.dialect == name
                records.append((call.prompt_ids, call.completion_ids, call.messages, call.tools))
            assert records[0] == records[1] == records[2]

    asyncio.run(main())


@pytest.mark.parametrize("name", DIALECTS)
@pytest.mark.parametrize("text", ["Done ✓ 😀", f"Let me see.\n{CALL}", f"<think>\nhm, hm\n</think>\n\n{CALL}\n{CALL}"])
def test_a_stream_records_what_the_unary_call_records(proxy_stage: Any, name: str, text: str) -> None:
    async def main() -> None:
        async with proxy_stage() as stage:
            stage.add("u")
            stage.add("s")
            stage.engine.script = lambda _: stage.say(text)
            await ask(stage, "u", name, body(name))
            events = await listen(stage, "s", name, body(name))
            (unary,), (streamed,) = stage.store.calls.of("u"), stage.store.calls.of("s")
            assert unary.completion_ids == streamed.completion_ids
            assert load_message(unary.messages[-1]) == load_message(streamed.messages[-1])
            last = {"chat": "chunk", "responses": "response.completed", "messages": "message_stop"}[name]
            assert kinds(events)[-1] == last
            await until(lambda: stage.store.calls.of("s")[0].delivered)

    asyncio.run(main())


def test_texts_leave_before_the_answer_ends(proxy_stage: Any) -> None:
    """Deltas of each dialect come while the engine still samples."""

    async def first_delta(stage: Stage, name: str) -> bool:
        stage.add(name)
        stage.engine.script = lambda _: stage.say("one two three four five", pause=0.05)
        async with post(stage, name, PATHS[name], {**body(name), "stream": True}) as response:
            async for line in response.content:
                if b"delta" in line and (b'"one' in line or b'"o' in line):
                    return not stage.store.calls.of(name)
        return False

    async def main() -> None:
        async with proxy_stage() as stage:
            for name in DIALECTS:
                assert await first_delta(stage, name)

    asyncio.run(main())


@pytest.mark.parametrize("name", DIALECTS)
def test_errors_have_the_callers_shape(proxy_stage: Any, name: str) -> None:
    async def main() -> None:
        async with proxy_stage() as stage:
            stage.add("r")
            for key, sent, status in (("wrong", b"{}", 401), (stage.keys["r"], b"{", 400)):
                url = f"{stage.url}/rollouts/r/v1/{PATHS[name]}"
                async with stage.http.post(url, data=sent, headers={"x-api-key": key}) as response:
                    found = await response.json()
                    assert response.status == status
                if name == "messages":
                    kind = {401: "authentication_error", 400: "invalid_request_error"}[status]
                    assert (found["type"], found["error"]["type"]) == ("error", kind)
                else:
                    assert set(found["error"]) == {"message", "type", "code", "param"}
            assert stage.engine.asked == []

    asyncio.run(main())


@pytest.mark.parametrize("name", DIALECTS)
def test_pictures_are_refused_by_a_model_that_reads_text(proxy_stage: Any, name: str) -> None:
    parts = {
        "chat": {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PNG}"}},
        "responses": {"type": "input_image", "image_url": f"data:image/png;base64,{PNG}"},
        "messages": {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PNG}},
    }

    async def main() -> None:
        async with proxy_stage() as stage:
            stage.add("r")
            key = "input" if name == "responses" else "messages"
            async with post(stage, "r", PATHS[name], {key: [{"role": "user", "content": [parts[name]]}]}) as response:
                assert response.status == 400
                assert f"{key}[0].content[0]" in (await response.json())["error"]["message"]
            assert stage.store.calls.of("r") == []

    asyncio.run(main())


def test_models_in_the_callers_shape(proxy_stage: Any) -> None:
    async def main() -> None:
        async with proxy_stage() as stage:
            key = stage.add("r")
            url, name = f"{stage.url}/rollouts/r", str(stage.folder)

            def read() -> tuple[Any, ...]:
                theirs = anthropic.Anthropic(base_url=url, api_key=key, max_retries=0)
                ours = openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0)
                found = ([m.id for m in theirs.models.list()], [m.id for m in ours.models.list()])
                assert ours.models.retrieve(name).id == theirs.models.retrieve(name).id == name
                with pytest.raises(openai.NotFoundError, match="no model"):
                    ours.models.retrieve("other")
                theirs.close()
                ours.close()
                return found

            assert await asyncio.to_thread(read) == ([name], [name])

    asyncio.run(main())


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("HEAD", "/api/hello", 404),
        ("GET", "/api/hello", 404),
        ("GET", "/v1/responses", 426),
        ("GET", "/v1/responses/resp_1", 404),
        ("POST", "/v1/responses/compact", 404),
        ("POST", "/embeddings", 404),
        ("POST", "/v1/embeddings", 404),
        ("GET", "/api/v1/models", 404),
        ("POST", "/api/show", 404),
        ("GET", "/v1/messages", 405),
        ("DELETE", "/v1/responses", 405),
        ("POST", "/v1/messages/batches", 404),
    ],
)
def test_probes_get_a_fast_answer_and_never_the_model(proxy_stage: Any, method: str, path: str, status: int) -> None:
    async def main() -> None:
        async with proxy_stage() as stage:
            headers = {"Authorization": f"Bearer {stage.add('r')}"}
            async with stage.http.request(method, f"{stage.url}/rollouts/r{path}", headers=headers) as response:
                assert response.status == status
                raw = await response.read()
            if method != "HEAD":
                assert "error" in json.loads(raw)
            assert stage.engine.asked == []
            assert stage.store.calls.of("r") == []

    asyncio.run(main())


def test_a_websocket_is_told_to_post(proxy_stage: Any) -> None:
    async def main() -> None:
        async with proxy_stage() as stage:
            stage.add("r")
            with pytest.raises(InvalidStatus) as caught:
                async with connect(f"{stage.url.replace('http', 'ws')}/rollouts/r/v1/responses"):
                    pass
            assert caught.value.response.status_code == 426

    asyncio.run(main())


def test_keep_alives_come_behind_the_head_of_the_answer(proxy_stage: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As events: a client that watches for events would call a stream of comments idle."""
    from rollout.proxy import outlet

    monkeypatch.setattr(outlet, "PING_S", 0.05)
    first = {
        "responses": ["response.created", "response.in_progress", "keepalive", "keepalive"],
        "messages": ["message_start", "ping", "ping"],
    }

    async def main() -> None:
        async with proxy_stage() as stage:
            for name, begin in first.items():
                stage.add(name)
                stage.engine.script = lambda _: stage.say("D", pause=0.3)
                events = await listen(stage, name, name, body(name))
                assert kinds(events)[: len(begin)] == begin
                numbers = [e["sequence_number"] for e in events if "sequence_number" in e]
                assert numbers == list(range(len(numbers)))
                assert [e.get("type") for e in events].count(begin[0]) == 1
                (call,) = stage.store.calls.of(name)
                recorded = stage.store.blobs.get(call.response)
                assert b"event: ping" not in recorded
                assert b"keepalive" not in recorded
                assert f"event: {begin[0]}".encode() in recorded

    asyncio.run(main())


def test_official_clients_take_keep_alives(proxy_stage: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from rollout.proxy import outlet

    monkeypatch.setattr(outlet, "PING_S", 0.05)

    def read(url: str, key: str) -> tuple[str, str]:
        ours = openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0)
        theirs = anthropic.Anthropic(base_url=url, api_key=key, max_retries=0)
        with ours.responses.stream(model="m", input="go") as events:
            text = events.get_final_response().output_text
        with theirs.messages.stream(model="m", max_tokens=9, messages=[{"role": "user", "content": "go"}]) as stream:
            other = stream.get_final_text()
        ours.close()
        theirs.close()
        return text, other

    async def main() -> None:
        async with proxy_stage() as stage:
            key = stage.add("r")
            stage.engine.script = lambda _: stage.say("D", pause=0.3)
            assert await asyncio.to_thread(read, f"{stage.url}/rollouts/r", key) == ("D", "D")

    asyncio.run(main())


def test_rules_and_what_was_left_out_stand_in_the_record(proxy_stage: Any) -> None:
    async def main() -> None:
        async with proxy_stage() as stage:
            stage.add("r")
            stage.engine.script = lambda _: stage.say("Done.")
            text = [{"type": "input_text", "text": "[Mon 2026-11-30 21:12 UTC] go"}]
            await ask(
                stage,
                "r",
                "responses",
                {"input": [{"role": "user", "content": text}], "tools": [{"type": "web_search"}]},
            )
            (call,) = stage.store.calls.of("r")
            assert call.rules == ("single-text", "clock")
            assert call.left_out == ("tools[0]: web_search",)
            assert b"21:12" in stage.store.blobs.get(call.request)

    asyncio.run(main())


def test_a_second_turn_extends_the_first_in_each_dialect(proxy_stage: Any) -> None:
    """What a client makes of an answer and sends back is read as the very message that was recorded."""

    async def turn(stage: Stage, name: str) -> None:
        stage.add(name)
        stage.engine.queue = [stage.say(CALL), stage.say("Done.")]
        answer = await ask(stage, name, name, body(name))
        sent = body(name)
        if name == "chat":
            sent["messages"].append(answer["choices"][0]["message"])
            call_id = answer["choices"][0]["message"]["tool_calls"][0]["id"]
            sent["messages"].append({"role": "tool", "tool_call_id": call_id, "content": "open"})
        elif name == "responses":
            sent["input"] += answer["output"]
            call_id = answer["output"][0]["call_id"]
            sent["input"].append({"type": "function_call_output", "call_id": call_id, "output": "open"})
        else:
            sent["messages"].append({"role": "assistant", "content": answer["content"]})
            result = {"type": "tool_result", "tool_use_id": answer["content"][0]["id"], "content": "open"}
            sent["messages"].append({"role": "user", "content": [result]})
        await ask(stage, name, name, sent)
        first, second = stage.store.calls.of(name)
        ids = first.prompt_ids + first.completion_ids
        assert second.prompt_ids[: len(ids)] == ids
        assert second.fork_reason == ""
        assert first.delivered

    async def main() -> None:
        async with proxy_stage() as stage:
            for name in DIALECTS:
                await turn(stage, name)

    asyncio.run(main())


def test_keys_are_checked_on_every_surface(proxy_stage: Any) -> None:
    async def main() -> None:
        async with proxy_stage() as stage:
            stage.add("r")
            stage.add("other")
            for path in (*PATHS.values(), "messages/count_tokens"):
                url = f"{stage.url}/rollouts/r/v1/{path}"
                for key in ("", "x" * 40, stage.keys["other"]):
                    async with stage.http.post(url, data=b"{}", headers={"x-api-key": key}) as response:
                        assert response.status == 401
            assert stage.engine.asked == []

    asyncio.run(main())
