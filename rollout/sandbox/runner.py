"""The runner: a stdlib-only program that owns one sandbox and performs typed operations inside it.

It runs beside bubblewrap, in a session of its own, so it outlives the server that started it; each `run` is one
bubblewrap with its own pid namespace, which dies with the runner. It holds one outbound long-poll to
`/runner/<id>/next` and posts each outcome to `/runner/<id>/result`; the key stands in a 0600 file that no sandbox
sees. When the server is not heard of for 60 s, it kills everything and exits. Thousands are started in a demo,
so it and the two modules beside it import little.
"""

from __future__ import annotations

import json
import os
from binascii import b2a_base64

from rollout.sandbox.runner_command import Run
from rollout.sandbox.runner_link import Link, Lost, Stop

TYPE_CHECKING = False
if TYPE_CHECKING:  # the typing module would cost CPU at each start
    from typing import Any

    Json = dict[str, Any]

BOOT = "import sys; sys.path.append(sys.argv[1]); from rollout.sandbox.runner import main; main(sys.argv[2])"
"""`python3 -I -S -c BOOT CODE_ROOT CONFIG`: as a module it is compiled once, not at every start."""
STOPPED, LOST = 0, 3


def read_beneath(root: str, path: str, max_bytes: int) -> Json:
    """The first `max_bytes` bytes of a regular file below `root`, no link followed in any component."""
    fd = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
    try:
        for part in path.split("/"):
            if part in ("", ".", ".."):
                return {"found": False}
            info = os.stat(part, dir_fd=fd, follow_symlinks=False)
            kind = os.O_DIRECTORY if info.st_mode & 0o170000 == 0o040000 else 0
            inner = os.open(part, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | kind, dir_fd=fd)
            os.close(fd)
            fd = inner
        info = os.fstat(fd)
        if info.st_mode & 0o170000 != 0o100000:
            return {"found": False}
        with os.fdopen(os.dup(fd), "rb") as file:
            return {"found": True, "data": b2a_base64(file.read(max_bytes), newline=False).decode()}
    except OSError:
        return {"found": False}
    finally:
        os.close(fd)


def perform(op: Json, link: Link) -> Json:
    if op["kind"] == "get":
        return read_beneath(op["root"], op["path"], op["max_bytes"])
    run = Run(op)
    try:
        run.start()
    except OSError as error:
        return {"error": f"the command could not be started: {error}"}
    return run.loop(link)


def main(path: str) -> None:
    """Serves until the server says stop or is lost; ends the process."""
    with open(path) as file:
        link = Link(json.load(file))
    code = STOPPED
    try:
        while True:
            op = link.wait()
            link.post(op["seq"], perform(op, link))
    except Stop:
        pass
    except Lost as error:
        os.write(2, f"runner: {error}\n".encode())
        code = LOST
    os._exit(code)  # nothing is buffered; interpreter shutdown would cost CPU
