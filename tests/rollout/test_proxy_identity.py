"""Who may call what: keys, phases, caps, routes and the tool gateway."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from proxy_fakes import TOOLS, Stage, until

from rollout.proxy import intake
from rollout.types import Limits, Sampling

BODY: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "tools": TOOLS}
TICKETS = {"helpdesk": {"tickets": [{"id": 7, "subject": "Printer", "status": "open"}]}}


def recorded(stage: Stage) -> int:
    return stage.store.calls.count()


@pytest.mark.bugs
@pytest.mark.parametrize("key", ["", "of-wrong", "Bearer", "ключ"])
def test_bug_30_an_unknown_key_is_refused_and_recorded_nowhere(proxy_stage: Any, key: str) -> None:
    async def main() -> None:
        async with proxy_stage() as stage:
            stage.add("r")
            status, answer = await stage.ask("r", BODY, key=key)
            assert (status, answer["error"]["code"]) == (401, "unknown_key")
            assert recorded(stage) == 0
            assert stage.engine.asked == []

    asyncio.run(main())


@pytest.mark.bugs
def test_bug_85_identity_comes_from_the_key_alone(proxy_stage: Any) -> None:
    """Neither the path, a header nor a body field lets one rollout speak for another."""

    async def main() -> None:
        async with proxy_stage() as stage:
            mine, _ = stage.add("mine"), stage.add("other")
            assert (await stage.ask("other", BODY, key=mine))[0] == 401
            stage.engine.queue = [stage.say("ok")]
            claimed = {**BODY, "session_id": "other", "user": "other", "metadata": {"rollout_id": "other"}}
            headers = {"X-Session-Id": "other", "X-Rollout-Id": "other", "session-id": "other"}
            assert (await stage.ask("mine", claimed, headers=headers))[0] == 200
            assert [c.rollout_id for c in stage.store.calls.of_many(["mine", "other"])["mine"]] == ["mine"]
            assert stage.store.calls.of("other") == []

    asyncio.run(main())


@pytest.mark.parametrize("header", ["Authorization", "authorization", "api-key", "x-api-key"])
def test_the_key_is_read_where_clients_put_it(proxy_stage: Any, header: str) -> None:
    async def main() -> None:
        async with proxy_stage() as stage:
            key = stage.add("r")
            stage.engine.queue = [stage.say("ok")]
            value = f"bearer {key}" if "uth" in header else key
            async with stage.http.post(
                f"{stage.url}/rollouts/r/v1/chat/completions", data=json.dumps(BODY), headers={header: value}
            ) as response:
                assert response.status == 200

    asyncio.run(main())


def test_a_revoked_key_ends_within_its_time(proxy_stage: Any) -> None:
    async def main() -> None:
        async with proxy_stage() as stage:
            stage.add("r")
            stage.engine.script = lambda _: stage.say("ok")
            assert (await stage.ask("r", BODY))[0] == 200
            stage.store.rollouts.revoke_keys("r")
            await asyncio.sleep(2.1)
            assert (await stage.ask("r", BODY))[0] == 401

    asyncio.run(main())


def test_the_solution_phase_uses_tools_but_never_the_model(proxy_stage: Any) -> None:
    async def main() -> None:
        async with proxy_stage() as stage:
            stage.add("s", phase="solution")
            stage.services.open("s", TICKETS)
            status, answer = await stage.ask("s", BODY)
            assert (status, answer["error"]["code"]) == (403, "wrong_phase")
            status, answer = await tool(stage, "s", "helpdesk/get_ticket", {"id": 7})
            assert (status, answer["result"]["id"]) == (200, 7)
            stage.add("v", phase="verify")
            stage.services.open("v", TICKETS)
            assert (await tool(stage, "v", "helpdesk/get_ticket", {"id": 7}))[0] == 403

    asyncio.run(main())


async def tool(stage: Stage, name: str, path: str, arguments: Any, key: str | None = None) -> tuple[int, Any]:
    headers = {"Authorization": f"Bearer {stage.keys[name] if key is None else key}"}
    data = arguments if isinstance(arguments, bytes) else json.dumps(arguments)
    async with stage.http.post(f"{stage.url}/rollouts/{name}/tools/{path}", data=data, headers=headers) as response:
        return response.status, await response.json()


def test_tool_calls_reach_the_services_and_the_audit(proxy_stage: Any) -> None:
    async def main() -> None:
        async with proxy_stage() as stage:
            stage.add("r")
            stage.add("closed")
            stage.services.open("r", TICKETS)
            assert (await tool(stage, "r", "helpdesk/close_ticket", {"id": 7}))[0] == 200
            status, answer = await tool(stage, "r", "helpdesk/get_ticket", {"id": 99})
            assert (status, answer["status"], answer["error"]["code"]) == (200, 404, "unknown_id")
            for path in ("helpdesk/no_tool", "nowhere/get_ticket"):
                status, answer = await tool(stage, "r", path, {})
                assert (status, answer["status"]) == (200, 404)
            assert (await tool(stage, "r", "helpdesk/get_ticket", b"[1]"))[0] == 400
            assert (await tool(stage, "r", "helpdesk/get_ticket", b"{"))[0] == 400
            assert (await tool(stage, "r", "helpdesk/get_ticket", {}, key="no"))[0] == 401
            assert (await tool(stage, "r", "helpdesk/get_ticket", {}, key=stage.keys["closed"]))[0] == 401
            assert (await tool(stage, "closed", "helpdesk/get_ticket", {"id": 7}))[0] == 503
            final = stage.services.final("r")
            assert final["services"]["helpdesk"]["tickets"][0]["status"] == "closed"
            assert [entry["tool"] for entry in final["audit"]] == ["close_ticket", "get_ticket"]

    asyncio.run(main())


def test_a_service_that_fails_is_no_failure_of_the_gateway(proxy_stage: Any) -> None:
    async def main() -> None:
        async with proxy_stage() as stage:
            stage.add("r")
            stage.services.open("r", TICKETS, error_rate=1.0)
            answers = [await tool(stage, "r", "helpdesk/get_ticket", {"id": 7}) for _ in range(20)]
            assert {status for status, _ in answers} == {200}
            assert {answer["status"] for _, answer in answers} == {429, 503}

    asyncio.run(main())


@pytest.mark.parametrize(
    ("limits", "code"),
    [
        (Limits(calls=2), "call_cap"),
        (Limits(tokens=5), "token_cap"),
        (Limits(context=16), "context_cap"),
    ],
)
def test_caps_end_the_session_with_a_reason(proxy_stage: Any, limits: Limits, code: str) -> None:
    async def main() -> None:
        async with proxy_stage() as stage:
            stage.add("r", limits=limits)
            stage.engine.script = lambda asked: stage.say("abcdefgh", finish="stop")
            for i in range(4):
                status, answer = await stage.ask("r", {**BODY, "user": str(i)})
                if status != 200:
                    break
            assert (status, answer["error"]["code"]) == (400, code)
            stored = stage.store.rollouts.get("r")
            assert stored
            assert stored.end_reason == code
            assert recorded(stage) == {"call_cap": 2, "token_cap": 1, "context_cap": 0}[code]

    asyncio.run(main())


def test_caps_survive_a_restart(proxy_stage: Any) -> None:
    async def main() -> None:
        async with proxy_stage() as stage:
            key = stage.add("r", limits=Limits(calls=1))
            stage.engine.queue = [stage.say("ok")]
            assert (await stage.ask("r", BODY))[0] == 200
            await until(lambda: stage.store.calls.of("r")[0].delivered)
        async with proxy_stage() as stage:
            stage.keys["r"] = key
            assert (await stage.ask("r", BODY))[1]["error"]["code"] == "call_cap"

    asyncio.run(main())


def test_an_answer_is_bounded_by_what_is_left(proxy_stage: Any) -> None:
    async def main() -> None:
        async with proxy_stage() as stage:
            limits, sampling = Limits(tokens=50, context=4096), Sampling(max_tokens=40)
            stage.add("r", limits=limits, sampling=sampling)
            stage.engine.script = lambda asked: stage.say("abcdef", finish="stop")
            await stage.ask("r", {**BODY, "max_tokens": 3})
            left = 50
            while left > 0:
                left -= len(stage.store.calls.of("r")[-1].completion_ids)
                await stage.ask("r", {**BODY, "max_tokens": 32000, "user": str(left)})
                if left > 0:
                    assert stage.engine.asked[-1]["max_tokens"] == min(40, left)
            assert stage.engine.asked[0]["max_tokens"] == 3

    asyncio.run(main())


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/rollouts/r/v1/responses", 426),
        ("HEAD", "/rollouts/r/api/hello", 404),
        ("POST", "/rollouts/r/v1/embeddings", 404),
        ("GET", "/rollouts/r/v1/chat/completions", 405),
        ("POST", "/v1/chat/completions", 404),
        ("GET", "/rollouts/r/tools/helpdesk/get_ticket", 405),
        ("GET", "/rollouts/r/tools/helpdesk/state", 405),
        ("POST", "/rollouts/r/tools/helpdesk", 404),
    ],
)
def test_other_routes_are_a_fast_error_and_never_the_model(
    proxy_stage: Any, method: str, path: str, status: int
) -> None:
    async def main() -> None:
        async with proxy_stage() as stage:
            stage.add("r")
            headers = {"Authorization": f"Bearer {stage.keys['r']}"}
            async with stage.http.request(method, stage.url + path, headers=headers) as response:
                assert response.status == status
                if method != "HEAD":
                    assert (await response.json())["error"]["code"] == "no_route"
            assert stage.engine.asked == []

    asyncio.run(main())


def test_models_lists_the_rollouts_own(proxy_stage: Any) -> None:
    async def main() -> None:
        async with proxy_stage() as stage:
            key = stage.add("r")
            headers = {"Authorization": f"Bearer {key}"}
            async with stage.http.get(f"{stage.url}/rollouts/r/v1/models", headers=headers) as response:
                assert [m["id"] for m in (await response.json())["data"]] == [str(stage.folder)]
            async with stage.http.get(f"{stage.url}/rollouts/r/v1/models") as response:
                assert response.status == 401

    asyncio.run(main())


def test_large_and_compressed_bodies_are_refused(proxy_stage: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(intake, "UNDECLARED_MAX", 1000)

    async def main() -> None:
        async with proxy_stage() as stage:
            stage.add("r", limits=Limits(body_mb=1))
            status, answer = await stage.ask("r", b"x" * (2**20 + 1))
            assert status == 413
            assert "1048576 bytes" in answer["error"]["message"]

            async def parts() -> Any:
                for _ in range(20):
                    yield b"x" * 100

            headers = {"Authorization": f"Bearer {stage.keys['r']}"}
            url = f"{stage.url}/rollouts/r/v1/chat/completions"
            async with stage.http.post(url, data=parts(), headers=headers) as response:
                assert response.status == 413
            assert (await stage.ask("r", BODY, headers={"Content-Encoding": "gzip"}))[0] == 415

    asyncio.run(main())


def test_a_model_that_is_not_there_is_a_clear_error(proxy_stage: Any) -> None:
    async def main() -> None:
        from rollout.types import ModelRef

        async with proxy_stage() as stage:
            stage.add("r", model=ModelRef(name="nowhere"))
            status, answer = await stage.ask("r", BODY)
            assert status == 503
            assert "openforge models add" in answer["error"]["message"]

    asyncio.run(main())
