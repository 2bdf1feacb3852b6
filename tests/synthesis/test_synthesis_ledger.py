"""The ledger: its state machine, its claims, and many writers at once."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from rollout.config import open_home
from rollout.types import Split
from synthesis.families import Slots
from synthesis.ledger import Ledger, Query, owner_name
from synthesis.types import TRANSITIONS, TRIAL_SCRIPT, Outcome, Proposal, Stage, State, Twin

SLOTS = Slots(asked=47, now=52, others=(10, 11), name="Ana", template=0, decoy="close_ticket")


def proposal(name: str, identity: str = "", split: Split = Split.RL, batch: str = "b") -> Proposal:
    return Proposal(
        id=name, batch=batch, split=split, family="f", seed=0, slots=SLOTS, identity=identity or f"i-{name}"
    )


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    opened = Ledger.open(open_home(tmp_path))
    yield opened
    opened.close()


def claim(ledger: Ledger, owner: str, state: State = State.PROPOSED, limit: int = 100) -> list[Proposal]:
    return ledger.claim(Query("b", (state,)), owner, limit, 60.0)


def test_no_twin_gets_in_and_adding_again_adds_nothing(ledger: Ledger) -> None:
    added = ledger.add([proposal("a", "x"), proposal("b", "x"), proposal("c", "y")])
    assert (added.new, added.known, added.twins) == (2, 0, ("b",))
    again = ledger.add([proposal("a", "x"), proposal("c", "y"), proposal("d", "y", batch="other")])
    assert (again.new, again.known, again.twins) == (0, 2, ("d",))


def test_states_change_only_by_their_owner_and_along_the_table(ledger: Ledger) -> None:
    ledger.add([proposal("a")])
    mine, other = owner_name(), owner_name()
    [row] = claim(ledger, mine)
    assert claim(ledger, other) == []
    assert ledger.advance(row, State.SELECTED, other) is None
    with pytest.raises(ValueError, match="no transition"):
        ledger.advance(row, State.ACCEPTED, mine)
    selected = ledger.advance(row, State.SELECTED, mine)
    assert selected is not None
    assert ledger.advance(row, State.SELECTED, mine) is None, "a stale record changes nothing"
    assert ledger.get("a") == selected
    ledger.release(mine)
    assert [p.id for p in claim(ledger, other, State.SELECTED)] == ["a"]


def test_a_patch_cannot_take_an_identity_that_is_there(ledger: Ledger) -> None:
    ledger.add([proposal("a", "x"), proposal("b", "y")])
    owner = owner_name()
    rows = claim(ledger, owner)
    with pytest.raises(Twin):
        ledger.advance(rows[0], State.SELECTED, owner, identity="y")
    assert ledger.get("a") == rows[0]


def test_an_expired_lease_and_a_dead_owner_free_their_claims(ledger: Ledger) -> None:
    ledger.add([proposal("a"), proposal("b")])
    slow = owner_name()
    assert len(ledger.claim(Query("b"), slow, 1, 0.05)) == 1
    time.sleep(0.1)
    assert len(claim(ledger, owner_name())) == 2
    ledger.add([proposal("c")])
    child = subprocess.run(
        [sys.executable, "-c", "from synthesis.ledger import owner_name; print(owner_name())"],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert [p.id for p in claim(ledger, child.stdout.strip())] == ["c"]
    assert [p.id for p in claim(ledger, owner_name())] == ["c"]


def test_renewing_keeps_a_claim(ledger: Ledger) -> None:
    ledger.add([proposal("a")])
    owner = owner_name()
    ledger.claim(Query("b"), owner, 1, 0.05)
    assert ledger.renew(owner, 60.0) == 1
    time.sleep(0.1)
    assert claim(ledger, owner_name()) == []


def test_costs_add_up_per_stage_and_outcomes_replace_themselves(ledger: Ledger) -> None:
    ledger.add([proposal("a")])
    ledger.book(["a"], Stage.BUILD, 0.5)
    ledger.book(["a"], Stage.BUILD, 0.25)
    trial = Outcome(rollout_id="r", proposal_id="a", round=0, script=TRIAL_SCRIPT, reward=0.0, tokens=30, seconds=2.0)
    solve = Outcome(rollout_id="s", proposal_id="a", round=0, script="solve", reward=1.0, seconds=1.0)
    for _ in range(2):
        ledger.note([trial, solve])
    spent = {c.stage: (c.seconds, c.tokens, c.rollouts) for c in ledger.costs("a")}
    assert spent == {Stage.BUILD: (0.75, 0, 0), Stage.TRIAL: (2.0, 30, 1), Stage.REFINE: (1.0, 0, 1)}


WRITER = """
import sys
from pathlib import Path
from rollout.config import Home
from rollout.types import Split
from synthesis.families import Slots
from synthesis.ledger import Ledger, Query, owner_name
from synthesis.types import Proposal, State

root, worker, count = sys.argv[1], sys.argv[2], int(sys.argv[3])
slots = Slots(asked=47, now=52, others=(10, 11), name="Ana", template=0, decoy="close_ticket")
ledger, owner = Ledger.open(Home(Path(root))), owner_name()
for i in range(count):
    name = f"{worker}-{i}"
    identity = f"shared-{i}" if i % 2 else f"i-{name}"
    row = Proposal(id=name, batch="b", split=Split.RL, family="f", seed=0, slots=slots, identity=identity)
    ledger.add([row])
    if i % 10 == 0:
        for row in ledger.claim(Query("b", (State.PROPOSED,)), owner, 3, 60.0):
            assert ledger.advance(row, State.SELECTED, owner) is not None
            print(row.id)
ledger.close()
"""


def test_bug_62_63_many_processes_write_during_reads(tmp_path: Path) -> None:
    """Eight processes read, then write, with no SQLITE_BUSY, no twin and no claim given twice."""
    home = open_home(tmp_path)
    workers, count = 8, 200
    command = [sys.executable, "-c", WRITER, str(home.root)]
    running = [
        subprocess.Popen([*command, str(w), str(count)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for w in range(workers)
    ]
    watcher = Ledger.open(home)
    while any(p.poll() is None for p in running):
        watcher.all(Query("b"))
        time.sleep(0.05)
    ended = [p.communicate(timeout=60) for p in running]
    assert [err for _, err in ended] == [""] * workers
    assert [p.returncode for p in running] == [0] * workers
    rows = watcher.all(Query("b"))
    assert len(rows) == workers * count // 2 + count // 2
    assert len({p.identity for p in rows}) == len(rows)
    claimed = [name for out, _ in ended for name in out.split()]
    assert len(claimed) == len(set(claimed)) == watcher.states("b")[State.SELECTED] > workers
    watcher.close()


class LedgerMachine(RuleBasedStateMachine):
    """Two owners claim and advance at random; a model beside the ledger says what must come of it."""

    @initialize(n=st.integers(1, 5))
    def start(self, n: int) -> None:
        import tempfile

        self.folder = tempfile.TemporaryDirectory()
        self.ledger = Ledger.open(open_home(self.folder.name))
        self.owners = [owner_name(), owner_name()]
        self.state = {f"p{i}": State.PROPOSED for i in range(n)}
        self.holder: dict[str, str] = {}
        self.ledger.add([proposal(name) for name in self.state])

    @rule(who=st.integers(0, 1), state=st.sampled_from(list(State)), limit=st.integers(1, 3))
    def claim(self, who: int, state: State, limit: int) -> None:
        owner = self.owners[who]
        free = sorted(n for n, s in self.state.items() if s is state and n not in self.holder)
        got = self.ledger.claim(Query("b", (state,)), owner, limit, 60.0)
        assert [p.id for p in got] == free[:limit]
        self.holder.update({p.id: owner for p in got})

    @rule(who=st.integers(0, 1), pick=st.integers(0, 4), to=st.sampled_from(list(State)))
    def advance(self, who: int, pick: int, to: State) -> None:
        name = sorted(self.state)[pick % len(self.state)]
        row = self.ledger.get(name)
        assert row is not None
        if to not in TRANSITIONS.get(row.state, frozenset()):
            with pytest.raises(ValueError, match="no transition"):
                self.ledger.advance(row, to, self.owners[who])
            return
        new = self.ledger.advance(row, to, self.owners[who])
        assert (new is not None) == (self.holder.get(name) == self.owners[who])
        if new:
            self.state[name] = to

    @precondition(lambda self: self.holder)
    @rule(who=st.integers(0, 1))
    def release(self, who: int) -> None:
        self.ledger.release(self.owners[who])
        self.holder = {n: o for n, o in self.holder.items() if o != self.owners[who]}

    @invariant()
    def same_states(self) -> None:
        if hasattr(self, "ledger"):
            assert {p.id: p.state for p in self.ledger.all(Query("b"))} == self.state

    def teardown(self) -> None:
        if hasattr(self, "ledger"):
            self.ledger.close()
            self.folder.cleanup()


TestLedgerMachine = LedgerMachine.TestCase
TestLedgerMachine.settings = settings(max_examples=20, stateful_step_count=25, deadline=None)
