"""The procedural author: draws slots for a family and composes the whole task from them, with no model and no key.

Everything is a pure function of (family, split, seed, luck). A `Draft` is a task before it is written to disk: the
instruction, the seeded services, the three tools it shows, the teacher's plans and the wrong solutions.
"""

from __future__ import annotations

import hashlib
import json
import math
import random
from dataclasses import dataclass
from typing import Any

from rollout.types import Split
from synthesis.families import Family, GradedFact, Slots, fixture, pool_of
from synthesis.play import Act, Final, Step, from_result, play

OTHERS = 2
ANSWER = "done"


@dataclass(frozen=True)
class Draft:
    family: Family
    slots: Slots
    instruction: str
    services: dict[str, Any]
    """Service name -> seed state."""
    tools: tuple[str, ...]
    oracle: tuple[Step, ...]
    shortcut: tuple[Step, ...]
    mistake: tuple[Step, ...]
    wrong: dict[str, tuple[Step, ...]]
    """Name -> steps of a solution that must score 0. Idle is checked besides."""
    graded: tuple[GradedFact, ...]

    @property
    def identity(self) -> str:
        """Digest of family + slots + fixture: equal identities are the same task."""
        body = [self.family.name, self.slots.model_dump(mode="json"), self.services]
        return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()[:32]


def lucky(number: int, luck_rate: float) -> bool:
    """Whether nothing was replaced in the draft of this number: `luck_rate` of any run of numbers, evenly spread."""
    return math.floor((number + 1) * luck_rate) > math.floor(number * luck_rate)


def draw(family: Family, split: Split, seed: int, luck: bool) -> Slots:
    """Slots from the split's pool; all but luck depends on the seed alone, so that nothing else tells of it."""
    rng = random.Random(f"{family.name}:{split.value}:{seed}")
    pool = pool_of(split)
    asked, moved, *others = rng.sample(pool.numbers, 2 + OTHERS)
    return Slots(
        asked=asked,
        now=asked if luck else moved,
        others=tuple(others),
        name=rng.choice(pool.names),
        template=rng.randrange(len(family.templates)),
        decoy=rng.choice(family.decoys),
    )


def compose(family: Family, slots: Slots) -> Draft:
    """The task of these slots. Tools stand in the order of their names, so that no position gives one away."""
    asked = Act(family.action, {"id": slots.asked})
    look = Act(family.lookup, {"id": slots.asked})
    stop = Final(ANSWER)
    now = Act(family.action, {"id": from_result(0, "now")})
    oracle = (look, now, stop) if family.follow else (asked, stop)
    return Draft(
        family=family,
        slots=slots,
        instruction=family.templates[slots.template].format(asked=slots.asked, name=slots.name),
        services=fixture(family, slots),
        tools=tuple(sorted((family.lookup, family.action, slots.decoy))),
        oracle=oracle,
        shortcut=(asked, stop),
        mistake=_mistake(family, slots),
        wrong=_wrong(family, slots),
        graded=family.graded(slots),
    )


def _off_target(family: Family, slots: Slots) -> int:
    """The id that a careless policy acts on; in a lucky instance there is none, so one that was never asked for."""
    if slots.luck:
        return slots.others[0]
    return slots.asked if family.follow else slots.now


def _mistake(family: Family, slots: Slots) -> tuple[Step, ...]:
    """The wrong tool for half of the tasks, the wrong id for the others."""
    if (slots.asked + slots.template) % 2:
        return (Act(slots.decoy, {"id": slots.asked}), Final(ANSWER))
    return (
        Act(family.lookup, {"id": slots.asked}),
        Act(family.action, {"id": _off_target(family, slots)}),
        Final(ANSWER),
    )


def _wrong(family: Family, slots: Slots) -> dict[str, tuple[Step, ...]]:
    right = Act(family.action, {"id": family.target(slots)})
    off = Act(family.action, {"id": _off_target(family, slots)})
    return {
        "off-target": (off, Final(ANSWER)),
        "twice": (right, right, Final(ANSWER)),
        "silent": (right,),
    }


def expected_end(draft: Draft) -> dict[str, Any]:
    """tests/expected.json: final states, the writes that may have happened, and the word of the answer."""
    final = play(draft.services, draft.oracle).final
    writes = [[e["service"], e["tool"], e["arguments"]] for e in final["audit"] if e["label"] == "write"]
    return {"services": final["services"], "writes": writes, "answer": ANSWER}
