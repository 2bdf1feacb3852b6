"""What `openforge rollouts show --raw` writes: requests and answers of recorded calls, byte for byte."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rollout.errors import ConfigError

if TYPE_CHECKING:
    from rollout.store import Store
    from rollout.types import ModelCall


def write_raw(store: Store, calls: Sequence[ModelCall], out: Path | None) -> None:
    """To stdout, a line end behind each body; into the folder `out` as they were, a file for each body."""
    for name, sent in _bodies(store, calls):
        if out is None:
            sys.stdout.buffer.write(sent + b"\n")
        else:
            out.mkdir(parents=True, exist_ok=True)
            (out / name).write_bytes(sent)
    sys.stdout.buffer.flush()


def chosen(calls: Sequence[ModelCall], index: int | None) -> list[ModelCall]:
    """All calls, or the one with that index. Raises ConfigError when there is none."""
    found = [call for call in calls if index in (None, call.index)]
    if not found:
        there = f"there are {calls[0].index} to {calls[-1].index}" if calls else "none is recorded"
        raise ConfigError(f"no call {index if index is not None else 'at all'}; {there}")
    return found


def _bodies(store: Store, calls: Sequence[ModelCall]) -> Iterator[tuple[str, bytes]]:
    for call in calls:
        answer = "sse" if call.stream else "json"
        for name, digest in (("request.json", call.request), (f"response.{answer}", call.response)):
            if digest:
                yield f"{call.index:04d}.{name}", store.blobs.get(digest)
