"""Recorded calls as parts: what goes in comes out, and what repeats is stored once."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout.blobs import digest_of
from rollout.config import open_home
from rollout.errors import FailureClass
from rollout.store import Store, open_store, packing
from rollout.store.tables import parts
from rollout.types import CallTag, Failure, ModelCall, VersionSpan


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    opened = open_store(open_home(tmp_path))
    yield opened
    opened.close()


def append(store: Store, *calls: ModelCall, **wire: bytes) -> list[ModelCall]:
    async def main() -> list[ModelCall]:
        return [await store.calls.append(call, **wire) for call in calls]

    return asyncio.run(main())


def count_parts(store: Store) -> int:
    return store.databases[1].read(lambda c: c.execute(sa.select(sa.func.count()).select_from(parts)).scalar_one())


# -- packing -------------------------------------------------------------------------------------------


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 2**32 - 1)))
def test_ids_come_back(ids: list[int]) -> None:
    raw = packing.pack_ids(ids)
    assert raw is not None
    assert packing.unpack_ids(packing.expand_ids(packing.shrink_ids(raw))) == tuple(ids)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.floats(width=32)) | st.lists(st.floats()))
def test_logprobs_come_back_exactly(values: list[float]) -> None:
    back = packing.unpack_floats(packing.pack_floats(values))
    assert [value.hex() for value in back] == [value.hex() for value in values]


def test_float32_logprobs_take_four_bytes() -> None:
    single = [packing.struct.unpack("<f", bytes([i % 251, i % 7, i % 127, 190]))[0] for i in range(2000)]
    assert packing.pack_floats(single)[:1] == b"f"
    assert packing.pack_floats([-0.1])[:1] == b"d"


near_texts = st.tuples(st.binary(max_size=300), st.binary(max_size=50), st.binary(max_size=50), st.binary(max_size=300))


@settings(max_examples=300, deadline=None)
@given(near_texts, st.sampled_from((1, 700)))
def test_common_head_and_tail_are_the_longest(texts: tuple[bytes, bytes, bytes, bytes], times: int) -> None:
    a = texts[0] * times + texts[1] + texts[3] * times
    b = texts[0] * times + texts[2] + texts[3] * times
    head = packing.common_head(a, b)
    assert a[:head] == b[:head]
    assert head == min(len(a), len(b)) or a[head] != b[head]
    most = min(len(a), len(b)) - head
    tail = packing.common_tail(a, b, most)
    assert a[len(a) - tail :] == b[len(b) - tail :]
    assert tail == most or a[-tail - 1] != b[-tail - 1]
    quoted = packing.around(a, head, tail)
    assert packing.expand(packing.shrink(b, quoted), quoted) == b


# -- calls ---------------------------------------------------------------------------------------------

texts = st.text(st.characters(codec="utf-8"), max_size=30)
ids = st.lists(st.integers(0, 300), max_size=12).map(tuple)
values = st.none() | st.booleans() | st.integers(-9, 9) | texts
messages = st.fixed_dictionaries(
    {"role": st.sampled_from(("user", "assistant", "tool")), "content": texts},
    optional={"images": st.just([{"media_type": "image/png", "sha256": "0" * 64}]), "extra": values},
)


@st.composite
def steps(draw: st.DrawFn) -> list[dict[str, Any]]:
    """Calls of a few rollouts: each starts anew, extends an earlier one, or forks from the middle of it."""
    out: list[dict[str, Any]] = []
    for _ in range(draw(st.integers(1, 10))):
        rollout = draw(st.sampled_from("ab"))
        mine = [step for step in out if step["rollout_id"] == rollout]
        base = draw(st.sampled_from(mine)) if mine and draw(st.booleans()) else None
        before = base["prompt_ids"] + base["completion_ids"] if base else ()
        kept = before[: draw(st.integers(0, len(before)))] if draw(st.booleans()) else before
        turns = (base["messages"] if base else ()) + tuple(draw(st.lists(messages, max_size=3)))
        completion = draw(ids)
        out.append(
            {
                "rollout_id": rollout,
                "index": len(mine),
                "thread": draw(st.sampled_from(("main", "sub"))),
                "tag": draw(st.sampled_from(CallTag)),
                "messages": turns,
                "tools": ({"name": draw(texts)},) if draw(st.booleans()) else (),
                "prompt_ids": kept + draw(ids),
                "completion_ids": completion,
                "logprobs": draw(st.none() | st.just(tuple(-0.1 * i for i, _ in enumerate(completion)))),
                "versions": (VersionSpan(version=1, tokens=len(completion)),),
                "fork_reason": draw(texts),
                "latency": draw(st.floats(0, 9)),
                "failure": draw(st.none() | st.just(Failure(kind=FailureClass.CANCELLED, message="left"))),
                "delivered": draw(st.booleans()),
            }
        )
    return out


@settings(max_examples=60, deadline=None)
@given(steps(), st.data())
def test_calls_come_back_as_they_were(
    tmp_path_factory: pytest.TempPathFactory, plan: list[dict[str, Any]], data: st.DataObject
) -> None:
    """Also with a restart anywhere in between, and after another rollout's calls have been removed."""
    home = open_home(tmp_path_factory.mktemp("home"))
    stops = data.draw(st.sets(st.integers(0, len(plan))))
    store, written, wires = open_store(home), list[ModelCall](), dict[str, bytes]()
    try:
        for at, step in enumerate(plan):
            if at in stops:
                store.close()
                store = open_store(home)
            call = ModelCall(**step)
            wire = {"request": json.dumps(call.messages).encode(), "response": data.draw(st.binary(max_size=40))}
            (back,) = append(store, call, **wire)
            wires |= {digest_of(sent): sent for sent in wire.values()}
            assert (back.request, back.response) == tuple(digest_of(sent) for sent in wire.values())
            written.append(back)
        for name in "ab":
            assert store.calls.of(name) == [call for call in written if call.rollout_id == name]
        assert all(store.blobs.get(digest) == sent for digest, sent in wires.items())
        store.calls.remove(["a"])
        assert store.calls.of("b") == [call for call in written if call.rollout_id == "b"]
        assert all(
            store.blobs.get(d) == wires[d] for c in written if c.rollout_id == "b" for d in (c.request, c.response)
        )
        store.calls.remove(["b"])
        assert count_parts(store) == 0
    finally:
        store.close()


def test_ids_beyond_32_bits_and_odd_text_come_back(store: Store) -> None:
    call = ModelCall(
        rollout_id="r",
        index=0,
        prompt_ids=(-1, 2**40),
        completion_ids=(2**63,),
        logprobs=(float("-inf"),),
        messages=({"role": "user", "content": "\ud800", "n": float("inf")},),
    )
    append(store, call)
    assert store.calls.of("r") == [call]


def test_a_call_of_a_session_costs_what_is_new_in_it(store: Store) -> None:
    """20 calls over a prompt of 20,000 ids and a body of 300 KB that changes in its middle and before its end."""
    prompt, body, sizes = tuple(range(1000, 21000)), [f"x{i * i}" for i in range(30000)], []
    for index in range(20):
        body.insert(-2, f"new message {index}")
        body[100] = f"clock {index}"
        call = ModelCall(rollout_id="r", index=index, prompt_ids=prompt, completion_ids=(7, 8, index))
        append(store, call, request=" ".join(body).encode(), response=b"data: x\n\n" * 40)
        sizes.append(store.calls.size(["r"]))
        prompt += (7, 8, index, *range(50))
    grown = [b - a for a, b in pairwise(sizes)]
    assert max(grown) < 2500 < sizes[0] / 20


def test_equal_prompts_tools_and_messages_of_two_rollouts_are_stored_once(store: Store) -> None:
    same = {"prompt_ids": tuple(range(500)), "tools": ({"name": "t"},), "messages": ({"role": "user", "content": "u"},)}
    append(store, ModelCall(rollout_id="a", index=0, completion_ids=(1,), **same))
    before = count_parts(store)
    append(store, ModelCall(rollout_id="b", index=0, completion_ids=(2,), **same))
    assert count_parts(store) == before + 1, "only the answer is new"
    store.calls.remove(["a"])
    assert store.calls.of("b")[0].prompt_ids == same["prompt_ids"]
    assert count_parts(store) == before


def test_a_base_that_is_gone_is_done_without(store: Store) -> None:
    """The calls were removed by another process while this one remembered them."""
    first = ModelCall(
        rollout_id="r", index=0, prompt_ids=tuple(range(100)), messages=({"role": "user", "content": "a"},)
    )
    append(store, first, request=b"a" * 500, response=b"b" * 500)
    other = open_store(store.home)
    other.calls.remove(["r"])
    other.close()
    second = first.model_copy(update={"index": 1, "prompt_ids": tuple(range(120))})
    (back,) = append(store, second, request=b"a" * 501, response=b"b" * 501)
    assert store.calls.of("r") == [back]
    assert (store.blobs.get(back.request), store.blobs.get(back.response)) == (b"a" * 501, b"b" * 501)


def test_a_picture_is_stored_once_by_its_hash_and_goes_with_the_last_request(store: Store) -> None:
    picture = bytes(range(256)) * 40
    text = base64.b64encode(picture)
    chat = b'{"messages": [{"url": "data:image/png;base64,' + text + b'"}]}'
    claude = b'{"a":{"type":"base64","data":"' + text + b'"},"b":{"data": "' + text + b'"}}'
    (one,) = append(store, ModelCall(rollout_id="a", index=0), request=chat)
    (two,) = append(store, ModelCall(rollout_id="b", index=0), request=claude)
    assert store.blobs.get(digest_of(picture)) == picture
    assert (store.blobs.get(one.request), store.blobs.get(two.request)) == (chat, claude)
    held = sum(len(d) for d in store.databases[1].read(lambda c: c.execute(sa.select(parts.c.data)).scalars().all()))
    assert held < 1000
    store.calls.remove(["a"])
    assert store.blobs.get(two.request) == claude
    assert store.calls.size(["b"]) > store.blobs.size(digest_of(picture)) > 0
    store.calls.remove(["b"])
    assert store.blobs.size(digest_of(picture)) == 0
    with pytest.raises(FileNotFoundError):
        store.blobs.get(two.request)


def test_a_damaged_part_is_named(store: Store) -> None:
    (call,) = append(store, ModelCall(rollout_id="r", index=0), request=b"right")
    change = sa.update(parts).where(parts.c.id == bytes.fromhex(call.request)).values(data=packing.shrink(b"wrong"))
    store.databases[1].write(lambda c: c.execute(change))
    with pytest.raises(ValueError, match="damaged"):
        store.blobs.get(call.request)


def test_calls_are_synced_to_the_disk_at_each_commit(store: Store) -> None:
    queue, recorded = (d.read(lambda c: c.exec_driver_sql("PRAGMA synchronous").scalar()) for d in store.databases)
    assert (queue, recorded) == (1, 2), "NORMAL for the queue, FULL for recorded calls"
