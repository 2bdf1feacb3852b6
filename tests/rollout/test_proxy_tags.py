"""Purposes and agent threads in the record, and how each harness's session is ended: adapters at a real proxy."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from proxy_clients import Talk
from proxy_fakes import Stage, events, until

from rollout.harness import stop_style, tagger_of
from rollout.proxy.attribution import Adapters
from rollout.proxy.mergeability import session_report
from rollout.types import CallTag, Limits, ModelCall, RolloutState, Trajectory
from training.samples import split_calls

REAL = Adapters(tagger_of, stop_style)
CODEX = {"session-id": "s", "thread-id": "s"}
CLAUDE = {"x-claude-code-session-id": "s", "anthropic-version": "2023-06-01"}
CAPPED = Limits(calls=1, tokens=4096, context=4096)


def calls(stage: Stage) -> list[ModelCall]:
    return stage.store.calls.of("r")


def tags(stage: Stage) -> list[tuple[str, str, str]]:
    return [(call.tag.value, call.thread, call.fork_reason) for call in calls(stage)]


def test_threads_of_codex_extend_themselves_alone(proxy_stage: Any) -> None:
    async def main() -> None:
        async with proxy_stage(adapters=REAL) as stage:
            stage.add("r", harness="codex")
            stage.engine.script = lambda asked: stage.say(f"Answer {len(stage.engine.asked)}.")
            main = Talk(stage, "r", "responses", CODEX).user("a")
            child = Talk(stage, "r", "responses", {**CODEX, "thread-id": "c", "x-openai-subagent": "collab_spawn"})
            child.user("look around")
            await main.turn()
            await child.turn()
            await main.user("b").turn()
            await child.user("more").turn()
            kind = json.dumps({"request_kind": "compaction"})
            summary = Talk(stage, "r", "responses", {**CODEX, "x-codex-turn-metadata": kind})
            summary.tools, summary.rows = [], [*main.rows, {"role": "user", "content": "Summarise."}]
            await summary.turn()
            main.rows = [{"role": "user", "content": "a, in short"}]
            await main.turn()
            assert tags(stage) == [
                ("main", "main", ""),
                ("subagent", "c", "subagent"),
                ("main", "main", ""),
                ("subagent", "c", ""),
                ("compaction", "main", "compaction"),
                ("main", "main", "compaction"),
            ]
            rollout = stage.store.rollouts.get("r")
            assert rollout
            report = session_report(rollout, calls(stage), {}, stage.codec.decode)
            assert report.rows == 4
            assert report.tags == {"main": 3, "subagent": 2, "compaction": 1}
            assert [fork.reason for fork in report.forks] == ["subagent", "compaction", "compaction"]

    asyncio.run(main())


def test_two_agents_may_ask_the_same_at_once(proxy_stage: Any) -> None:
    """Equal bytes of two threads are two calls; equal bytes of one are a retry."""

    async def main() -> None:
        async with proxy_stage(adapters=REAL) as stage:
            stage.add("r", harness="claude-code")
            stage.engine.script = lambda asked: stage.say("abcdef", pause=0.03)
            agents = ["a1", "a2", "a2"]
            talks = [Talk(stage, "r", "messages", {**CLAUDE, "x-claude-code-agent-id": a}).user("go") for a in agents]
            await asyncio.gather(*(talk.turn() for talk in talks))
            assert sorted(call.thread for call in calls(stage)) == ["a1", "a2"]
            assert len(stage.engine.asked) == 2

    asyncio.run(main())


def test_a_call_of_the_agents_shell_is_recorded_and_not_trained(proxy_stage: Any) -> None:
    async def main() -> None:
        async with proxy_stage(adapters=REAL) as stage:
            stage.add("r", harness="codex")
            stage.engine.script = lambda asked: stage.say("Answer.")
            main = Talk(stage, "r", "responses", CODEX).user("a")
            shell = Talk(stage, "r", "chat").user("what is my reward?")
            await main.turn()
            await shell.turn()
            await main.user("b").turn()
            await until(lambda: all(call.delivered for call in calls(stage)))
            assert tags(stage) == [("main", "main", ""), ("unattributed", "unattributed", ""), ("main", "main", "")]
            rollout = stage.store.rollouts.get("r")
            assert rollout
            done = rollout.model_copy(update={"state": RolloutState.SUCCEEDED})
            split = split_calls(Trajectory(rollout=done, calls=tuple(calls(stage))))
            assert (len(split.kept), split.dropped) == (2, {"unattributed": 1})

    asyncio.run(main())


def test_the_agents_shell_cannot_end_the_session_by_a_long_prompt(proxy_stage: Any) -> None:
    async def main() -> None:
        async with proxy_stage(adapters=REAL) as stage:
            stage.add("r", harness="codex", limits=Limits(context=1000))
            stage.engine.script = lambda asked: stage.say("Answer.")
            shell = Talk(stage, "r", "chat").user("x y " * 1000)
            status, raw = await shell.post(shell.body())
            assert (status, json.loads(raw)["error"]["code"]) == (400, "context_cap")
            stored = stage.store.rollouts.get("r")
            assert stored
            assert stored.end_reason == ""
            await Talk(stage, "r", "responses", CODEX).user("a").turn()

    asyncio.run(main())


@pytest.mark.parametrize(
    ("harness", "dialect", "headers"),
    [
        ("codex", "responses", CODEX),
        ("openclaw", "chat", {"traceparent": "00-1"}),
        ("mini-swe-agent", "chat", {}),
        ("react", "chat", {}),
    ],
)
def test_a_cap_is_a_400_for_who_takes_it_well(
    proxy_stage: Any, harness: str, dialect: str, headers: dict[str, str]
) -> None:
    async def main() -> None:
        async with proxy_stage(adapters=REAL) as stage:
            stage.add("r", harness=harness, limits=CAPPED)
            stage.engine.script = lambda asked: stage.say("Answer.")
            talk = Talk(stage, "r", dialect, headers).user("a")
            await talk.turn()
            for stream in (False, True):
                status, raw = await talk.user("b").post(talk.body(stream=stream))
                if calls(stage)[0].tag is not CallTag.UNATTRIBUTED:
                    assert end_reason(stage) == "call_cap"
                assert (status, json.loads(raw)["error"]["code"]) == (400, "call_cap")
            assert len(calls(stage)) == 1

    asyncio.run(main())


def end_reason(stage: Stage) -> str:
    stored = stage.store.rollouts.get("r")
    assert stored
    return stored.end_reason


@pytest.mark.parametrize("limits", [CAPPED, Limits(tokens=1), Limits(context=40)])
def test_claude_code_gets_a_normal_end_of_turn(proxy_stage: Any, limits: Limits) -> None:
    async def main() -> None:
        async with proxy_stage(adapters=REAL) as stage:
            stage.add("r", harness="claude-code", limits=limits)
            stage.engine.script = lambda asked: stage.say("Answer.")
            talk = Talk(stage, "r", "messages", CLAUDE).user("a")
            if limits.context > 40:
                await talk.turn()
            before = len(calls(stage))
            status, raw = await talk.user("b").post(talk.body(), query="?beta=true")
            message = json.loads(raw)
            assert (status, message["stop_reason"]) == (200, "end_turn")
            assert [block["type"] for block in message["content"]] == ["text"]
            status, raw = await talk.post(talk.body(stream=True))
            kinds = [line[7:] for line in raw.decode().split("\n") if line.startswith("event: ")]
            assert (status, kinds[0], kinds[-2:]) == (200, "message_start", ["message_delta", "message_stop"])
            assert '"stop_reason":"end_turn"' in raw.decode()
            assert len(calls(stage)) == before, "nothing was sampled, nothing is recorded"
            assert end_reason(stage) in ("call_cap", "token_cap", "context_cap")

    asyncio.run(main())


def test_a_session_that_a_cap_has_ended_stays_ended(proxy_stage: Any) -> None:
    """A client that shortens its history after a full context does not go on behind a noted end."""

    async def main() -> None:
        async with proxy_stage() as stage:
            key = stage.add("r", limits=Limits(context=1000))
            talk = Talk(stage, "r", "chat").user("x y " * 1000)
            assert (await talk.post(talk.body()))[0] == 400
            talk.rows = [{"role": "user", "content": "short"}]
            assert json.loads((await talk.post(talk.body()))[1])["error"]["code"] == "context_cap"
        async with proxy_stage() as stage:
            stage.keys["r"] = key
            talk = Talk(stage, "r", "chat").user("short")
            assert json.loads((await talk.post(talk.body()))[1])["error"]["code"] == "context_cap"
            assert stage.engine.asked == []

    asyncio.run(main())


@pytest.mark.parametrize("stream", [False, True])
def test_the_wall_clock_of_a_rollout_cuts_its_call(proxy_stage: Any, stream: bool) -> None:
    async def main() -> None:
        async with proxy_stage() as stage:
            stage.add("r", limits=Limits(seconds=0.4))
            stage.engine.script = lambda asked: stage.say("x" * 60, pause=0.05)
            talk = Talk(stage, "r", "chat").user("a")
            status, raw = await talk.post(talk.body(stream=stream))
            if stream:
                assert [e["error"]["code"] for e in events(raw) if "error" in e] == ["time_cap"]
            else:
                assert (status, json.loads(raw)["error"]["code"]) == (400, "time_cap")
            assert end_reason(stage) == "time_cap"
            (call,) = calls(stage)
            assert call.failure
            assert (call.failure.kind.value, 0 < len(call.completion_ids) < 60) == ("timeout", True)
            status, raw = await talk.user("again").post(talk.body())
            assert (status, json.loads(raw)["error"]["code"]) == (400, "time_cap")

    asyncio.run(main())
