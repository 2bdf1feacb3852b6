"""Failures seen in other proxies, whole: streams and ids, silence, long histories, weight updates, engines that break.

Silence of minutes runs on `SkippingLoop`, whose clock is set forward while the sockets stay real.
"""

from __future__ import annotations

import asyncio
import base64
import json
import random
from collections.abc import AsyncIterator, Coroutine
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from proxy_clients import PATHS, Talk
from proxy_fakes import Reply, Stage, call_text, events, until

from rollout.errors import FailureClass
from rollout.types import Limits, ModelCall, Sampling, Timeouts, VersionSpan

pytestmark = pytest.mark.bugs
DIALECTS = list(PATHS)
THOUGHT = "<think>\nTicket 7, ä 😀.\n</think>\n\n"


class SkippingLoop(asyncio.SelectorEventLoop):
    """A loop whose clock can be set forward."""

    skipped = 0.0

    def time(self) -> float:
        return super().time() + self.skipped


@pytest.fixture
def slow_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk runs by the real clock: a skipped second is none for a commit under way."""
    monkeypatch.setattr("rollout.proxy.turn.COMMIT_S", 24 * 3600.0)


def run_skipping(work: Coroutine[Any, Any, None]) -> None:
    with asyncio.Runner(loop_factory=SkippingLoop) as runner:
        runner.run(work)


async def skip(minutes: float, step: float = 5.0) -> None:
    """Lets the time pass in steps short enough that no timer is overrun by another."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, SkippingLoop)
    for _ in range(int(minutes * 60 / step)):
        loop.skipped += step
        for _ in range(8):
            await asyncio.sleep(0)
        await asyncio.sleep(0.002)


def calls(stage: Stage) -> list[ModelCall]:
    return stage.store.calls.of("r")


# -- ids of streams --------------------------------------------------------------------------------------


async def both_ways(proxy_stage: Any, dialect: str, text: str, step: int) -> tuple[ModelCall, ModelCall, int]:
    async with proxy_stage() as stage:
        stage.add("r")
        talk = Talk(stage, "r", dialect).user("Close ticket 7")
        ids = tuple(stage.codec.encode(text + "<|im_end|>"))
        stage.engine.script = lambda asked: Reply(ids, step=step)
        for stream in (False, True):
            assert (await talk.post(talk.body(stream=stream)))[0] == 200
        unary, streamed = calls(stage)
        assert unary.completion_ids == ids
        return unary, streamed, len(ids)


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("step", [1, 3])
def test_bug_01_a_stream_with_a_tool_call_has_the_ids_of_the_unary_answer(
    proxy_stage: Any, dialect: str, step: int
) -> None:
    async def main() -> None:
        text = "Let me see.\n" + call_text("get_ticket", {"id": 7})
        unary, streamed, size = await both_ways(proxy_stage, dialect, text, step)
        assert streamed.completion_ids == unary.completion_ids
        assert streamed.logprobs == unary.logprobs
        assert len(streamed.logprobs or ()) == size
        assert streamed.messages[-1]["tool_calls"][0]["function"] == unary.messages[-1]["tool_calls"][0]["function"]

    asyncio.run(main())


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("tail", ["Done.", call_text("get_ticket", {"id": 7}), ""])
def test_bug_02_a_stream_with_reasoning_has_the_ids_of_the_unary_answer(
    proxy_stage: Any, dialect: str, tail: str
) -> None:
    async def main() -> None:
        unary, streamed, _ = await both_ways(proxy_stage, dialect, THOUGHT + tail, 2)
        assert streamed.completion_ids == unary.completion_ids
        assert (
            streamed.messages[-1]["reasoning_content"] == unary.messages[-1]["reasoning_content"] == "Ticket 7, ä 😀."
        )
        assert streamed.messages[-1]["content"] == unary.messages[-1]["content"]

    asyncio.run(main())


@pytest.mark.parametrize("dialect", DIALECTS)
def test_bug_13_an_engine_that_answers_whole_still_gives_a_stream(proxy_stage: Any, dialect: str) -> None:
    async def main() -> None:
        async with proxy_stage() as stage:
            stage.add("r")
            stage.engine.script = lambda asked: stage.say("Done.", fault="unary")
            talk = Talk(stage, "r", dialect).user("a")
            status, raw = await talk.post(talk.body(stream=True))
            ends = {"chat": b"data: [DONE]", "responses": b"response.completed", "messages": b"message_stop"}
            assert (status, raw.count(ends[dialect]) > 0) == (200, True)
            assert b"Done." in raw
            (call,) = calls(stage)
            assert (call.failure, len(call.logprobs or ())) == (None, len(call.completion_ids))

    asyncio.run(main())


# -- pictures --------------------------------------------------------------------------------------------


def picture(dialect: str, raw: bytes) -> dict[str, Any]:
    data = base64.b64encode(raw).decode()
    if dialect == "messages":
        return {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}}
    url = f"data:image/png;base64,{data}"
    if dialect == "responses":
        return {"type": "input_image", "image_url": url}
    return {"type": "image_url", "image_url": {"url": url}}


async def seeing(stage: Stage) -> None:
    """As if the model saw pictures: each is its placeholder."""
    assert stage.app
    session = await stage.app.state.sessions.session("r")
    session.codec.vision = True


@pytest.mark.parametrize("dialect", DIALECTS)
def test_bug_15_a_picture_is_expanded_once_however_often_it_is_sent(proxy_stage: Any, dialect: str) -> None:
    async def main() -> None:
        async with proxy_stage() as stage:
            stage.add("r")
            await seeing(stage)
            stage.engine.script = lambda asked: stage.say("I see.")
            talk = Talk(stage, "r", dialect)
            kind = "input_text" if dialect == "responses" else "text"
            talk.rows = [{"role": "user", "content": [{"type": kind, "text": "look"}, picture(dialect, b"\x89PNG 1")]}]
            for text in ("b", "c", "d"):
                await talk.turn()
                talk.user(text)
            recorded = calls(stage)
            assert [tuple(body["prompt"]) for body in stage.engine.asked] == [c.prompt_ids for c in recorded]
            for call in recorded:
                assert call.fork_reason == ""
                assert stage.codec.decode(call.prompt_ids).count("<image ") == 1
            assert recorded[2].prompt_ids[: len(recorded[0].prompt_ids)] == recorded[0].prompt_ids

    asyncio.run(main())


def peak_mb() -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) // 1024


def test_bug_25_forty_screenshots_pass_and_more_than_the_bound_is_told(proxy_stage: Any) -> None:
    """80 MB in one body, three at once: room for a part of them at a time."""
    shots = [picture("chat", random.Random(n).randbytes(1_500_000)) for n in range(4)]
    message = {"role": "user", "content": [{"type": "text", "text": "look"}, *(shots * 10)]}
    body = json.dumps({"messages": [message], "user": "0"}).encode()
    assert len(body) > 80_000_000

    async def pieces(data: bytes) -> AsyncIterator[bytes]:
        for at in range(0, len(data), 2**20):
            yield data[at : at + 2**20]

    async def send(stage: Stage, tail: bytes) -> tuple[int, bytes]:
        whole = body[:-2] + tail + b'"}'
        headers = {"Authorization": f"Bearer {stage.keys['r']}", "Content-Length": str(len(whole))}
        url = f"{stage.url}/rollouts/r/v1/chat/completions"
        async with stage.http.post(url, data=pieces(whole), headers=headers) as response:
            return response.status, await response.read()

    async def main() -> None:
        async with proxy_stage() as stage:
            stage.add("r", limits=Limits(calls=9, context=8192, tokens=4096, body_mb=96))
            await seeing(stage)
            stage.engine.script = lambda asked: stage.say("I see.")
            before = peak_mb()
            answers = await asyncio.gather(*(send(stage, str(n).encode()) for n in range(3)))
            assert [status for status, _ in answers] == [200, 200, 200], answers
            assert peak_mb() - before < 1600
            assert {len(call.messages[0]["images"]) for call in calls(stage)} == {40}
            status, raw = await send(stage, b"x" * 24_000_000)
            assert (status, json.loads(raw)["error"]["code"]) == (413, "too_large")
            assert "100663296 bytes" in json.loads(raw)["error"]["message"]

    asyncio.run(main())


# -- silence ---------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("slow_disk")
@pytest.mark.parametrize("dialect", DIALECTS)
def test_bug_19_six_silent_minutes_are_filled_with_keep_alives(proxy_stage: Any, dialect: str) -> None:
    async def main() -> None:
        async with proxy_stage() as stage:
            stage.add("r")
            stage.engine.script = lambda asked: Reply(
                tuple(stage.codec.encode("Done.<|im_end|>")), pause=360.0, step=99
            )
            talk = Talk(stage, "r", dialect).user("a")
            patience = aiohttp.ClientTimeout(total=None, sock_read=30.0)
            async with aiohttp.ClientSession(timeout=patience) as talk.stage.http:
                post = asyncio.create_task(talk.post(talk.body(stream=True)))
                await until(lambda: len(stage.engine.asked) == 1)
                await skip(6.1)
                status, raw = await post
            ping = {"chat": b": keep-alive", "responses": b"keepalive", "messages": b"event: ping"}[dialect]
            assert (status, raw.count(ping) >= 12) == (200, True)
            assert b"Done." in raw
            (call,) = calls(stage)
            assert call.failure is None

    run_skipping(main())


@pytest.mark.usefixtures("slow_disk")
@pytest.mark.parametrize(("budget", "ends"), [(1200.0, True), (600.0, False)])
def test_bug_20_only_the_rollouts_own_budget_ends_a_long_answer(proxy_stage: Any, budget: float, ends: bool) -> None:
    """Sixteen minutes of generation, an id now and then."""

    async def main() -> None:
        async with proxy_stage() as stage:
            stage.add("r")
            rollout = stage.store.rollouts.get("r")
            assert rollout
            task = rollout.task.model_copy(update={"timeouts": Timeouts(agent=budget)})
            stage.add("long", task=task)
            ids = stage.codec.encode("Done after a while.<|im_end|>")
            stage.engine.script = lambda asked: Reply(tuple(ids), pause=960.0 / len(ids))
            talk = Talk(stage, "long", "chat").user("a")
            async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as talk.stage.http:
                post = asyncio.create_task(talk.post(talk.body()))
                await until(lambda: len(stage.engine.asked) == 1)
                await skip(16.5)
                status, raw = await post
            (call,) = stage.store.calls.of("long")
            if ends:
                assert (status, call.failure) == (200, None)
                assert b"Done after a while." in raw
            else:
                assert status == 504
                assert call.failure
                assert call.failure.kind is FailureClass.TIMEOUT
                assert 0 < len(call.completion_ids) < len(ids)

    run_skipping(main())


# -- weights, sampling and what is recorded --------------------------------------------------------------


def test_bug_29_streams_that_run_through_an_update_finish_with_every_token_stamped(proxy_stage: Any) -> None:
    async def main() -> None:
        async with proxy_stage() as stage:
            names = [f"r{n}" for n in range(8)]
            for name in names:
                stage.add(name)
            ids = tuple(stage.codec.encode("x" * 30))
            stage.engine.script = lambda asked: Reply(ids, "length", 0.01, versions=(3,) * 12 + (4,) * (len(ids) - 12))
            talks = [Talk(stage, name, "chat").user("a") for name in names]
            answers = await asyncio.gather(*(talk.post(talk.body(stream=True)) for talk in talks))
            for status, raw in answers:
                assert status == 200
                assert events(raw)[-1]["choices"][0]["finish_reason"] == "length"
            for name in names:
                (call,) = stage.store.calls.of(name)
                spans = (VersionSpan(version=3, tokens=12), VersionSpan(version=4, tokens=len(ids) - 12))
                assert (call.failure, call.versions) == (None, spans)

    asyncio.run(main())


@pytest.mark.parametrize("sampling", [Sampling(temperature=0.7), Sampling(top_p=0.8)])
def test_bug_28_82_the_engines_own_logprobs_stand_beside_the_sampling_that_made_them(
    proxy_stage: Any, sampling: Sampling
) -> None:
    """Nothing is rescaled on the way: the loss knows temperature and truncation from the rollout."""

    async def main() -> None:
        async with proxy_stage() as stage:
            stage.add("r", sampling=sampling)
            stage.engine.script = lambda asked: stage.say("Done.")
            talk = Talk(stage, "r", "chat").user("a")
            await talk.turn(temperature=0.0, top_p=0.1, seed=99, top_k=1, min_p=0.5)
            (asked,), (call,) = stage.engine.asked, calls(stage)
            assert (asked["temperature"], asked["top_p"]) == (sampling.temperature, sampling.top_p)
            assert not {"top_k", "min_p"} & set(asked)
            assert call.logprobs == tuple(-0.25 - i / 1000 for i in range(len(call.completion_ids)))
            stored = stage.store.rollouts.get("r")
            assert stored
            assert stored.sampling == sampling

    asyncio.run(main())


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("fault", ["html", "cut", "error"])
def test_bug_86_an_engine_that_breaks_is_a_502_and_a_record(
    proxy_stage: Any, dialect: str, stream: bool, fault: str
) -> None:
    async def main() -> None:
        async with proxy_stage() as stage:
            stage.add("r")
            stage.engine.script = lambda asked: stage.say("Some words", fault=fault)
            talk = Talk(stage, "r", dialect).user("a")
            status, raw = await talk.post(talk.body(stream=stream))
            if fault == "html" or not stream:
                assert status == 502
                assert "error" in json.loads(raw)
            else:
                assert status == 200
                assert b"error" in raw
            (call,) = calls(stage)
            assert call.failure
            assert call.failure.kind is FailureClass.INFRASTRUCTURE
            assert call.delivered is False

    asyncio.run(main())
