"""Starts a harness inside the sandbox, behind a port of the sandbox's own: stdlib only.

    python3 -I -S /opt/openforge/forwarder.py [--report FILE] PORT PROGRAM ARGUMENT...

    program --TCP--> 127.0.0.1:PORT --bytes--> the proxy's unix socket (OPENFORGE_SOCKET)

The sandbox has no network but `lo`; most harnesses speak HTTP over TCP alone. Connecting to the socket is tried for
PATIENCE_S, so that a restarted server is found again; whoever goes away first closes both ends, so that a harness
that gives up a call gives it up at the proxy too.

The program runs with an empty stdin and its streams in /logs/agent. Their last bytes (of FILE in place of stdout,
where one is named) are printed at the end, because a cut at a limit keeps the beginning. Ends with the program's code.
"""

from __future__ import annotations

import asyncio
import os
import sys

PATIENCE_S = 60.0
RETRY_S = 0.25
LOGS = "/logs/agent"
TAIL = {"stdout": 65536, "stderr": 16384}
"""Bytes shown of each stream."""
CHUNK = 65536


async def connect() -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Raises OSError once PATIENCE_S have passed."""
    end = asyncio.get_running_loop().time() + PATIENCE_S
    while True:
        try:
            return await asyncio.open_unix_connection(os.environ["OPENFORGE_SOCKET"])
        except OSError:
            if asyncio.get_running_loop().time() > end:
                raise
            await asyncio.sleep(RETRY_S)


async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Copies until either end is gone."""
    try:
        while data := await reader.read(CHUNK):
            writer.write(data)
            await writer.drain()
    except OSError as error:
        print(f"forwarder: {error}", file=sys.stderr)


async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """One connection of the harness."""
    try:
        upstream, to_proxy = await connect()
    except OSError as error:
        print(f"forwarder: no connection to the proxy for {PATIENCE_S:.0f} s: {error}", file=sys.stderr)
        writer.close()
        return
    both = [asyncio.ensure_future(pump(reader, to_proxy)), asyncio.ensure_future(pump(upstream, writer))]
    await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
    for end in (to_proxy, writer):
        end.close()
    for task in both:
        task.cancel()


async def run(port: int, argv: list[str]) -> int:
    """Exit code of the program; 128 + n when signal n ended it. Raises OSError when it cannot be started."""
    server = await asyncio.start_server(forward, "127.0.0.1", port)
    out, err = (os.open(f"{LOGS}/{name}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644) for name in TAIL)
    child = await asyncio.create_subprocess_exec(*argv, stdin=asyncio.subprocess.DEVNULL, stdout=out, stderr=err)
    code = await child.wait()
    server.close()
    return code if code >= 0 else 128 - code


def show(path: str, fd: int, count: int) -> None:
    """Writes the last `count` bytes of a file to `fd`, from the beginning of a line where it was cut."""
    if not os.path.exists(path):
        return
    with open(path, "rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - count))
        data = file.read()
    if size > count:
        data = data.partition(b"\n")[2] or data
    while data:
        data = data[os.write(fd, data) :]


def main(argv: list[str]) -> int:
    report = f"{LOGS}/stdout"
    if argv[:1] == ["--report"]:
        report, argv = argv[1], argv[2:]
    code = asyncio.run(run(int(argv[0]), argv[1:]))
    show(report, 1, TAIL["stdout"])
    show(f"{LOGS}/stderr", 2, TAIL["stderr"])
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
