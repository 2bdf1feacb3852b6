"""What the proxy adds: `python benchmarks/proxy_overhead.py [--streams 1 16 64] [--events 48] [--rounds 3]`.

The same load goes straight to a scripted engine and through the proxy to that engine, alternating, in one run:
streamed chat calls of `--prompt` characters, `--events` events of one id each, `--pause` ms apart. Their starts are
spread evenly over the length of one. Engine, proxy and client are a process each. Printed are the times to the first
event and between events, p50 and p95, and what the proxy adds to their medians. The bar: at 64 streams it adds at most
5 ms to the first event and to each following one. Ends 1 beyond.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from proxy_fakes import FakeEngine, Reply, a_rollout, register, save_codec

from rollout.config import Home, open_home
from rollout.inference.router import EngineRouter
from rollout.proxy.app import ProxyContext, create_proxy
from rollout.services import ServiceHost
from rollout.store import open_store
from rollout.types import Limits

BAR_MS = 5.0
BAR_STREAMS = 64
START_S = 60.0


@dataclass
class Times:
    """Seconds."""

    first: list[float] = field(default_factory=list)
    between: list[float] = field(default_factory=list)

    def of(self, what: str, quantile: float) -> float:
        values = sorted(getattr(self, what))
        return values[min(len(values) - 1, int(quantile * len(values)))]


@dataclass(frozen=True)
class Load:
    streams: int
    events: int
    prompt: int
    seconds: float
    """Of one stream: the starts are spread evenly over it, as those of sessions that run on their own."""


# -- servers ---------------------------------------------------------------------------------------------


def serve(app: Any, sock: socket.socket) -> None:
    import uvicorn

    config = uvicorn.Config(app, log_level="warning", access_log=False, lifespan="off", loop="uvloop")
    uvicorn.Server(config).run([sock])


def engine_process(sock: socket.socket, events: int, pause: float) -> None:
    """One id per event; their number stands in the request as max_tokens."""
    serve(FakeEngine(lambda body: Reply((100,) * min(events, body["max_tokens"]), "length", pause)).app(), sock)


def proxy_process(sock: socket.socket, root: str) -> None:
    store = open_store(open_home(root))
    serve(create_proxy(ProxyContext(store, ServiceHost(), EngineRouter(store))), sock)


def listening() -> tuple[socket.socket, str]:
    sock = socket.socket()
    sock.bind(("127.0.0.1", 0))
    sock.listen(1024)
    return sock, f"http://127.0.0.1:{sock.getsockname()[1]}"


# -- the load --------------------------------------------------------------------------------------------


async def one(
    http: aiohttp.ClientSession, url: str, body: bytes, headers: dict[str, str], into: Times, *, after: float
) -> None:
    """Starts `after` seconds from now."""
    await asyncio.sleep(after)
    began = last = time.perf_counter()
    first = True
    async with http.post(url, data=body, headers=headers) as response:
        if response.status != 200:
            raise SystemExit(f"{url} answered {response.status}: {await response.text()}")
        async for line in response.content:
            if not line.startswith(b"data: {"):
                continue
            now = time.perf_counter()
            if first:
                into.first.append(now - began)
            else:
                into.between.append(now - last)
            first, last = False, now


def straight(load: Load) -> bytes:
    body = {"prompt": [100] * (load.prompt // 3), "max_tokens": load.events, "stream": True, "return_token_ids": True}
    return json.dumps(body).encode()


def chat(load: Load, number: int) -> bytes:
    text = "the ticket was merged into another one " * (load.prompt // 39)
    messages = [{"role": "system", "content": text}, {"role": "user", "content": f"call {number}"}]
    return json.dumps({"messages": messages, "max_tokens": load.events, "stream": True}).encode()


async def compare(load: Load, urls: tuple[str, str], keys: Sequence[str], rounds: int) -> tuple[Times, Times]:
    plain, through = Times(), Times()
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as http:
        for number in range(-1, rounds):
            into = (plain, through) if number >= 0 else (Times(), Times())
            starts = [load.seconds * i / load.streams for i in range(load.streams)]
            work = [
                one(http, f"{urls[0]}/v1/completions", straight(load), {}, into[0], after=starts[i])
                for i in range(load.streams)
            ]
            await asyncio.gather(*work)
            work = [
                one(
                    http,
                    f"{urls[1]}/rollouts/b{i}/v1/chat/completions",
                    chat(load, number),
                    {"Authorization": f"Bearer {keys[i]}"},
                    into[1],
                    after=starts[i],
                )
                for i in range(load.streams)
            ]
            await asyncio.gather(*work)
    return plain, through


def prepare(home: Home, engine_url: str, streams: int) -> list[str]:
    folder = save_codec(home.root / "student")
    store = open_store(home)
    try:
        register(store, str(folder), engine_url)
        limits = Limits(calls=10_000, tokens=10**8, context=10**6)
        rollouts = [a_rollout(f"b{i}", folder, limits=limits) for i in range(streams)]
        store.rollouts.enqueue([r.model_copy(update={"sampling": _long(r.sampling)}) for r in rollouts])
        return [store.rollouts.issue_key(r.id, "agent") for r in rollouts]
    finally:
        store.close()


def _long(sampling: Any) -> Any:
    return sampling.model_copy(update={"max_tokens": 10_000})


async def ready(url: str) -> None:
    end = time.monotonic() + START_S
    async with aiohttp.ClientSession() as http:
        while True:
            try:
                async with http.get(url):
                    return
            except aiohttp.ClientConnectionError:
                if time.monotonic() > end:
                    raise SystemExit(f"{url} did not start") from None
                await asyncio.sleep(0.1)


def report(load: Load, plain: Times, through: Times) -> bool:
    """Prints one load's lines; True beyond the bar."""
    beyond = False
    for what, name in (("first", "first event"), ("between", "each event")):
        added = 1000 * (statistics.median(getattr(through, what)) - statistics.median(getattr(plain, what)))
        numbers = [1000 * times.of(what, q) for times in (plain, through) for q in (0.5, 0.95)]
        print(
            f"{load.streams:3d} streams, {name}: straight p50 {numbers[0]:7.2f} p95 {numbers[1]:7.2f} ms, "
            f"proxy p50 {numbers[2]:7.2f} p95 {numbers[3]:7.2f} ms: adds {added:6.2f} ms, "
            f"ratio {numbers[2] / max(numbers[0], 1e-6):.2f}"
        )
        beyond |= load.streams >= BAR_STREAMS and added > BAR_MS
    return beyond


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, nargs="*", default=[1, 16, 64])
    parser.add_argument("--events", type=int, default=48)
    parser.add_argument("--pause", type=float, default=20.0, help="ms between the engine's events")
    parser.add_argument("--prompt", type=int, default=6000, help="characters")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    engine_sock, engine_url = listening()
    proxy_sock, proxy_url = listening()
    start = multiprocessing.get_context("fork").Process
    with tempfile.TemporaryDirectory(prefix="openforge-bench-") as root:
        keys = prepare(open_home(root), engine_url, max(args.streams))
        servers = [
            start(target=engine_process, args=(engine_sock, args.events, args.pause / 1000), daemon=True),
            start(target=proxy_process, args=(proxy_sock, root), daemon=True),
        ]
        for server in servers:
            server.start()
        try:
            asyncio.run(ready(f"{engine_url}/health"))
            asyncio.run(ready(f"{proxy_url}/"))
            print(f"{os.cpu_count()} CPUs, {args.events} events {args.pause:g} ms apart, {args.prompt} characters")
            loads = [Load(n, args.events, args.prompt, args.events * args.pause / 1000) for n in args.streams]
            beyond = [
                report(load, *asyncio.run(compare(load, (engine_url, proxy_url), keys, args.rounds))) for load in loads
            ]
        finally:
            for server in servers:
                server.terminate()
                server.join(10)
    print(f"{'BEYOND' if any(beyond) else 'within'} the bar ({BAR_MS:g} ms added at {BAR_STREAMS} streams)")
    return 1 if any(beyond) else 0


if __name__ == "__main__":
    sys.exit(main())
