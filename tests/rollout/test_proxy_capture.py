"""Streams of ids cut into text, reasoning and calls: pieces always add up, code points are never split."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from proxy_fakes import call_text

from rollout.errors import EngineError
from rollout.inference.base import Chunk
from rollout.proxy.capture import Capture, Splitter, TextStream
from rollout.proxy.dialects.base import Answer, Piece
from rollout.proxy.render import CALL_MARK, Codec
from rollout.types import VersionSpan

MARKS = ["<think>", "</think>", "<tool_call>", "</tool_call>", "\n", "<", ">", "tool_call", "think", "a", "😀", " "]
snippets = st.lists(st.sampled_from(MARKS), max_size=14).map("".join)


def cut(text: str, at: Sequence[int]) -> list[str]:
    points = sorted({0, len(text), *(i % (len(text) + 1) for i in at)})
    return [text[a:b] for a, b in itertools.pairwise(points)]


def split(parts: Sequence[str], mark: str) -> tuple[str, str, str]:
    """(reasoning, content, held) of a text that comes in `parts`."""
    splitter = Splitter(mark)
    pieces = [piece for part in parts for piece in splitter.feed(part)] + splitter.finish()
    assert all(piece.text for piece in pieces)
    by = {kind: "".join(p.text for p in pieces if p.kind == kind) for kind in ("reasoning", "content")}
    return by["reasoning"], by["content"], splitter.held


@settings(max_examples=400)
@given(snippets, st.lists(st.integers(0, 200), max_size=8), st.sampled_from(["", CALL_MARK]))
def test_how_a_text_arrives_changes_nothing(text: str, at: list[int], mark: str) -> None:
    assert split(cut(text, at), mark) == split([text], mark)


@settings(max_examples=300)
@given(snippets, st.lists(st.integers(0, 200), max_size=8))
def test_no_call_markup_is_given_out_as_text(text: str, at: list[int]) -> None:
    reasoning, content, held = split(cut(text, at), CALL_MARK)
    assert CALL_MARK not in content
    assert CALL_MARK not in reasoning
    assert held == "" or held.lstrip("\n").startswith(CALL_MARK)


@given(snippets)
def test_without_tools_a_text_is_only_split_by_thinking(text: str) -> None:
    _, content, held = split([text], "")
    assert held == ""
    if not text.lstrip().startswith("<think>"):
        assert content == text


def test_text_before_a_call_loses_the_one_newline_that_the_template_adds() -> None:
    assert split(["Look:\n\n<tool_call>x"], CALL_MARK) == ("", "Look:\n", "\n<tool_call>x")
    assert split(["\n<tool_call>x"], CALL_MARK) == ("", "", "\n<tool_call>x")


@settings(max_examples=300)
@given(data=st.data())
def test_random_ids_stream_to_exactly_their_text(proxy_codec: Codec, data: st.DataObject) -> None:
    ids = data.draw(st.lists(st.integers(0, 330), max_size=40))
    at = data.draw(st.lists(st.integers(0, 40), max_size=6))
    points = sorted({0, len(ids), *(i for i in at if i <= len(ids))})
    stream = TextStream(proxy_codec)
    out = [stream.feed(tuple(ids[a:b])) for a, b in itertools.pairwise(points)]
    out.append(stream.feed((), last=True))
    assert "".join(out) == proxy_codec.decode(ids)


@given(text=st.text(alphabet=st.characters(blacklist_categories=("Cs",)), max_size=30))
def test_no_code_point_is_split(proxy_codec: Codec, text: str) -> None:
    stream = TextStream(proxy_codec)
    ids = proxy_codec.encode(text)
    out = [stream.feed((token,), last=n == len(ids) - 1) for n, token in enumerate(ids)]
    assert "".join(out) == text
    assert "\ufffd" in text or not any("\ufffd" in part for part in out)


def captured(codec: Codec, text: str, *, tools: bool, finish: str = "stop") -> tuple[Answer, list[Piece], Capture]:
    capture = Capture(codec, (1, 2), tools=tools)
    ids = codec.encode(text)
    pieces: list[Piece] = []
    for n, token in enumerate(ids):
        pieces += capture.feed(Chunk((token,), (-0.5,), n // 4, finish if n == len(ids) - 1 else ""))
    answer, rest = capture.finish("call_0")
    return answer, pieces + rest, capture


@settings(max_examples=150, deadline=None)
@given(text=snippets, tools=st.booleans(), finish=st.sampled_from(["stop", "length"]))
def test_pieces_add_up_to_the_answer(proxy_codec: Codec, text: str, tools: bool, finish: str) -> None:
    answer, pieces, capture = captured(proxy_codec, text + "<|im_end|>", tools=tools, finish=finish)
    assert "".join(p.text for p in pieces if p.kind == "content") == answer.content
    assert "".join(p.text for p in pieces if p.kind == "reasoning") == answer.reasoning
    assert answer.completion_tokens == len(capture.ids) == len(capture.logprobs or ())
    assert sum(span.tokens for span in capture.versions) == len(capture.ids)


def test_calls_without_tools_in_the_request_are_text(proxy_codec: Codec) -> None:
    text = call_text("get_ticket", {"id": 7})
    answer, _, _ = captured(proxy_codec, text + "<|im_end|>", tools=False)
    assert (answer.content, answer.tool_calls, answer.malformed) == (text, (), False)


def test_a_call_spelt_without_control_tokens_is_malformed(proxy_codec: Codec) -> None:
    """The parser sees none, so the markup is the answer's text, and it is told."""
    capture = Capture(proxy_codec, (1,), tools=True)
    ids = [i for part in ("<tool", "_call", ">{}") for i in proxy_codec.encode(part)]
    assert proxy_codec.decode(ids).startswith("<tool_call>")
    assert capture.feed(Chunk(tuple(ids), None, 0, "length")) == []
    answer, _ = capture.finish("call_0")
    assert (answer.content, answer.malformed) == ("<tool_call>{}", True)
    assert capture.logprobs is None


def test_spans_of_one_version_are_joined(proxy_codec: Codec) -> None:
    *_, capture = captured(proxy_codec, "abcdefgh", tools=False, finish="length")
    assert [s.version for s in capture.versions] == sorted({s.version for s in capture.versions})
    assert capture.versions[0] == VersionSpan(version=0, tokens=4)


@pytest.mark.parametrize(
    "chunks",
    [
        [Chunk((5,), (-0.1, -0.2), 0, "stop")],
        [Chunk((5,), (-0.1,), 0, "")],
        [Chunk((5,), (-0.1,), 0, "stop"), Chunk((6,), (-0.1,), 0, "")],
        [],
    ],
)
def test_wrong_chunks_are_engine_errors(proxy_codec: Codec, chunks: list[Chunk]) -> None:
    capture = Capture(proxy_codec, (1,), tools=False)

    def take() -> None:
        for chunk in chunks:
            capture.feed(chunk)
        capture.finish("call_0")

    with pytest.raises(EngineError):
        take()
