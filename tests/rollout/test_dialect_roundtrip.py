"""Whatever surface a history comes through it means the same, and official clients read whole and streamed answers
alike."""

from __future__ import annotations

import json
from typing import Any

import anthropic
import openai
import pytest
from dialect_fakes import DIALECTS, HEAD, Player, answers, body_of, conversations, play, streamed
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rollout.proxy.dialects.base import Answer, CallRequest
from rollout.proxy.messages import Message, ToolCall, load_message

ASK = [{"role": "user", "content": "Close ticket 7"}]
SLOW = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@pytest.mark.parametrize("name", DIALECTS)
@given(messages=conversations(), ascii_only=st.booleans())
@settings(max_examples=120, deadline=None)
def test_a_history_is_read_back(name: str, messages: tuple[Message, ...], ascii_only: bool) -> None:
    raw = json.dumps(body_of(name, messages), ensure_ascii=ascii_only).encode()
    found = DIALECTS[name].parse(raw)
    assert found.messages == messages
    assert tuple(load_message(m.dump()) for m in found.messages) == messages


@given(messages=conversations())
@settings(max_examples=60, deadline=None)
def test_a_history_means_the_same_in_each_dialect(messages: tuple[Message, ...]) -> None:
    read = [DIALECTS[n].parse(json.dumps(body_of(n, messages)).encode()).messages for n in DIALECTS]
    assert read[0] == read[1] == read[2]


# -- answers -------------------------------------------------------------------------------------------


def as_item(item: Any) -> dict[str, Any]:
    return dict(item.model_dump(exclude_none=True))


@pytest.mark.parametrize("name", DIALECTS)
@given(answer=answers())
@settings(max_examples=60, deadline=None)
def test_an_answer_comes_back_as_the_message_it_was(name: str, answer: Answer) -> None:
    """What the client keeps of an answer and sends again is the recorded message: no call forks over it."""
    dialect = DIALECTS[name]
    body = json.loads(dialect.whole(HEAD, CallRequest((), sealed_reasoning=True), answer))
    if name == "chat":
        sent = {"messages": [*ASK, body["choices"][0]["message"], *ASK]}
    elif name == "responses":
        sent = {"input": [*ASK, *body["output"], *ASK]}
    else:
        sent = {"messages": [*ASK, {"role": "assistant", "content": body["content"]}, *ASK]}
    assert dialect.parse(json.dumps(sent).encode()).messages[1] == answer.message()


def test_openai_client_reads_chat_answers_alike() -> None:
    def check(player: Player, url: str) -> None:
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="k", max_retries=0)

        @given(answer=answers())
        @SLOW
        def compare(answer: Answer) -> None:
            player.answer = answer
            whole = client.chat.completions.create(model="m", messages=ASK).choices[0]  # type: ignore[arg-type]
            with client.chat.completions.stream(model="m", messages=ASK) as stream:  # type: ignore[arg-type]
                last = [event.snapshot for event in stream if event.type == "chunk"][-1].choices[0]
            message = as_item(whole.message)
            assert (last.message.content or "") == (message.get("content") or "")
            calls = [as_item(c) for c in last.message.tool_calls or ()]
            for call in calls:
                call.pop("index", None)
                call["function"].pop("parsed_arguments", None)
            assert calls == message.get("tool_calls", [])
            assert last.finish_reason == whole.finish_reason
            assert getattr(last.message, "reasoning_content", "") == message.get("reasoning_content", "")
            assert [json.loads(c["function"]["arguments"]) for c in calls] == [c.arguments for c in answer.tool_calls]

        compare()
        client.close()

    play(check)


def test_openai_client_reads_responses_alike() -> None:
    def check(player: Player, url: str) -> None:
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="k", max_retries=0)

        @given(answer=answers())
        @SLOW
        def compare(answer: Answer) -> None:
            player.answer = answer
            whole = client.responses.create(model="m", input="x", include=["reasoning.encrypted_content"])
            events = list(
                client.responses.create(model="m", input="x", include=["reasoning.encrypted_content"], stream=True)
            )
            assert [e.sequence_number for e in events] == list(range(len(events)))
            assert [e.type for e in events[:2]] == ["response.created", "response.in_progress"]
            assert events[-1].type == (
                "response.incomplete" if answer.finish_reason == "length" else "response.completed"
            )
            assert as_item(events[-1].response) == as_item(whole)
            done = [as_item(e.item) for e in events if e.type == "response.output_item.done"]
            assert done == [as_item(item) for item in whole.output]
            assert whole.output_text == answer.content
            said = "".join(e.delta for e in events if e.type == "response.output_text.delta")
            thought = "".join(e.delta for e in events if e.type == "response.reasoning_text.delta")
            assert (said, thought) == (answer.content, answer.reasoning)
            told = [e.arguments for e in events if e.type == "response.function_call_arguments.done"]
            assert [json.loads(text) for text in told] == [c.arguments for c in answer.tool_calls]
            items = {e.item.id for e in events if e.type == "response.output_item.added"}
            assert items == {item.id for item in whole.output}

        compare()
        client.close()

    play(check)


def test_anthropic_client_reads_messages_alike() -> None:
    def check(player: Player, url: str) -> None:
        client = anthropic.Anthropic(base_url=url, api_key="k", max_retries=0)

        @given(answer=answers())
        @SLOW
        def compare(answer: Answer) -> None:
            player.answer = answer
            whole = client.messages.create(model="m", max_tokens=9, messages=ASK)  # type: ignore[arg-type]
            with client.messages.stream(model="m", max_tokens=9, messages=ASK) as stream:  # type: ignore[arg-type]
                last = stream.get_final_message()
            blocks = [as_item(block) for block in last.content]
            for block in blocks:
                block.pop("parsed_output", None)
            assert blocks == [as_item(block) for block in whole.content]
            assert (last.stop_reason, last.stop_sequence) == (whole.stop_reason, whole.stop_sequence)
            assert (last.usage.input_tokens, last.usage.output_tokens) == (11, answer.completion_tokens)
            assert last.id == whole.id
            calls = [b for b in blocks if b["type"] == "tool_use"]
            assert [c["input"] for c in calls] == [dict(c.arguments) for c in answer.tool_calls]

        compare()
        client.close()

    play(check)


@pytest.mark.parametrize("name", DIALECTS)
@pytest.mark.parametrize("step", [1, 4, 1000])
def test_the_cut_of_the_pieces_does_not_matter(name: str, step: int) -> None:
    answer = Answer("Über 😀 done", "hm, hm", (ToolCall("call_0_0", "f", {"a": [1, None]}),), False, "tool_calls", 3, 4)
    raw = streamed(DIALECTS[name], CallRequest(()), answer, step).decode()
    events = [json.loads(line[6:]) for line in raw.split("\n") if line.startswith("data: {")]
    text, thought = "", ""
    for event in events:
        for delta in (event.get("delta"), *(c["delta"] for c in event.get("choices", ()))):
            if isinstance(delta, dict):
                text += delta.get("content") or delta.get("text") or ""
                thought += delta.get("reasoning_content") or delta.get("thinking") or ""
        text += event["delta"] if event.get("type") == "response.output_text.delta" else ""
        thought += event["delta"] if event.get("type") == "response.reasoning_text.delta" else ""
    assert (text, thought) == (answer.content, answer.reasoning)
