"""The rollout queue: enqueue, claim, advance by compare-and-set, cancel, keys.

A stage gives its rollouts deterministic ids, so that enqueueing again does nothing. A retry's id is
`<root>.r<n>`; `latest` follows the chain.
"""

from __future__ import annotations

import hashlib
import secrets
import time
from collections.abc import Iterable, Sequence
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from rollout.errors import FailureClass
from rollout.store.database import Database
from rollout.store.tables import keys, rollouts
from rollout.types import TERMINAL, TRANSITIONS, Failure, Purpose, Rollout, RolloutState

_TERMINAL = [state.value for state in TERMINAL]
_NOTED = (rollouts.c.end_reason, rollouts.c.weight_version, rollouts.c.calls, rollouts.c.tokens)
_WHOLE = sa.select(rollouts.c.body, *_NOTED)
"""What the proxy notes while a rollout runs has columns of its own, so that `advance` never overwrites it."""
ATTEMPTS = 3
"""A rollout that infrastructure broke is tried this often in all."""


def retry_id(root: str, attempt: int) -> str:
    return f"{root}.r{attempt}"


def _row(rollout: Rollout) -> dict[str, Any]:
    return {
        "id": rollout.id,
        "run": rollout.run,
        "task_id": rollout.task_id,
        "group_id": rollout.group_id,
        "start_index": rollout.start_index,
        "retry_of": rollout.retry_of,
        "purpose": rollout.purpose.value,
        "model": rollout.model.name,
        "state": rollout.state.value,
        "created": rollout.created,
        "body": rollout.model_dump_json(),
    }


class RolloutStore:
    def __init__(self, db: Database) -> None:
        self._db = db

    # -- asking for rollouts

    def enqueue(self, items: Sequence[Rollout]) -> int:
        """Adds the rollouts that are not there yet; returns how many were new."""
        now = time.time()
        rows = [_row(r.model_copy(update={"created": r.created or now})) for r in items]

        def change(c: Connection) -> int:
            known = set(c.execute(sa.select(rollouts.c.id).where(rollouts.c.id.in_([r["id"] for r in rows]))).scalars())
            fresh = [{**r, "cancel": False} for r in rows if r["id"] not in known]
            if fresh:
                c.execute(sa.insert(rollouts), fresh)
            return len(fresh)

        return self._db.write(change)

    def cancel(self, *, ids: Sequence[str] = (), run: str = "") -> int:
        """Marks live rollouts (and live retries of them); the orchestrator ends them."""
        live = rollouts.c.state.not_in(_TERMINAL)
        which = rollouts.c.run == run if run else rollouts.c.id.in_(ids) | rollouts.c.retry_of.in_(ids)
        return self._db.write(lambda c: c.execute(sa.update(rollouts).where(which, live).values(cancel=True)).rowcount)

    # -- running them

    def claim(self, owner: str, limit: int, lease_s: float) -> list[Rollout]:
        """QUEUED -> STARTING for at most `limit` rollouts, oldest first, owned until the lease runs out."""

        def change(c: Connection) -> list[Rollout]:
            query = (
                _WHOLE.where(rollouts.c.state == RolloutState.QUEUED.value, rollouts.c.cancel.is_(False))
                .order_by(rollouts.c.created, rollouts.c.group_id, rollouts.c.start_index)
                .limit(limit)
            )
            out = []
            for old in _read(c, query):
                new = old.model_copy(update={"state": RolloutState.STARTING, "started": time.time()})
                if _swap(c, old.state, new, owner=owner, lease_until=time.time() + lease_s):
                    out.append(new)
            return out

        return self._db.write(change)

    def renew(self, owner: str, ids: Sequence[str], lease_s: float) -> int:
        """Longer leases for those of `ids` that `owner` still runs; what it lost sight of runs out."""
        mine = (rollouts.c.owner == owner) & rollouts.c.id.in_(ids) & rollouts.c.state.not_in(_TERMINAL)
        until = time.time() + lease_s
        return self._db.write(lambda c: c.execute(sa.update(rollouts).where(mine).values(lease_until=until)).rowcount)

    def advance(self, rollout: Rollout, **changes: Any) -> Rollout | None:
        """Writes `rollout` with `changes` if its stored state is still `rollout.state`; None if it was not.

        Raises ValueError for a transition that `TRANSITIONS` does not have.
        """
        new = rollout.model_copy(update=changes)
        if new.state != rollout.state and new.state not in TRANSITIONS.get(rollout.state, frozenset()):
            raise ValueError(f"{rollout.id}: {rollout.state} -> {new.state} is no transition")
        return new if self._db.write(lambda c: _swap(c, rollout.state, new)) else None

    def finish(
        self, rollout: Rollout, state: RolloutState, failure: Failure | None, *, retry: bool = False
    ) -> Rollout | None:
        """Ends `rollout` from whatever live state it is in; with `retry` its next attempt is enqueued in the same
        transaction, unless it has had `ATTEMPTS`. None if it had ended already.

        One that was to be tried again but is marked for cancellation ends as cancelled instead.
        """

        def change(c: Connection) -> Rollout | None:
            found = _read(c, _WHOLE.where(rollouts.c.id == rollout.id))
            if not found or found[0].state.terminal:
                return None
            old = found[0]
            cancelled = retry and c.execute(sa.select(rollouts.c.cancel).where(rollouts.c.id == old.id)).scalar_one()
            end = _cancelled(failure) if cancelled else {"state": state, "failure": failure}
            new = old.model_copy(update={**end, "ended": time.time()})
            _swap(c, old.state, new)
            if retry and not cancelled and old.attempt + 1 < ATTEMPTS:
                c.execute(sa.insert(rollouts), {**_row(_next_attempt(old)), "cancel": False})
            return new

        return self._db.write(change)

    # -- what the proxy notes while it runs

    def note_end(self, rollout_id: str, reason: str) -> None:
        """Why the policy's session ended; the first reason stays."""
        where = (rollouts.c.id == rollout_id) & (rollouts.c.end_reason == "")
        self._db.submit(lambda c: c.execute(sa.update(rollouts).where(where).values(end_reason=reason))).result()

    def note_call(self, rollout_id: str, tokens: int, weight_version: int | None) -> None:
        """Counts one recorded call; the version of the first one stays. Queued, not waited for."""
        values = {
            "calls": rollouts.c.calls + 1,
            "tokens": rollouts.c.tokens + tokens,
            "weight_version": sa.func.coalesce(rollouts.c.weight_version, weight_version),
        }
        self._db.submit(lambda c: c.execute(sa.update(rollouts).where(rollouts.c.id == rollout_id).values(values)))

    def orphans(self) -> list[Rollout]:
        """Live rollouts whose owner's lease has run out."""
        query = _WHOLE.where(
            rollouts.c.state.not_in([*_TERMINAL, RolloutState.QUEUED.value]), rollouts.c.lease_until < time.time()
        )
        return self._bodies(query)

    def owned(self, owner_prefix: str) -> dict[str, list[Rollout]]:
        """Live rollouts by owner, of the owners whose name starts so (a host's earlier serve processes)."""
        live = rollouts.c.state.not_in([*_TERMINAL, RolloutState.QUEUED.value])
        mine = rollouts.c.owner.startswith(owner_prefix, autoescape=True)

        def query(c: Connection) -> dict[str, list[Rollout]]:
            owners = c.execute(sa.select(rollouts.c.owner).where(live, mine).distinct()).scalars().all()
            return {owner: _read(c, _WHOLE.where(live, rollouts.c.owner == owner)) for owner in owners}

        return self._db.read(query)

    def to_cancel(self) -> list[str]:
        query = sa.select(rollouts.c.id).where(rollouts.c.cancel.is_(True), rollouts.c.state.not_in(_TERMINAL))
        return self._db.read(lambda c: list(c.execute(query).scalars()))

    # -- looking at them

    def get(self, rollout_id: str) -> Rollout | None:
        found = self._bodies(_WHOLE.where(rollouts.c.id == rollout_id))
        return found[0] if found else None

    def latest(self, ids: Iterable[str]) -> dict[str, Rollout]:
        """For each id the last attempt of its retry chain."""
        wanted = list(ids)
        out: dict[str, Rollout] = {}
        for at in range(0, len(wanted), 400):
            part = wanted[at : at + 400]
            query = _WHOLE.where(rollouts.c.id.in_(part) | rollouts.c.retry_of.in_(part))
            for rollout in self._bodies(query):
                root = rollout.retry_of or rollout.id
                if root not in out or rollout.attempt > out[root].attempt:
                    out[root] = rollout
        return out

    def states(self, ids: Sequence[str]) -> dict[str, RolloutState]:
        """State of the last attempt for each id: the cheap question that a waiting stage repeats."""
        out: dict[str, tuple[int, RolloutState]] = {}
        for at in range(0, len(ids), 400):
            part = list(ids[at : at + 400])
            query = sa.select(rollouts.c.id, rollouts.c.retry_of, rollouts.c.state).where(
                rollouts.c.id.in_(part) | rollouts.c.retry_of.in_(part)
            )
            for rid, root, state in self._db.read(lambda c, q=query: list(c.execute(q))):  # type: ignore[misc]
                attempt = int(rid.rpartition(".r")[2]) if root else 0
                key = root or rid
                if key not in out or attempt > out[key][0]:
                    out[key] = (attempt, RolloutState(state))
        return {key: state for key, (_, state) in out.items()}

    def query(
        self,
        *,
        run: str = "",
        purpose: Purpose | None = None,
        group_id: str = "",
        state: RolloutState | None = None,
        limit: int = 100_000,
    ) -> list[Rollout]:
        where = []
        if run:
            where.append(rollouts.c.run == run)
        if purpose:
            where.append(rollouts.c.purpose == purpose.value)
        if group_id:
            where.append(rollouts.c.group_id == group_id)
        if state:
            where.append(rollouts.c.state == state.value)
        order = (rollouts.c.created, rollouts.c.group_id, rollouts.c.start_index, rollouts.c.id)
        return self._bodies(_WHOLE.where(*where).order_by(*order).limit(limit))

    def counts(self, run: str = "") -> dict[RolloutState, int]:
        query = sa.select(rollouts.c.state, sa.func.count()).group_by(rollouts.c.state)
        if run:
            query = query.where(rollouts.c.run == run)
        return {RolloutState(s): n for s, n in self._db.read(lambda c: list(c.execute(query)))}

    # -- keys

    def issue_key(self, rollout_id: str, phase: str) -> str:
        """A new unguessable key; only its hash is stored."""
        key = f"of-{secrets.token_urlsafe(32)}"
        row = {"hash": hash_key(key), "rollout_id": rollout_id, "phase": phase, "revoked": False}
        self._db.write(lambda c: c.execute(sa.insert(keys), row))
        return key

    def rollout_of_key(self, key: str) -> tuple[str, str] | None:
        """(rollout id, phase) of a live key of a rollout that has not ended, or None."""
        query = (
            sa.select(keys.c.rollout_id, keys.c.phase)
            .join(rollouts, rollouts.c.id == keys.c.rollout_id)
            .where(keys.c.hash == hash_key(key), keys.c.revoked.is_(False), rollouts.c.state.not_in(_TERMINAL))
        )
        row = self._db.read(lambda c: c.execute(query).first())
        return (row[0], row[1]) if row else None

    def revoke_keys(self, rollout_id: str) -> None:
        self._db.write(lambda c: c.execute(sa.update(keys).where(keys.c.rollout_id == rollout_id).values(revoked=True)))

    def _bodies(self, query: sa.Select[Any]) -> list[Rollout]:
        return self._db.read(lambda c: _read(c, query))


def _cancelled(cause: Failure | None) -> dict[str, Any]:
    message = "cancelled through the store" + (f"; it had broken before: {cause.message}" if cause else "")
    failure = Failure(kind=FailureClass.CANCELLED, phase=cause.phase if cause else "", message=message)
    return {"state": RolloutState.CANCELLED, "failure": failure}


def _next_attempt(old: Rollout) -> Rollout:
    root = old.retry_of or old.id
    fresh = {"state": RolloutState.QUEUED, "started": None, "ended": None, "failure": None, "created": time.time()}
    noted = {"end_reason": "", "weight_version": None, "calls": 0, "tokens": 0}
    attempt = old.attempt + 1
    return old.model_copy(
        update={**fresh, **noted, "id": retry_id(root, attempt), "retry_of": root, "attempt": attempt}
    )


def _read(c: Connection, query: sa.Select[Any]) -> list[Rollout]:
    return [
        Rollout.model_validate_json(body).model_copy(
            update={"end_reason": reason, "weight_version": version, "calls": calls, "tokens": tokens}
        )
        for body, reason, version, calls, tokens in c.execute(query).all()
    ]


def hash_key(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def _swap(c: Connection, expected: RolloutState, new: Rollout, **columns: Any) -> bool:
    values = {"state": new.state.value, "body": new.model_dump_json(), **columns}
    where = (rollouts.c.id == new.id) & (rollouts.c.state == expected.value)
    return c.execute(sa.update(rollouts).where(where).values(values)).rowcount == 1
