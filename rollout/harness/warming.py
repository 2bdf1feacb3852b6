"""Fills a harness's compile cache when it is installed: one run, laid out as in the sandbox, that is refused at once.

Caches are keyed by path, so the folder stands at /opt/harness here too, this once writable. The model that the run
meets answers every call with a 400.
"""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from rollout.errors import ConfigError
from rollout.harness.wrapping import PORT, PROGRAM, STATE
from rollout.sandbox import bwrap
from rollout.sandbox.base import Mount

WARM_S = 180.0
REFUSER = f"""
import http.server, subprocess, sys, threading
class Refuse(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(400)
        self.send_header("content-type", "application/json")
        self.end_headers()
        self.wfile.write(b'{{"error": {{"code": "call_cap", "message": "enough"}}}}')
server = http.server.ThreadingHTTPServer(("127.0.0.1", {PORT}), Refuse)
threading.Thread(target=server.serve_forever, daemon=True).start()
sys.exit(subprocess.run(sys.argv[1:], stdin=subprocess.DEVNULL).returncode)
"""


def run_refused(folder: Path, argv: Sequence[str], env: Mapping[str, str], files: Mapping[str, bytes]) -> None:
    """Runs `argv` with `folder` at /opt/harness and `files` below /harness. Raises ConfigError when it cannot run."""
    with tempfile.TemporaryDirectory() as place:
        root = Path(place)
        writable = [Mount(root / name, target) for name, target in (("state", STATE), ("workspace", "/workspace"))]
        for mount in writable:
            mount.source.mkdir()
        for path, data in files.items():
            (root / "state" / Path(path).relative_to(STATE)).write_bytes(data)
        (root / "etc").mkdir()
        for name, text in bwrap.ETC.items():
            (root / "etc" / name).write_text(text)
        layout = bwrap.Layout(etc=root / "etc", writable=(*writable, Mount(folder, PROGRAM)))
        options = bwrap.options(layout, env, "/workspace")
        try:
            subprocess.run(
                ["bwrap", *options, "--", "/usr/bin/python3", "-I", "-c", REFUSER, *argv],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=WARM_S,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise ConfigError(f"{folder.name} could not be run once to fill its compile cache: {error}") from error
