"""What each stage kept, dropped and cost, as rows with bar widths in percent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rollout.types import StageRecord

SYNTHESIS = ("propose", "prune", "build", "trial", "refine", "distill")
TELLS = {
    "propose": "task ideas from the pool",
    "prune": "near duplicates and weak ideas go",
    "build": "environment, verifier, oracle",
    "trial": "an open model tries each task",
    "refine": "oracle passes, wrong answers fail",
    "distill": "teacher rollouts, successes kept",
    "sft": "supervised steps",
    "rl": "policy gradient in the harness",
}


@dataclass(frozen=True)
class Share:
    reason: str
    count: int
    width: float
    """Percent of the widest stage."""


@dataclass(frozen=True)
class StageRow:
    name: str
    tells: str
    kept: int
    kept_width: float
    dropped: tuple[Share, ...]
    """Most frequent first."""

    @property
    def dropped_total(self) -> int:
        return sum(s.count for s in self.dropped)


@dataclass(frozen=True)
class CostRow:
    name: str
    tone: str
    seconds: float
    width: float
    """Percent of the slowest stage."""
    share: float
    """Percent of all seconds."""
    tokens: int
    rollouts: int


@dataclass(frozen=True)
class Costs:
    rows: tuple[CostRow, ...]
    seconds: float
    tokens: int
    rollouts: int


def stage_rows(stages: Sequence[StageRecord]) -> tuple[StageRow, ...]:
    """The synthesis stages and distillation."""
    shown = [s for s in stages if s.stage in SYNTHESIS]
    widest = max((s.kept + sum(s.dropped.values()) for s in shown), default=0) or 1
    return tuple(
        StageRow(
            name=stage_name(s, stages),
            tells=TELLS.get(s.stage, ""),
            kept=s.kept,
            kept_width=100 * s.kept / widest,
            dropped=tuple(
                Share(reason, n, 100 * n / widest)
                for reason, n in sorted(s.dropped.items(), key=lambda item: (-item[1], item[0]))
                if n
            ),
        )
        for s in shown
    )


def costs(stages: Sequence[StageRecord]) -> Costs:
    total = sum(s.seconds for s in stages)
    slowest = max((s.seconds for s in stages), default=0.0) or 1.0
    rows = tuple(
        CostRow(
            name=stage_name(s, stages),
            tone=_tone(s.stage),
            seconds=s.seconds,
            width=100 * s.seconds / slowest,
            share=100 * s.seconds / (total or 1.0),
            tokens=s.tokens,
            rollouts=s.rollouts,
        )
        for s in stages
    )
    return Costs(rows, total, sum(s.tokens for s in stages), sum(s.rollouts for s in stages))


def stage_name(stage: StageRecord, stages: Sequence[StageRecord]) -> str:
    """The stage, with its run where two runs have one of that name."""
    twice = sum(s.stage == stage.stage for s in stages) > 1
    return f"{stage.stage} ({stage.run})" if twice else stage.stage


def _tone(stage: str) -> str:
    if stage.startswith("eval-"):
        return "s-eval"
    return "s-train" if stage in ("sft", "rl") else "s-synth"


def duration(seconds: float) -> str:
    """`0.8 s`, `42 s`, `3 min 05 s`, `1 h 12 min`."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    if seconds < 59.5:
        return f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def grouped(number: int) -> str:
    """Thousands set apart by a narrow space."""
    return f"{number:,}".replace(",", "\N{NARROW NO-BREAK SPACE}")
