"""Clients that leave, ask again or ask twice at once; a proxy that is started again; a store that hangs."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import pytest
from proxy_fakes import TOOLS, FakeEngine, Reply, Stage, call_text, events, joined, register, serving, until

from rollout.errors import FailureClass
from rollout.proxy import turn as turn_module
from rollout.types import ModelCall

USER = {"role": "user", "content": "Close ticket 7"}
BODY: dict[str, Any] = {"messages": [USER], "tools": TOOLS}


def slow(stage: Stage, text: str = "x" * 60, pause: float = 0.05) -> Reply:
    return stage.say(text, pause=pause)


def calls(stage: Stage) -> list[ModelCall]:
    return stage.store.calls.of("r")


async def read_first(stage: Stage, body: dict[str, Any]) -> None:
    """Reads one event of a stream, then closes the connection."""
    async with stage.post("r", {**body, "stream": True}) as response:
        await response.content.readany()
        response.close()


@pytest.mark.bugs
@pytest.mark.parametrize("stream", [False, True])
def test_bug_17_a_client_that_leaves_stops_the_engine_within_a_second(proxy_stage: Any, stream: bool) -> None:
    async def main() -> None:
        async with proxy_stage() as stage:
            stage.add("r")
            stage.engine.queue = [slow(stage, "x" * 400)]
            if stream:
                await read_first(stage, BODY)
            else:
                with pytest.raises(asyncio.TimeoutError):
                    async with asyncio.timeout(0.3):
                        await stage.ask("r", BODY)
            left = time.monotonic()
            await until(lambda: stage.engine.aborted == 1, 1.0)
            assert time.monotonic() - left < 1.0
            await until(lambda: len(calls(stage)) == 1)
            (call,) = calls(stage)
            assert not call.delivered
            assert call.failure
            assert call.failure.kind is FailureClass.CANCELLED
            assert 0 < len(call.completion_ids) < 400

    asyncio.run(main())


@pytest.mark.bugs
def test_bug_18_a_clients_retry_leaves_one_trained_turn(proxy_stage: Any) -> None:
    """The first attempt is cut off and flagged; the second is the turn; the next prompt extends that one."""

    async def main() -> None:
        async with proxy_stage() as stage:
            stage.add("r")
            stage.engine.queue = [slow(stage), stage.say("Done."), stage.say("Bye.")]
            with pytest.raises(asyncio.TimeoutError):
                async with asyncio.timeout(0.3):
                    await stage.ask("r", BODY)
            _, answer = await stage.ask("r", BODY, headers={"x-stainless-retry-count": "1"})
            turns = [USER, answer["choices"][0]["message"], {"role": "user", "content": "again"}]
            await stage.ask("r", {**BODY, "messages": turns})
            orphan, first, second = calls(stage)
            assert (orphan.delivered, bool(orphan.failure)) == (False, True)
            assert (first.delivered, first.failure, first.fork_reason) == (True, None, "")
            assert second.fork_reason == ""
            assert second.prompt_ids[: len(first.prompt_ids + first.completion_ids)] == (
                first.prompt_ids + first.completion_ids
            )

    asyncio.run(main())


@pytest.mark.parametrize("stream", [False, True])
def test_a_committed_answer_that_did_not_arrive_is_replayed(proxy_stage: Any, stream: bool) -> None:
    async def main() -> None:
        async with proxy_stage() as stage:
            stage.add("r")
            body = {**BODY, "stream": stream}
            stage.engine.queue = [stage.say(call_text("get_ticket", {"id": 7}))]
            async with stage.post("r", body) as response:
                first = await response.read()
            await until(lambda: calls(stage)[0].delivered)
            lose_delivery(stage)
        async with proxy_stage() as stage:
            stage.keys["r"] = stage.store.rollouts.issue_key("r", "agent")
            assert not calls(stage)[0].delivered
            async with stage.post("r", body) as response:
                assert await response.read() == first
            assert stage.engine.asked == []
            await until(lambda: calls(stage)[0].delivered)
            stage.engine.queue = [stage.say("something new")]
            async with stage.post("r", body) as response:
                assert await response.read() != first
            assert [c.index for c in calls(stage)] == [0, 1]
            async with stage.post("r", body, headers={"x-stainless-retry-count": "2"}) as response:
                await response.read()
            assert len(calls(stage)) == 2, "a retry header replays even what was delivered"

    asyncio.run(main())


def lose_delivery(stage: Stage) -> None:
    """What a kill between the last byte and its flag leaves behind."""
    import sqlalchemy as sa

    from rollout.store.tables import calls as table

    stage.store.databases[1].write(lambda c: c.execute(sa.update(table).values(delivered=False)))


@pytest.mark.parametrize("stream", [False, True])
def test_a_twin_in_flight_gets_the_same_answer(proxy_stage: Any, stream: bool) -> None:
    async def main() -> None:
        async with proxy_stage() as stage:
            stage.add("r")
            stage.engine.queue = [slow(stage, "x" * 8)]
            body = {**BODY, "stream": stream}

            async def ask(delay: float) -> bytes:
                await asyncio.sleep(delay)
                async with stage.post("r", body) as response:
                    return bytes(await response.read())

            one, two = await asyncio.gather(ask(0), ask(0.15))
            assert one == two
            assert len(stage.engine.asked) == len(calls(stage)) == 1

    asyncio.run(main())


def test_a_twin_keeps_the_call_alive_when_the_first_client_leaves(proxy_stage: Any) -> None:
    async def main() -> None:
        async with proxy_stage() as stage:
            stage.add("r")
            stage.engine.queue = [slow(stage, "x" * 12)]
            first = asyncio.create_task(stage.ask("r", BODY))
            await asyncio.sleep(0.15)
            second = asyncio.create_task(stage.ask("r", BODY))
            await asyncio.sleep(0.15)
            first.cancel()
            status, answer = await second
            assert (status, answer["choices"][0]["message"]["content"]) == (200, "x" * 12)
            assert stage.engine.aborted == 0

    asyncio.run(main())


def test_a_later_call_that_shows_the_answer_flags_it_delivered(proxy_stage: Any) -> None:
    async def main() -> None:
        async with proxy_stage() as stage:
            stage.add("r")
            stage.engine.queue = [stage.say("Done.")]
            _, answer = await stage.ask("r", BODY)
            await until(lambda: calls(stage)[0].delivered)
            lose_delivery(stage)
        async with proxy_stage() as stage:
            stage.keys["r"] = stage.store.rollouts.issue_key("r", "agent")
            stage.engine.queue = [stage.say("Bye.")]
            again = [USER, answer["choices"][0]["message"], {"role": "user", "content": "again"}]
            assert (await stage.ask("r", {**BODY, "messages": again}))[0] == 200
            one, two = calls(stage)
            assert one.delivered
            assert (two.index, two.fork_reason) == (1, "")

    asyncio.run(main())


def test_a_restarted_proxy_goes_on_counting_and_extending(proxy_stage: Any) -> None:
    async def main() -> None:
        async with proxy_stage() as stage:
            key = stage.add("r")
            stage.engine.queue = [stage.say(call_text("get_ticket", {"id": 7}))]
            _, answer = await stage.ask("r", BODY)
        message = answer["choices"][0]["message"]
        result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "{}"}
        async with proxy_stage() as stage:
            stage.keys["r"] = key
            stage.engine.queue = [stage.say("Done.")]
            await stage.ask("r", {**BODY, "messages": [USER, message, result]})
            one, two = calls(stage)
            assert two.index == 1
            assert two.prompt_ids[: len(one.prompt_ids + one.completion_ids)] == one.prompt_ids + one.completion_ids
            assert stage.engine.asked[0]["seed"] == 5 + 1

    asyncio.run(main())


def test_the_terminal_event_waits_for_the_commit(proxy_stage: Any) -> None:
    """While the store's writer is held up, text flows but no client can see the end of an unrecorded answer."""

    async def main() -> None:
        async with proxy_stage() as stage:
            stage.add("r")
            stage.engine.queue = [stage.say("Done.")]
            hold = hold_writer(stage)
            async with stage.post("r", {**BODY, "stream": True}) as response:
                seen = b""
                while b"D" not in seen:
                    seen += await response.content.readany()
                end = asyncio.get_running_loop().time() + 0.5
                while (left := end - asyncio.get_running_loop().time()) > 0:
                    seen += await soon(response.content.readany(), left)
                assert b'finish_reason":"stop' not in seen
                assert b"[DONE]" not in seen
                hold.set()
                seen += await response.read()
            assert joined(seen)["finish_reason"] == "stop"
            assert len(calls(stage)) == 1

    asyncio.run(main())


def test_a_commit_past_its_limit_is_an_error_and_lands_undelivered(
    proxy_stage: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(turn_module, "COMMIT_S", 0.2)

    async def main() -> None:
        async with proxy_stage() as stage:
            stage.add("r")
            stage.engine.queue = [stage.say("Done.")]
            hold = hold_writer(stage)
            raw = await stage.stream("r", BODY)
            assert events(raw)[-1]["error"]["code"] == "infrastructure"
            hold.set()
            await until(lambda: len(calls(stage)) == 1)
            assert not calls(stage)[0].delivered

    asyncio.run(main())


async def soon(work: Any, seconds: float) -> bytes:
    """What comes within `seconds`, or nothing."""
    try:
        async with asyncio.timeout(seconds):
            return bytes(await work)
    except TimeoutError:
        return b""


def hold_writer(stage: Stage) -> Any:
    """Occupies the writer of calls.db until the returned event is set (at most 5 s)."""
    import threading

    free = threading.Event()
    stage.store.databases[1].submit(lambda _: free.wait(5))
    return free


def test_an_engine_that_comes_back_elsewhere_is_found(proxy_stage: Any) -> None:
    """Killed before the first id: the call waits, finds the new address in the table and goes on."""

    async def main() -> None:
        async with proxy_stage() as stage:
            stage.add("r")
            register(stage.store, str(stage.folder), "http://127.0.0.1:9")
            asking = asyncio.create_task(stage.ask("r", BODY))
            await asyncio.sleep(0.3)
            second = FakeEngine(queue=[stage.say("Done.")])
            async with serving(second.app()) as url:
                register(stage.store, str(stage.folder), url)
                status, answer = await asking
            assert (status, answer["choices"][0]["message"]["content"]) == (200, "Done.")

    asyncio.run(main())


def test_keep_alives_come_before_the_first_id(proxy_stage: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from rollout.proxy import outlet

    monkeypatch.setattr(outlet, "PING_S", 0.05)

    async def main() -> None:
        async with proxy_stage() as stage:
            stage.add("r")
            stage.engine.queue = [stage.say("D", pause=0.3)]
            raw = await stage.stream("r", BODY)
            assert raw.startswith(b": keep-alive\n\n")
            assert joined(raw)["content"] == "D"
            assert b"keep-alive" not in stage.store.blobs.get(calls(stage)[0].response)

    asyncio.run(main())


def test_forget_ends_running_calls_and_keys_at_once(proxy_stage: Any) -> None:
    async def main() -> None:
        async with proxy_stage() as stage:
            stage.add("r")
            stage.engine.queue = [slow(stage, "x" * 400)]
            asking = asyncio.create_task(stage.ask("r", BODY))
            await until(lambda: len(stage.engine.asked) == 1)
            stage.store.rollouts.revoke_keys("r")
            stage.app.state.sessions.forget("r")
            assert (await asking)[0] == 499
            await until(lambda: stage.engine.aborted == 1)
            assert (await stage.ask("r", BODY))[0] == 401

    asyncio.run(main())


@pytest.mark.bugs
def test_bug_84_many_slow_calls_start_at_once(proxy_stage: Any) -> None:
    async def main() -> None:
        async with proxy_stage() as stage:
            for i in range(150):
                stage.add(f"r{i}")
            stage.engine.script = lambda _: stage.say("", pause=2.0)
            asking = [asyncio.create_task(stage.ask(f"r{i}", json.dumps(BODY).encode())) for i in range(100)]
            async with asyncio.timeout(20):
                await until(lambda: len(stage.engine.asked) >= 100, 1.9 * 5)
                answers = await asyncio.gather(*asking)
            assert {status for status, _ in answers} == {200}
            assert len(stage.engine.asked) == 100, "no call was sent twice"

    asyncio.run(main())
