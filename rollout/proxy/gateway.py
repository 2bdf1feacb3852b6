"""The gateway: a rollout's tool calls to its mock services, under the same key as its model calls.

POST /rollouts/<id>/tools/<service>/<tool> with a JSON object of arguments -> HTTP 200 and an envelope,
`{"status": 200, "result": ...}` or `{"status": 4xx | 5xx, "error": ...}`: what a service answers, failures included,
is the policy's to read. Any other HTTP status is the gateway's own, so that a harness can tell the two apart.
There are no other routes to a service, above all none that shows or sets its state.
"""

from __future__ import annotations

from typing import Any, Protocol

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from rollout.errors import InfrastructureError
from rollout.proxy.dialects.base import Refused, read_object
from rollout.proxy.intake import read_body
from rollout.proxy.session import Sessions
from rollout.proxy.surface import key_of

PHASES = ("agent", "solution")


class ToolAnswer(Protocol):
    def envelope(self) -> dict[str, Any]: ...


class ToolHost(Protocol):
    def call(self, rollout_id: str, service: str, tool: str, arguments: Any) -> ToolAnswer:
        """Performs and records one call. Raises InfrastructureError for a rollout that is not open."""
        ...


class Gateway:
    def __init__(self, services: ToolHost, sessions: Sessions) -> None:
        self._services = services
        self._sessions = sessions

    async def call(self, request: Request) -> Response:
        rollout_id = request.path_params["rollout_id"]
        phase = self._sessions.identify(key_of(request.headers), rollout_id)
        if phase not in PHASES:
            raise Refused(403, "wrong_phase", f"a key of the phase {phase} may not call tools")
        arguments = read_object(await read_body(request) or b"{}")
        service, tool = request.path_params["service"], request.path_params["tool"]
        try:
            result = self._services.call(rollout_id, service, tool, arguments)
        except InfrastructureError as error:
            raise Refused(503, "unavailable", str(error)) from error
        return JSONResponse(result.envelope())
