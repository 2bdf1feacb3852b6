"""The engine as a process: its HTTP API, what it refuses, and how it ends."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

KEY = "k-update"
START_S = 120.0


@dataclass(frozen=True)
class Running:
    process: subprocess.Popen[bytes]
    http: httpx.Client
    folder: Path

    def stats(self) -> dict[str, Any]:
        return dict(self.http.get("/stats").json())

    def wait_until(self, what: str, value: int, within_s: float = 10.0) -> float:
        """Seconds until `/stats` shows `what` == value."""
        began = time.monotonic()
        while self.stats()[what] != value:
            assert time.monotonic() - began < within_s, f"{what} never became {value}: {self.stats()}"
            time.sleep(0.02)
        return time.monotonic() - began


def start(folder: Path, port_file: Path, *options: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "training.serve", "--model", str(folder), "--port-file", str(port_file), *options]
    environment = {**os.environ, "OPENFORGE_ENGINE_KEY": KEY}
    return subprocess.Popen(command, env=environment, stderr=subprocess.PIPE)


def connect(process: subprocess.Popen[bytes], port_file: Path) -> httpx.Client:
    end = time.monotonic() + START_S
    while not port_file.exists():
        assert process.poll() is None, (process.stderr.read() if process.stderr else b"").decode()
        assert time.monotonic() < end
        time.sleep(0.05)
    return httpx.Client(base_url=f"http://127.0.0.1:{port_file.read_text().strip()}", timeout=60)


@pytest.fixture(scope="module")
def engine(sharp_models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    port_file = tmp_path_factory.mktemp("serve") / "port"
    process = start(sharp_models["qwen3"], port_file, "--slots", "2", "--threads", "1", "--name", "policy")
    with connect(process, port_file) as http:
        yield Running(process, http, sharp_models["qwen3"])
    process.terminate()
    process.wait(20)
    if process.stderr:
        process.stderr.close()


def body(**changes: Any) -> dict[str, Any]:
    return {"prompt": list(range(20)), "max_tokens": 12, "seed": 3, "logprobs": 1, "ignore_eos": True, **changes}


def streamed(http: httpx.Client, **changes: Any) -> list[dict[str, Any]]:
    with http.stream("POST", "/v1/completions", json=body(stream=True, **changes)) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def test_a_stream_and_a_plain_answer_hold_the_same_ids(engine: Running) -> None:
    whole = engine.http.post("/v1/completions", json=body()).json()
    chunks = streamed(engine.http)
    choices = [c["choices"][0] for c in chunks]
    answer = whole["choices"][0]
    assert [i for c in choices for i in c["token_ids"]] == answer["token_ids"]
    streamed_logprobs = [p for c in choices for p in c["logprobs"]["token_logprobs"]]
    assert streamed_logprobs == pytest.approx(answer["logprobs"]["token_logprobs"], abs=0.05)
    assert len(answer["token_ids"]) == len(streamed_logprobs) == 12
    assert [c["finish_reason"] for c in choices] == [None] * (len(choices) - 1) + ["length"]
    assert len(choices) > 1
    assert {c["weight_version"] for c in chunks} == {whole["weight_version"]}
    assert whole["usage"] == {"prompt_tokens": 20, "completion_tokens": 12, "total_tokens": 32}


def test_a_stop_id_ends_the_answer_and_belongs_to_it(engine: Running) -> None:
    ids = engine.http.post("/v1/completions", json=body()).json()["choices"][0]["token_ids"]
    chunks = streamed(engine.http, stop_token_ids=[ids[5]])
    got = [i for c in chunks for i in c["choices"][0]["token_ids"]]
    assert got == ids[: ids.index(ids[5]) + 1]
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize(
    ("changes", "status", "says"),
    [
        ({"prompt": [1] * 512}, 400, "--max-len"),
        ({"prompt": []}, 400, "empty"),
        ({"prompt": "text"}, 400, "prompt"),
        ({"prompt": [300]}, 400, "0..299"),
        ({"temperature": -1}, 400, "temperature"),
        ({"temperature": "NaN"}, 400, "temperature"),
        ({"presence_penalty": 1}, 400, "presence_penalty"),
        ({"n": 2}, 400, "n:"),
        ({"model": "other"}, 404, "policy"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(
    engine: Running, changes: dict[str, Any], status: int, says: str
) -> None:
    response = engine.http.post("/v1/completions", json=body(**changes))
    assert response.status_code == status
    assert says in response.json()["error"]["message"]


def test_garbage_is_a_400(engine: Running) -> None:
    assert engine.http.post("/v1/completions", content=b'{"prompt": [1').status_code == 400
    assert engine.http.post("/v1/completions", content=b"\xff\xfe").status_code == 400


def test_health_models_and_metrics(engine: Running) -> None:
    assert engine.http.get("/health").json() == {"status": "ok"}
    names = [m["id"] for m in engine.http.get("/v1/models").json()["data"]]
    assert names == ["qwen3-1", "policy", str(engine.folder)]
    assert engine.http.post("/v1/completions", json=body(model="policy")).status_code == 200
    assert "openforge_engine_sampled " in engine.http.get("/metrics").text


def test_more_requests_than_slots_wait_their_turn(engine: Running) -> None:
    with ThreadPoolExecutor(6) as pool:
        answers = list(pool.map(lambda k: streamed(engine.http, seed=k, prompt=[k] * 30), range(6)))
    assert [sum(len(c["choices"][0]["token_ids"]) for c in chunks) for chunks in answers] == [12] * 6


def test_a_client_that_goes_away_frees_its_place_within_a_second(engine: Running) -> None:
    """Two in the slots and one in the queue: the queued one has had no byte yet when it goes."""
    before = engine.stats()["cancelled"]
    host, port = str(engine.http.base_url.host), engine.http.base_url.port
    payload = json.dumps(body(max_tokens=480, stream=True)).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(payload)}\r\n\r\n".encode()
    sockets = []
    for _ in range(3):
        sock = socket.create_connection((host, port or 0), timeout=10)
        sock.sendall(head + payload)
        sockets.append(sock)
    engine.wait_until("queued", 1)
    sockets[2].close()
    assert engine.wait_until("queued", 0) < 1.0
    for sock in sockets[:2]:
        sock.close()
    assert engine.wait_until("running", 0) < 1.0
    assert engine.stats()["cancelled"] == before + 3


def test_new_weights_need_the_key_and_mark_every_later_token(engine: Running, sharp_models: dict[str, Path]) -> None:
    wanted = {"path": str(sharp_models["qwen3-next"]), "version": 4}
    auth = {"Authorization": f"Bearer {KEY}"}
    assert engine.http.post("/update_weights", json=wanted).status_code == 401
    assert engine.http.post("/update_weights", json=wanted, headers={"Authorization": "Bearer x"}).status_code == 401
    bad = engine.http.post("/update_weights", json={**wanted, "path": str(sharp_models["llama"])}, headers=auth)
    assert bad.status_code == 400
    assert "other names or shapes" in bad.json()["error"]["message"]
    old = engine.http.post("/v1/completions", json=body()).json()
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(streamed, engine.http, max_tokens=450)
        engine.wait_until("running", 1)
        assert engine.http.post("/update_weights", json=wanted, headers=auth).json()["weight_version"] == 4
        versions = [c["weight_version"] for c in running.result(60)]
    assert versions == sorted(versions)
    assert versions[0] == 0
    assert versions[-1] == 4
    new = engine.http.post("/v1/completions", json=body()).json()
    assert new["weight_version"] == engine.stats()["version"] == 4
    assert new["choices"][0]["token_ids"] != old["choices"][0]["token_ids"]


def test_sigterm_ends_it_promptly_under_load(sharp_models: dict[str, Path], tmp_path: Path) -> None:
    process = start(sharp_models["qwen3"], tmp_path / "port", "--slots", "1", "--threads", "1")
    with connect(process, tmp_path / "port") as http:
        with http.stream("POST", "/v1/completions", json=body(max_tokens=490, stream=True)) as response:
            next(response.iter_lines())
            process.send_signal(signal.SIGTERM)
            began = time.monotonic()
            process.wait(20)
            assert time.monotonic() - began < 8
    if process.stderr:
        process.stderr.close()


def test_a_taken_port_and_a_broken_folder_are_explained(sharp_models: dict[str, Path], tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        process = start(sharp_models["qwen3"], tmp_path / "port", "--port", str(taken.getsockname()[1]))
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 2
    assert b"choose another --port" in errors
    (tmp_path / "empty").mkdir()
    process = start(tmp_path / "empty", tmp_path / "port")
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 2
    assert b"half-written" in errors
    assert not (tmp_path / "port").exists()
