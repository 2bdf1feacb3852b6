"""vLLM as an engine: what the gate adds to its server, on a made-up app and on the real one (mark `vllm`)."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from training import vllm_serve
from training.vllm_serve import Gate, parse_arguments, read_update, stamp, vllm_arguments

KEY = "k-update"


class Held:
    """vLLM's engine client as the gate sees it; notes the order of calls."""

    def __init__(self, fails: str = "") -> None:
        self.said: list[Any] = []
        self._fails = fails

    def _note(self, *what: Any) -> None:
        self.said.append(what if len(what) > 1 else what[0])
        if what[0] == self._fails:
            raise RuntimeError("no such file")

    async def pause_generation(self, *, mode: str) -> None:
        self._note("pause", mode)

    async def collective_rpc(self, method: str, timeout: float, kwargs: dict[str, str]) -> None:
        self._note(method, kwargs["weights_path"])

    async def reset_prefix_cache(self, reset_running_requests: bool) -> bool:
        self._note("reset", reset_running_requests)
        return self._fails != "refused"

    async def resume_generation(self) -> None:
        self._note("resume")


async def app(scope: Any, receive: Any, send: Any) -> None:
    whole = b'{"choices":[]}'
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"14")]})
    await send({"type": "http.response.body", "body": whole})


def gated(engine: Held, monkeypatch: pytest.MonkeyPatch, talk: Callable[[httpx.AsyncClient], Awaitable[None]]) -> None:
    monkeypatch.setenv(vllm_serve.KEY_VARIABLE, KEY)
    monkeypatch.setenv(vllm_serve.VERSION_VARIABLE, "3")
    monkeypatch.setattr(vllm_serve, "SETTLE_S", 0.0)
    gate = Gate(app)

    async def outer(scope: Any, receive: Any, send: Any) -> None:
        await gate({**scope, "app": SimpleNamespace(state=SimpleNamespace(engine_client=engine))}, receive, send)

    async def main() -> None:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(outer), base_url="http://engine") as http:
            await talk(http)

    asyncio.run(main())


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text("{}")
    return tmp_path


def update(http: httpx.AsyncClient, key: str = KEY, **body: Any) -> Awaitable[httpx.Response]:
    return http.post("/update_weights", json=body, headers={"Authorization": f"Bearer {key}"})


def test_an_update_holds_the_streams_while_weights_and_cache_change(
    weights: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Held()

    async def talk(http: httpx.AsyncClient) -> None:
        assert (await http.post("/v1/completions")).json()["weight_version"] == 3
        answer = await update(http, path=str(weights), version=4)
        assert answer.status_code == 200
        assert answer.json()["weight_version"] == 4
        assert (await http.post("/v1/completions")).json()["weight_version"] == 4
        assert "weight_version" not in (await http.get("/v1/models")).json()

    gated(engine, monkeypatch, talk)
    assert engine.said == [("pause", "keep"), ("reload_weights", str(weights)), ("reset", True), "resume"]


@pytest.mark.parametrize("fails", ["reload_weights", "refused"])
def test_a_failed_update_lets_the_streams_go_on_under_the_old_version(
    weights: Path, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    engine = Held(fails)

    async def talk(http: httpx.AsyncClient) -> None:
        answer = await update(http, path=str(weights), version=4)
        assert answer.status_code == 503
        assert "the update failed" in answer.json()["error"]["message"]
        assert (await http.post("/v1/completions")).json()["weight_version"] == 3

    gated(engine, monkeypatch, talk)
    assert engine.said[-1] == "resume"


def test_only_the_trainer_updates(weights: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Held()

    async def talk(http: httpx.AsyncClient) -> None:
        assert (await update(http, "guess", path=str(weights), version=4)).status_code == 401
        assert (await http.post("/update_weights", json={})).status_code == 401
        assert (await http.get("/update_weights")).status_code == 405
        assert (await update(http, path="x" * 70_000, version=4)).status_code == 400
        assert (await update(http, path=str(weights / "none"), version=4)).status_code == 400
        monkeypatch.delenv(vllm_serve.KEY_VARIABLE)
        assert (await update(http, "", path=str(weights), version=4)).status_code == 401

    gated(engine, monkeypatch, talk)
    assert engine.said == []


@pytest.mark.parametrize("version", [-1, True, 1.5, "1", None])
def test_a_version_is_a_number(weights: Path, version: Any) -> None:
    with pytest.raises(ValueError, match="version"):
        read_update(json.dumps({"path": str(weights), "version": version}).encode())


def test_every_event_is_stamped() -> None:
    events = b'data: {"a":1}\n\ndata: {"b":2}\n\ndata: [DONE]\n\n'
    stamped = stamp(events, 7).split(b"\n\n")
    assert [json.loads(line[6:]) for line in stamped[:2]] == [
        {"weight_version": 7, "a": 1},
        {"weight_version": 7, "b": 2},
    ]
    assert stamped[2:] == [b"data: [DONE]", b""]


def test_it_takes_the_options_of_the_embedded_engine_and_passes_others_on() -> None:
    args, more = parse_arguments(["--model", "/m/x", "--slots", "4", "--max-len", "512", "--tensor-parallel-size", "2"])
    line = vllm_arguments(args, 1234, True, more)
    for option, value in (("--max-num-seqs", "4"), ("--max-model-len", "512"), ("--port", "1234")):
        assert line[line.index(option) + 1] == value
    assert line[-2:] == ["--tensor-parallel-size", "2"]
    assert "--enforce-eager" in line
    assert "--enforce-eager" not in vllm_arguments(args, 1234, False)
