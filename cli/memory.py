"""Peak resident memory of everything that a command set to work: its own tree, `serve` and the engines."""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass, field

import psutil

from rollout.config import Home
from rollout.processes import find_serve

SAMPLE_S = 1.0


def resident_mib(home: Home) -> float:
    """MiB of all those processes together; pages that they share count once for each."""
    return sum(_rss(process) for process in _processes(home).values()) / 2**20


def _processes(home: Home) -> dict[int, psutil.Process]:
    from rollout.store import open_store

    roots = [os.getpid()]
    if serve := find_serve(home):
        roots.append(int(serve["pid"]))
    store = open_store(home)
    try:
        roots += [engine.pid for engine in store.engines.all()]
    finally:
        store.close()
    found: dict[int, psutil.Process] = {}
    for pid in roots:
        try:
            process = psutil.Process(pid)
            found |= {p.pid: p for p in (process, *process.children(recursive=True))}
        except psutil.NoSuchProcess:
            continue
    return found


def _rss(process: psutil.Process) -> int:
    try:
        return int(process.memory_info().rss)
    except psutil.NoSuchProcess:
        return 0


@dataclass
class PeakMemory:
    """Samples in a thread while its block runs; `mib` is the peak so far."""

    home: Home
    mib: float = 0.0
    _stop: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def __enter__(self) -> PeakMemory:
        self._thread = threading.Thread(target=self._sample, name="peak-memory", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        if self._thread:
            self._thread.join(10 * SAMPLE_S)

    def _sample(self) -> None:
        while not self._stop.is_set():
            self.mib = max(self.mib, resident_mib(self.home))
            self._stop.wait(SAMPLE_S)
