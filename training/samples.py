"""Trajectories to training samples: pure. Serves distillation and RL, between rollouts and the trainer.

Paper section 1: a trajectory is an unordered collection of pairs (prompt, answer). *Paper mode* makes one sample of
each pair. *Merged mode* puts calls that extend each other into one row: a call joins the row whose tokens are a
prefix of its prompt, any other call opens a row of its own. In both, each sampled token of a trainable call is
trained exactly once, with the same weight, so that the gradient is the same.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from rollout.types import CallTag, ModelCall, RolloutState, TrainingSample, Trajectory

ALL_TAGS = frozenset(CallTag) - {CallTag.UNATTRIBUTED}


@dataclass(frozen=True)
class SampleRules:
    """Which calls are trained, and how much a token weighs."""

    tags: frozenset[CallTag] = ALL_TAGS
    """Purposes that are trained; all attributed ones by default, as in the paper."""
    logprobs: bool = True
    """Whether a call must carry the engine's log-probabilities (RL needs them, SFT does not)."""
    weighting: Literal["token", "call"] = "token"
    """`token`: 1 for each token; `call`: 1 / length of its call."""
    version: int | None = None
    """Weights that must have sampled a call whole (RL: the trainer's own); None takes any."""


@dataclass(frozen=True)
class CallSplit:
    """The trainable calls in commit order, and how many were left out for which reason."""

    kept: tuple[ModelCall, ...]
    dropped: Counter[str] = field(default_factory=Counter)


def split_calls(trajectory: Trajectory, rules: SampleRules = SampleRules()) -> CallSplit:
    """Sorts the calls of a trajectory into trainable ones and counted rest."""
    kept: list[ModelCall] = []
    dropped: Counter[str] = Counter()
    for at, call in enumerate(trajectory.calls):
        reason = _refusal(call, rules) or ("" if _delivered(trajectory, at) else "undelivered")
        if reason:
            dropped[reason] += 1
        else:
            kept.append(call)
    return CallSplit(tuple(kept), dropped)


def _refusal(call: ModelCall, rules: SampleRules) -> str:
    if call.failure is not None:
        return "failed"
    if call.tag is CallTag.UNATTRIBUTED:
        return "unattributed"
    if call.tag not in rules.tags:
        return "purpose"
    if not call.prompt_ids or not call.completion_ids:
        return "no_ids"
    if sum(span.tokens for span in call.versions) not in (0, len(call.completion_ids)):
        return "corrupt"
    if rules.version is not None and any(span.version != rules.version for span in call.versions):
        return "stale"
    if call.logprobs is None:
        return "no_logprobs" if rules.logprobs else ""
    fit = len(call.logprobs) == len(call.completion_ids) and all(math.isfinite(p) for p in call.logprobs)
    return "" if fit else "corrupt"


def _delivered(trajectory: Trajectory, at: int) -> bool:
    """Flagged, or contained in a later prompt of its thread, or the last answer before a normal end."""
    call = trajectory.calls[at]
    if call.delivered:
        return True
    whole = call.prompt_ids + call.completion_ids
    later = trajectory.calls[at + 1 :]
    if any(c.thread == call.thread and c.prompt_ids[: len(whole)] == whole for c in later):
        return True
    rollout = trajectory.rollout
    return not later and rollout.state is RolloutState.SUCCEEDED and not rollout.end_reason


@dataclass
class _Row:
    ids: list[int]
    mask: list[bool]
    logprobs: list[float]
    weight: list[float]
    version: int

    @classmethod
    def empty(cls, call: ModelCall) -> _Row:
        return cls([], [], [], [], min((span.version for span in call.versions), default=0))

    def append(self, call: ModelCall, weight: float) -> None:
        """Adds what the call's prompt has beyond the row, untrained, then its answer."""
        context = call.prompt_ids[len(self.ids) :]
        answer = call.completion_ids
        self.ids += (*context, *answer)
        self.mask += [False] * len(context) + [True] * len(answer)
        self.logprobs += [0.0] * len(context) + list(call.logprobs or [0.0] * len(answer))
        self.weight += [0.0] * len(context) + [weight] * len(answer)

    def extended_by(self, call: ModelCall) -> bool:
        return len(self.ids) <= len(call.prompt_ids) and tuple(self.ids) == call.prompt_ids[: len(self.ids)]

    def sample(self, trajectory: Trajectory) -> TrainingSample:
        return TrainingSample(
            token_ids=tuple(self.ids),
            mask=tuple(self.mask),
            logprobs=tuple(self.logprobs),
            weight=tuple(self.weight),
            rollout_id=trajectory.rollout.id,
            group_id=trajectory.rollout.group_id,
            weight_version=self.version,
        )


def paper_samples(trajectory: Trajectory, rules: SampleRules = SampleRules()) -> list[TrainingSample]:
    """One sample per trainable call, in commit order."""
    rows = []
    for call in split_calls(trajectory, rules).kept:
        row = _Row.empty(call)
        row.append(call, _weight(call, rules))
        rows.append(row)
    return [row.sample(trajectory) for row in rows]


def merged_samples(trajectory: Trajectory, rules: SampleRules = SampleRules()) -> list[TrainingSample]:
    """Calls whose prompt extends a row's tokens join the longest such row; the others open a new one."""
    rows: list[_Row] = []
    for call in split_calls(trajectory, rules).kept:
        fitting = [row for row in rows if row.extended_by(call)]
        row = max(fitting, key=lambda r: len(r.ids), default=None)
        if row is None:
            row = _Row.empty(call)
            rows.append(row)
        row.append(call, _weight(call, rules))
    return [row.sample(trajectory) for row in rows]


def make_samples(trajectory: Trajectory, rules: SampleRules, *, merge: bool) -> list[TrainingSample]:
    return merged_samples(trajectory, rules) if merge else paper_samples(trajectory, rules)


def trained_tokens(samples: Sequence[TrainingSample]) -> int:
    return sum(sum(s.mask) for s in samples)


def _weight(call: ModelCall, rules: SampleRules) -> float:
    return 1.0 if rules.weighting == "token" else 1.0 / len(call.completion_ids)
