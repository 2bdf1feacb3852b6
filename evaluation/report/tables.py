"""The numbers of the report as rows that the template prints: headline, models, families, the task matrix."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePath

from evaluation.metrics import Difference, Interval, by_family, paired_difference
from evaluation.report.collect import Evaluated
from evaluation.run import passes, summary
from evaluation.types import K, ModelSummary

TITLES = {"base": "Base", "sft": "SFT", "rl": "SFT + RL", "teacher": "Teacher"}


def title_of(label: str) -> str:
    return TITLES.get(label, label)


def tone_of(label: str) -> str:
    """CSS class that colours a model."""
    return f"m-{label}" if label in TITLES else "m-other"


@dataclass(frozen=True)
class Step:
    """A paired difference to an earlier row; `other` names it. `text` says why there is none."""

    other: str
    difference: Difference | None
    text: str = ""


@dataclass(frozen=True)
class ModelRow:
    label: str
    title: str
    tone: str
    model: str
    summary: ModelSummary
    step: Step | None
    dropped: int
    drop_text: str


@dataclass(frozen=True)
class Mark:
    """One model's pass@1 in one family."""

    title: str
    tone: str
    value: float
    interval: Interval


@dataclass(frozen=True)
class FamilyRow:
    name: str
    n_tasks: int
    marks: tuple[Mark, ...]


@dataclass(frozen=True)
class Cell:
    task: str
    passed: int
    trials: int

    @property
    def level(self) -> int:
        """0 to 4: how dark the cell is."""
        return 0 if not self.trials else round(4 * self.passed / self.trials)


@dataclass(frozen=True)
class MatrixRow:
    label: str
    title: str
    tone: str
    cells: tuple[Cell, ...]


@dataclass(frozen=True)
class MatrixBlock:
    """The tasks of one family as columns, those that the last model passes most often first; rows are models."""

    family: str
    apart: bool
    rows: tuple[MatrixRow, ...]


@dataclass(frozen=True)
class Headline:
    title: str
    lede: str


def model_rows(evaluated: Sequence[Evaluated], *, apart: bool = False) -> tuple[ModelRow, ...]:
    """One row a model, each compared with the row above it."""
    rows: list[ModelRow] = []
    before: Evaluated | None = None
    for item in evaluated:
        if not passes(item.result, apart=apart):
            continue
        dropped = item.result.dropped
        rows.append(
            ModelRow(
                label=item.label,
                title=title_of(item.label),
                tone=tone_of(item.label),
                model=PurePath(item.result.model.name).name,
                summary=summary(item.result, apart=apart),
                step=step_between(before, item, apart=apart) if before else None,
                dropped=sum(dropped.values()),
                drop_text=", ".join(f"{n} {kind}" for kind, n in sorted(dropped.items())),
            )
        )
        before = item
    return tuple(rows)


def overall(evaluated: Sequence[Evaluated]) -> Step | None:
    """The last model against the first, when there is one between them."""
    shown = [e for e in evaluated if passes(e.result)]
    return step_between(shown[0], shown[-1]) if len(shown) > 2 else None


def step_between(before: Evaluated, after: Evaluated, *, apart: bool = False) -> Step:
    one, two = passes(before.result, apart=apart), passes(after.result, apart=apart)
    name = title_of(before.label)
    if set(one) != set(two):
        return Step(name, None, "other tasks")
    return Step(name, paired_difference(one, two))


def family_rows(evaluated: Sequence[Evaluated], *, apart: bool = False) -> tuple[FamilyRow, ...]:
    marks: dict[str, list[Mark]] = {}
    sizes: dict[str, int] = {}
    for item in evaluated:
        rows = passes(item.result, apart=apart)
        if not rows:
            continue
        for family, found in by_family(rows, item.result.families, K).items():
            sizes[family] = max(sizes.get(family, 0), found.n_tasks)
            mark = Mark(title_of(item.label), tone_of(item.label), found.pass_at_1, found.interval)
            marks.setdefault(family, []).append(mark)
    return tuple(FamilyRow(f, sizes[f], tuple(marks[f])) for f in sorted(marks))


def matrix(evaluated: Sequence[Evaluated]) -> tuple[MatrixBlock, ...]:
    """Every task of every model; the same column is the same task."""
    families = {t: f for item in evaluated for t, f in item.result.families.items()}
    rows = {item.label: passes(item.result) | passes(item.result, apart=True) for item in evaluated}
    blocks = []
    for family in sorted(set(families.values())):
        tasks = [t for t, f in families.items() if f == family]
        tasks.sort(key=lambda t: ([-sum(r.get(t, ())) for r in reversed(rows.values())], t))
        blocks.append(
            MatrixBlock(
                family,
                any(family in item.result.apart for item in evaluated),
                tuple(
                    MatrixRow(
                        label,
                        title_of(label),
                        tone_of(label),
                        tuple(Cell(t, sum(row.get(t, ())), len(row.get(t, ()))) for t in tasks),
                    )
                    for label, row in rows.items()
                ),
            )
        )
    return tuple(blocks)


def headline(rows: Sequence[ModelRow]) -> Headline:
    """A title that says no more than the intervals carry."""
    if not rows:
        return Headline("A run without results yet", "No model was evaluated in this run.")
    last = rows[-1]
    tasks = f"{last.summary.n_tasks} held-out task{'s' * (last.summary.n_tasks != 1)}"
    if len(rows) == 1 or not last.step or not last.step.difference:
        return Headline(f"{last.title} passes {percent(last.summary.pass_at_1)} % of {tasks}", _lede(last, tasks))
    before, found = rows[-2], last.step.difference
    if found.clear:
        verb = "lifts" if found.mean > 0 else "lowers"
        short = last.title.replace("SFT + RL", "RL")
        title = f"{short} {verb} pass@1 from {percent(before.summary.pass_at_1)} to {percent(last.summary.pass_at_1)} %"
    else:
        title = f"{last.title} and {before.title} are not told apart on {tasks}"
    return Headline(title, _lede(last, tasks))


def _lede(last: ModelRow, tasks: str) -> str:
    trials = last.summary.n_trials // max(1, last.summary.n_tasks)
    text = f"{tasks.capitalize()}, {trials} trial{'s' * (trials != 1)} each, the same tasks and seeds for every model."
    if last.step and last.step.difference:
        found = last.step.difference
        text += (
            f" Paired difference to {last.step.other}: {signed(found.mean)} points, "
            f"95 % interval {signed(found.interval.low)} to {signed(found.interval.high)}."
        )
    return text


def percent(share: float) -> str:
    return f"{100 * share:.1f}"


def signed(share: float) -> str:
    """Percentage points with a sign; the minus is a real one."""
    text = f"{100 * share:+.1f}"
    return text.replace("-", "\N{MINUS SIGN}") if float(text) else "0.0"
