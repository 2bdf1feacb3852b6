"""The engine client against a scripted engine on a real socket: ids, logprobs, faults, waiting, aborting, updates."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from proxy_fakes import FakeEngine, Reply, a_rollout, register, serving, until

from rollout.config import open_home
from rollout.errors import EngineError
from rollout.inference.base import CallContext, Chunk, Engine
from rollout.inference.router import EngineRouter, Route
from rollout.inference.vllm import EngineAddress, VllmEngine, read_choice, read_chunks
from rollout.store import open_store
from rollout.types import Purpose, Sampling

CONTEXT = CallContext("r", "/bundle", 3, 40)
SAMPLING = Sampling(temperature=0.5, top_p=0.8, max_tokens=9)


async def collect(engine: Engine) -> list[Chunk]:
    async with aclosing(engine.generate((1, 2, 3), SAMPLING, (7,), CONTEXT)) as chunks:  # type: ignore[type-var]
        return [chunk async for chunk in chunks]


def with_engine(reply: Reply, check: Callable[[FakeEngine, VllmEngine], Any], wait_s: float = 1.0) -> Any:
    async def main() -> Any:
        fake = FakeEngine(queue=[reply] * 8)
        async with serving(fake.app()) as url:
            engine = VllmEngine(lambda *_, **__: EngineAddress(url, 5, "engine-key"), wait_s=wait_s)
            try:
                return await check(fake, engine)
            finally:
                await engine.close()

    return asyncio.run(main())


@pytest.mark.parametrize("step", [1, 2, 9])
def test_ids_logprobs_and_versions_arrive_whole(step: int) -> None:
    async def check(fake: FakeEngine, engine: VllmEngine) -> None:
        chunks = await collect(engine)
        assert [i for c in chunks for i in c.ids] == [11, 12, 13, 7]
        assert [p for c in chunks for p in c.logprobs or ()] == pytest.approx([-0.25, -0.251, -0.252, -0.253])
        assert [c.finish_reason for c in chunks] == [""] * (len(chunks) - 1) + ["stop"]
        assert fake.asked == [
            {
                "prompt": [1, 2, 3],
                "max_tokens": 9,
                "temperature": 0.5,
                "top_p": 0.8,
                "seed": 43,
                "stop_token_ids": [7],
                "logprobs": 1,
                "return_token_ids": True,
                "stream": True,
            }
        ]

    with_engine(Reply((11, 12, 13, 7), step=step), check)


FAULTS = {
    "html": "instead of events",
    "no_ids": "without token_ids",
    "no_logprobs": "without log-probabilities",
    "line": "broken event",
    "error": "lost",
    "cut": "without a finish reason",
    "usage": "counts 99",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_broken_answer_is_an_engine_error(fault: str) -> None:
    async def check(fake: FakeEngine, engine: VllmEngine) -> None:
        with pytest.raises(EngineError, match=FAULTS[fault]):
            await collect(engine)
        assert len(fake.asked) == 1, "an answer that had begun is never asked for again"

    with_engine(
        Reply((11, 12, 13, 14, 15), fault=fault, finish="" if fault in ("cut", "line", "error") else "stop"), check
    )


@pytest.mark.bugs
def test_bug_83_entries_named_by_id_are_looked_up() -> None:
    async def check(fake: FakeEngine, engine: VllmEngine) -> None:
        chunks = await collect(engine)
        assert [p for c in chunks for p in c.logprobs or ()] == [-14.0, -15.0]

    with_engine(Reply((11, 12), fault="top_first"), check)


@pytest.mark.bugs
def test_bug_17_closing_the_iterator_aborts() -> None:
    async def check(fake: FakeEngine, engine: VllmEngine) -> None:
        stream = engine.generate((1,), SAMPLING, (7,), CONTEXT)
        async for _ in stream:
            break
        await stream.aclose()  # type: ignore[attr-defined]
        await until(lambda: fake.aborted == 1, 1.0)

    with_engine(Reply(tuple(range(10, 200)), pause=0.05), check)


def test_a_busy_engine_is_waited_for() -> None:
    async def check(fake: FakeEngine, engine: VllmEngine) -> None:
        fake.queue = [Reply(fault="busy"), Reply(fault="busy"), Reply((11, 7))]
        assert [i for c in await collect(engine) for i in c.ids] == [11, 7]
        assert len(fake.asked) == 3

    with_engine(Reply(), check, wait_s=5.0)


def test_an_absent_engine_is_an_error_after_the_wait() -> None:
    async def main() -> None:
        for address in (None, EngineAddress("http://127.0.0.1:9")):
            engine = VllmEngine(lambda *_, found=address, **__: found, wait_s=0.5)
            with pytest.raises(EngineError, match="no engine within"):
                await collect(engine)
            await engine.close()

    asyncio.run(main())


def test_weights_are_updated_with_the_key() -> None:
    async def check(fake: FakeEngine, engine: VllmEngine) -> None:
        await engine.update("/weights", 6)
        assert fake.updates == [{"path": "/weights", "version": 6}]
        fake.key = "other"
        with pytest.raises(EngineError, match="401"):
            await engine.update("/weights", 7)

    with_engine(Reply(), check)


def test_the_route_follows_the_table_and_leases(tmp_path: Path) -> None:
    store = open_store(open_home(tmp_path))
    now = [0.0]
    route = Route(store, "m", "run", clock=lambda: now[0])
    assert route() is None
    register(store, "m", "http://one")
    assert route() == EngineAddress("http://one", 0, "")
    register(store, "m", "http://two", version=4)
    assert route() == EngineAddress("http://one", 0, "")
    assert route(fresh=True) == EngineAddress("http://two", 4, "")
    register(store, "m", "http://mine", id="e2", exclusive="run")
    now[0] += 2
    assert (route() or EngineAddress("")).url == "http://mine"
    assert (Route(store, "m", "run", exclusive_only=True)() or EngineAddress("")).url == "http://mine"
    assert Route(store, "m", "another run", exclusive_only=True)() is None
    other = Route(store, "m", "another run")()
    assert other
    assert other.url == "http://two"
    store.close()


@pytest.mark.parametrize("purpose", Purpose)
def test_rollouts_on_policy_wait_for_their_own_engine(tmp_path: Path, purpose: Purpose) -> None:
    """While the run's engine is started again, a shared one on the initial weights never stands in for it."""

    async def main() -> list[int]:
        shared, own = FakeEngine(queue=[Reply((11, 7))]), FakeEngine(queue=[Reply((12, 7))])
        store = open_store(open_home(tmp_path))
        async with serving(shared.app()) as shared_url, serving(own.app()) as own_url:
            register(store, "m", shared_url)
            router = EngineRouter(store)
            engine = router.engine_for(a_rollout("r", Path("m"), purpose=purpose, run="rl-1"), None)
            call = asyncio.create_task(collect(engine))
            await asyncio.sleep(0.3)
            register(store, "m", own_url, id="own", exclusive="rl-1")
            chunks = await call
            await router.close()
        store.close()
        return [i for chunk in chunks for i in chunk.ids]

    on_policy = purpose in (Purpose.TRAIN, Purpose.VALIDATE)
    assert asyncio.run(main()) == ([12, 7] if on_policy else [11, 7])


@given(
    ids=st.lists(st.integers(0, 500), min_size=1, max_size=12),
    at=st.lists(st.integers(0, 2000), max_size=12),
    noise=st.sampled_from([b"", b": ping\n\n", b"event: x\n", b"\r\n"]),
)
def test_events_may_be_cut_anywhere(ids: list[int], at: list[int], noise: bytes) -> None:
    raw = noise
    for n, token in enumerate(ids):
        choice = {"token_ids": [token], "logprobs": {"token_logprobs": [-1.0]}, "finish_reason": None}
        if n == len(ids) - 1:
            choice["finish_reason"] = "length"
        raw += b"data: " + json.dumps({"choices": [choice], "weight_version": 2}).encode() + b"\n\n" + noise
    raw += b"data: [DONE]\n\n"
    points = sorted({0, len(raw), *(i % len(raw) for i in at)})

    async def parts() -> AsyncIterator[bytes]:
        for a, b in itertools.pairwise(points):
            yield raw[a:b]

    async def main() -> list[Chunk]:
        return [chunk async for chunk in read_chunks(parts(), 0)]

    chunks = asyncio.run(main())
    assert [i for c in chunks for i in c.ids] == ids
    assert {c.version for c in chunks} == {2}


@pytest.mark.parametrize(
    "change",
    [
        {"token_ids": None},
        {"token_ids": ["5"]},
        {"logprobs": {"token_logprobs": []}},
        {"logprobs": {"token_logprobs": [None]}},
        {"logprobs": {"token_logprobs": [0.5]}},
        {"logprobs": {"token_logprobs": [float("nan")]}},
        {"logprobs": {"token_logprobs": [-1.0], "top_logprobs": [{"token_id:6": -1.0}]}},
        {"logprobs": {"token_logprobs": [-1.0], "top_logprobs": [{}, {}]}},
        {"finish_reason": "abort"},
    ],
)
def test_wrong_choices_are_refused(change: dict[str, Any]) -> None:
    good = {"token_ids": [5], "logprobs": {"token_logprobs": [-1.0]}, "finish_reason": "stop"}
    assert read_choice(good, 1) == Chunk((5,), (-1.0,), 1, "stop")
    with pytest.raises(EngineError):
        read_choice({**good, **change}, 1)


# -- replicas ------------------------------------------------------------------------------------------


def test_a_rollout_keeps_to_its_replica_and_only_its_own_move_when_one_is_gone(tmp_path: Path) -> None:
    store = open_store(open_home(tmp_path))
    for k in range(3):
        register(store, "m", f"http://{k}", id=f"e-{k}", replica=k)
    route = Route(store, "m", "run")
    names = [f"r{i}" for i in range(60)]

    def chosen(avoid: frozenset[str] = frozenset()) -> dict[str, str]:
        return {n: found.url for n in names if (found := route(n, avoid=avoid))}

    first = chosen()
    assert first == chosen()
    assert all(10 <= sum(url == f"http://{k}" for url in first.values()) <= 30 for k in range(3))
    without = chosen(frozenset({"http://1"}))
    assert {n for n in names if without[n] != first[n]} == {n for n in names if first[n] == "http://1"}
    assert "http://1" not in without.values()
    assert len(chosen(frozenset(f"http://{k}" for k in range(3)))) == 60, "all were tried: they are tried again"
    store.close()


def test_a_dead_replica_is_left_for_another_within_the_call() -> None:
    async def main() -> None:
        fake = FakeEngine(queue=[Reply((11, 7))] * 3)
        async with serving(fake.app()) as url:
            dead, live = EngineAddress("http://127.0.0.1:9"), EngineAddress(url)

            def locate(
                rollout_id: str = "", *, fresh: bool = False, avoid: Collection[str] = ()
            ) -> EngineAddress | None:
                assert rollout_id == CONTEXT.rollout_id
                return live if dead.url in avoid else dead

            engine = VllmEngine(locate, wait_s=5.0)
            assert [i for c in await collect(engine) for i in c.ids] == [11, 7]
            await engine.close()

    asyncio.run(main())
