"""`openforge serve`: the proxy, the service host and the orchestrator in one long-lived process.

Three listeners: the proxy on a unix socket (what sandboxes see) and on 127.0.0.1, and the runners' long-poll on a
second socket that no sandbox sees. `serve.json` in the home names the process while it lives; a second serve in
the same home ends at once. OPENFORGE_CONCURRENCY is how many rollouts run at once where the command line says nothing.
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
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, nullcontext, suppress
from pathlib import Path
from typing import Literal

import uvicorn
from starlette.applications import Starlette

from rollout.config import Home, open_home
from rollout.errors import ConfigError, OpenForgeError
from rollout.harness import stop_style, tagger_of
from rollout.inference.router import EngineRouter
from rollout.lifecycle import Context
from rollout.orchestrator.loop import Orchestrator
from rollout.processes import serve_file, write_pid_file
from rollout.proxy.app import ProxyContext, create_proxy
from rollout.proxy.attribution import Adapters
from rollout.sandbox.hub import RunnerHub, create_hub
from rollout.sandbox.local import LocalSandbox, reap
from rollout.services.host import ServiceHost
from rollout.store import open_store

log = logging.getLogger(__name__)
SOCKET_PATH_MAX = 107
"""Bytes of a unix socket's path (sun_path of Linux, its end mark aside)."""
CONCURRENCY = 32
CONCURRENCY_VARIABLE = "OPENFORGE_CONCURRENCY"
CONCURRENCY_MAX = 4096
LISTEN_END_S = 10.0
SPARE_THREADS = 16
"""Beside one for each rollout, whose write may wait for a locked store: for the proxy, the sandboxes and sweeps."""


class _Server(uvicorn.Server):
    """A server among several: signals belong to the process, not to one of them."""

    def install_signal_handlers(self) -> None:
        return None

    def capture_signals(self):  # type: ignore[no-untyped-def]
        return nullcontext()


def _listener(path: Path) -> socket.socket:
    if len(os.fsencode(path)) > SOCKET_PATH_MAX:
        raise ConfigError(
            f"{path} is longer than a unix socket's path may be ({SOCKET_PATH_MAX} bytes); "
            "set OPENFORGE_HOME to a shorter path"
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.bind(str(path))
    path.chmod(0o666)
    sock.listen(1024)
    return sock


def _tcp(port: int) -> socket.socket:
    if not 0 <= port < 65536:
        raise ConfigError(f"{port} is no port; choose --port between 1 and 65535, or 0 for a free one")
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
    """Runs until SIGTERM or SIGINT, or until nothing ran for `idle_exit` seconds (0: never) and no engine is left.

    However it ends, the rollouts end first, then the listeners that their sandboxes need, the store last.
    """
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(concurrency + SPARE_THREADS))
    stop = asyncio.Event()
    for signum in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(signum, stop.set)
    async with AsyncExitStack() as stack:
        store = open_store(home)
        stack.callback(serve_file(home).unlink, missing_ok=True)
        stack.callback(store.close)
        services, hub, router = ServiceHost(), RunnerHub(), EngineRouter(store)
        stack.push_async_callback(router.close)
        proxy = create_proxy(ProxyContext(store, services, router, Adapters(tagger_of, stop_style)))
        reap(home)
        tcp = _tcp(port)
        _listen(stack, _server(proxy, "on"), [_listener(home.run / "proxy" / "proxy.sock"), tcp])
        _listen(stack, _server(create_hub(hub), "off"), [_listener(home.run / "runner" / "runner.sock")])
        url = f"http://127.0.0.1:{tcp.getsockname()[1]}"
        write_pid_file(serve_file(home), url=url)
        log.info("serving %s at %s", home.root, url)
        ctx = Context(store, services, lambda: LocalSandbox(hub, home), proxy.state.sessions.forget)
        orchestrator = Orchestrator(ctx, concurrency)
        stack.push_async_callback(orchestrator.stop)
        loop = asyncio.create_task(orchestrator.run())

        def idle() -> bool:  # as long as there are engines, somebody must end them when their lease runs out
            return (
                bool(idle_exit) and time.monotonic() - orchestrator.idle_since > idle_exit and not store.engines.all()
            )

        await _until(stop, loop, idle)


def _listen(stack: AsyncExitStack, server: _Server, sockets: list[socket.socket]) -> None:
    """Starts a server that ends with `stack`."""
    listening = asyncio.create_task(server.serve(sockets))

    async def end() -> None:
        server.should_exit = server.force_exit = True
        await asyncio.wait([listening], timeout=LISTEN_END_S)

    stack.push_async_callback(end)


async def _until(stop: asyncio.Event, loop: asyncio.Task[None], idle: Callable[[], bool]) -> None:
    while not stop.is_set() and not idle():
        if loop.done():
            loop.result()
        with suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), 1.0)


def concurrency_of(asked: int) -> int:
    """Rollouts at once: `asked`, else OPENFORGE_CONCURRENCY, else the default. Raises ConfigError outside 1..4096."""
    source = "--concurrency" if asked else CONCURRENCY_VARIABLE
    text = str(asked) if asked else os.environ.get(CONCURRENCY_VARIABLE) or str(CONCURRENCY)
    if not text.strip().isdecimal() or not 1 <= int(text) <= CONCURRENCY_MAX:
        raise ConfigError(f"{source} is {text!r}; give a whole number from 1 to {CONCURRENCY_MAX}")
    return int(text)


def main(home: Home, *, port: int = 0, concurrency: int = 0, idle_exit: float = 0.0) -> int:
    """Entry point; returns 0. A serve that already runs in this home makes this one end with a message.

    `concurrency` 0: see `concurrency_of`. Raises ConfigError.
    """
    slots = concurrency_of(concurrency)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    for noisy in ("aiohttp.access", "alembic"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    with (home.run / "serve.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            print(f"openforge serve already runs for {home.root}", file=sys.stderr)
            return 0
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        import uvloop

        uvloop.run(serve(home, port=port, concurrency=slots, idle_exit=idle_exit))
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="openforge serve", description=__doc__)
    parser.add_argument("--home", default=None)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--concurrency", type=int, default=0, help=f"rollouts at once (0: ${CONCURRENCY_VARIABLE})")
    parser.add_argument("--idle-exit", type=float, default=0.0)
    return parser.parse_args()


if __name__ == "__main__":
    args = _arguments()
    try:
        sys.exit(main(open_home(args.home), port=args.port, concurrency=args.concurrency, idle_exit=args.idle_exit))
    except OpenForgeError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
