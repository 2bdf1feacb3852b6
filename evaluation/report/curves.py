"""Steps of SFT and RL as charts: geometry for SVG, computed here, printed by `marks.jinja`.

Every mean reward carries a 95 % interval: that of the step's metrics (`ci_low`, `ci_high`) if they have one, else
a bootstrap over the groups of its rollouts, else (rollouts removed, or steps that share their weights) Wilson's over
the number of groups, which is the widest that such a mean can have.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from evaluation.metrics import Interval, bootstrap_mean, wilson
from evaluation.report.collect import Batch, Spread
from rollout.types import Purpose, StepRecord

Spreads = Mapping[Batch, Spread]

WIDTH, HEIGHT = 560.0, 250.0
LEFT, RIGHT, TOP, BOTTOM = 44.0, 16.0, 14.0, 34.0
SMOOTH = 0.25
RESAMPLES = 2_000


@dataclass(frozen=True)
class Point:
    x: float
    y: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Series:
    name: str
    tone: str
    points: tuple[Point, ...]
    style: str = "line"
    """`line` with a band where there are intervals, `whiskers` for few points, `faint` for raw values."""


@dataclass(frozen=True)
class Tick:
    at: float
    text: str


@dataclass(frozen=True)
class Drawn:
    """One series in pixels."""

    name: str
    tone: str
    style: str
    line: str
    band: str
    dots: tuple[tuple[float, float, float, float], ...]
    """x, y, y of the interval's low and high end."""


@dataclass(frozen=True)
class Hit:
    """A column of the chart that shows `tip` while pointed at."""

    x: float
    width: float
    tip: str


@dataclass(frozen=True)
class Chart:
    title: str
    note: str
    series: tuple[Drawn, ...]
    x_ticks: tuple[Tick, ...]
    y_ticks: tuple[Tick, ...]
    hits: tuple[Hit, ...]
    x_label: str = "step"


def charts(steps: Sequence[StepRecord], spreads: Spreads) -> tuple[Chart, ...]:
    """The charts that have data, in the order of training."""
    sft = [s for s in steps if s.kind == "sft" and s.loss is not None and math.isfinite(s.loss)]
    rl = [s for s in steps if s.kind == "rl"]
    validation = [s for s in steps if s.kind == "validation"]
    found = (_loss(sft), _reward(rl, validation, spreads), _malformed(rl), _mixed(rl))
    return tuple(chart for chart in found if chart)


def _loss(steps: Sequence[StepRecord]) -> Chart | None:
    raw = [Point(s.step, s.loss) for s in steps if s.loss is not None]
    if not raw:
        return None
    smooth, value = [], raw[0].y
    for point in raw:
        value += SMOOTH * (point.y - value)
        smooth.append(Point(point.x, value))
    note = f"nats a trained token; last {raw[-1].y:.3f}"
    series = (Series("each step", "m-sft", tuple(raw), "faint"), Series("smoothed", "m-sft", tuple(smooth)))
    return draw("SFT loss", note, series, top=max(p.y for p in raw), percent=False)


def _reward(steps: Sequence[StepRecord], validation: Sequence[StepRecord], spreads: Spreads) -> Chart | None:
    train = _means(steps, spreads)
    held = _means(validation, spreads)
    series = [Series("mean reward of the batch", "m-rl", train)] if train else []
    series += [Series("validation tasks", "m-validation", held, "whiskers")] if held else []
    if not series:
        return None
    best = max(held, key=lambda p: p.y, default=None)
    note = f"best validation {100 * best.y:.1f} % at step {best.x:.0f}" if best else "95 % intervals"
    return draw("RL reward and validation", note, series, top=1.0, percent=True)


def _malformed(steps: Sequence[StepRecord]) -> Chart | None:
    found = [(s, s.metrics["malformed_share"]) for s in steps if "malformed_share" in s.metrics and s.finished]
    points = tuple(_point(s.step, share, wilson(share, s.finished)) for s, share in found)
    if not points:
        return None
    top = max(0.1, *(p.high or p.y for p in points))
    series = (Series("malformed share", "m-warn", points),)
    return draw("Malformed tool calls", "share of rollouts with one", series, top=top, percent=True)


def _mixed(steps: Sequence[StepRecord]) -> Chart | None:
    mixed = tuple(Point(s.step, float(s.mixed_groups)) for s in steps)
    groups = [len(s.group_sizes) for s in steps if s.group_sizes]
    if not mixed or not (groups or any(p.y for p in mixed)):
        return None
    top = max([*groups, *(p.y for p in mixed)])
    note = f"of {max(groups)} a step" if groups else "groups that carry a gradient"
    return draw(
        "Groups with mixed rewards", note, (Series("mixed groups", "m-rl", mixed, "bars"),), top=top, percent=False
    )


def _means(steps: Sequence[StepRecord], spreads: Spreads) -> tuple[Point, ...]:
    found = [(s, s.metrics.get("pass_at_1", s.reward_mean)) for s in steps]
    return tuple(_point(s.step, value, _interval(s, value, spreads)) for s, value in found if value is not None)


def _point(x: float, y: float, interval: Interval) -> Point:
    return Point(x, y, min(interval.low, y), max(interval.high, y))


def _interval(step: StepRecord, value: float, spreads: Spreads) -> Interval:
    if "ci_low" in step.metrics and "ci_high" in step.metrics:
        return Interval(step.metrics["ci_low"], step.metrics["ci_high"])
    purpose = Purpose.TRAIN if step.kind == "rl" else Purpose.VALIDATE
    spread = spreads.get(Batch(step.run, purpose, step.weight_version))
    if spread and spread.rollouts == step.finished:
        return bootstrap_mean(spread.means, resamples=RESAMPLES)
    return wilson(value, len(step.group_sizes) or step.finished)


# -- geometry ------------------------------------------------------------------------------------------


def draw(title: str, note: str, series: Sequence[Series], *, top: float, percent: bool) -> Chart:
    """Lays `series` out over their common x range and [0, top]."""
    xs = sorted({p.x for s in series for p in s.points})
    y_ticks = ticks(top)
    plane = _Plane(xs[0], xs[-1], max(top, y_ticks[-1]), bars=any(s.style == "bars" for s in series))
    return Chart(
        title=title,
        note=note,
        series=tuple(_drawn(s, plane) for s in series),
        x_ticks=tuple(Tick(plane.x(x), f"{x:g}") for x in _steps_shown(xs)),
        y_ticks=tuple(Tick(plane.y(y), f"{100 * y:g} %" if percent else f"{y:g}") for y in y_ticks),
        hits=_hits(series, plane, xs, percent),
    )


@dataclass(frozen=True)
class _Plane:
    first: float
    last: float
    top: float
    bars: bool = False

    def x(self, value: float) -> float:
        inner = WIDTH - LEFT - RIGHT
        pad = 14.0 if self.bars else 6.0
        span = self.last - self.first
        return LEFT + (inner / 2 if not span else pad + (inner - 2 * pad) * (value - self.first) / span)

    def y(self, value: float) -> float:
        share = min(1.0, max(0.0, value / self.top))
        return HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM)


def ticks(top: float, about: int = 4) -> tuple[float, ...]:
    """Round numbers from 0 to at least `top`, about `about` steps apart."""
    if top <= 0:
        return (0.0, 1.0)
    raw = top / about
    unit = 10.0 ** math.floor(math.log10(raw))
    step = next(unit * m for m in (1, 2, 2.5, 5, 10) if unit * m >= raw * 0.999)
    return tuple(round(i * step, 10) for i in range(math.ceil(top / step - 1e-9) + 1))


def _steps_shown(xs: Sequence[float]) -> list[float]:
    """All of a few steps, the round ones of many."""
    if len(xs) <= 12:
        return list(xs)
    every = max(1.0, ticks(xs[-1] - xs[0], 8)[1])
    return [x for x in xs if x % every == 0]


def _drawn(series: Series, plane: _Plane) -> Drawn:
    spots = [(plane.x(p.x), plane.y(p.y)) for p in series.points]
    ranged = [p for p in series.points if p.low is not None and p.high is not None]
    upper = [(plane.x(p.x), plane.y(p.high)) for p in ranged if p.high is not None]
    lower = [(plane.x(p.x), plane.y(p.low)) for p in ranged if p.low is not None]
    return Drawn(
        name=series.name,
        tone=series.tone,
        style=series.style,
        line=_path(spots),
        band=f"{_path([*upper, *reversed(lower)])}Z" if len(ranged) > 1 and series.style == "line" else "",
        dots=tuple(
            (x, y, plane.y(p.low if p.low is not None else p.y), plane.y(p.high if p.high is not None else p.y))
            for (x, y), p in zip(spots, series.points, strict=True)
        ),
    )


def _path(spots: Sequence[tuple[float, float]]) -> str:
    return "".join(f"{'L' if i else 'M'}{x:.1f} {y:.1f}" for i, (x, y) in enumerate(spots))


def _hits(series: Sequence[Series], plane: _Plane, xs: Sequence[float], percent: bool) -> tuple[Hit, ...]:
    places = [plane.x(x) for x in xs]
    edges = [LEFT, *((a + b) / 2 for a, b in itertools.pairwise(places)), WIDTH - RIGHT]
    return tuple(
        Hit(edges[i], edges[i + 1] - edges[i], "\n".join([f"step {x:g}", *_tips(series, x, percent)]))
        for i, x in enumerate(xs)
    )


def _tips(series: Sequence[Series], x: float, percent: bool) -> list[str]:
    def text(value: float) -> str:
        return f"{100 * value:.1f} %" if percent else f"{value:.4g}"

    out = []
    for item in series:
        for p in item.points:
            if p.x == x:
                ranged = f" [{text(p.low)}, {text(p.high)}]" if p.low is not None and p.high is not None else ""
                out.append(f"{item.name}: {text(p.y)}{ranged}")
    return out
