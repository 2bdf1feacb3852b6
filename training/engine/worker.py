"""The thread that steps the batcher, and the way into it from asyncio: submit, stream, cancel, update.

Commands go through a queue and are carried out between two steps; the events of a step come back to the event loop in
one call. Nothing else touches the batcher once the thread runs.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import Future
from dataclasses import asdict, dataclass

import torch

from rollout.errors import ConfigError, EngineError
from training.engine.batcher import Batcher, Event, Request

log = logging.getLogger(__name__)
IDLE_POLL_S = 0.5
JOIN_S = 10.0
STALL_S = 600.0
"""A request that hears nothing for so long, queueing included, fails."""


@dataclass(frozen=True)
class Stats:
    """What `/stats` shows."""

    version: int
    running: int
    queued: int
    slots: int
    max_len: int
    uptime_s: float
    steps: int
    sampled: int
    prompt_tokens: int
    reused_tokens: int
    requests: int
    cancelled: int
    updates: int


class EngineWorker:
    """Runs `make()` and then steps its batcher in a thread of its own. `start` returns when the model is loaded."""

    def __init__(self, make: Callable[[], Batcher], *, threads: int) -> None:
        self._make = make
        self._threads = threads
        self._commands: queue.SimpleQueue[Callable[[Batcher], None]] = queue.SimpleQueue()
        self._ready: Future[Batcher] = Future()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._streams: dict[str, asyncio.Queue[Event]] = {}
        self._born = time.monotonic()
        self.failure = ""
        """Why the thread ended, when it ended by itself."""

    def start(self, deadline_s: float) -> Batcher:
        """Raises what `make` raised; TimeoutError when it took longer. The batcher is for reading only."""
        self._thread.start()
        return self._ready.result(deadline_s)

    def stop(self) -> None:
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(JOIN_S)

    def check(self, request: Request) -> None:
        """Raises ConfigError for a request that can never run."""
        self._ready.result(0).check(request)

    async def generate(self, request: Request) -> AsyncGenerator[list[Event], None]:
        """Events of a checked request as they come, one or more at a time. Closing it cancels it before the next step.

        Raises EngineError when the engine fails under it.
        """
        if self.failure:
            raise EngineError(self.failure)
        self._loop = asyncio.get_running_loop()
        stream = self._streams[request.id] = asyncio.Queue()
        self._commands.put(lambda b: b.submit(request))
        try:
            while True:
                events = [await asyncio.wait_for(stream.get(), STALL_S)]
                while not stream.empty():
                    events.append(stream.get_nowait())
                if events[-1].error:
                    raise EngineError(events[-1].error)
                yield events
                if events[-1].finish:
                    return
        except TimeoutError as late:
            raise EngineError(f"the engine gave no token for {STALL_S:.0f} s") from late
        finally:
            del self._streams[request.id]
            self._commands.put(lambda b: b.cancel(request.id))

    async def update(self, path: str, version: int, deadline_s: float) -> None:
        """Raises ConfigError when the weights do not fit (nothing changed), TimeoutError past the deadline."""
        done: Future[None] = Future()

        def change(batcher: Batcher) -> None:
            try:
                batcher.update(path, version)
            except ConfigError as unfit:
                done.set_exception(unfit)
            except Exception as error:
                done.set_exception(EngineError(f"the update failed half way: {error}"))
                raise
            else:
                done.set_result(None)

        self._commands.put(change)
        await asyncio.wait_for(asyncio.wrap_future(done), deadline_s)

    def stats(self) -> Stats:
        batcher = self._ready.result(0)
        return Stats(
            version=batcher.version,
            running=batcher.running,
            queued=batcher.queued,
            slots=len(batcher.table.busy),
            max_len=batcher.table.max_len,
            uptime_s=round(time.monotonic() - self._born, 3),
            **asdict(batcher.counters),
        )

    def _run(self) -> None:
        torch.set_num_threads(self._threads)
        torch.set_flush_denormal(True)
        try:
            batcher = self._make()
        except Exception as error:
            self._ready.set_exception(error)
            return
        self._ready.set_result(batcher)
        try:
            while not self._stop.is_set():
                self._obey(batcher)
                self._deliver(batcher.step())
            self._end(batcher, "the engine is shutting down")
        except Exception as error:
            log.exception("the engine failed")
            self.failure = f"the engine failed: {type(error).__name__}: {error}"
            self._end(batcher, self.failure)

    def _obey(self, batcher: Batcher) -> None:
        """Carries out what is queued; waits for something when there is nothing to step."""
        try:
            command = self._commands.get(timeout=IDLE_POLL_S) if batcher.idle else self._commands.get_nowait()
            while True:
                command(batcher)
                command = self._commands.get_nowait()
        except queue.Empty:
            return

    def _end(self, batcher: Batcher, why: str) -> None:
        while not self._commands.empty():
            self._commands.get_nowait()(batcher)
        self._deliver([Event(gone, error=why) for gone in batcher.drop_all()])

    def _deliver(self, events: list[Event]) -> None:
        loop = self._loop
        if events and loop is not None and not loop.is_closed():
            loop.call_soon_threadsafe(self._dispatch, events)

    def _dispatch(self, events: list[Event]) -> None:
        for event in events:
            stream = self._streams.get(event.request)
            if stream is not None:
                stream.put_nowait(event)
