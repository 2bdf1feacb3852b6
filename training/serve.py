"""`python -m training.serve --model DIR`: the embedded engine as a process, on 127.0.0.1.

Binds the port (0 = any), loads the model, writes the port to `--port-file`, and serves until SIGTERM or SIGINT, which
breaks off open streams and ends the process within seconds. /update_weights needs OPENFORGE_ENGINE_KEY.
"""

from __future__ import annotations

import argparse
import logging
import os
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

from rollout.errors import ConfigError
from training.models import read_entry

log = logging.getLogger("training.serve")
LOAD_S = 300.0
DRAIN_S = 1
SWITCH_S = 0.0005
"""Seconds after which a thread gives up the interpreter: the default of 5 ms would hold up a step at every turn."""
SPIN_COUNT = "3000"
"""How long OpenMP's threads spin for each other. By default a step takes six times as long as soon as another process
wants one of two cores, with this twice; alone it costs up to a tenth. Read when torch is loaded."""


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m training.serve", description="Serve a model folder on the CPU.")
    parser.add_argument("--model", type=Path, required=True, help="model or checkpoint folder")
    parser.add_argument("--version", type=int, default=0, help="version of these weights, stamped on every answer")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0, help="0 takes any free port")
    parser.add_argument("--port-file", type=Path, help="where the port is written once the engine listens")
    parser.add_argument("--slots", type=int, default=64, help="requests that run at once; others queue")
    parser.add_argument(
        "--max-len", type=int, default=0, help="longest prompt + completion; 0 is the model's own limit"
    )
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--name", default="", help="further name to serve the model under")
    return parser.parse_args(argv)


def listen(host: str, port: int) -> socket.socket:
    """A bound socket. Raises ConfigError when the port is taken."""
    sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
        sock.listen(1024)
    except OSError as error:
        raise ConfigError(f"{host}:{port} cannot be bound ({error.strerror}); choose another --port, or 0") from error
    return sock


def announce(file: Path, port: int) -> None:
    part = file.with_suffix(f".{os.getpid()}")
    part.write_text(f"{port}\n")
    part.replace(file)


def serve(args: argparse.Namespace) -> None:
    """Serves until it is told to end. Raises ConfigError when it cannot start."""
    entry = read_entry(args.model)
    sock = listen(args.host, args.port)

    os.environ.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)

    import uvicorn

    from training.engine.app import Served, create_app, key_from_environment, served_names
    from training.engine.batcher import Batcher
    from training.engine.model import context_limit
    from training.engine.worker import EngineWorker

    limit = context_limit(args.model)
    length = min(args.max_len or limit, limit)

    def load() -> Batcher:
        return Batcher(args.model, slots=args.slots, max_len=length, version=args.version)

    worker = EngineWorker(load, threads=args.threads)
    batcher = worker.start(LOAD_S)
    names = served_names(args.model, entry.name, args.name)
    app = create_app(Served(worker, names, batcher.model.eos, key_from_environment()))
    config = uvicorn.Config(app, log_level="warning", access_log=False, timeout_graceful_shutdown=DRAIN_S)
    port = sock.getsockname()[1]
    if args.port_file:
        announce(args.port_file, port)
    log.info("serving %s on http://%s:%d, %d slots of %d tokens", args.model, args.host, port, args.slots, length)
    uvicorn.Server(config).run(sockets=[sock])


def main(argv: Sequence[str] | None = None) -> int:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s", stream=sys.stderr)
    sys.setswitchinterval(SWITCH_S)
    try:
        serve(parse_arguments(argv))
    except ConfigError as error:
        log.error("%s", error)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
