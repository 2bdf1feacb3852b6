"""Which services there are, and the tools that a task may show to its policy."""

from __future__ import annotations

from collections.abc import Sequence

from rollout.errors import ConfigError
from rollout.services.base import Service, ToolSpec
from rollout.services.calendar import CALENDAR
from rollout.services.contacts import CONTACTS
from rollout.services.helpdesk import HELPDESK
from rollout.services.mail import MAIL

SERVICES: dict[str, Service] = {service.name: service for service in (MAIL, CALENDAR, CONTACTS, HELPDESK)}
_SPECS: dict[str, ToolSpec] = {spec.name: spec for service in SERVICES.values() for spec in service.specs()}


def service_named(name: str) -> Service:
    """Raises ConfigError for a service that is not there."""
    if name not in SERVICES:
        raise ConfigError(f"no service {name!r}; there are: {', '.join(SERVICES)}")
    return SERVICES[name]


def catalog(services: Sequence[str], tools: Sequence[str] = ()) -> list[ToolSpec]:
    """Tools of `services`; only `tools`, in their order, when some are named. Raises ConfigError for unknown names."""
    known = {spec.name: spec for name in services for spec in service_named(name).specs()}
    missing = [name for name in tools if name not in known]
    if missing:
        raise ConfigError(f"no tool {missing[0]!r} in {', '.join(services)}; there are: {', '.join(known)}")
    return [known[name] for name in tools] if tools else list(known.values())


def find_tool(name: str) -> ToolSpec:
    """Raises ConfigError for a tool that no service has."""
    if name not in _SPECS:
        raise ConfigError(f"no tool {name!r}; there are: {', '.join(_SPECS)}")
    return _SPECS[name]
