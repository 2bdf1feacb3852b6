"""Which ids a prompt gets: the template's text always, recorded ids where they read the same, forks with a reason."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from proxy_fakes import TOOLS, call_text, save_codec

from rollout.proxy.codecs import load_codec
from rollout.proxy.dialects.base import CallRequest, Refused
from rollout.proxy.forks import kind_of
from rollout.proxy.history import Recorded, make_prompt
from rollout.proxy.messages import Message, ToolCall, continues, load_message
from rollout.proxy.render import Codec
from rollout.types import HistoryMode

USER = Message("user", "Close ticket 7")
CALL = ToolCall("c1", "get_ticket", {"id": 7})
RESULT = Message("tool", '{"id": 7, "now": 9}', tool_call_id="c1")
TEMPLATE, RETAIN = HistoryMode.TEMPLATE, HistoryMode.RETAIN


def request(*messages: Message, tools: Any = TOOLS) -> CallRequest:
    return CallRequest(messages=messages, tools=tuple(tools))


def record(codec: Codec, asked: CallRequest, completion: list[int], answer: Message, before: Any = ()) -> Recorded:
    """A delivered call that sampled `completion` and was read as `answer`."""
    prompt = make_prompt(codec, asked, list(before), TEMPLATE)
    return Recorded(
        index=len(before),
        prompt=prompt.ids,
        completion=tuple(completion),
        messages=(*asked.messages, answer),
        tools=asked.tools,
        request="",
        response="",
        delivered=True,
    )


def apart(codec: Codec, text: str) -> list[int]:
    """`text` in a split that no tokenizer would choose: one character at a time, control tokens whole."""
    out: list[int] = []
    for part in text.replace("<", "\0<").replace(">", ">\0").split("\0"):
        single = codec.encode(part)
        out += single if len(single) == 1 else [i for char in part for i in codec.encode(char)]
    return out


def test_the_prompt_is_the_renderers(proxy_codec: Codec) -> None:
    prompt = make_prompt(proxy_codec, request(USER), [], TEMPLATE)
    assert list(prompt.ids) == proxy_codec.render([USER], TOOLS)
    assert prompt.fork_reason == ""


@pytest.mark.parametrize("natural", [True, False])
def test_a_tool_cycle_extends_whatever_the_token_split(proxy_codec: Codec, natural: bool) -> None:
    text = call_text("get_ticket", {"id": 7}) + "<|im_end|>"
    ids = proxy_codec.encode(text) if natural else apart(proxy_codec, text)
    assert proxy_codec.decode(ids) == text
    answer = Message("assistant", tool_calls=(CALL,))
    first = record(proxy_codec, request(USER), ids, answer)
    prompt = make_prompt(proxy_codec, request(USER, answer, RESULT), [first], TEMPLATE)
    assert prompt.fork_reason == ""
    assert prompt.ids[: len(first.ids)] == first.ids
    full = proxy_codec.render([USER, answer, RESULT], TOOLS)
    assert proxy_codec.decode(prompt.ids) == proxy_codec.decode(full)
    assert (list(prompt.ids) == full) is natural


def test_an_answer_cut_by_its_length_extends(proxy_codec: Codec) -> None:
    answer = Message("assistant", "I was go")
    first = record(proxy_codec, request(USER), apart(proxy_codec, "I was go"), answer)
    prompt = make_prompt(proxy_codec, request(USER, answer, USER), [first], TEMPLATE)
    assert prompt.fork_reason == ""
    assert prompt.ids[: len(first.ids)] == first.ids
    assert proxy_codec.decode(prompt.ids[len(first.ids) :]).startswith("<|im_end|>\n<|im_start|>user\nClose")


def test_forks_name_their_reason_and_keep_the_templates_text(proxy_codec: Codec) -> None:
    codec = proxy_codec
    tight = '<tool_call>{"name":"get_ticket","arguments":{"id":7}}</tool_call><|im_end|>'
    answer = Message("assistant", tool_calls=(CALL,))
    plain = Message("assistant", "Done.")
    loose = record(codec, request(USER), codec.encode(tight), answer)
    said = record(codec, request(USER), codec.encode("Done.<|im_end|>"), plain)
    thought = record(
        codec,
        request(USER),
        codec.encode("<think>\nhm\n</think>\n\nDone.<|im_end|>"),
        replace(plain, reasoning="hm"),
    )
    cases = [
        (loose, request(USER, answer, RESULT), "non-canonical text"),
        (said, request(USER, Message("assistant", "Done!"), USER), "client edit at token {said}"),
        (said, request(Message("system", "new"), USER, plain, USER), "system changed"),
        (said, request(USER), "history shortened"),
        (said, request(USER, plain, USER, tools=()), "tool list changed"),
        (thought, request(USER, replace(plain, reasoning="hm"), USER), "reasoning stripped"),
        (thought, request(USER, plain, USER), "reasoning stripped"),
    ]
    at = len(said.prompt) + len(codec.encode("Done"))
    for earlier, asked, reason in cases:
        prompt = make_prompt(codec, asked, [earlier], TEMPLATE)
        assert prompt.fork_reason == reason.format(said=at)
        assert list(prompt.ids) == codec.render(asked.messages, asked.tools)


def test_a_fork_still_reuses_the_call_before(proxy_codec: Codec) -> None:
    codec = proxy_codec
    answer = Message("assistant", tool_calls=(CALL,))
    one = record(codec, request(USER), apart(codec, call_text("get_ticket", {"id": 7}) + "<|im_end|>"), answer)
    two = record(
        codec, request(USER, answer, RESULT), codec.encode("Done.<|im_end|>"), Message("assistant", "Done."), [one]
    )
    assert two.prompt[: len(one.ids)] == one.ids
    edited = request(USER, answer, RESULT, Message("assistant", "Done, I think."), USER)
    prompt = make_prompt(codec, edited, [one, two], TEMPLATE)
    assert kind_of(prompt.fork_reason) == "client edit"
    assert prompt.ids[: len(one.ids)] == one.ids


def test_retain_keeps_recorded_ids_where_the_message_is_equal(proxy_codec: Codec) -> None:
    codec = proxy_codec
    tight = '<tool_call>{"name":"get_ticket","arguments":{"id":7}}</tool_call><|im_end|>'
    answer = Message("assistant", tool_calls=(CALL,))
    first = record(codec, request(USER), codec.encode(tight), answer)
    prompt = make_prompt(codec, request(USER, answer, RESULT), [first], RETAIN)
    assert prompt.fork_reason == ""
    assert prompt.ids[: len(first.ids)] == first.ids
    edited = request(USER, Message("assistant", "other"), USER)
    assert kind_of(make_prompt(codec, edited, [first], RETAIN).fork_reason) == "client edit"


def test_ids_of_tool_calls_do_not_matter_and_names_do() -> None:
    one = Message("assistant", tool_calls=(CALL,))
    assert continues([USER, replace(one, tool_calls=(replace(CALL, id="x"),)), RESULT], [USER, one])
    assert not continues([USER, replace(one, tool_calls=(replace(CALL, name="x"),))], [USER, one])
    assert not continues([USER], [USER, one])


def test_the_stock_template_serves_an_unknown_family(tmp_path: Path) -> None:
    codec = load_codec(save_codec(tmp_path / "plain", renderer="default"), "default")
    ids = codec.render([USER], ())
    assert codec.decode(ids) == "<|im_start|>user\nClose ticket 7<|im_end|>\n<|im_start|>assistant\n"
    assert codec.call_mark == ""
    first = record(codec, request(USER, tools=()), apart(codec, "Done.<|im_end|>"), Message("assistant", "Done."))
    prompt = make_prompt(codec, request(USER, Message("assistant", "Done."), USER, tools=()), [first], TEMPLATE)
    assert prompt.fork_reason == ""
    assert prompt.ids[: len(first.ids)] == first.ids


def test_a_template_that_refuses_is_a_clear_400(tmp_path: Path) -> None:
    folder = save_codec(tmp_path / "strict", renderer="default")
    (folder / "chat_template.jinja").write_text("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(Refused, match="roles must alternate") as caught:
        load_codec(folder, "default").render([USER], ())
    assert caught.value.status == 400


texts = st.text(alphabet=st.characters(blacklist_categories=("Cs",)), max_size=40)
arguments = st.dictionaries(texts, st.one_of(texts, st.integers(-9, 9), st.booleans(), st.none()), max_size=3)
tool_calls = st.builds(ToolCall, id=texts, name=st.sampled_from(["get_ticket", "x"]), arguments=arguments)
messages = st.builds(
    Message,
    role=st.sampled_from(["system", "user", "assistant", "tool"]),
    content=texts,
    reasoning=texts,
    tool_calls=st.lists(tool_calls, max_size=2).map(tuple),
    tool_call_id=texts,
)


@given(messages)
def test_messages_survive_their_record(message: Message) -> None:
    assert load_message(message.dump()) == message


@settings(max_examples=60, deadline=None)
@given(content=texts, following=texts)
def test_any_sampled_text_extends_or_forks_but_always_reads_as_the_template(
    proxy_codec: Codec, content: str, following: str
) -> None:
    answer = Message("assistant", content)
    first = record(proxy_codec, request(USER), apart(proxy_codec, content + "<|im_end|>"), answer)
    asked = request(USER, answer, Message("user", following))
    prompt = make_prompt(proxy_codec, asked, [first], TEMPLATE)
    full = proxy_codec.render(asked.messages, TOOLS)
    assert proxy_codec.decode(prompt.ids) == proxy_codec.decode(full)
    assert prompt.ids[: len(first.ids)] == first.ids or prompt.fork_reason
