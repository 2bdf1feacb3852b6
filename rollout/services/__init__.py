"""Mock services (mail, calendar, contacts, helpdesk): seeded state machines behind a typed tool catalogue."""

from __future__ import annotations

from rollout.services.base import Label, ToolResult, ToolSpec
from rollout.services.catalog import catalog, find_tool
from rollout.services.host import AuditEntry, Faults, ServiceHost

__all__ = ["AuditEntry", "Faults", "Label", "ServiceHost", "ToolResult", "ToolSpec", "catalog", "find_tool"]
