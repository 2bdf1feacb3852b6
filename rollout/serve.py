"""`openforge serve`: the proxy, the service host and the orchestrator in one long-lived process.

Three listeners: the proxy on a unix socket (what sandboxes see) and on 127.0.0.1, and the runners' long-poll on a
second socket that no sandbox sees. `serve.json` in the home names the process while it lives; a second serve in
the same home ends at once.
"""

from __future__ import annotations

import argparse
import asyncio
import fcntl
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from contextlib import AsyncExitStack, nullcontext, suppress
from pathlib import Path
from typing import Literal

import uvicorn
from starlette.applications import Starlette

from rollout.config import Home, open_home
from rollout.errors import ConfigError, OpenForgeError
from rollout.inference.router import EngineRouter
from rollout.lifecycle import Context
from rollout.orchestrator.loop import Orchestrator
from rollout.processes import serve_file, write_pid_file
from rollout.proxy.app import ProxyContext, create_proxy
from rollout.sandbox.hub import RunnerHub, create_hub
from rollout.sandbox.local import LocalSandbox, reap
from rollout.services.host import ServiceHost
from rollout.store import open_store

log = logging.getLogger(__name__)
CONCURRENCY = 32


class _Server(uvicorn.Server):
    """A server among several: signals belong to the process, not to one of them."""

    def install_signal_handlers(self) -> None:
        return None

    def capture_signals(self):  # type: ignore[no-untyped-def]
        return nullcontext()


def _listener(path: Path) -> socket.socket:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.bind(str(path))
    path.chmod(0o666)
    sock.listen(1024)
    return sock


def _tcp(port: int) -> socket.socket:
    sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind(("127.0.0.1", port))
    except OSError as error:
        raise ConfigError(
            f"port {port} is in use on 127.0.0.1; choose another with --port, or 0 for a free one"
        ) from error
    sock.listen(1024)
    return sock


def _server(app: Starlette, lifespan: Literal["on", "off"]) -> _Server:
    config = uvicorn.Config(app, log_level="warning", access_log=False, lifespan=lifespan, timeout_keep_alive=120)
    config.load()
    return _Server(config)


async def serve(home: Home, *, port: int = 0, concurrency: int = CONCURRENCY, idle_exit: float = 0.0) -> None:
    """Runs until SIGTERM or SIGINT, or until nothing ran for `idle_exit` seconds (0: never)."""
    store = open_store(home)
    services, hub = ServiceHost(), RunnerHub()
    router = EngineRouter(store)
    proxy = create_proxy(ProxyContext(store=store, services=services, engines=router))
    ctx = Context(store, services, lambda: LocalSandbox(hub, home), proxy.state.sessions.forget)
    reap(home)
    orchestrator = Orchestrator(ctx, concurrency)
    servers = [_server(proxy, "on"), _server(create_hub(hub), "off")]
    tcp = _tcp(port)
    unix = _listener(home.run / "proxy" / "proxy.sock")
    runner = _listener(home.run / "runner" / "runner.sock")
    stop = asyncio.Event()
    for signum in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(signum, stop.set)
    async with AsyncExitStack() as stack:
        stack.callback(store.close)
        stack.push_async_callback(router.close)
        listening = [
            asyncio.create_task(servers[0].serve([unix, tcp])),
            asyncio.create_task(servers[1].serve([runner])),
        ]
        url = f"http://127.0.0.1:{tcp.getsockname()[1]}"
        write_pid_file(serve_file(home), url=url)
        log.info("serving %s at %s", home.root, url)
        loop = asyncio.create_task(orchestrator.run())
        await _until(stop, loop, lambda: bool(idle_exit) and time.monotonic() - orchestrator.idle_since > idle_exit)
        await orchestrator.stop()
        for server in servers:
            server.should_exit = server.force_exit = True
        await asyncio.wait(listening, timeout=10)
    serve_file(home).unlink(missing_ok=True)


async def _until(stop: asyncio.Event, loop: asyncio.Task[None], idle: Callable[[], bool]) -> None:
    while not stop.is_set() and not idle():
        if loop.done():
            loop.result()
        with suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), 1.0)


def main(home: Home, *, port: int = 0, concurrency: int = CONCURRENCY, idle_exit: float = 0.0) -> int:
    """Entry point; returns 0. A serve that already runs in this home makes this one end with a message."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("aiohttp.access").setLevel(logging.WARNING)
    with (home.run / "serve.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            print(f"openforge serve already runs for {home.root}", file=sys.stderr)
            return 0
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        import uvloop

        uvloop.run(serve(home, port=port, concurrency=concurrency, idle_exit=idle_exit))
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="openforge serve", description=__doc__)
    parser.add_argument("--home", default=None)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--concurrency", type=int, default=CONCURRENCY)
    parser.add_argument("--idle-exit", type=float, default=0.0)
    return parser.parse_args()


if __name__ == "__main__":
    args = _arguments()
    try:
        sys.exit(main(open_home(args.home), port=args.port, concurrency=args.concurrency, idle_exit=args.idle_exit))
    except OpenForgeError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
