"""`openforge serve`: the proxy, the service host and the orchestrator in the foreground."""

from __future__ import annotations

from rollout.config import open_home


def serve(*, port: int = 0, concurrency: int = 0, idle_exit: float = 0.0) -> int:
    """Runs the proxy, the mock services and the orchestrator until Ctrl-C.

    Parameters
    ----------
    port
        TCP port of the proxy on 127.0.0.1; 0 takes a free one. Sandboxes use its unix socket.
    concurrency
        Rollouts at the same time; 0 takes OPENFORGE_CONCURRENCY, or 32 where that is not set.
    idle_exit
        Seconds without a rollout after which it ends; 0 never.
    """
    from rollout.serve import main

    return main(open_home(), port=port, concurrency=concurrency, idle_exit=idle_exit)
