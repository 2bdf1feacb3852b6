"""Every error that openforge raises on purpose, named by the boundary that was crossed.

    OpenForgeError
    ├── ConfigError            the user's input: preset, bundle, model folder, home
    │   └── NewerHomeError     the home was written by a newer version
    └── RolloutError           ends one rollout; `failure` is its class
        ├── PolicyEnd          a normal end that the policy caused (cap, malformed call, own limits)
        ├── HarnessError       the harness program failed for reasons of its own
        ├── InfrastructureError
        │   ├── SandboxError   the sandbox could not start, or was lost
        │   ├── EngineError    the inference server failed or is gone
        │   └── StoreError     the store refused or lost a write
        ├── VerifierError      the verifier crashed, or wrote no finite reward in [0, 1]
        ├── PhaseTimeout       a phase passed its deadline
        └── Cancelled          cancelled through the store

`classify` is the one place that turns an exception into a failure class.
"""

from __future__ import annotations

import asyncio
from enum import StrEnum


class FailureClass(StrEnum):
    """Who broke a rollout. Each class has one policy and one counter (docs/design/failures.md)."""

    POLICY = "policy"
    HARNESS = "harness"
    INFRASTRUCTURE = "infrastructure"
    VERIFIER = "verifier"
    TIMEOUT = "timeout"
    CANCELLED = "cancelled"


class OpenForgeError(Exception):
    """Base of every deliberate error."""


class ConfigError(OpenForgeError):
    """What the user gave cannot be used. The message says what was expected, what came and what to do."""


class NewerHomeError(ConfigError):
    """OPENFORGE_HOME carries a schema version above this program's."""


class RolloutError(OpenForgeError):
    """Ends one rollout."""

    failure: FailureClass = FailureClass.INFRASTRUCTURE


class PolicyEnd(RolloutError):
    """A normal end that the policy caused: it is verified as it stands and its reward is kept."""

    failure = FailureClass.POLICY


class HarnessError(RolloutError):
    failure = FailureClass.HARNESS


class InfrastructureError(RolloutError):
    failure = FailureClass.INFRASTRUCTURE


class SandboxError(InfrastructureError):
    """The sandbox could not be made, or died under the rollout."""


class EngineError(InfrastructureError):
    """The engine answered with an error, or not at all."""


class StoreError(InfrastructureError):
    """A write did not reach the store."""


class VerifierError(RolloutError):
    failure = FailureClass.VERIFIER


class PhaseTimeout(RolloutError):
    failure = FailureClass.TIMEOUT


class Cancelled(RolloutError):
    failure = FailureClass.CANCELLED


def classify(error: BaseException) -> FailureClass:
    """Failure class of any exception that ended a rollout; what nobody typed is infrastructure.

    A ConfigError (a bundle without the script asked for, an unknown harness) is a harness failure: trying again
    cannot help.
    """
    if isinstance(error, RolloutError):
        return error.failure
    if isinstance(error, ConfigError):
        return FailureClass.HARNESS
    if isinstance(error, TimeoutError):
        return FailureClass.TIMEOUT
    if isinstance(error, asyncio.CancelledError):
        return FailureClass.CANCELLED
    return FailureClass.INFRASTRUCTURE
