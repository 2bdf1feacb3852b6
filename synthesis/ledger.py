"""The ledger (`ledger.db`): every proposal of every batch and what became of it, shared by all synthesis workers.

The states are drawn in `types.py`. State changes are compare-and-set; work is claimed under a lease, and the claims
of a process that died are free at once. An identity (family + slots + fixture) occurs once,
over all batches, so that no twin gets in. Outcomes of trial and check rollouts and the costs of each stage are
rows beside the proposal.
"""

from __future__ import annotations

import os
import secrets
import socket
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from rollout.config import Home
from rollout.processes import alive, started
from rollout.store import Database
from rollout.types import Split
from synthesis.types import TRANSITIONS, TRIAL_SCRIPT, Cost, Outcome, Proposal, Stage, State, Twin

LEDGER = sa.MetaData()

proposals = sa.Table(
    "proposals",
    LEDGER,
    sa.Column("id", sa.String, primary_key=True),
    sa.Column("batch", sa.String, nullable=False, index=True),
    sa.Column("split", sa.String, nullable=False),
    sa.Column("family", sa.String, nullable=False),
    sa.Column("identity", sa.String, nullable=False, unique=True),
    sa.Column("state", sa.String, nullable=False, index=True),
    sa.Column("owner", sa.String, nullable=False, default=""),
    sa.Column("lease_until", sa.Float, nullable=False, default=0.0),
    sa.Column("body", sa.Text, nullable=False),
)

outcomes = sa.Table(
    "outcomes",
    LEDGER,
    sa.Column("rollout_id", sa.String, primary_key=True),
    sa.Column("proposal_id", sa.String, nullable=False, index=True),
    sa.Column("body", sa.Text, nullable=False),
)

costs = sa.Table(
    "costs",
    LEDGER,
    sa.Column("proposal_id", sa.String, primary_key=True),
    sa.Column("stage", sa.String, primary_key=True),
    sa.Column("seconds", sa.Float, nullable=False),
)


@dataclass(frozen=True)
class Added:
    new: int
    known: int
    """Ids that were there already."""
    twins: tuple[str, ...]
    """Ids left out because another proposal has their identity."""


def owner_name() -> str:
    """host:pid:start time:nonce, so that a dead owner is known as such and a recycled pid is not taken for it."""
    pid = os.getpid()
    return f"{socket.gethostname()}:{pid}:{started(pid):.2f}:{secrets.token_hex(4)}"


def _dead(owner: str) -> bool:
    host, pid, since, _ = owner.rsplit(":", 3)
    return host == socket.gethostname() and not alive(int(pid), float(since))


class Ledger:
    def __init__(self, db: Database) -> None:
        self._db = db

    @classmethod
    def open(cls, home: Home) -> Ledger:
        """Opens `ledger.db` of a home; close it when done. Raises NewerHomeError, StoreError."""
        return cls(Database(home.database_url("ledger"), LEDGER))

    def close(self) -> None:
        self._db.close()

    # -- writing

    def add(self, items: Sequence[Proposal]) -> Added:
        """Adds what is not there yet, in one transaction; a twin is left out and named."""

        def change(c: Connection) -> Added:
            ids = _found(c, proposals.c.id, [p.id for p in items])
            identities = _found(c, proposals.c.identity, [p.identity for p in items])
            fresh: list[Proposal] = []
            twins: list[str] = []
            for item in items:
                if item.id in ids:
                    continue
                (twins.append(item.id) if item.identity in identities else fresh.append(item))
                ids.add(item.id)
                identities.add(item.identity)
            if fresh:
                c.execute(sa.insert(proposals), [{**_row(p), "owner": "", "lease_until": 0.0} for p in fresh])
            return Added(len(fresh), len(items) - len(fresh) - len(twins), tuple(twins))

        return self._db.write(change)

    def claim(self, query: Query, owner: str, limit: int, lease_s: float) -> list[Proposal]:
        """Leases at most `limit` free proposals to `owner`. Free: no lease, an expired one, or a dead owner's."""

        def change(c: Connection) -> list[Proposal]:
            owners = c.execute(sa.select(proposals.c.owner).where(query.where(), proposals.c.owner != "").distinct())
            gone = [name for name in owners.scalars() if _dead(name)]
            now = time.time()
            free = (proposals.c.owner.in_(["", *gone])) | (proposals.c.lease_until < now)
            rows = c.execute(
                sa.select(proposals.c.body).where(query.where(), free).order_by(proposals.c.id).limit(limit)
            )
            found = [Proposal.model_validate_json(body) for body in rows.scalars()]
            for at in range(0, len(found), 400):
                mine = proposals.c.id.in_([p.id for p in found[at : at + 400]])
                c.execute(sa.update(proposals).where(mine).values(owner=owner, lease_until=now + lease_s))
            return found

        return self._db.write(change)

    def renew(self, owner: str, lease_s: float) -> int:
        until = time.time() + lease_s
        return self._db.write(
            lambda c: (
                c.execute(sa.update(proposals).where(proposals.c.owner == owner).values(lease_until=until)).rowcount
            )
        )

    def release(self, owner: str) -> int:
        """Gives back what `owner` still holds."""
        free = {"owner": "", "lease_until": 0.0}
        return self._db.write(
            lambda c: c.execute(sa.update(proposals).where(proposals.c.owner == owner).values(free)).rowcount
        )

    def advance(self, proposal: Proposal, state: State, owner: str, **changes: Any) -> Proposal | None:
        """To `state`, if the stored state is still `proposal.state` and `owner` holds the claim; else None.

        The claim stays until `release`. Raises ValueError for a step that TRANSITIONS does not have, Twin when a
        new identity is taken.
        """
        found = self.advance_many([(proposal, state, changes)], owner)
        return found[0]

    def advance_many(
        self, steps: Sequence[tuple[Proposal, State, Mapping[str, Any]]], owner: str
    ) -> list[Proposal | None]:
        """`advance` for many in one transaction; all or none when one raises."""
        for proposal, state, _ in steps:
            if state not in TRANSITIONS.get(proposal.state, frozenset()):
                raise ValueError(f"{proposal.id}: {proposal.state} -> {state} is no transition")

        def change(c: Connection) -> list[Proposal | None]:
            out: list[Proposal | None] = []
            for proposal, state, changes in steps:
                new = proposal.model_copy(update={**changes, "state": state})
                out.append(new if _swap(c, proposal, new, owner) else None)
            return out

        try:
            return self._db.write(change)
        except sa.exc.IntegrityError as error:
            raise Twin(f"{', '.join(p.id for p, _, _ in steps)}: another proposal has this identity") from error

    def note(self, found: Sequence[Outcome]) -> None:
        """Records rollout outcomes; noting one again replaces it."""
        rows = [{"rollout_id": o.rollout_id, "proposal_id": o.proposal_id, "body": o.model_dump_json()} for o in found]

        def change(c: Connection) -> None:
            for at in range(0, len(rows), 400):
                part = rows[at : at + 400]
                c.execute(sa.delete(outcomes).where(outcomes.c.rollout_id.in_([r["rollout_id"] for r in part])))
                c.execute(sa.insert(outcomes), part)

        self._db.write(change)

    def book(self, proposal_ids: Sequence[str], stage: Stage, seconds: float) -> None:
        """Adds `seconds` to what `stage` cost each of these proposals, rollouts apart."""

        def change(c: Connection) -> None:
            for proposal_id in proposal_ids:
                where = (costs.c.proposal_id == proposal_id) & (costs.c.stage == stage.value)
                more = {"seconds": costs.c.seconds + seconds}
                if not c.execute(sa.update(costs).where(where).values(more)).rowcount:
                    row = {"proposal_id": proposal_id, "stage": stage.value, "seconds": seconds}
                    c.execute(sa.insert(costs), row)

        self._db.write(change)

    # -- reading

    def get(self, proposal_id: str) -> Proposal | None:
        query = sa.select(proposals.c.body).where(proposals.c.id == proposal_id)
        body = self._db.read(lambda c: c.execute(query).scalar())
        return Proposal.model_validate_json(body) if body else None

    def all(self, query: Query) -> list[Proposal]:
        """In the order of their ids."""
        chosen = sa.select(proposals.c.body).where(query.where()).order_by(proposals.c.id)
        return [Proposal.model_validate_json(b) for b in self._db.read(lambda c: list(c.execute(chosen).scalars()))]

    def count(self, query: Query) -> int:
        chosen = sa.select(sa.func.count()).select_from(proposals).where(query.where())
        return self._db.read(lambda c: c.execute(chosen).scalar_one())

    def states(self, batch: str) -> dict[State, int]:
        chosen = (
            sa.select(proposals.c.state, sa.func.count()).where(proposals.c.batch == batch).group_by(proposals.c.state)
        )
        return {State(s): n for s, n in self._db.read(lambda c: list(c.execute(chosen)))}

    def outcomes(self, proposal_id: str) -> list[Outcome]:
        chosen = sa.select(outcomes.c.body).where(outcomes.c.proposal_id == proposal_id).order_by(outcomes.c.rollout_id)
        return [Outcome.model_validate_json(b) for b in self._db.read(lambda c: list(c.execute(chosen).scalars()))]

    def costs(self, proposal_id: str) -> list[Cost]:
        """What each stage spent on a proposal: booked seconds, and those and the tokens of its rollouts."""
        chosen = sa.select(costs.c.stage, costs.c.seconds).where(costs.c.proposal_id == proposal_id)
        booked = {Stage(stage): seconds for stage, seconds in self._db.read(lambda c: list(c.execute(chosen)))}
        spent = {stage: Cost(proposal_id=proposal_id, stage=stage, seconds=s) for stage, s in booked.items()}
        for outcome in self.outcomes(proposal_id):
            stage = Stage.TRIAL if outcome.script == TRIAL_SCRIPT else Stage.REFINE
            old = spent.get(stage, Cost(proposal_id=proposal_id, stage=stage))
            spent[stage] = Cost(
                proposal_id=proposal_id,
                stage=stage,
                seconds=old.seconds + outcome.seconds,
                tokens=old.tokens + outcome.tokens,
                rollouts=old.rollouts + 1,
            )
        return [spent[stage] for stage in Stage if stage in spent]


@dataclass(frozen=True)
class Query:
    """Which proposals. An empty tuple of states or splits means all of them."""

    batch: str
    states: tuple[State, ...] = ()
    splits: tuple[Split, ...] = ()

    def where(self) -> sa.ColumnElement[bool]:
        parts: list[sa.ColumnElement[bool]] = [proposals.c.batch == self.batch]
        if self.states:
            parts.append(proposals.c.state.in_([s.value for s in self.states]))
        if self.splits:
            parts.append(proposals.c.split.in_([s.value for s in self.splits]))
        return sa.and_(*parts)


def _row(proposal: Proposal) -> dict[str, Any]:
    return {
        "id": proposal.id,
        "batch": proposal.batch,
        "split": proposal.split.value,
        "family": proposal.family,
        "identity": proposal.identity,
        "state": proposal.state.value,
        "body": proposal.model_dump_json(),
    }


def _swap(c: Connection, old: Proposal, new: Proposal, owner: str) -> bool:
    where = (proposals.c.id == old.id) & (proposals.c.state == old.state.value) & (proposals.c.owner == owner)
    return c.execute(sa.update(proposals).where(where).values(_row(new))).rowcount == 1


def _found(c: Connection, column: sa.Column[Any], values: Iterable[str]) -> set[str]:
    wanted = list(values)
    found: set[str] = set()
    for at in range(0, len(wanted), 400):
        found.update(c.execute(sa.select(column).where(column.in_(wanted[at : at + 400]))).scalars())
    return found
