"""Every record that crosses a process or the disk: frozen pydantic, `extra="forbid"`.

The life of a rollout, as a table in `TRANSITIONS`:

    QUEUED -> STARTING -> RUNNING -> VERIFYING -> SUCCEEDED
       any state but a terminal one -> FAILED | TIMED_OUT | CANCELLED

SUCCEEDED means that the rollout ran to a verdict, whatever the reward. Each id ends once; a retry is a new
rollout with a new id and a new key (`retry_of`).
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from rollout.errors import FailureClass


class Record(BaseModel):
    """Base of every stored record."""

    model_config = ConfigDict(frozen=True, extra="forbid")


# -- tasks ---------------------------------------------------------------------------------------------


class Domain(StrEnum):
    CLAW = "claw"
    COMPUTER_USE = "computer-use"
    BROWSER_USE = "browser-use"


class Split(StrEnum):
    SFT = "sft"
    RL = "rl"
    VALIDATION = "validation"
    HELDOUT = "heldout"


class VerificationMode(StrEnum):
    FRESH = "fresh"
    SNAPSHOT = "snapshot"
    IN_PLACE = "in-place"


class VerifierSpec(Record):
    mode: VerificationMode = VerificationMode.FRESH
    state: tuple[str, ...] = ("/workspace",)
    """Paths carried from the agent's sandbox into the fresh one."""


class Resources(Record):
    cpus: float = Field(1.0, gt=0)
    memory_mb: int = Field(512, ge=32)
    pids: int = Field(64, ge=4)
    disk_mb: int = Field(64, ge=1)
    output_kb: int = Field(256, ge=1)
    """Bytes of stdout + stderr kept of each phase, in KiB."""


class Timeouts(Record):
    """Seconds."""

    setup: float = Field(60.0, gt=0)
    agent: float = Field(900.0, gt=0)
    verify: float = Field(60.0, gt=0)


class Provenance(Record):
    author: Literal["procedural", "agent", "benchmark", "user"] = "user"
    family: str = ""
    batch: str = ""
    seed: int = 0
    identity: str = ""
    """Digest of family + slots + fixtures: equal identities are the same task."""
    difficulty: str = "unmeasured"


class TaskSpec(Record):
    """What the policy must do: the frozen half of a bundle. `bundle` is an absolute folder."""

    id: str = Field(pattern=r"^[a-z0-9][a-z0-9._-]{0,80}$")
    domain: Domain = Domain.CLAW
    category: str = "misc"
    split: Split = Split.RL
    harness: str = "react"
    instruction: str = Field(min_length=1, max_length=65536)
    bundle: str
    digest: str
    services: tuple[str, ...] = ()
    tools: tuple[str, ...] = ()
    """Tools shown to the policy, in this order; empty: all tools of its services."""
    verifier: VerifierSpec = VerifierSpec()
    resources: Resources = Resources()
    timeouts: Timeouts = Timeouts()
    needs_image: bool = False
    error_rate: float = Field(0.0, ge=0, lt=1)
    """Share of an agent's service calls that fail with 429 or 503, by the rollout's sampling seed."""
    provenance: Provenance = Provenance()


# -- rollouts ------------------------------------------------------------------------------------------


class RolloutState(StrEnum):
    QUEUED = "queued"
    STARTING = "starting"
    RUNNING = "running"
    VERIFYING = "verifying"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    TIMED_OUT = "timed_out"
    CANCELLED = "cancelled"

    @property
    def terminal(self) -> bool:
        return self in TERMINAL


TERMINAL = frozenset({RolloutState.SUCCEEDED, RolloutState.FAILED, RolloutState.TIMED_OUT, RolloutState.CANCELLED})
_ENDS = frozenset({RolloutState.FAILED, RolloutState.TIMED_OUT, RolloutState.CANCELLED})
TRANSITIONS: dict[RolloutState, frozenset[RolloutState]] = {
    RolloutState.QUEUED: frozenset({RolloutState.STARTING}) | _ENDS,
    RolloutState.STARTING: frozenset({RolloutState.RUNNING}) | _ENDS,
    RolloutState.RUNNING: frozenset({RolloutState.VERIFYING}) | _ENDS,
    RolloutState.VERIFYING: frozenset({RolloutState.SUCCEEDED}) | _ENDS,
}


class Purpose(StrEnum):
    TRIAL = "trial"
    TEACHER = "teacher"
    TRAIN = "train"
    VALIDATE = "validate"
    EVAL = "eval"
    RUN = "run"


class HistoryMode(StrEnum):
    TEMPLATE = "template"
    RETAIN = "retain"


class ModelRef(Record):
    """Which weights. `name` is a name of `openforge models list`, or `scripted:oracle` for the demo teacher."""

    name: str
    digest: str = ""


class Sampling(Record):
    """Belongs to the rollout, never to the harness: the proxy injects it into every call."""

    temperature: float = Field(1.0, ge=0)
    top_p: float = Field(1.0, gt=0, le=1)
    max_tokens: int = Field(256, ge=1)
    """Tokens of one call."""
    seed: int = 0


class Limits(Record):
    calls: int = Field(16, ge=1)
    tokens: int = Field(8192, ge=1)
    """Sampled tokens over all calls of the rollout."""
    context: int = Field(8192, ge=16)
    """Longest prompt + completion of a call, in tokens."""
    body_mb: int = Field(96, ge=1)
    """Longest request body of a call, in MiB: a long history with its screenshots."""
    seconds: float = Field(0.0, ge=0)
    """Wall clock from the first call on; 0: only the task's own timeout."""


class Failure(Record):
    kind: FailureClass
    phase: str = ""
    message: str = ""


class Rollout(Record):
    """One run of one harness on one task in one sandbox."""

    id: str
    run: str
    """Name of the stage run that asked for it, e.g. `demo-eval-sft`."""
    task_id: str
    group_id: str
    start_index: int = 0
    retry_of: str | None = None
    attempt: int = 0
    harness: str = "react"
    model: ModelRef
    purpose: Purpose
    history: HistoryMode = HistoryMode.TEMPLATE
    sampling: Sampling = Sampling()
    limits: Limits = Limits()
    task: TaskSpec
    state: RolloutState = RolloutState.QUEUED
    weight_version: int | None = None
    """Version of the weights of its first call."""
    created: float = 0.0
    started: float | None = None
    ended: float | None = None
    """Unix seconds."""
    failure: Failure | None = None
    end_reason: str = ""
    """Why the session ended when the policy caused it: `call_cap`, `time_cap`, `malformed`, `memory`, ..."""
    verdict: Verdict | None = None
    calls: int = 0
    tokens: int = 0


class Verdict(Record):
    reward: float = Field(ge=0.0, le=1.0, allow_inf_nan=False)
    passed: bool
    criteria: dict[str, float] = {}
    explanation: str = ""
    source: Literal["verifier", "judge"] = "verifier"
    mode: VerificationMode = VerificationMode.FRESH


# -- calls ---------------------------------------------------------------------------------------------


class CallTag(StrEnum):
    MAIN = "main"
    TITLE = "title"
    COMPACTION = "compaction"
    SUBAGENT = "subagent"
    PROBE = "probe"
    UNATTRIBUTED = "unattributed"


class VersionSpan(Record):
    """`tokens` consecutive completion tokens that were sampled under weights `version`."""

    version: int
    tokens: int


class ModelCall(Record):
    """One request of the harness to the model and its answer, as the proxy recorded it."""

    rollout_id: str
    index: int
    dialect: Literal["chat", "responses", "messages"] = "chat"
    tag: CallTag = CallTag.MAIN
    thread: str = "main"
    stream: bool = False
    request: str = ""
    response: str = ""
    """Blob digests of the bytes as received and as sent."""
    messages: tuple[dict[str, Any], ...] = ()
    """Canonical messages of the prompt, then the answer as last one: what a reader sees."""
    tools: tuple[dict[str, Any], ...] = ()
    prompt_ids: tuple[int, ...] = ()
    completion_ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] | None = None
    """Natural log of the sampling probability of each completion id; None from chat-level or scripted engines."""
    finish_reason: str = ""
    versions: tuple[VersionSpan, ...] = ()
    fork_reason: str = ""
    """Why the prompt does not extend the previous call of its thread; empty when it does."""
    malformed: bool = False
    """The answer held a tool call that did not parse."""
    rules: tuple[str, ...] = ()
    """Canonicalisation rules that changed something (proxy/dialects/noise.py)."""
    left_out: tuple[str, ...] = ()
    """What the request holds and the model was not shown: hosted and deferred tools, items of foreign servers."""
    delivered: bool = False
    started: float = 0.0
    latency: float = 0.0
    failure: Failure | None = None


class Trajectory(Record):
    """The paper's unordered collection of calls, and the verdict."""

    rollout: Rollout
    calls: tuple[ModelCall, ...]

    @property
    def reward(self) -> float | None:
        return self.rollout.verdict.reward if self.rollout.verdict else None


class TrainingSample(Record):
    """One token row. All tuples have the row's length T; position t is predicted from positions < t."""

    token_ids: tuple[int, ...]
    mask: tuple[bool, ...]
    """True exactly on sampled tokens that are trained."""
    logprobs: tuple[float, ...]
    """Recorded log-probabilities, 0.0 where the mask is False."""
    weight: tuple[float, ...]
    """Loss weight of each token, so that merging calls into rows changes no loss aggregation."""
    advantage: float = 0.0
    rollout_id: str
    group_id: str
    weight_version: int = 0


# -- records of the stages -----------------------------------------------------------------------------


class EngineRecord(Record):
    """A running inference server. `model` is a model name or a checkpoint folder."""

    id: str
    model: str
    path: str
    url: str
    pid: int
    process_started: float
    """Start time of the process in seconds since boot, so that a recycled pid is never mistaken for it."""
    version: int = 0
    """Version of the weights it serves now."""
    exclusive: str = ""
    """Run that leases it for training; no other run is routed to it."""
    lease_until: float = 0.0
    replica: int = Field(0, ge=0)
    """Several engines may serve the same weights; each rollout keeps to one of them."""
    backend: Literal["embedded", "vllm"] = "embedded"
    """How it is started again when it died."""


class StageRecord(Record):
    """What a stage run did: one row a stage and run, replaced when the stage runs again."""

    run: str
    stage: str
    kept: int = 0
    dropped: dict[str, int] = {}
    """Reason -> count."""
    seconds: float = 0.0
    tokens: int = 0
    rollouts: int = 0
    details: dict[str, Any] = {}


class StepRecord(Record):
    """One optimizer step of RL (or one logged step of SFT when `kind` is `sft`)."""

    run: str
    kind: Literal["rl", "sft", "validation"]
    step: int
    weight_version: int = 0
    started: int = 0
    finished: int = 0
    dropped: dict[str, int] = {}
    group_sizes: tuple[int, ...] = ()
    mixed_groups: int = 0
    samples: int = 0
    tokens: int = 0
    reward_mean: float | None = None
    loss: float | None = None
    metrics: dict[str, float] = {}
    seconds: float = 0.0


class ResultRecord(Record):
    """Outcome of one evaluation: task id -> list of rewards, one per trial, in trial order."""

    run: str
    label: str
    """`base`, `sft`, `rl` or a user's name."""
    model: ModelRef
    harness: str
    history: HistoryMode
    sampling: Sampling
    trials: dict[str, list[float]]
    families: dict[str, str]
    """Task id -> family."""
    rollouts: dict[str, list[str]]
    """Task id -> rollout ids, in trial order."""
    apart: tuple[str, ...] = ()
    """Families left out of training: reported beside the table, never in it."""
    dropped: dict[str, int] = {}
    metrics: dict[str, float] = {}
    seconds: float = 0.0


Rollout.model_rebuild()
