"""Prune: keeps the wanted number of the most diverse proposals of each split and family, and discards the others.

Greedy: of what is left, the proposal whose ids, wording and decoy were chosen least so far, within the wanted
share of lucky instances. The order of ids decides ties, so that the same proposals always give the same choice.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from rollout.store import Store
from rollout.types import Split, StageRecord
from synthesis.config import SynthConfig
from synthesis.ledger import Ledger, Query
from synthesis.propose import Group, groups
from synthesis.stage import Progress, Source, Spent, StageRun, advance_all, close, drain, drop
from synthesis.types import Proposal, Stage, State


def prune(store: Store, ledger: Ledger, config: SynthConfig, run: str, progress: Progress) -> StageRecord:
    """Every proposed row of the batch becomes selected or discarded."""
    stage = StageRun(store, ledger, config, run, progress)
    spent = Spent()

    def work(claimed: list[Proposal], owner: str) -> None:
        taken = Counter((p.split, p.family) for p in ledger.all(Query(config.batch)) if p.state not in _UNDECIDED)
        chosen = {p.id for group in groups(config) for p in _choose(group, claimed, taken, config.luck_rate)}
        steps: list[tuple[Proposal, State, dict[str, str]]] = [
            (p, State.SELECTED, {}) if p.id in chosen else (p, State.DISCARDED, drop(p, Stage.PRUNE, "surplus"))
            for p in claimed
        ]
        advance_all(stage, owner, steps)
        progress("prune", len(claimed), len(claimed))

    spent.items = drain(stage, Source((State.PROPOSED,)), work)
    return close(stage, Stage.PRUNE, spent)


_UNDECIDED = (State.PROPOSED, State.DISCARDED)


def _choose(
    group: Group, claimed: Sequence[Proposal], taken: Counter[tuple[Split, str]], luck_rate: float
) -> list[Proposal]:
    key = (group.split, group.family)
    rows = [p for p in claimed if (p.split, p.family) == key]
    return select(rows, max(0, group.want - taken[key]), luck_rate)


def select(rows: Sequence[Proposal], want: int, luck_rate: float) -> list[Proposal]:
    """The `want` most diverse of `rows`, `luck_rate` of them lucky as far as there are such."""
    lucky, plain = ([p for p in rows if p.slots.luck is luck] for luck in (True, False))
    n_lucky = min(len(lucky), round(want * luck_rate))
    n_plain = min(len(plain), want - n_lucky)
    n_lucky = min(len(lucky), want - n_plain)
    seen = _Seen()
    return _spread(plain, n_plain, seen) + _spread(lucky, n_lucky, seen)


@dataclass
class _Seen:
    """How often each value was chosen."""

    counts: Counter[tuple[str, object]] = field(default_factory=Counter)

    def cost(self, proposal: Proposal) -> int:
        return sum(self.counts[value] for value in _values(proposal))

    def add(self, proposal: Proposal) -> None:
        self.counts.update(_values(proposal))


def _values(proposal: Proposal) -> list[tuple[str, object]]:
    slots = proposal.slots
    return [("asked", slots.asked), ("now", slots.now), ("template", slots.template), ("decoy", slots.decoy)]


def _spread(rows: Sequence[Proposal], want: int, seen: _Seen) -> list[Proposal]:
    left = sorted(rows, key=lambda p: p.id)
    chosen = []
    for _ in range(want):
        best = min(left, key=lambda p: (seen.cost(p), p.id))
        left.remove(best)
        seen.add(best)
        chosen.append(best)
    return chosen
