"""A lock file that the system frees when its holder dies: two demos never share a home."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager

from rollout.config import Home
from rollout.errors import ConfigError


@contextmanager
def only_one(home: Home, name: str) -> Iterator[None]:
    """Raises ConfigError at once when another process holds `name` in this home."""
    path = home.run / f"{name}.lock"
    with path.open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            file.seek(0)
            raise ConfigError(
                f"another `openforge {name}` (pid {file.read().strip() or '?'}) runs in {home.root}; "
                "wait for its end, or set OPENFORGE_HOME to another folder"
            ) from error
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield
