"""Propose: the procedural author drafts more tasks than wanted and appends them to the ledger, which refuses twins."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from rollout.client import seed_of
from rollout.errors import ConfigError
from rollout.store import Store
from rollout.types import Split, StageRecord
from synthesis.config import SynthConfig
from synthesis.families import family_named
from synthesis.ledger import Ledger
from synthesis.procedural import compose, draw, lucky
from synthesis.stage import Progress, Spent, StageRun, close
from synthesis.types import Proposal, Stage

DRAWS = 20
"""Drafts tried for each proposal wanted before the family's slots count as used up."""


@dataclass(frozen=True)
class Group:
    """Proposals of one split and family; `want` of them are to be selected."""

    split: Split
    family: str
    want: int


def groups(config: SynthConfig) -> list[Group]:
    """Every split's count, divided over its families as evenly as it goes."""
    out = []
    for split in (Split.SFT, Split.RL, Split.VALIDATION, Split.HELDOUT):
        each, rest = divmod(getattr(config.counts, split.value), len(config.families))
        out += [Group(split, name, each + (i < rest)) for i, name in enumerate(config.families)]
    out.append(Group(Split.HELDOUT, config.heldout_family, config.counts.heldout_family))
    return [group for group in out if group.want]


def propose(store: Store, ledger: Ledger, config: SynthConfig, run: str, progress: Progress) -> StageRecord:
    """`oversample` times the wanted number of proposals for each split and family.

    Raises ConfigError when a family cannot give that many different tasks.
    """
    stage = StageRun(store, ledger, config, run, progress)
    spent = Spent()
    twins = 0
    todo = groups(config)
    total = sum(_quota(config, group) for group in todo)
    done = 0
    for group in todo:
        new, refused = _fill(stage, group)
        spent.items += new
        twins += refused
        done += _quota(config, group)
        progress("propose", done, total)
    return close(stage, Stage.PROPOSE, spent, {"twin": twins} if twins else None)


def _quota(config: SynthConfig, group: Group) -> int:
    return math.ceil(group.want * config.oversample)


def _fill(stage: StageRun, group: Group) -> tuple[int, int]:
    """(new proposals, twins refused). Draws are numbered, so that a second call finds the first one's rows."""
    quota = _quota(stage.config, group)
    drafts = _drafts(stage.config, group)
    have = new = twins = 0
    for _ in range(DRAWS):
        added = stage.ledger.add([next(drafts) for _ in range(quota - have)])
        new += added.new
        have += added.new + added.known
        twins += len(added.twins)
        if have >= quota:
            return new, twins
    raise ConfigError(
        f"family {group.family} gave only {have} of {quota} different {group.split.value} tasks; "
        "lower the counts of [synth] or use another seed"
    )


def _drafts(config: SynthConfig, group: Group) -> Iterator[Proposal]:
    number = 0
    while True:
        name = f"{config.batch}-{group.split.value}-{group.family}-{number:04d}"
        luck = lucky(number, config.luck_rate)
        yield proposal_of(name, config.batch, group, Draw(seed_of(config.seed, number), luck))
        number += 1


@dataclass(frozen=True)
class Draw:
    seed: int
    luck: bool


def proposal_of(name: str, batch: str, group: Group, drawn: Draw) -> Proposal:
    """The proposal that this draw gives."""
    family = family_named(group.family)
    slots = draw(family, group.split, drawn.seed, drawn.luck)
    return Proposal(
        id=name,
        batch=batch,
        split=group.split,
        family=group.family,
        seed=drawn.seed,
        slots=slots,
        identity=compose(family, slots).identity,
    )
