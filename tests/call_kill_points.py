"""A proxy that kills itself with SIGKILL at the n-th boundary of a call, and a client that goes on all the same.

`python tests/call_kill_points.py MODEL_FOLDER WORK_FOLDER stream|unary` tries every boundary: before and after each
SQL statement of either database, at each commit and behind it, before and after each piece of the answer. Every try
has a home of its own: serve, ask, be killed, serve again, ask again as a harness does, go on. One JSON line a try.
Processes are forked from this one, which has no threads, so that hundreds of tries take moments each.
"""

from __future__ import annotations

import asyncio
import json
import mmap
import os
import shutil
import signal
import socket
import struct
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import sqlalchemy as sa
from proxy_fakes import TOOLS, a_rollout, joined, save_codec, serving, until

from rollout.config import open_home
from rollout.inference.base import Chunk
from rollout.proxy.app import ProxyContext, create_proxy
from rollout.proxy.codecs import load_codec
from rollout.services import ServiceHost
from rollout.store import Store, open_store
from rollout.types import ModelCall

NEVER = 1 << 60
USER = {"role": "user", "content": "Close ticket 7"}


class Fuse:
    """Counts boundaries in memory that is shared with the forked process; kills that process at the chosen one."""

    def __init__(self) -> None:
        self._shared = mmap.mmap(-1, 256)
        self.target = NEVER
        self.armed = False

    @property
    def count(self) -> int:
        return int(struct.unpack("<q", self._shared[:8])[0])

    @property
    def place(self) -> str:
        return self._shared[8:].split(b"\0")[0].decode()

    def reset(self, target: int) -> None:
        self._shared[:8] = struct.pack("<q", 0)
        self.target = target

    def tick(self, place: str) -> None:
        if not self.armed:
            return
        count = self.count + 1
        self._shared[:8] = struct.pack("<q", count)
        self._shared[8:] = place.encode()[:200].ljust(248, b"\0")
        if count == self.target:
            os.kill(os.getpid(), signal.SIGKILL)

    def watch(self, name: str, engine: sa.Engine) -> None:
        def told(when: str) -> Any:
            return lambda _c, _cur, statement, *_: self.tick(f"{name} {when} {' '.join(statement.split())[:60]}")

        sa.event.listen(engine, "before_cursor_execute", told("before"))
        sa.event.listen(engine, "after_cursor_execute", told("after"))
        sa.event.listen(engine, "commit", lambda _: self.tick(f"{name} before commit"))
        sa.event.listen(engine, "checkin", lambda *_: self.tick(f"{name} connection free"))

    def around(self, app: Any) -> Any:
        """`app` with a boundary before and after each message of an answer."""

        async def watched(scope: Any, receive: Any, send: Any) -> None:
            async def told(message: Any) -> None:
                self.tick(f"before {message['type']}")
                await send(message)
                self.tick(f"after {message['type']}")

            self.armed = self.armed or scope["type"] == "http"
            await app(scope, receive, told)

        return watched


class Speaker:
    """An engine and its source; answers in five chunks, in other words in each process."""

    structured_outputs = False

    def engine_for(self, rollout: Any, codec: Any) -> Speaker:
        self.codec = codec
        return self

    async def generate(self, ids: Any, sampling: Any, stop_ids: Any, context: Any) -> AsyncIterator[Chunk]:
        said = self.codec.encode(f"Done by {os.getpid()}.<|im_end|>")
        size = len(said) // 5 + 1
        for at in range(0, len(said), size):
            part = tuple(said[at : at + size])
            await asyncio.sleep(0)
            yield Chunk(part, (-0.5,) * len(part), 0, "stop" if at + size >= len(said) else "")


class Trial:
    """One home, its server and its client."""

    def __init__(self, home: Path, key: str, port: int, stream: bool) -> None:
        self.home, self.key, self.stream = home, key, stream
        self.port = port

    def serve(self, fuse: Fuse) -> int:
        """Forks a server; returns its pid."""
        if pid := os.fork():
            return pid
        try:
            asyncio.run(self._serve(fuse))
        finally:
            os._exit(1)

    async def _serve(self, fuse: Fuse) -> None:
        store = open_store(open_home(self.home))
        for name, database in zip(("rollouts", "calls"), store.databases, strict=True):
            fuse.watch(name, database.engine)
        app = create_proxy(ProxyContext(store=store, services=ServiceHost(), engines=Speaker()))
        async with serving(fuse.around(app), self.port):
            await asyncio.sleep(60)

    async def ask(self, messages: list[dict[str, Any]], *, again: bool = False) -> dict[str, Any] | None:
        """The answer's message, or None when the connection broke before its end."""
        url = f"http://127.0.0.1:{self.port}/rollouts/r/v1/chat/completions"
        headers = {"Authorization": f"Bearer {self.key}", **({"x-stainless-retry-count": "1"} if again else {})}
        body = json.dumps({"messages": messages, "tools": TOOLS, "stream": self.stream}).encode()
        await until(self._listening, 30)
        timeout = aiohttp.ClientTimeout(total=30)
        try:
            async with (
                aiohttp.ClientSession() as http,
                http.post(url, data=body, headers=headers, timeout=timeout) as r,
            ):
                raw = await r.read()
        except aiohttp.ClientError:
            return None
        assert r.status == 200, raw
        if not self.stream:
            return dict(json.loads(raw)["choices"][0]["message"])
        message = joined(raw)
        return {"role": "assistant", "content": message["content"]}

    def _listening(self) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0

    def calls(self) -> list[ModelCall]:
        store = open_store(open_home(self.home))
        try:
            for call in store.calls.of("r"):
                store.blobs.get(call.request)
                store.blobs.get(call.response)
            return store.calls.of("r")
        finally:
            store.close()


def play(trial: Trial, fuse: Fuse) -> dict[str, Any]:
    """Serve, ask, be killed, serve again, ask again unless the answer had come, go on."""
    pid = trial.serve(fuse)
    answer = asyncio.run(trial.ask([USER]))
    killed = end(pid, wait=fuse.target != NEVER)
    after = trial.calls()
    target, place, fuse.target = fuse.target, fuse.place, NEVER
    pid = trial.serve(fuse)
    shown = answer or asyncio.run(trial.ask([USER], again=True))
    last = asyncio.run(trial.ask([USER, shown or {}, {"role": "user", "content": "Thanks"}]))
    end(pid, wait=False, settle=0.05)
    return {
        "point": target,
        "place": place,
        "killed": killed,
        "arrived": answer is not None,
        "after_kill": [summary(call) for call in after],
        "shown": shown and shown["content"],
        "last": last and last["content"],
        "calls": [summary(call) for call in trial.calls()],
    }


def summary(call: ModelCall) -> dict[str, Any]:
    return {
        "index": call.index,
        "answer": call.messages[-1]["content"],
        "delivered": call.delivered,
        "failed": call.failure is not None,
        "fork_reason": call.fork_reason,
        "ids": [*call.prompt_ids, *call.completion_ids],
    }


def end(pid: int, *, wait: bool, settle: float = 0.3) -> bool:
    """Waits for the server's own end for a while, else kills it; whether it ended by itself."""
    over = time.monotonic() + (10 if wait else settle)
    while time.monotonic() < over:
        if os.waitpid(pid, os.WNOHANG)[0]:
            return True
        time.sleep(0.005)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return False


def prepare(home: Path, folder: Path) -> str:
    store: Store = open_store(open_home(home))
    store.rollouts.enqueue([a_rollout("r", folder)])
    key = store.rollouts.issue_key("r", "agent")
    store.close()
    return key


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def main(folder: Path, work: Path, stream: bool) -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    load_codec(folder, "qwen3")
    key = prepare(work / "first", folder)
    fuse, point, total = Fuse(), 0, NEVER
    while point <= total:
        home = work / f"p{point}"
        shutil.copytree(work / "first", home)
        fuse.reset(point or NEVER)
        fuse.armed = False
        trial = Trial(home, key, free_port(), stream)
        if point == 0:
            pid = trial.serve(fuse)
            asyncio.run(trial.ask([USER]))
            end(pid, wait=False)
            total = fuse.count
        else:
            print(json.dumps(play(trial, fuse)), flush=True)
        shutil.rmtree(home)
        point += 1


if __name__ == "__main__":
    if not Path(sys.argv[1]).exists():
        save_codec(Path(sys.argv[1]))
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3] == "stream")
