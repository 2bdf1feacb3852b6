"""The service host: one seeded state and one audit log for each open rollout, in the memory of `serve`.

The host serialises the calls of a rollout, injects errors when asked to (deterministic by seed and call number, the
state untouched), and hands the verifier the final states with the log. Nothing that a policy sends raises; only a
rollout that is not open does.
"""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from rollout.errors import InfrastructureError
from rollout.services.base import Label, State, ToolResult, clean, plain_json
from rollout.services.catalog import find_tool, service_named
from rollout.types import Record

CALLS_MAX = 1000
BYTES_MAX = 4 * 2**20
"""Bytes of arguments and results that one rollout's log holds; states grow by arguments alone."""


class AuditEntry(Record):
    """One call of a tool that exists. `status` is 429 or 503 where an error was injected."""

    seq: int
    service: str
    tool: str
    label: Label
    arguments: Any
    status: int
    result: Any


@dataclass(frozen=True)
class Faults:
    """The error-injection switch: each call fails with probability `rate`, by `seed` and the call's number alone.

    What fails is busy (429) or unavailable (503), each as often as the other.
    """

    rate: float = 0.0
    seed: int = 0

    def at(self, seq: int, service: str) -> ToolResult | None:
        """What call number `seq` gets instead of its result, if anything."""
        drawn = random.Random(f"{self.seed}:{seq}").random()
        if drawn >= self.rate:
            return None
        if drawn < self.rate / 2:
            return _refuse(429, "rate_limited", f"{service} is busy, try again")
        return _refuse(503, "unavailable", f"{service} is unavailable, try again")


@dataclass
class _Session:
    states: dict[str, State]
    faults: Faults
    tools: frozenset[str]
    audit: list[AuditEntry] = field(default_factory=list)
    size: int = 0
    """Bytes of arguments and results in `audit`."""


class ServiceHost:
    def __init__(self) -> None:
        self._open: dict[str, _Session] = {}
        self._lock = threading.Lock()  # guards _open and every session in it

    def open(
        self,
        rollout_id: str,
        seeds: Mapping[str, Any],
        error_rate: float = 0.0,
        error_seed: int = 0,
        tools: Iterable[str] = (),
    ) -> None:
        """Seeds a rollout's services, afresh if it was open. `tools`: the only ones offered (default: all).

        Raises ConfigError for a service or tool that does not exist and for a wrong seed state.
        """
        states = {name: service_named(name).seed(seed) for name, seed in seeds.items()}
        offered = frozenset(find_tool(name).name for name in tools)
        session = _Session(states, Faults(error_rate, error_seed), offered)
        with self._lock:
            self._open[rollout_id] = session

    def call(self, rollout_id: str, service: str, tool: str, arguments: Any) -> ToolResult:
        """Performs and records one call. Raises InfrastructureError for a rollout that is not open."""
        with self._lock:
            return _call(self._session(rollout_id), service, tool, arguments)

    def final(self, rollout_id: str) -> dict[str, Any]:
        """`{"services": {name: state}, "audit": [entry]}` as plain JSON: what the verifier reads."""
        with self._lock:
            session = self._session(rollout_id)
            return {
                "services": {name: state.model_dump(mode="json") for name, state in session.states.items()},
                "audit": [entry.model_dump(mode="json") for entry in session.audit],
            }

    def close(self, rollout_id: str) -> None:
        """Forgets a rollout; safe for one that is not open."""
        with self._lock:
            self._open.pop(rollout_id, None)

    def _session(self, rollout_id: str) -> _Session:
        if rollout_id not in self._open:
            raise InfrastructureError(f"the services of rollout {rollout_id} are not open in this process")
        return self._open[rollout_id]


def _call(session: _Session, service: str, name: str, arguments: Any) -> ToolResult:
    if service not in session.states:
        return _refuse(404, "unknown_service", f"no service {service}")
    tool = service_named(service).tool(name)
    if tool is None or (session.tools and name not in session.tools):
        return _refuse(404, "unknown_tool", f"{service} has no tool {name}")
    seq = len(session.audit)
    if seq >= CALLS_MAX:
        return _refuse(429, "too_many_calls", f"a rollout has {CALLS_MAX} tool calls")
    given = plain_json(arguments)
    if session.size + _size(given) > BYTES_MAX:
        return _refuse(413, "too_large", f"the tool calls of a rollout have {BYTES_MAX} bytes in all")
    fault = session.faults.at(seq, service)
    if fault is not None:
        result = fault
    else:
        session.states[service], result = service_named(service).call(session.states[service], tool, arguments)
    session.size += _size(given) + _size(result.body)
    session.audit.append(
        AuditEntry(
            seq=seq,
            service=service,
            tool=name,
            label=tool.label,
            arguments=given,
            status=result.status,
            result=result.body,
        )
    )
    return result


def _size(value: Any) -> int:
    return len(json.dumps(value, ensure_ascii=False).encode("utf-8", "replace"))


def _refuse(status: int, code: str, message: str) -> ToolResult:
    return ToolResult(status=status, body={"code": code, "message": clean(message)[:200]})
