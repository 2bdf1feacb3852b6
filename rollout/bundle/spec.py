"""What a bundle is made of: all its parts (`BundleSpec`), and our own table of task.toml (`Extras`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import Field

from rollout.types import (
    Domain,
    Provenance,
    Record,
    Resources,
    Split,
    Timeouts,
    VerificationMode,
    VerifierSpec,
)

BASE_IMAGE = "python:3.11-slim-bookworm"


@dataclass(frozen=True)
class BundleSpec:
    """All parts of a bundle. Paths in `files` and `tests` are relative, with `/`."""

    id: str
    instruction: str
    test: str
    """tests/test.sh"""
    description: str = ""
    keywords: tuple[str, ...] = ()
    domain: Domain = Domain.CLAW
    category: str = "misc"
    split: Split = Split.RL
    harness: str = "react"
    services: Mapping[str, Any] = field(default_factory=dict)
    """Service name -> seed state."""
    tools: tuple[str, ...] = ()
    files: Mapping[str, bytes] = field(default_factory=dict)
    tests: Mapping[str, bytes] = field(default_factory=dict)
    """What stands beside tests/test.sh."""
    solve: str = ""
    wrong: Mapping[str, str] = field(default_factory=dict)
    plan: Mapping[str, Any] = field(default_factory=dict)
    dockerfile: str = ""
    """Empty: the plain base."""
    needs_image: bool = False
    error_rate: float = 0.0
    """Share of an agent's service calls that fail."""
    verifier: VerifierSpec = field(default_factory=VerifierSpec)
    resources: Resources = field(default_factory=Resources)
    timeouts: Timeouts = field(default_factory=Timeouts)
    provenance: Provenance = field(default_factory=Provenance)
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """Free facts for [metadata]; plain TOML values."""


class Extras(Record):
    """[metadata.openforge]: what Harbor's schema has no field for."""

    harness: str = "react"
    services: tuple[str, ...] | None = None
    tools: tuple[str, ...] = ()
    mode: VerificationMode = VerificationMode.FRESH
    state: tuple[str, ...] = ("/workspace",)
    needs_image: bool | None = None
    error_rate: float = Field(0.0, ge=0, lt=1)
    pids: int = Field(64, ge=4)
    output_kb: int = Field(256, ge=1)
    setup_timeout_sec: float = Field(60.0, gt=0)
    provenance: Provenance = Provenance()


def plain_dockerfile(files: bool) -> str:
    """The environment of a bundle that needs no image of its own."""
    copy = "COPY files/ /workspace/\n" if files else ""
    return f"FROM {BASE_IMAGE}\nWORKDIR /workspace\n{copy}"
