"""Chat Completions through a real proxy and a scripted engine: answers, streams, records, bad histories."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from openai import OpenAI
from proxy_fakes import TOOLS, Reply, Stage, call_text, events, joined, until

from rollout.blobs import digest_of
from rollout.errors import FailureClass
from rollout.proxy.messages import load_message
from rollout.types import ModelCall, VersionSpan

USER = {"role": "user", "content": "Close ticket 7 — ✓ 😀"}
CALL = call_text("get_ticket", {"id": 7})


def body(*messages: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"model": "any", "messages": list(messages) or [USER], "tools": TOOLS, **fields}


def only(stage: Stage, name: str = "r") -> ModelCall:
    (call,) = stage.store.calls.of(name)
    return call


def noted(stage: Stage) -> tuple[int, int, int | None]:
    """Calls, tokens and weight version on the rollout's row: written just behind the call itself."""
    rollout = stage.store.rollouts.get("r")
    assert rollout
    return rollout.calls, rollout.tokens, rollout.weight_version


def test_unary_answer_is_recorded_id_by_id(proxy_stage: Any) -> None:
    async def main() -> None:
        async with proxy_stage() as stage:
            stage.add("r")
            reply = stage.say("Done, größer 😀.", versions=(), step=2)
            stage.engine.queue = [reply]
            sent = json.dumps(body(temperature=0.1, top_p=0.2, seed=9, note="kept")).encode()
            status, answer = await stage.ask("r", sent)
            assert status == 200
            choice = answer["choices"][0]
            assert choice["message"] == {"role": "assistant", "content": "Done, größer 😀."}
            assert choice["finish_reason"] == "stop"
            call = only(stage)
            assert call.completion_ids == reply.ids
            assert call.logprobs == pytest.approx([-0.25 - i / 1000 for i in range(len(reply.ids))])
            assert call.versions == (VersionSpan(version=0, tokens=len(reply.ids)),)
            assert stage.codec.decode(call.prompt_ids).endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")
            assert "Close ticket 7 — ✓ 😀<|im_end|>" in stage.codec.decode(call.prompt_ids)
            asked = stage.engine.asked[0]
            assert asked["prompt"] == list(call.prompt_ids)
            assert (asked["temperature"], asked["top_p"], asked["seed"], asked["max_tokens"]) == (0.7, 0.9, 5, 64)
            assert answer["usage"] == {
                "prompt_tokens": len(call.prompt_ids),
                "completion_tokens": len(reply.ids),
                "total_tokens": len(call.prompt_ids) + len(reply.ids),
            }
            assert stage.store.blobs.get(call.request) == sent
            assert json.loads(stage.store.blobs.get(call.response)) == answer
            await until(lambda: only(stage).delivered)
            assert (call.index, call.stream, call.fork_reason, call.malformed) == (0, False, "", False)
            assert load_message(call.messages[-1]).content == "Done, größer 😀."
            await until(lambda: noted(stage)[2] is not None)
            assert noted(stage) == (1, len(reply.ids), 0)

    asyncio.run(main())


@pytest.mark.parametrize("step", [1, 3, 100])
@pytest.mark.parametrize(
    "text",
    [
        "Done.",
        f"Let me see.\n{CALL}",
        CALL,
        f"{CALL}\n{call_text('get_ticket', {'id': 8})}",
        "<tool",
        "😀 <tool_cal l>",
    ],
)
def test_stream_adds_up_to_the_unary_answer(proxy_stage: Any, text: str, step: int) -> None:
    async def main() -> None:
        async with proxy_stage() as stage:
            stage.add("u")
            stage.add("s")
            stage.engine.script = lambda _: stage.say(text, step=step)
            _, answer = await stage.ask("u", body())
            raw = await stage.stream("s", body(stream_options={"include_usage": True}))
            message = answer["choices"][0]["message"]
            streamed = joined(raw)
            assert streamed["content"] == (message["content"] or "")
            assert streamed["tool_calls"] == message.get("tool_calls", [])
            assert streamed["finish_reason"] == answer["choices"][0]["finish_reason"]
            assert events(raw)[-1]["usage"] == answer["usage"]
            unary, whole = only(stage, "u"), only(stage, "s")
            assert unary.completion_ids == whole.completion_ids
            assert unary.messages == whole.messages
            assert stage.store.blobs.get(whole.response) == raw

    asyncio.run(main())


def test_tool_call_has_json_arguments_and_no_text(proxy_stage: Any) -> None:
    async def main() -> None:
        async with proxy_stage() as stage:
            stage.add("r")
            stage.engine.queue = [stage.say(call_text("get_ticket", {"id": 7, "flag": False, "ort": "Köln"}))]
            _, answer = await stage.ask("r", body())
            message = answer["choices"][0]["message"]
            assert message["content"] is None
            assert answer["choices"][0]["finish_reason"] == "tool_calls"
            function = message["tool_calls"][0]["function"]
            assert function["name"] == "get_ticket"
            assert json.loads(function["arguments"]) == {"id": 7, "flag": False, "ort": "Köln"}
            assert "Köln" in function["arguments"]

    asyncio.run(main())


@pytest.mark.bugs
def test_bug_3_every_sampled_id_is_recorded_once_and_counted(proxy_stage: Any) -> None:
    """Text that was held back, or that the stop id hides, still has its ids in record and usage."""

    async def main() -> None:
        async with proxy_stage() as stage:
            stage.add("r")
            reply = stage.say(f"a\n<tool_c\n{CALL}", step=2)
            stage.engine.queue = [reply]
            raw = await stage.stream("r", body(stream_options={"include_usage": True}))
            assert only(stage).completion_ids == reply.ids
            assert events(raw)[-1]["usage"]["completion_tokens"] == len(reply.ids)
            assert sum(span.tokens for span in only(stage).versions) == len(reply.ids)
            assert len(only(stage).logprobs or ()) == len(reply.ids)

    asyncio.run(main())


@pytest.mark.bugs
def test_bug_4_tool_markup_never_reaches_the_stream_as_text(proxy_stage: Any) -> None:
    async def main() -> None:
        async with proxy_stage() as stage:
            stage.add("r")
            stage.engine.queue = [stage.say(f"Look: <b>\n{CALL}")]
            raw = await stage.stream("r", body())
            assert joined(raw)["content"] == "Look: <b>"
            assert b"<tool_call>" not in raw

    asyncio.run(main())


@pytest.mark.bugs
@pytest.mark.parametrize("arguments", ['{"a": 1', "[]", "null", "3", None, '{"a": NaN}'])
def test_bug_7_a_bad_call_in_the_history_is_kept_as_text(proxy_stage: Any, arguments: Any) -> None:
    async def main() -> None:
        async with proxy_stage() as stage:
            stage.add("r")
            stage.engine.queue = [stage.say("ok")]
            bad = {"id": "c1", "type": "function", "function": {"name": "get_ticket", "arguments": arguments}}
            history = [
                USER,
                {"role": "assistant", "content": None, "tool_calls": [bad]},
                {"role": "tool", "tool_call_id": "c1", "content": "bad arguments"},
            ]
            status, _ = await stage.ask("r", body(*history))
            assert status == 200
            shown = json.dumps(arguments) if not isinstance(arguments, str) else arguments
            call = only(stage)
            assert f'{{"name": "get_ticket", "arguments": {shown}}}' in stage.codec.decode(call.prompt_ids)
            assert "tool_calls" not in call.messages[1]

    asyncio.run(main())


@pytest.mark.bugs
@pytest.mark.parametrize("stream", [False, True])
def test_bug_8_parallel_calls_keep_ids_and_arguments(proxy_stage: Any, stream: bool) -> None:
    async def main() -> None:
        async with proxy_stage() as stage:
            stage.add("r")
            second = call_text("get_ticket", {"id": 8})
            stage.engine.queue = [stage.say(f"{CALL}\n{second}"), stage.say("Done.")]
            if stream:
                calls = joined(await stage.stream("r", body()))["tool_calls"]
            else:
                calls = (await stage.ask("r", body()))[1]["choices"][0]["message"]["tool_calls"]
            assert [json.loads(c["function"]["arguments"])["id"] for c in calls] == [7, 8]
            assert len({c["id"] for c in calls}) == 2
            turns = [{"role": "tool", "tool_call_id": c["id"], "content": f'{{"n": {i}}}'} for i, c in enumerate(calls)]
            status, _ = await stage.ask("r", body(USER, {"role": "assistant", "tool_calls": calls}, *turns))
            assert status == 200
            one, two = stage.store.calls.of("r")
            assert two.prompt_ids[: len(one.prompt_ids + one.completion_ids)] == one.prompt_ids + one.completion_ids
            assert two.fork_reason == ""

    asyncio.run(main())


@pytest.mark.parametrize(
    ("text", "finish"),
    [
        ('<tool_call>\n{"name": "get_ticket", "arguments": {"id": 7}\n</tool_call>', "stop"),
        ('<tool_call>\n{"name": "get_ticket", "argum', "length"),
        ('I will.\n<tool_call>\n{"arguments": {}}\n</tool_call>', "stop"),
        ('<tool_call>\n{"name": "get_ticket", "arguments": [1]}\n</tool_call>', "stop"),
        ('<tool_call>\n{"name": "get_ticket", "arguments": {"x": 1e999}}\n</tool_call>', "stop"),
        ('<tool_call>\n{"name": "get_ticket", "arguments": {"x": "\\ud800"}}\n</tool_call>', "stop"),
        (f"{CALL}\n<tool_call>\nno json\n</tool_call>", "stop"),
        (
            '<tool_call>\n{"name": "get_ticket", "arguments": {"x": ' + 300 * "[" + 300 * "]" + "}}\n</tool_call>",
            "stop",
        ),
        ("<tool_call></tool_call>", "stop"),
        ("</tool_call><tool_call>", "length"),
    ],
)
def test_malformed_call_comes_back_as_text_and_extends(proxy_stage: Any, text: str, finish: str) -> None:
    async def main() -> None:
        async with proxy_stage() as stage:
            stage.add("r")
            end = "<|im_end|>" if finish == "stop" else ""
            stage.engine.queue = [stage.say(text, end=end, finish=finish), stage.say("sorry")]
            _, answer = await stage.ask("r", body())
            assert answer["choices"][0]["message"] == {"role": "assistant", "content": text}
            assert answer["choices"][0]["finish_reason"] == finish
            again = {"role": "user", "content": "again"}
            status, _ = await stage.ask("r", body(USER, answer["choices"][0]["message"], again))
            assert status == 200
            one, two = stage.store.calls.of("r")
            assert one.malformed
            assert not two.malformed
            assert two.prompt_ids[: len(one.prompt_ids + one.completion_ids)] == one.prompt_ids + one.completion_ids

    asyncio.run(main())


def test_empty_garbage_and_endless_answers_are_answers(proxy_stage: Any) -> None:
    async def main() -> None:
        async with proxy_stage() as stage:
            for name in ("empty", "garbage", "endless"):
                stage.add(name)
            (end,) = stage.codec.encode("<|im_end|>")
            stage.engine.queue = [Reply((end,))]
            _, answer = await stage.ask("empty", body())
            assert answer["choices"][0]["message"]["content"] == ""
            garbage = tuple((i * 37) % 300 + 9 for i in range(60))
            stage.engine.queue = [Reply(garbage, finish="length")]
            raw = await stage.stream("garbage", body())
            assert joined(raw)["content"] == stage.codec.decode(garbage)
            stage.engine.queue = [Reply(tuple(stage.codec.encode("x" * 64)), finish="length")]
            _, answer = await stage.ask("endless", body())
            assert answer["choices"][0]["finish_reason"] == "length"

    asyncio.run(main())


def test_think_blocks_become_reasoning(proxy_stage: Any) -> None:
    async def main() -> None:
        async with proxy_stage() as stage:
            stage.add("r")
            stage.add("s")
            stage.engine.script = lambda _: stage.say("<think>\nhm, 7\n</think>\n\nDone.")
            _, answer = await stage.ask("r", body())
            message = answer["choices"][0]["message"]
            assert (message["reasoning_content"], message["content"]) == ("hm, 7", "Done.")
            raw = await stage.stream("s", body())
            deltas = [c["delta"] for e in events(raw) for c in e["choices"]]
            assert "".join(d.get("reasoning_content", "") for d in deltas) == "hm, 7"
            assert "".join(d.get("content", "") for d in deltas) == "Done."

    asyncio.run(main())


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"n": 2}, "n"),
        ({"logit_bias": {"5": 100}}, "logit_bias"),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "get_ticket"}}}, "tool_choice"),
        ({"stop": ["x"]}, "stop"),
        ({"logprobs": True}, "logprobs"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"stream": "yes"}, "stream"),
        ({"tools": [{"type": "web_search"}]}, "tools[0]"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "messages[0].content[0]",
        ),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(proxy_stage: Any, fields: dict[str, Any], named: str) -> None:
    async def main() -> None:
        async with proxy_stage() as stage:
            stage.add("r")
            status, answer = await stage.ask("r", {**body(), **fields})
            assert (status, answer["error"]["param"]) == (400, named)
            assert named in answer["error"]["message"]
            assert stage.engine.asked == []

    asyncio.run(main())


@pytest.mark.parametrize("raw", [b"", b"{", b"[]", b'{"messages": NaN}', b"\xff\xfe", b"[" * 100_000, b'{"n": 1e999}'])
def test_bad_bytes_are_refused(proxy_stage: Any, raw: bytes) -> None:
    async def main() -> None:
        async with proxy_stage() as stage:
            stage.add("r")
            status, answer = await stage.ask("r", raw)
            assert (status, answer["error"]["code"]) == (400, "bad_json")

    asyncio.run(main())


def test_harmless_fields_and_parts_are_taken(proxy_stage: Any) -> None:
    async def main() -> None:
        async with proxy_stage() as stage:
            stage.add("r")
            stage.engine.queue = [stage.say("ok")]
            parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two \ud800"}]
            sent = body(
                {"role": "developer", "content": "be brief"},
                {"role": "user", "content": parts},
                max_completion_tokens=7,
                max_tokens=9,
                parallel_tool_calls=True,
                reasoning_effort="high",
                tool_choice="none",
                store=False,
            )
            assert (await stage.ask("r", sent))[0] == 200
            call = only(stage)
            text = stage.codec.decode(call.prompt_ids)
            assert "<|im_start|>system\nbe brief<|im_end|>" in text
            assert "one\ntwo ?<|im_end|>" in text
            assert "get_ticket" not in text
            assert stage.engine.asked[0]["max_tokens"] == 7

    asyncio.run(main())


def test_weight_versions_are_stamped_per_span(proxy_stage: Any) -> None:
    async def main() -> None:
        async with proxy_stage() as stage:
            stage.add("r")
            ids = tuple(stage.codec.encode("abcd")) + tuple(stage.codec.encode("<|im_end|>"))
            stage.engine.queue = [Reply(ids, versions=(3,) * 2 + (4,) * (len(ids) - 2))]
            await stage.ask("r", body())
            spans = [(span.version, span.tokens) for span in only(stage).versions]
            assert spans == [(3, 2), (4, len(ids) - 2)]
            await until(lambda: noted(stage)[2] is not None)
            assert noted(stage) == (1, len(ids), 3)

    asyncio.run(main())


@pytest.mark.bugs
@pytest.mark.parametrize("fault", ["line", "error", "cut", "no_ids", "no_logprobs", "html", "usage"])
@pytest.mark.parametrize("stream", [False, True])
def test_bug_27_and_86_a_broken_engine_leaves_a_failed_record(proxy_stage: Any, fault: str, stream: bool) -> None:
    async def main() -> None:
        async with proxy_stage() as stage:
            stage.add("r")
            stage.engine.queue = [stage.say("a longer answer", fault=fault, pause=0.01, finish="")]
            async with stage.post("r", body(stream=stream)) as response:
                raw = await response.read()
                begun = stream and fault in ("line", "error", "cut", "usage")
                assert response.status == (200 if begun else 502)
            error = events(raw)[-1] if begun else json.loads(raw)
            assert error["error"]["code"] == "engine_error"
            call = only(stage)
            assert call.failure
            assert call.failure.kind is FailureClass.INFRASTRUCTURE
            assert not call.delivered
            assert len(call.messages) == 1
            stage.engine.queue = [stage.say("fine")]
            assert (await stage.ask("r", body()))[0] == 200
            assert [c.index for c in stage.store.calls.of("r")] == [0, 1]

    asyncio.run(main())


@pytest.mark.bugs
def test_bug_83_the_sampled_ids_own_logprob_is_recorded(proxy_stage: Any) -> None:
    async def main() -> None:
        async with proxy_stage() as stage:
            stage.add("r")
            reply = stage.say("ok", fault="top_first")
            stage.engine.queue = [reply]
            assert (await stage.ask("r", body()))[0] == 200
            assert only(stage).logprobs == tuple(-3.0 - i for i in reply.ids)

    asyncio.run(main())


@pytest.mark.parametrize("stream", [False, True])
def test_the_openai_client_reads_the_answers(proxy_stage: Any, stream: bool) -> None:
    async def main() -> None:
        async with proxy_stage() as stage:
            key = stage.add("r")
            stage.engine.queue = [stage.say(f"Let me see.\n{CALL}")]
            client = OpenAI(base_url=f"{stage.url}/rollouts/r/v1", api_key=key, max_retries=0)

            def ask() -> tuple[str, str, str]:
                if not stream:
                    found = client.chat.completions.create(model="m", messages=[USER], tools=TOOLS)  # type: ignore
                    message = found.choices[0].message
                    call = message.tool_calls[0].function
                    return message.content, call.name, call.arguments
                text, name, arguments = "", "", ""
                for chunk in client.chat.completions.create(model="m", messages=[USER], tools=TOOLS, stream=True):  # type: ignore
                    delta = chunk.choices[0].delta
                    text += delta.content or ""
                    for part in delta.tool_calls or ():
                        name += part.function.name or ""
                        arguments += part.function.arguments or ""
                return text, name, arguments

            assert await asyncio.to_thread(ask) == ("Let me see.", "get_ticket", '{"id": 7}')
            client.close()

    asyncio.run(main())


def test_request_digest_names_the_bytes(proxy_stage: Any) -> None:
    async def main() -> None:
        async with proxy_stage() as stage:
            stage.add("r")
            stage.engine.queue = [stage.say("ok")]
            raw = json.dumps(body()).encode()
            await stage.ask("r", raw)
            assert only(stage).request == digest_of(raw)

    asyncio.run(main())
